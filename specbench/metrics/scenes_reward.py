"""The embedded reward: the confidence of a reader that an image shows what its caption states.

For a caption that states attributes a = 1..m (layout, background; shape, colour, size and fill of each object), with
K_a choices each, and the reader's probability p_a of the stated choice,

    reward = 1/m sum_a (p_a - 1/K_a) / (1 - 1/K_a)

1: the reader is certain of every attribute; 0: no better than chance; negative: it is certain of something else (an
attribute then counts -1/(K_a - 1)). A mean of log-probabilities would measure the same, but one confident contradiction
would outweigh a dozen attributes drawn well, and the network's calibration would set the scale. The note gives the
share of attributes whose most probable choice is the stated one ("attribute accuracy"). A class of scenes with one
object states three attributes: that there is one object, its shape and its colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.metrics.base import Images, MeanMetric, PromptItem
from specbench.metrics.embedded import EmbeddedMetric, EmbeddedScorer, of_classes, of_scenes

if TYPE_CHECKING:
    from torch import Tensor


def rewards(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Reward (N,) float32 of each image from the reader's logits (14 of (N, K_a)) and labels (N, 14) int64."""
    import torch

    from specbench.data import scenes
    from specbench.models import evaluators as ev

    chance = torch.tensor([1 / len(choices) for choices in scenes.ATTRIBUTES.values()], device=labels.device)
    return ((ev.captioned_probabilities(logits, labels) - chance) / (1 - chance)).nanmean(1)


class ScenesReward(EmbeddedMetric, MeanMetric):
    """Needs items with labels. Scorer outputs (N, 15) float32: the reward, and for each attribute whether it is read
    right, NaN where the labels do not state it."""

    weights = "scenes_reader.safetensors"
    reads_prompt = True  # by way of the labels, which a caption of scenes fixes

    def scorer(self) -> EmbeddedScorer:
        import torch

        from specbench.models import evaluators as ev

        reader = ev.load(self.path, ev.AttributeReader, self.context.device)

        def outputs(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            labels = torch.tensor([item.labels for item in items], dtype=torch.int64).to(x.device)
            logits = reader(x)
            return torch.cat([rewards(logits, labels).unsqueeze(1), ev.read_right(logits, labels)], 1)

        return EmbeddedScorer(self, outputs)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        if all(map(of_scenes, items)):
            return ""
        return "these prompts come without labels of scenes, so there are no attributes to compare with"

    def note(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> str:
        from specbench.data import scenes

        right = outputs[:, 1:].astype(np.float64)
        note = f"attribute accuracy {np.nanmean(right):.4f}"
        if all(map(of_classes, items)):
            stated = [a for a in range(right.shape[1]) if not np.isnan(right[:, a]).all()]
            names = list(scenes.ATTRIBUTES)
            parts = ", ".join(f"{names[a]} {np.nanmean(right[:, a]):.4f}" for a in stated)
            note += f" over the class's attributes alone: {parts}"
        return note
