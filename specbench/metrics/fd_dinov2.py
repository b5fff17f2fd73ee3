"""Fréchet distance of DINOv2 features (Stein et al. 2023, FD-DINOv2), which follows people's judgement more closely
than Inception-V3's.

Network and preparation are those of dgm-eval, which the published values come from: Meta's file dinov2_vitl14_pretrain
.pth, each image to 224 x 224 by PIL's bicubic whatever its shape, ImageNet's mean and deviation, the 1,024 features of
the class token. torch-fidelity resizes with TensorFlow's bilinear filter, which gives other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.metrics import weights
from specbench.metrics.base import PromptItem, Scorer, SingleImageScorer
from specbench.metrics.compared import FrechetMetric
from specbench.metrics.preparation import IMAGENET, normalised, squeezed

if TYPE_CHECKING:
    from specbench.metrics.dinov2 import DINOv2

PART, FILE = "dinov2", "dinov2_vitl14_pretrain.pth"
FEATURES, SIDE = 1024, 224


class DINOv2Scorer(SingleImageScorer):
    """Outputs (B, 1024) float32: the features of the class token."""

    def __init__(self, network: DINOv2, device: str) -> None:
        self.network, self.device = network, device

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        x = torch.stack([normalised(squeezed(image, SIDE), IMAGENET) for image in images])
        with torch.inference_mode():
            found: np.ndarray = self.network(x.to(self.device)).cpu().numpy()
        return found


class FDDINOv2(weights.PublishedMetric, FrechetMetric):
    """No options."""

    width, of_real = FEATURES, "fd_dinov2"
    fetched_by, file_names = "fd_dinov2", {PART: FILE}

    @property
    def cache_key(self) -> str:
        return f"dinov2-vit-l-14@{self.hashes[0]}, {SIDE} bicubic"

    def scorer(self) -> Scorer:
        from specbench.metrics import dinov2

        (file,) = self.published_files
        network = dinov2.load(file, self.context.device)
        return DINOv2Scorer(network, self.context.device)
