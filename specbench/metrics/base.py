"""What all metrics share. A metric is a statistic over a scorer's outputs for each image.

A `Scorer` is a network. It maps an image, and for some its prompt, to a few numbers (features, a cosine, a
reward). Its outputs are cached (see `outputs`): scoring resumes, several metrics share one pass, and two runs can be
compared image by image. A metric maps the outputs of all images to one value per column. Imports nothing heavy.
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
    """Images that are read on access: each (H, W, 3) uint8, of its own size."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class ScoringContext:
    """The scoring context of a metric. assets: folder of the embedded evaluators; weights: of the real ones, in a
    sub-folder each (`home.metrics_folder()` unless the user names another); reference: statistics of real images, None
    for those that `specbench reference` made for `data`; data: the data set's name; device, batch: of the scorer's
    forward passes."""

    assets: Path
    weights: Path
    reference: Path | None = None
    data: str = ""
    device: str = "cpu"
    batch: int = 64


class Unavailable(Exception):  # noqa: N818 (no error: the run goes on)
    """A metric cannot be measured here; the text is one line on what to fetch and where to put it."""


class Scorer(ABC):
    """A scorer: a network on a device, ready to use."""

    @abstractmethod
    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        """Outputs (B, width) float32 or float64 of B images (H, W, 3) uint8. Each row depends on its own image and
        item alone, not on the others in the batch; the rounding of float32 may depend on its place in the batch."""


class SingleImageScorer(Scorer):
    """A scorer that takes one image at a time on a CPU. The CPU kernels, and so the last bits, change with the batch
    size; one image through a large network keeps all cores busy."""

    device: str

    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        size = 1 if self.device == "cpu" else len(images)
        batches = (slice(i, i + size) for i in range(0, len(images), size))
        return np.concatenate([self.batch(images[rows], items[rows]) for rows in batches])

    @abstractmethod
    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        """As `__call__`, in one forward pass."""


class NetworkScorer(SingleImageScorer):
    """outputs: images (B) and their items (B) -> outputs (B, width) of a network on `device`."""

    def __init__(self, device: str, outputs: Callable[[Sequence[np.ndarray], Sequence[PromptItem]], Tensor]) -> None:
        self.device, self.outputs = device, outputs

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            found: np.ndarray = self.outputs(images, items).cpu().numpy()
        return found


class QuestionScorer(Scorer):
    """VQA models that answer a different number of questions about each image: its scores, and NaN up to `MOST`.

    scores: an image and its item -> the score of each question, in order. Outputs (B, MOST) float64.
    """

    MOST = 128  # questions about an image: every output of a scorer has the same width

    def __init__(self, scores: Callable[[np.ndarray, PromptItem], Sequence[float]]) -> None:
        self.scores = scores

    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        outputs = np.full((len(images), self.MOST), np.nan)
        for row, image, item in zip(outputs, images, items, strict=True):
            scores = self.scores(image, item)
            row[: len(scores)] = scores
        return outputs


