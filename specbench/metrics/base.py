"""The base classes of metrics. A metric is a statistic over a scorer's outputs for each image.

A `Scorer` is a network. It maps an image, and for some scorers its prompt, to a few numbers (features, a cosine, a
reward). Its outputs are cached (see `outputs`), so that scoring resumes, several metrics share one pass, and two runs
can be compared image by image. A metric maps the outputs of all images to one value per column. Imports nothing heavy.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from specbench.errors import UsageError, unknown
from specbench.rows.remark import Remark, remark
from specbench.rows.scores import Score as Score
from specbench.rows.summary import mean

if TYPE_CHECKING:
    from torch import Tensor


class PromptItem(Protocol):
    """What a metric needs from an entry of a data set (`specbench.data.Item`)."""

    @property
    def index(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def labels(self) -> tuple[int, ...] | None: ...
    @property
    def metadata(self) -> Mapping[str, Any] | None: ...


class Images(Protocol):
    """Images that are read on access: (H, W, 3) uint8; their sizes may differ."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class ScoringContext:
    """The scoring context of a metric.

    assets: folder of the embedded evaluators; weights: folder of the real evaluators, with one sub-folder per
    evaluator (`home.metrics_folder()` unless the user names another); reference: file with statistics of real images,
    or None for the file that `specbench reference` made for `data`; data: name of the data set; device, batch: of the
    scorer's forward passes.
    """

    assets: Path
    weights: Path
    reference: Path | None = None
    data: str = ""
    device: str = "cpu"
    batch: int = 64


class Unavailable(Exception):  # noqa: N818 (no error: the run continues)
    """A metric cannot be measured here. The message is one line: what to fetch and where to put it."""


class Scorer(ABC):
    """A network on a device, ready to use."""

    @abstractmethod
    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        """Outputs (B, width) float32 or float64 of B images (H, W, 3) uint8. A row depends only on its image and item,
        not on the rest of the batch; only the rounding of float32 may depend on the position in the batch."""


class SingleImageScorer(Scorer):
    """A scorer that takes one image at a time on a CPU. There, the kernels and therefore the last bits change with the
    batch size; a large network keeps all cores busy with one image."""

    device: str

    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        size = 1 if self.device == "cpu" else len(images)
        batches = (slice(i, i + size) for i in range(0, len(images), size))
        return np.concatenate([self.batch(images[rows], items[rows]) for rows in batches])

    @abstractmethod
    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        """Like `__call__`, in one forward pass."""


class NetworkScorer(SingleImageScorer):
    """outputs: images (B) and their items (B) -> outputs (B, width) of a network on `device`."""

    def __init__(self, device: str, outputs: Callable[[Sequence[np.ndarray], Sequence[PromptItem]], Tensor]) -> None:
        self.device, self.outputs = device, outputs

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            outputs: np.ndarray = self.outputs(images, items).cpu().numpy()
        return outputs


