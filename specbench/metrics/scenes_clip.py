"""CLIP score (Hessel et al. 2021) of the embedded two-tower model: the mean cosine between the embeddings of an image
and of its caption, counted as 0 where it is negative. It is the cosine itself, as the papers print it, and not x100.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from specbench.metrics.base import Item, Pictures, Score, mean_and_stderr
from specbench.metrics.embedded import EmbeddedJudge, EmbeddedMetric, of_classes

if TYPE_CHECKING:
    from torch import Tensor

    from specbench.models.evaluators import TwoTower


class _Cosine(EmbeddedJudge):
    """Images and captions -> (N, 1) float64 cosines."""

    def __init__(self, metric: Measure) -> None:
        super().__init__(metric)
        self.towers = metric.towers

    def outputs(self, x: Tensor, items: Sequence[Item]) -> Tensor:
        import torch

        seen = self.towers.embed_images(x).double()
        said = self.towers.embed_captions([item.prompt for item in items]).double()
        return torch.cosine_similarity(seen, said).unsqueeze(1)


class Measure(EmbeddedMetric):
    """Mean cosine between images and captions of the embedded two-tower model."""

    weights = "scenes_two_tower.safetensors"
    reads_prompt = True

    @cached_property
    def towers(self) -> TwoTower:
        from specbench.models import evaluators as ev

        return ev.load(self.path, ev.TwoTower, self.place.device)

    def judge(self) -> EmbeddedJudge:
        return _Cosine(self)

    def refuses(self, pictures: Pictures, items: Sequence[Item]) -> str:
        unread = sum(not readable(self.towers, item.prompt) for item in items)
        if not unread:
            return ""
        return (
            f"{unread} of {len(items)} captions hold words that the model has never seen, or none: it was trained on"
            " scenes only"
        )

    def score(self, outputs: np.ndarray, items: Sequence[Item]) -> tuple[Score, ...]:
        mean, stderr = mean_and_stderr(self.each(outputs))
        notes = ["the mean cosine is negative, which counts as 0"] if mean < 0 else []
        if all(map(of_classes, items)):
            notes.append("the prompts are names of classes, the model has seen whole captions: compare only such runs")
        return (Score(max(mean, 0.0), stderr, self.judged_by, "; ".join(notes)),)

    def each(self, outputs: np.ndarray) -> np.ndarray:
        return outputs[:, 0].astype(np.float64)


def readable(towers: TwoTower, caption: str) -> bool:
    """Whether a caption has words, and the model has seen all of them."""
    from specbench.data import scenes

    return bool(scenes.words(caption)) and not towers.unknown_words(caption)
