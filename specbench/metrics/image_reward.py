"""The embedded reward: how surely a reader finds in a picture what its caption asked for.

For a caption that states attributes a = 1..m (layout, background; shape, colour, size and fill of each object), with
K_a choices each, and the reader's probability p_a of the stated choice,

    reward = 1/m sum_a (p_a - 1/K_a) / (1 - 1/K_a)

1: the reader is certain of every attribute; 0: no better than a blind guess; negative: it is certain of something else
(an attribute counts -1/(K_a - 1) then). A mean of log-probabilities would answer the same question, but one confident
contradiction would outweigh a dozen attributes drawn well, and the network's calibration would set the scale. The share
of attributes whose likeliest choice is the stated one ("attribute accuracy") is given in the note. A class of scenes
with one object states three attributes: that there is one object, its shape and its colour.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specbench.data import scenes
from specbench.metrics.base import Item, Score, mean_and_stderr
from specbench.metrics.embedded import EmbeddedMetric, as_input, of_classes, of_scenes
from specbench.models import evaluators as ev

CHANCE = torch.tensor([1 / len(choices) for choices in scenes.ATTRIBUTES.values()])


def rewards(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Reward (N,) float32 of each picture from the reader's logits (14 of (N, K_a)) and labels (N, 14) int64."""
    chance = CHANCE.to(labels.device)
    return ((ev.captioned_probabilities(logits, labels) - chance) / (1 - chance)).nanmean(1)


class ImageReward(EmbeddedMetric):
    """Mean reward of the embedded attribute reader. Needs items with labels."""

    weights = ev.READER

    def judge(self, images: np.ndarray, items: Sequence[Item]) -> Score:
        if not all(map(of_scenes, items)):
            return Score.unmeasured(
                "these prompts come without labels of scenes, so nothing says what should be read", self.backend
            )
        labels = torch.tensor([item.labels for item in items], dtype=torch.int64)
        reader = ev.load(self.path, ev.AttributeReader, self.device)
        each, right = [], []
        with torch.no_grad():
            for rows, x in self.batches(images):
                logits, wanted = reader(as_input(x)), labels[rows].to(self.device)
                each.append(rewards(logits, wanted).cpu())
                right.append(ev.read_right(logits, wanted).cpu())
        mean, stderr = mean_and_stderr(torch.cat(each).double().numpy())
        table = torch.cat(right)
        note = f"attribute accuracy {float(table.nanmean()):.4f}"
        if all(map(of_classes, items)):
            stated = ~table.isnan().all(0)
            names = [name for name, there in zip(scenes.ATTRIBUTES, stated.tolist(), strict=True) if there]
            parts = zip(names, table[:, stated].nanmean(0).tolist(), strict=True)
            note += f" over the class's attributes alone: {', '.join(f'{name} {value:.4f}' for name, value in parts)}"
        return Score(mean, stderr, self.backend, note)
