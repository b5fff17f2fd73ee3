"""Human Preference Score v3 (Ma et al. 2025): Qwen2-VL-7B, trained on people's choices between images.

The score is the first of the network's two outputs, about 0 to 15, as in the authors' code; the other is the logarithm
of its uncertainty. An image is resized to about 200,704 pixels (448 x 448), its shape kept. No package of the authors
is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.metrics import weights
from specbench.metrics.base import MeanMetric, PromptItem, Scorer

if TYPE_CHECKING:
    from specbench.metrics.hpsv3_network import ChatSequences, HPSv3Network

PART, FILE, TOKENIZER = "hpsv3", "HPSv3.safetensors", "tokenizer.json"


class HPSv3Scorer(Scorer):
    """Outputs (B, 2) float32: the scores, and the logarithms of their uncertainties; one image after the other."""

    def __init__(self, network: HPSv3Network, sequences: ChatSequences, device: str) -> None:
        self.network, self.sequences, self.device = network, sequences, device

    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        from specbench.metrics import hpsv3_network

        rows = []
        for image, item in zip(images, items):
            x, grid = hpsv3_network.patches(image)
            ids, reward = self.sequences(item.prompt, grid)
            with torch.inference_mode():
                rows.append(self.network(ids.to(self.device), x.to(self.device), grid, reward).cpu())
        return torch.stack(rows).numpy()


class HPSv3(weights.PublishedMetric, MeanMetric):
    """The mean score. No options."""

    reads_prompt = True
    fetched_by, file_names = "hpsv3", {PART: FILE, f"{PART}/text": TOKENIZER}

    @property
    def cache_key(self) -> str:
        network, text = self.hashes
        return f"hpsv3@{network}, tokenizer {text}, 200704 pixels bicubic, bfloat16"

    def scorer(self) -> Scorer:
        from specbench.metrics import hpsv3_network

        network, text = self.published_files
        sequences, device = hpsv3_network.ChatSequences(text), self.context.device
        return HPSv3Scorer(hpsv3_network.load(network, device, sequences.image), sequences, device)
