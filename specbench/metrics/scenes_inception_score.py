"""Inception Score (Salimans et al. 2016) by the embedded reader: exp of the mean KL divergence of an image's
distribution over classes, shape by colour, from the mean one. At most 40, the number of classes. It uses no real images
and no prompts.

The value is comparable only between runs with the same backend. It is never one of Inception-V3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.metrics.base import PromptItem, Score
from specbench.metrics.embedded import EmbeddedMetric, EmbeddedScorer

if TYPE_CHECKING:
    from torch import Tensor


def divergences(log_probabilities: np.ndarray) -> np.ndarray:
    """KL divergence (N,) in nats of each distribution from their mean, of log-probabilities (N, K)."""
    logs = log_probabilities.astype(np.float64)
    mean = np.exp(logs).mean(0)
    return np.asarray((np.exp(logs) * (logs - np.log(np.maximum(mean, 1e-300)))).sum(1))


class ScenesInceptionScore(EmbeddedMetric):
    """The score of all images at once, not of splits. Scorer outputs (N, 40) float32: the log-probabilities of the
    classes of `data.scenes_classes`."""

    weights = "scenes_reader.safetensors"

    @property
    def cache_key(self) -> str:
        """The reward uses the same network and caches other outputs of it."""
        return f"{super().cache_key}, classes"

    def scorer(self) -> EmbeddedScorer:
        from specbench.data import scenes
        from specbench.models import evaluators as ev

        reader, names = ev.load(self.path, ev.AttributeReader, self.context.device), list(scenes.ATTRIBUTES)

        def classes(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            logits = reader(x)
            shape, colour = (logits[names.index(name)].log_softmax(-1) for name in ("shape0", "colour0"))
            return (shape.unsqueeze(-1) + colour.unsqueeze(-2)).flatten(1)

        return EmbeddedScorer(self, classes)

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        n, classes = outputs.shape
        if n < 2:
            return (Score.unmeasured("an Inception Score needs at least two images", self.cache_key),)
        apart = divergences(outputs)
        value = math.exp(apart.mean())
        note = f"of {classes} classes of shape and colour"
        if n < 10 * classes:
            note += f"; n = {n}: biased downwards, compare only runs of the same n"
        return (Score(value, value * float(apart.std(ddof=1)) / math.sqrt(n), self.cache_key, note),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        """An image's divergence is its influence on their mean, its part in the mean distribution included."""
        apart = divergences(outputs)
        return np.asarray(math.exp(apart.mean()) * (apart - apart.mean()))
