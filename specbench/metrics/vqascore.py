"""VQAScore (Lin et al. 2024): how probable it is that CLIP-FlanT5 answers "Yes" to 'Does this figure show "CAPTION"?'.

As in the authors' code (t2v_metrics), the score is the geometric mean of the probabilities of the answer's two tokens:
the word and the end token. An image is padded to a square with CLIP's mean colour and resized to 336 x 336 by PIL's
bicubic. Both networks compute in bfloat16. The authors' package is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specbench.errors import UsageError, unknown
from specbench.metrics import features, weights
from specbench.metrics.base import MeanMetric, NetworkScorer, PromptItem, Scorer, ScoringContext, chosen
from specbench.metrics.preparation import CLIP, normalised, squeezed
from specbench.storage.files import cached_sha256, sha256

if TYPE_CHECKING:
    from torch import Tensor

#: Model -> the folder of its weights.
MODELS = {"xxl": "vqascore", "xl": "vqascore_xl"}
TEXT, TOKENIZER = "vqascore_text", "tokenizer.json"
LARGEST = 8192  # maximal side in pixels: padding a long, narrow image could need any amount of memory


def padded(image: np.ndarray) -> np.ndarray:
    """The image in the middle of the smallest square around it, which has CLIP's mean colour."""
    height, width = image.shape[:2]
    side = max(height, width)
    if side > LARGEST:
        raise UsageError(
            f"vqascore pads an image to a square of at most {LARGEST} pixels per side, not {width}x{height}"
        )
    square = np.empty((side, side, 3), np.uint8)
    square[:] = [int(255 * level) for level in CLIP[0]]
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = image
    return square


class VQAScore(MeanMetric):
    """The mean score. Images are scored one at a time. Outputs (N, 1) float32. Options: `model`, "xxl" (the authors'
    recommendation) or "xl"."""

    reads_prompt = True
    known: ClassVar[Mapping[str, Any]] = {"model": "xxl"}

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, chosen(type(self), options, self.known))
        if self.options["model"] not in MODELS:
            raise unknown("model of vqascore", str(self.options["model"]), MODELS)
        self.part = MODELS[self.options["model"]]

    @property
    def files(self) -> list[Path]:
        """The files of Flan-T5's tensors in order, its tokenizer, and CLIP. Raises Unavailable."""
        folder = self.context.weights / self.part
        tensors = sorted([*folder.glob("*.safetensors")] or folder.glob("*.bin"))
        first = tensors[0].name if tensors else "model.safetensors.index.json"
        weights.find(self.context, self.part, self.part, first)
        tokenizer = weights.find(self.context, self.part, TEXT, TOKENIZER)
        return [*tensors, tokenizer, weights.find(self.context, self.part, features.CLIP_PART, features.CLIP_FILE)]

    @property
    def cache_key(self) -> str:
        *shards, tokenizer, tower = (cached_sha256(path) for path in self.files)
        network = f"clip-flant5-{self.options['model']}@{sha256(''.join(shards), 8)}"
        return f"{network}, tokenizer {tokenizer[:8]}, clip {tower[:8]}, padded {features.CLIP_SIDE} bicubic, bfloat16"

    def scorer(self) -> Scorer:
        import torch

        from specbench.metrics import clip, vqascore_network

        *shards, tokenizer, tower = self.files
        for part, path in (*((self.part, path) for path in shards), (TEXT, tokenizer), (features.CLIP_PART, tower)):
            weights.published(self.context, part, path)
        device = self.context.device
        network = vqascore_network.load(shards[0].parent, device, self.options["model"])
        questions = vqascore_network.Questions(tokenizer)
        eyes: Any = clip.load_image_tower(tower, device, dtype=torch.bfloat16)
        kind = next(eyes.parameters()).dtype

        def score_of(image: np.ndarray, item: PromptItem) -> Tensor:
            x = normalised(squeezed(padded(image), features.CLIP_SIDE), CLIP)[None]
            texts = (ids.to(device) for ids in questions(item.prompt))
            states = eyes.vision_model(x.to(device, kind), output_hidden_states=True).hidden_states[-2]
            score: Tensor = network(states[0, 1:], *texts)
            return score

        return NetworkScorer(device, lambda images, items: torch.stack(list(map(score_of, images, items)))[:, None])