class Metric(ABC):
    """One choice of conf/metrics: a statistic with its options, in a scoring context.

    options: the keys of the choice's file except `metric`; a subclass checks them (see `chosen`) and raises UsageError
    naming the ones it has.
    """

    reads_prompt: ClassVar[bool] = False  # whether a scorer's output depends on the item, too
    features: ClassVar[bool] = False  # whether a scorer's output describes an image, rather than rates it
    counts_prompts: ClassVar[bool] = False  # whether its own standard errors are over prompts, not images

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        self.context, self.options = context, dict(options)

    @property
    @abstractmethod
    def cache_key(self) -> str:
        """What the scorer's outputs depend on: its name, its weights' hash, its resize, such as
        "inception@6726825d, 299 bilinear". Metrics with the same `cache_key` share the outputs. Loads no network.
        Raises Unavailable where the weights are not here."""

    def basis(self) -> str:
        """Everything that determines the value apart from the images and items, as text: when it changes, a row is
        computed again. A metric with a reference adds that reference's label. Raises Unavailable as `cache_key`."""
        return f"{self.cache_key} {json.dumps(self.options, sort_keys=True)}"

    @abstractmethod
    def scorer(self) -> Scorer:
        """The scorer, loaded on the context's device. Raises Unavailable, or UsageError for wrong weights."""

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        """Why these images and items cannot be scored, as a note; empty where they can. May be costly."""
        return ""

    @abstractmethod
    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        """One `Score` for each of its columns (see conf/metrics), from the scorer's outputs (N, width), N >= 1, paired
        with the items by position. Depends on the set of pairs alone, not on their order. Raises Unavailable where a
        reference is absent.
        """

    def per_image(self, outputs: np.ndarray) -> np.ndarray | None:
        """The images' own scores (N,) float64, whose mean is the value of the first column, from the scorer's outputs
        (N, width); None for a metric that is no such mean."""
        return None

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        """How each image moves the value of the first column where that is no mean, from what `score` takes: (N,)
        float64 of mean zero, in row order. To first order an image adds its influence / N, so that the value's
        standard error is sqrt(sum influence^2) / N. None where it is not known, or for too few images."""
        return None


class MeanMetric(Metric):
    """The mean of a score per image, which is the first of a scorer's outputs."""

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        return (Score(*mean(self.per_image(outputs).tolist()), self.backend(), self.note(outputs, items)),)

    def per_image(self, outputs: np.ndarray) -> np.ndarray:
        return outputs[:, 0].astype(np.float64)

    def backend(self) -> str:
        """See `Score`."""
        return self.cache_key

    def note(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> str:
        """See `Score`."""
        return ""


def by_prompt(items: Sequence[PromptItem]) -> list[int] | None:
    """A number for each item's prompt, where some prompts have several images, which are not independent; else None.
    Items of one id are of one prompt; those without an id are each of their own."""
    numbers: dict[str | int, int] = {}
    found = [numbers.setdefault(item.id or i, len(numbers)) for i, item in enumerate(items)]
    return found if len(numbers) < len(found) else None


def over_prompts(
    metric: Metric, scores: tuple[Score, ...], outputs: np.ndarray, items: Sequence[PromptItem]
) -> tuple[Score, ...]:
    """The scores of a metric over images of which several may share a prompt, with standard errors over prompts.

    To first order an image adds 1/N of its influence to the value of the first column, so a prompt adds the sum over
    its images. The error of a value whose influences are not known is left out.
    """
    groups = by_prompt(items)
    if groups is None or metric.counts_prompts:
        return scores
    own = metric.per_image(outputs)
    moved = metric.influences(outputs, items) if own is None else own - own.mean()
    errors = [None if moved is None else mean(moved.tolist(), groups).stderr, *(len(scores) - 1) * [None]]
    return tuple(
        one if one.stderr is None else replace(one, stderr=error) for one, error in zip(scores, errors, strict=True)
    )


def chosen(metric: type[Metric], options: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a metric: those of `known`, whose values are the defaults. UsageError for another option."""
    if options and not known:
        raise UsageError(f"{metric.__name__} has no options: leave out {', '.join(options)}")
    for name in options:
        if name not in known:
            raise unknown(f"option of {metric.__name__}", name, known)
    return {**known, **options}


def cut_captions(cut: int, count: int, tokens: int) -> str:
    """The note of a metric whose network reads at most `tokens` tokens of a caption, which cuts some of `count`."""
    return f"{cut} of {count} captions have more than {tokens} tokens and lose their end" if cut else ""


def not_below_zero(score: Score) -> tuple[Score, ...]:
    """A mean cosine as CLIP score defines it: 0 where it is negative, with a note."""
    if score.value is None or score.value >= 0:
        return (score,)
    note = "; ".join(filter(None, ["the mean cosine is negative, which counts as 0", score.note]))
    return (replace(score, value=0.0, note=note),)
