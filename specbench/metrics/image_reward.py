"""ImageReward (Xu et al. 2023): a reward for an image and its caption, learnt from people's rankings.

The official weights run in transformers' BLIP, without the package image-reward, which needs an environment of its own
(see `image_reward_package`), and gives the same rewards. An image is resized to
224 by its shorter side, PIL's bicubic, and the centre is cut out; a caption has at most 35 tokens, as in the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.config import registry
from specbench.metrics import weights
from specbench.metrics.base import MeanMetric, PromptItem, Scorer, SingleImageScorer, cut_captions
from specbench.metrics.preparation import CLIP, normalised, shortest

if TYPE_CHECKING:
    from specbench.metrics.blip import Blip, Captions

FILE, VOCABULARY = "ImageReward.pt", "vocab.txt"


class ImageRewardScorer(SingleImageScorer):
    """Outputs (B, 1) float32: the rewards."""

    def __init__(self, network: Blip, captions: Captions, device: str) -> None:
        self.network, self.captions, self.device = network, captions, device

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        from specbench.metrics import blip

        side = blip.VISION["image_size"]
        x = torch.stack([normalised(square(image, side), CLIP) for image in images]).to(self.device)
        ids, mask = (t.to(self.device) for t in self.captions([item.prompt for item in items]))
        with torch.inference_mode():
            rewards: np.ndarray = self.network(x, ids, mask)[:, None].cpu().numpy()
        return rewards


def square(image: np.ndarray, side: int) -> np.ndarray:
    """Image (H, W, 3) uint8 -> (side, side, 3) uint8: the shorter side becomes `side`, PIL's bicubic, and the centre
    is cut out, with the roundings of torchvision's Resize and CenterCrop, which the package uses."""
    resized = shortest(image, side)
    height, width = resized.shape[:2]
    top, left = round((height - side) / 2), round((width - side) / 2)
    return np.array(resized[top : top + side, left : left + side])


class ImageReward(weights.PublishedMetric, MeanMetric):
    """The mean reward. No options."""

    reads_prompt = True
    fetched_by = "image_reward"
    file_names = {"image_reward": FILE, "image_reward/text": VOCABULARY}  # noqa: RUF012 (a ClassVar of the base)

    @property
    def cache_key(self) -> str:
        return f"image-reward@{self.digests}, 224 bicubic"

    @property
    def digests(self) -> str:
        network, vocabulary = map(registry.digest, self.files)
        return f"{network}, vocabulary {vocabulary}"

    def scorer(self) -> Scorer:
        from specbench.metrics import blip

        network, vocabulary = self.published_files
        return ImageRewardScorer(
            blip.load(network, self.context.device), blip.Captions(vocabulary), self.context.device
        )

    def note(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> str:
        from specbench.metrics import blip

        cut = blip.Captions(self.files[1]).too_long([item.prompt for item in items])
        return cut_captions(cut, len(items), blip.TOKENS)
