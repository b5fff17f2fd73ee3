"""Fréchet distance of DINOv2 features (Stein et al. 2023, FD-DINOv2), which follows people's judgement more closely
than Inception-V3's.

Network and preparation are those of dgm-eval, which the published values come from: Meta's file dinov2_vitl14_pretrain
.pth, each image to 224 x 224 by PIL's bicubic whatever its shape, ImageNet's mean and deviation, the 1,024 features of
the class token. torch-fidelity resizes with TensorFlow's bilinear filter, which gives other values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.metrics import weights
from specbench.metrics.base import PromptItem, Scorer, ScoringContext, SingleImageScorer, chosen
from specbench.metrics.compared import FrechetMetric
from specbench.metrics.preparation import IMAGENET, normalised, squeezed
from specbench.storage.files import cached_sha256

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


class FDDINOv2(FrechetMetric):
    """No options."""

    width, of_real = FEATURES, "fd_dinov2"

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, chosen(type(self), options, {}))

    @property
    def parts(self) -> tuple[str, ...]:
        return (PART,)

    @property
    def file(self) -> Path:
        """The network's weights. Raises Unavailable."""
        return weights.find(self.context, "fd_dinov2", PART, FILE)

    @property
    def cache_key(self) -> str:
        return f"dinov2-vit-l-14@{cached_sha256(self.file)[:8]}, {SIDE} bicubic"

    def scorer(self) -> Scorer:
        from specbench.metrics import dinov2

        network = dinov2.load(weights.published(self.context, PART, self.file), self.context.device)
        return DINOv2Scorer(network, self.context.device)
