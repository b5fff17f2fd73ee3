"""What the metrics of an embedded evaluator share: images of *scenes*, 64 x 64."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specbench.config.registry import digest
from specbench.errors import UsageError
from specbench.metrics.base import Item, Judge, Metric, Place, Unavailable

if TYPE_CHECKING:
    from torch import Tensor

#: Images in a forward pass, always: a convolution chooses the order of its sums by the batch size, and an image's
#: outputs must not depend on the number of other images in the batch.
GROUP = 32


class EmbeddedMetric(Metric):
    """A metric of an embedded evaluator, whose file lies in the assets folder. It has no options."""

    weights: ClassVar[str]  # the evaluator's file

    def __init__(self, place: Place, options: Mapping[str, Any]) -> None:
        super().__init__(place, options)
        if options:
            raise UsageError(
                f"the metric of {self.weights} has no options, but {', '.join(map(repr, options))} is given"
            )

    @property
    def path(self) -> Path:
        return self.place.assets / self.weights

    @property
    def judged_by(self) -> str:
        if not self.path.is_file():
            raise Unavailable(f"no {self.weights}: run `make train-scenes`")
        return f"{self.path.stem.replace('_', '-')}@{digest(self.path)}"


class EmbeddedJudge(Judge):
    """Scores in groups of `GROUP`. The last group is padded with its last image."""

    def __init__(self, metric: EmbeddedMetric) -> None:
        self.weights, self.device = metric.weights, metric.place.device

    @abstractmethod
    def outputs(self, x: Tensor, items: Sequence[Item]) -> Tensor:
        """Outputs (GROUP, width) of images (GROUP, 3, 64, 64) float32 in [-1, 1]."""

    def __call__(self, pictures: Sequence[np.ndarray], items: Sequence[Item]) -> np.ndarray:
        import torch

        from specbench.data import scenes

        for picture in pictures:
            height, width = picture.shape[:2]
            if (height, width) != (scenes.SIZE, scenes.SIZE):
                size = f"{scenes.SIZE}x{scenes.SIZE}"
                raise Unavailable(f"{self.weights} scores {size} images of scenes; these are {width}x{height}")
        said = []
        for start in range(0, len(pictures), GROUP):
            some, theirs = pictures[start : start + GROUP], items[start : start + GROUP]
            filling = GROUP - len(some)
            x = torch.from_numpy(np.stack([*some, *[some[-1]] * filling])).permute(0, 3, 1, 2).contiguous()
            with torch.no_grad():
                y = self.outputs(as_input(x.to(self.device)), [*theirs, *[theirs[-1]] * filling])
            said.append(y[: len(some)].cpu().numpy())
        return np.concatenate(said)


def of_scenes(item: Item) -> bool:
    """Whether an item's labels are attributes of scenes; other data sets have none, or classes of their own."""
    from specbench.data import scenes

    return item.labels is not None and len(item.labels) == len(scenes.ATTRIBUTES)


def of_classes(item: Item) -> bool:
    """Whether an item states a class of scenes with one object, and not a full scene: see `data.scenes_classes`."""
    from specbench.data import scenes

    background = list(scenes.ATTRIBUTES).index("background")
    return of_scenes(item) and item.labels is not None and item.labels[background] == scenes.ABSENT


def as_input(x: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) -> float32 in [-1, 1], what every embedded evaluator reads."""
    return x.float() / 127.5 - 1
