"""The common ground of the metrics whose network is an embedded evaluator: pictures of *scenes*, 64 x 64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specbench.data import scenes
from specbench.metrics.base import Item, Metric, Score
from specbench.models import evaluators as ev

_BACKGROUND = list(scenes.ATTRIBUTES).index("background")


class EmbeddedMetric(Metric):
    """Refuses pictures of another size, names the backend and deals out batches; subclasses do the judging."""

    weights: ClassVar[str]  # the evaluator's file under the assets folder

    @property
    def path(self) -> Path:
        return self.assets / self.weights

    @property
    def backend(self) -> str:
        return ev.backend(self.path)

    def score(self, images: np.ndarray, items: Sequence[Item]) -> Score:
        height, width = images.shape[1:3]
        if (height, width) != (scenes.SIZE, scenes.SIZE):
            size = f"{scenes.SIZE}x{scenes.SIZE}"
            return Score.unmeasured(f"{self.weights} judges {size} pictures of scenes; these are {width}x{height}")
        return self.judge(images, items)

    def judge(self, images: np.ndarray, items: Sequence[Item]) -> Score:
        """Score pictures (N, 64, 64, 3) uint8 against the items at the same positions."""
        raise NotImplementedError

    def batches(self, images: np.ndarray) -> Iterator[tuple[slice, Tensor]]:
        """The positions and the pictures (B, 3, 64, 64) uint8 of each batch, on the metric's device."""
        for start in range(0, len(images), self.batch):
            rows = slice(start, min(start + self.batch, len(images)))
            x = torch.from_numpy(np.ascontiguousarray(images[rows])).permute(0, 3, 1, 2).contiguous()
            yield rows, x.to(self.device)


def of_scenes(item: Item) -> bool:
    """Whether an item's labels are attributes of scenes; other data sets have none, or classes of their own."""
    return item.labels is not None and len(item.labels) == len(scenes.ATTRIBUTES)


def of_classes(item: Item) -> bool:
    """Whether an item states a class of scenes with one object, and not a whole scene: see `data.scenes_classes`."""
    return of_scenes(item) and item.labels is not None and item.labels[_BACKGROUND] == scenes.ABSENT


def as_input(x: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) -> float32 in [-1, 1], what every embedded evaluator reads."""
    return x.float() / 127.5 - 1
