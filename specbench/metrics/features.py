"""Distances between the features of generated and of real images, from networks newer than Inception-V3: FD-DINOv2 and
CMMD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.metrics import weights
from specbench.metrics.base import NetworkScorer, PromptItem, Score, Scorer
from specbench.metrics.compared import ComparedMetric, FrechetMetric
from specbench.metrics.preparation import CLIP, IMAGENET, center_square, normalised, squeezed
from specbench.rows.remark import remark

if TYPE_CHECKING:
    from torch import Tensor

DINO_FEATURES, DINO_SIDE = 1024, 224
#: CLIP ViT-L/14 at 336 pixels: the folder of its weights, and the file in it.
CLIP_PART, CLIP_FILE = "clip_l14_336", "pytorch_model.bin"
CLIP_FEATURES, CLIP_SIDE = 768, 336
SIGMA, SCALE = 10.0, 1000.0
BLOCK = 1000  # images whose kernel with all others is in memory at once


class FDDINOv2(weights.PublishedMetric, FrechetMetric):
    """Fréchet distance of DINOv2 features (Stein et al. 2023, FD-DINOv2), which agrees with people's judgement better
    than the distance of Inception-V3's features. Scorer outputs (N, 1024) float32: the class token's features. No
    options.

    Network and preparation follow dgm-eval, the source of the published values: Meta's file dinov2_vitl14_pretrain.pth,
    images of any shape resized to 224 x 224 by PIL's bicubic, ImageNet's mean and deviation. torch-fidelity resizes
    with TensorFlow's bilinear filter, which gives other values.
    """

    width, of_real = DINO_FEATURES, "fd_dinov2"
    fetched_by, file_names = "fd_dinov2", {"dinov2": "dinov2_vitl14_pretrain.pth"}

    @property
    def cache_key(self) -> str:
        return f"dinov2-vit-l-14@{self.hashes[0]}, {DINO_SIDE} bicubic"

    def scorer(self) -> Scorer:
        import torch

        from specbench.metrics import dinov2

        (file,) = self.published_files
        device = self.context.device
        network = dinov2.load(file, device)

        def outputs(images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> Tensor:
            x = torch.stack([normalised(squeezed(image, DINO_SIDE), IMAGENET) for image in images])
            features: Tensor = network(x.to(device))
            return features

        return NetworkScorer(device, outputs)


class CMMD(weights.PublishedMetric, ComparedMetric):
    """The squared maximum mean discrepancy (Jayasumana et al. 2024) of CLIP embeddings of images x and real images y
    under a Gaussian kernel of width 10, times 1,000. No options.

        1000 (mean k(x_i, x_j) + mean k(y_i, y_j) - 2 mean k(x_i, y_j)),   k(a, b) = exp(-|a - b|^2 / 200)

    As in the authors' code, the means are over all pairs, including an image with itself. This adds a bias that falls
    as 1 / N; a remark gives it. The scorer's outputs are embeddings (N, 768) float32 of length 1. An image's central
    square is resized to 336 x 336 by PIL's bicubic. No Gaussian is fitted, so it needs fewer images than a Fréchet
    distance. The standard error treats the real images as fixed, as for the Fréchet distance.
    """

    width, of_real = CLIP_FEATURES, "cmmd"
    fetched_by, file_names = "cmmd", {CLIP_PART: CLIP_FILE}
    needs_features = True

    @property
    def cache_key(self) -> str:
        return f"clip-vit-l-14-336@{self.hashes[0]}, centre {CLIP_SIDE} bicubic"

    def scorer(self) -> Scorer:
        import torch

        from specbench.metrics import clip

        (file,) = self.published_files
        device = self.context.device
        network: Any = clip.load_image_tower(file, device)

        def outputs(images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> Tensor:
            x = torch.stack([normalised(squeezed(center_square(image), CLIP_SIDE), CLIP) for image in images])
            return torch.nn.functional.normalize(network(x.to(device)).image_embeds, dim=-1)

        return NetworkScorer(device, outputs)

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        real = self.reference.features
        assert real is not None
        n, m = len(outputs), len(real)
        if min(n, m) < 2:
            return (Score.unmeasured(remark("needs_two_a_side", statistic="a kernel distance"), self.backend()),)
        within, across, reference = mean_kernel(outputs), mean_kernel(outputs, real), mean_kernel(real)
        value = SCALE * float(within.mean() + reference.mean() - 2 * across.mean())
        bias = SCALE * float((1 - within.mean()) / (n - 1) + (1 - reference.mean()) / (m - 1))
        error = float(self._influences(within, across).std(ddof=1)) / n**0.5
        remarks = [self.against(), *[remark("compared", images=m)] * (m != self.reference.count)]
        remarks.append(remark("own_pairs", images=n, bias=bias))
        return (Score(value, error, self.backend(), remarks),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        real = self.reference.features
        assert real is not None
        return self._influences(mean_kernel(outputs), mean_kernel(outputs, real)) if len(outputs) > 1 else None

    @staticmethod
    def _influences(within: np.ndarray, across: np.ndarray) -> np.ndarray:
        """The influence of each image: to first order, 2 / N times its witness minus the mean witness."""
        witness = within - across
        influences: np.ndarray = 2 * SCALE * (witness - witness.mean())
        return influences


def mean_kernel(a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
    """mean_j k(a_i, b_j), (N,) float64, for features a (N, d) and b (M, d); b = None: a itself."""
    a = a.astype(np.float64)
    b = a if b is None else b.astype(np.float64)
    squares, means = (b * b).sum(1), []
    for start in range(0, len(a), BLOCK):
        x = a[start : start + BLOCK]
        distances = (x * x).sum(1)[:, None] + squares - 2 * (x @ b.T)
        means.append(np.exp(distances / (-2 * SIGMA**2)).mean(1))
    return np.concatenate(means)
