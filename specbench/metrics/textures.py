"""The metrics of *textures*: the metrics of *scenes*, computed by the evaluators of this world."""

from __future__ import annotations

from specbench.data.textures import WORLD
from specbench.metrics.scenes import ScenesClip, ScenesFID, ScenesReward


class TexturesFID(ScenesFID):
    """Fréchet distance (see `frechet`) to real validation images of textures."""

    world = WORLD


class TexturesClip(ScenesClip):
    """CLIP score of the two-tower model of textures; see `ScenesClip`."""

    world = WORLD


class TexturesReward(ScenesReward):
    """The confidence of the reader of textures that an image shows what its caption states; see `ScenesReward`."""

    world = WORLD
