"""CMMD (Jayasumana et al. 2024): the squared maximum mean discrepancy of CLIP embeddings of images x and real images y
under a Gaussian kernel of width 10, times 1,000.

    1000 (mean k(x_i, x_j) + mean k(y_i, y_j) - 2 mean k(x_i, y_j)),   k(a, b) = exp(-|a - b|^2 / 200)

As in the authors' code the means are over all pairs, an image with itself included, which is biased upwards by an
amount that falls as 1 / N and that the note gives. Embeddings have length 1. An image's central square is resized to
336 x 336 by PIL's bicubic. It is no Gaussian fit, so that it needs fewer images than a Fréchet distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.metrics import weights
from specbench.metrics.base import PromptItem, Score, Scorer, SingleImageScorer
from specbench.metrics.compared import ComparedMetric
from specbench.metrics.preparation import CLIP, center_square, normalised, squeezed

if TYPE_CHECKING:
    from torch import nn

PART, FILE = "clip_l14_336", "pytorch_model.bin"
FEATURES, SIDE = 768, 336
SIGMA, SCALE = 10.0, 1000.0
BLOCK = 1000  # images whose kernel with all others is in memory at once


class CLIPImageScorer(SingleImageScorer):
    """Outputs (B, 768) float32: CLIP's embeddings of the images, of length 1."""

    def __init__(self, network: nn.Module, device: str) -> None:
        """network: transformers' CLIPVisionModelWithProjection, as `clip.load_image_tower` gives it."""
        self.network, self.device = network, device

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        x = torch.stack([normalised(squeezed(center_square(image), SIDE), CLIP) for image in images])
        with torch.inference_mode():
            embeddings = self.network(x.to(self.device)).image_embeds
            found: np.ndarray = torch.nn.functional.normalize(embeddings, dim=-1).cpu().numpy()
        return found


class CMMD(weights.PublishedMetric, ComparedMetric):
    """No options. The standard error holds the real images fixed, as those of the Fréchet distance and KID."""

    width, of_real = FEATURES, "cmmd"
    fetched_by, file_names = "cmmd", {PART: FILE}
    needs_features = True

    @property
    def cache_key(self) -> str:
        return f"clip-vit-l-14-336@{self.hashes[0]}, centre {SIDE} bicubic"

    def scorer(self) -> Scorer:
        from specbench.metrics import clip

        (file,) = self.published_files
        device = self.context.device
        return CLIPImageScorer(clip.load_image_tower(file, device), device)

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        real = self.reference.features
        assert real is not None
        n, m = len(outputs), len(real)
        if min(n, m) < 2:
            return (Score.unmeasured("a kernel distance needs at least two images a side", self.backend()),)
        within, across, reference = mean_kernel(outputs), mean_kernel(outputs, real), mean_kernel(real)
        value = SCALE * float(within.mean() + reference.mean() - 2 * across.mean())
        bias = SCALE * float((1 - within.mean()) / (n - 1) + (1 - reference.mean()) / (m - 1))
        error = float(self._moved(within, across).std(ddof=1)) / n**0.5
        kept = f", of which {m} are compared" if m != self.reference.count else ""
        note = f"{self.against()}{kept}; n = {n} adds {bias:.4f} by the pairs of an image with itself"
        return (Score(value, error, self.backend(), note),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        real = self.reference.features
        assert real is not None
        return self._moved(mean_kernel(outputs), mean_kernel(outputs, real)) if len(outputs) > 1 else None

    @staticmethod
    def _moved(within: np.ndarray, across: np.ndarray) -> np.ndarray:
        """How each image moves the value: to first order, by 2 / N times its witness, less the mean of all."""
        witness = within - across
        moved: np.ndarray = 2 * SCALE * (witness - witness.mean())
        return moved


def mean_kernel(a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
    """mean_j k(a_i, b_j) of features a (N, d) and b (M, d), or a itself: (N,) float64."""
    a = a.astype(np.float64)
    b = a if b is None else b.astype(np.float64)
    squares, found = (b * b).sum(1), []
    for start in range(0, len(a), BLOCK):
        x = a[start : start + BLOCK]
        distances = (x * x).sum(1)[:, None] + squares - 2 * (x @ b.T)
        found.append(np.exp(distances / (-2 * SIGMA**2)).mean(1))
    return np.concatenate(found)
