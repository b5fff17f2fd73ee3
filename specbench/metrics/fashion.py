"""The metrics of *fashion*: the metrics of *scenes*, computed by the evaluators of this world."""

from __future__ import annotations

from specbench.data.fashion import WORLD
from specbench.metrics.scenes import ScenesFID, ScenesReward


class FashionFID(ScenesFID):
    """Fréchet distance (see `frechet`) to the 10,000 test photographs of fashion."""

    world = WORLD


class FashionReward(ScenesReward):
    """The confidence of the reader of fashion that an image shows its class; see `ScenesReward`."""

    world = WORLD
