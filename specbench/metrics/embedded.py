"""What the metrics of an embedded evaluator share: images of *scenes*, 64 x 64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specbench.config.registry import digest
from specbench.errors import UsageError
from specbench.metrics.base import Metric, PromptItem, Scorer, ScoringContext, Unavailable

if TYPE_CHECKING:
    from torch import Tensor

#: Images in a forward pass, always: a convolution chooses the order of its sums by the batch size, and an image's
#: outputs must not depend on the number of other images in the batch.
GROUP = 32


class EmbeddedMetric(Metric):
    """A metric of an embedded evaluator, whose file lies in the assets folder. It has no options."""

    weights: ClassVar[str]  # the evaluator's file

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        if options:
            raise UsageError(
                f"the metric of {self.weights} has no options, but {', '.join(map(repr, options))} is given"
            )

    @property
    def path(self) -> Path:
        return self.context.assets / self.weights

    @property
    def cache_key(self) -> str:
        if not self.path.is_file():
            raise Unavailable(f"no {self.weights}: run `make train-scenes` in a clone")
        return f"{self.path.stem.replace('_', '-')}@{digest(self.path)}"


class EmbeddedScorer(Scorer):
    """Scores in groups of `GROUP`. The last group is padded with its last image.

    outputs: images (GROUP, 3, 64, 64) float32 in [-1, 1] and their items -> outputs (GROUP, width).
    """

    def __init__(self, metric: EmbeddedMetric, outputs: Callable[[Tensor, Sequence[PromptItem]], Tensor]) -> None:
        self.weights, self.device, self.outputs = metric.weights, metric.context.device, outputs

    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        from specbench.data import scenes

        for image in images:
            height, width = image.shape[:2]
            if (height, width) != (scenes.SIZE, scenes.SIZE):
                size = f"{scenes.SIZE}x{scenes.SIZE}"
                raise Unavailable(f"{self.weights} scores {size} images of scenes; these are {width}x{height}")
        outputs = []
        for start in range(0, len(images), GROUP):
            group, group_items = images[start : start + GROUP], items[start : start + GROUP]
            padding = GROUP - len(group)
            x = torch.from_numpy(np.stack([*group, *[group[-1]] * padding])).permute(0, 3, 1, 2).contiguous()
            with torch.no_grad():
                y = self.outputs(as_input(x.to(self.device)), [*group_items, *[group_items[-1]] * padding])
            outputs.append(y[: len(group)].cpu().numpy())
        return np.concatenate(outputs)


def of_scenes(item: PromptItem) -> bool:
    """Whether an item's labels are attributes of scenes; other data sets have none, or classes of their own."""
    from specbench.data import scenes

    return item.labels is not None and len(item.labels) == len(scenes.ATTRIBUTES)


def of_classes(item: PromptItem) -> bool:
    """Whether an item states a class of scenes with one object, and not a full scene: see `data.scenes_classes`."""
    from specbench.data import scenes

    background = list(scenes.ATTRIBUTES).index("background")
    return of_scenes(item) and item.labels is not None and item.labels[background] == scenes.ABSENT


def as_input(x: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) -> float32 in [-1, 1], what every embedded evaluator reads."""
    return x.float() / 127.5 - 1