class Metric(ABC):
    """One choice of conf/metrics: a statistic with its options, in a scoring context.

    options: the keys of the choice's file except `metric`. A subclass checks them (see `chosen`) and raises a
    UsageError that lists its options.
    """

    reads_prompt: ClassVar[bool] = False  # whether the scorer's output also depends on the item
    features: ClassVar[bool] = False  # whether the scorer's output describes an image instead of rating it
    counts_prompts: ClassVar[bool] = False  # whether `score` computes standard errors over prompts, not images

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        self.context, self.options = context, dict(options)

    @property
    @abstractmethod
    def cache_key(self) -> str:
        """Identifies the scorer's outputs by the scorer's name, the hash of its weights and its resize, such as
        "inception@6726825d, 299 bilinear". Metrics with the same `cache_key` share the outputs. Loads no network.
        Raises Unavailable if the weights are missing."""

    def fingerprint(self) -> str:
        """Everything except images and items that determines the value, as text. When it changes, a row is computed
        again. A metric with a reference adds the reference's label. Raises Unavailable as `cache_key` does."""
        return f"{self.cache_key} {json.dumps(self.options, sort_keys=True)}"

    @abstractmethod
    def scorer(self) -> Scorer:
        """The scorer, loaded on the context's device. Raises Unavailable, or UsageError for wrong weights."""

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        """Why these images and items cannot be scored; empty if they can. May be costly."""
        return ""

    @abstractmethod
    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        """One `Score` per column (see conf/metrics), from the scorer's outputs (N, width), N >= 1, which are paired
        with the items by position. The order of the pairs does not matter. Raises Unavailable if a reference is
        missing.
        """

    def per_image(self, outputs: np.ndarray) -> np.ndarray | None:
        """The scores (N,) float64 of the images, whose mean is the value of the first column, from the scorer's outputs
        (N, width). None if the metric is not such a mean."""
        return None

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        """The influence of each image on the first column if that is not a mean, from the arguments of `score`: (N,)
        float64 with mean zero, in row order. To first order, an image adds its influence / N to the value, so the
        standard error is sqrt(sum influence^2) / N. None if it is unknown, or for too few images."""
        return None


class MeanMetric(Metric):
    """The mean over images of the scorer's first output."""

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        return (Score(*mean(self.per_image(outputs).tolist()), self.backend(), self.remarks(outputs, items)),)

    def per_image(self, outputs: np.ndarray) -> np.ndarray:
        return outputs[:, 0].astype(np.float64)

    def backend(self) -> str:
        """See `Score`."""
        return self.cache_key

    def remarks(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> Sequence[Remark]:
        """See `Score`."""
        return ()


def by_prompt(items: Sequence[PromptItem]) -> list[int] | None:
    """The number of each item's prompt if a prompt has several images (which are not independent), else None. Items
    with the same id have the same prompt; an item without an id has its own prompt."""
    numbers: dict[str | int, int] = {}
    prompts = [numbers.setdefault(item.id or i, len(numbers)) for i, item in enumerate(items)]
    return prompts if len(numbers) < len(prompts) else None


def over_prompts(
    metric: Metric, scores: tuple[Score, ...], outputs: np.ndarray, items: Sequence[PromptItem]
) -> tuple[Score, ...]:
    """The scores of a metric, with standard errors over prompts if several images share a prompt.

    To first order, an image adds 1/N of its influence to the first column, and a prompt adds the sum over its images. A
    value whose influences are unknown gets no error.
    """
    groups = by_prompt(items)
    if groups is None or metric.counts_prompts:
        return scores
    per_image = metric.per_image(outputs)
    influences = metric.influences(outputs, items) if per_image is None else per_image - per_image.mean()
    errors = [None if influences is None else mean(influences.tolist(), groups).stderr, *(len(scores) - 1) * [None]]
    return tuple(
        score if score.stderr is None else replace(score, stderr=error)
        for score, error in zip(scores, errors, strict=True)
    )


def chosen(metric: type[Metric], options: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a metric, completed with the defaults of `known`. Raises UsageError for an option not in
    `known`."""
    if options and not known:
        raise UsageError(f"{metric.__name__} has no options: leave out {', '.join(options)}")
    for name in options:
        if name not in known:
            raise unknown(f"option of {metric.__name__}", name, known)
    return {**known, **options}


def cut_captions(cut: int, count: int, tokens: int) -> list[Remark]:
    """The remark that a network reads at most `tokens` tokens and so cuts off the end of `cut` of `count` captions."""
    return [remark("cut_captions", cut=cut, captions=count, tokens=tokens)] * (cut > 0)


def not_below_zero(score: Score) -> tuple[Score, ...]:
    """A mean cosine as CLIP score defines it: 0 if it is negative, with a remark."""
    if score.value is None or score.value >= 0:
        return (score,)
    return (replace(score, value=0.0, remarks=(remark("negative"), *score.remarks)),)
