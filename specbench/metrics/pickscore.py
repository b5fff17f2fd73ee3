"""PickScore (Kirstain et al. 2023): CLIP ViT-H/14, trained on people's choices between two images of a prompt.

The score is the cosine between image and caption times the network's learnt scale, about 100, as in the authors' code:
about 18 to 24. The shorter side of an image is resized to 224 by PIL's bicubic and the centre is cut out; a caption
has at most 77 tokens of transformers' tokenizer. Computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.metrics import weights
from specbench.metrics.base import MeanMetric, PromptItem, Scorer, ScoringContext, SingleImageScorer, chosen
from specbench.metrics.preparation import CLIP, center_square, normalised, shortest
from specbench.storage.files import cached_sha256

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


class PickScore(MeanMetric):
    """The mean score. No options."""

    reads_prompt = True

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, chosen(type(self), options, {}))

    @property
    def parts(self) -> tuple[str, ...]:
        return (PART,)

    @property
    def file(self) -> Path:
        """The network's weights. Raises Unavailable."""
        return weights.find(self.context, "pickscore", PART, FILE)

    @property
    def cache_key(self) -> str:
        weights.need("open_clip")
        return f"pickscore-v1@{cached_sha256(self.file)[:8]}, {SIDE} bicubic"

    def scorer(self) -> Scorer:
        from specbench.metrics import clip

        network = clip.load_both(weights.published(self.context, PART, self.file), self.context.device)
        return PickScoreScorer(network, self.context.device)

    def note(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> str:
        from specbench.metrics import clip

        cut = clip.captions().too_long([item.prompt for item in items])
        return f"{cut} of {len(items)} captions have more than 77 tokens and lose their end" if cut else ""
