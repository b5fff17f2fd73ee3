"""PickScore (Kirstain et al. 2023): CLIP ViT-H/14, trained on people's choices between two images of a prompt.

The score is the cosine between image and caption times the network's learnt scale, about 100, as in the authors' code:
about 18 to 24. The shorter side of an image is resized to 224 by PIL's bicubic and the centre is cut out; a caption
has at most 77 tokens of transformers' tokenizer. Computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.metrics import weights
from specbench.metrics.base import MeanMetric, PromptItem, Scorer, SingleImageScorer, cut_captions
from specbench.metrics.preparation import CLIP, center_square, normalised, shortest

if TYPE_CHECKING:
    from torch import nn

PART, FILE, SIDE = "pickscore", "model.safetensors", 224


class PickScoreScorer(SingleImageScorer):
    """Outputs (B, 1) float32: the scores."""

    def __init__(self, network: nn.Module, device: str) -> None:
        """network: transformers' CLIPModel."""
        self.network, self.device = network, device

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch
        from torch.nn.functional import cosine_similarity

        from specbench.metrics import clip

        network: Any = self.network
        x = torch.stack([normalised(center_square(shortest(image, SIDE)), CLIP) for image in images])
        ids = clip.captions()([item.prompt for item in items])
        with torch.inference_mode():
            of_images = network.visual_projection(network.vision_model(x.to(self.device)).pooler_output)
            of_captions = network.text_projection(network.text_model(ids.to(self.device)).pooler_output)
            scores = network.logit_scale.exp() * cosine_similarity(of_images, of_captions)
            found: np.ndarray = scores[:, None].cpu().numpy()
        return found


class PickScore(weights.PublishedMetric, MeanMetric):
    """The mean score. No options."""

    reads_prompt = True
    fetched_by, file_names = "pickscore", {PART: FILE}

    @property
    def cache_key(self) -> str:
        weights.need("open_clip")
        return f"pickscore-v1@{self.hashes[0]}, {SIDE} bicubic"

    def scorer(self) -> Scorer:
        from specbench.metrics import clip

        (file,) = self.published_files
        network = clip.load_both(file, self.context.device)
        return PickScoreScorer(network, self.context.device)

    def note(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> str:
        from specbench.metrics import clip

        return cut_captions(clip.captions().too_long([item.prompt for item in items]), len(items), 77)
