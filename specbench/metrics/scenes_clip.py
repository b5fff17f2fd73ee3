"""CLIP score (Hessel et al. 2021) of the embedded two-tower model: the mean cosine between the embeddings of an image
and of its caption, counted as 0 where it is negative. It is the cosine itself, as the papers print it, and not x100.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from specbench.metrics.base import Images, MeanMetric, PromptItem, Score, not_below_zero
from specbench.metrics.embedded import EmbeddedMetric, EmbeddedScorer, of_classes

if TYPE_CHECKING:
    from torch import Tensor

    from specbench.models.evaluators import TwoTower


class ScenesClip(EmbeddedMetric, MeanMetric):
    """Scorer outputs: cosines (N, 1) float64."""

    weights = "scenes_two_tower.safetensors"
    reads_prompt = True

    @cached_property
    def towers(self) -> TwoTower:
        from specbench.models import evaluators as ev

        return ev.load(self.path, ev.TwoTower, self.context.device)

    def scorer(self) -> EmbeddedScorer:
        import torch

        def cosines(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            image_embeddings = self.towers.embed_images(x).double()
            text_embeddings = self.towers.embed_captions([item.prompt for item in items]).double()
            return torch.cosine_similarity(image_embeddings, text_embeddings).unsqueeze(1)

        return EmbeddedScorer(self, cosines)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        unread = sum(not readable(self.towers, item.prompt) for item in items)
        if not unread:
            return ""
        return (
            f"{unread} of {len(items)} captions hold words that the model has never seen, or none: it was trained on"
            " scenes only"
        )

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        return not_below_zero(*super().score(outputs, items))

    def note(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> str:
        if not all(map(of_classes, items)):
            return ""
        return "the prompts are names of classes, the model has seen whole captions: compare only such runs"


def readable(towers: TwoTower, caption: str) -> bool:
    """Whether a caption has words, and the model has seen all of them."""
    from specbench.data import scenes

    return bool(scenes.words(caption)) and not towers.unknown_words(caption)
