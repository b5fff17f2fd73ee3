"""ImageReward by its makers' package image-reward: the second backend, to compare `image_reward` with.

The package pins old libraries and cannot be installed alongside the extra `metrics`; it has an extra of its own. It is
given the same two files as `image_reward` and fetches nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from specbench.errors import UsageError, install
from specbench.metrics import image_reward
from specbench.metrics.base import PromptItem, Scorer, Unavailable


class PackageScorer(Scorer):
    """Outputs (B, 1) float32: the rewards, one image after the other, as the package computes them."""

    def __init__(self, model: Any) -> None:
        """model: of `load`."""
        self.model = model

    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            rewards = [self.model.score(item.prompt, Image.fromarray(x)) for x, item in zip(images, items)]
        return np.array(rewards, dtype=np.float32)[:, None]


def load(weights: Path, vocabulary: Path, device: str) -> Any:
    """The package's own model, filled from ImageReward.pt, with a tokenizer from vocab.txt.

    Its own `load` fetches a configuration and a tokenizer, and accepts a file with missing tensors. Raises UsageError.
    """
    from ImageReward.ImageReward import ImageReward
    from ImageReward.models.BLIP import blip_pretrain
    from transformers import BertTokenizer

    from specbench.metrics import blip
    from specbench.models.loading import official

    def tokenizer() -> Any:
        made = BertTokenizer(str(vocabulary), do_lower_case=True)
        made.add_special_tokens({"bos_token": "[DEC]", "additional_special_tokens": ["[ENC]"]})
        return made

    blip.Captions(vocabulary)  # raises for a bad file
    source = official.open_source(weights)
    settings = {**blip.TEXT, "add_cross_attention": True, "pad_token_id": 0, "type_vocab_size": 2}
    theirs, blip_pretrain.init_tokenizer = blip_pretrain.init_tokenizer, tokenizer
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "med_config.json"
            file.write_text(json.dumps(settings), encoding="utf-8")
            model = ImageReward(med_config=str(file), device=device)
    finally:
        blip_pretrain.init_tokenizer = theirs
    try:
        keys = model.load_state_dict(dict(source.read(source.tensors)), strict=False)
    except RuntimeError as e:
        raise UsageError(
            f"{weights} does not fit ImageReward ({str(e).splitlines()[-1].strip()}); fetch it again"
        ) from e
    odd = [name for name in (*keys.missing_keys, *keys.unexpected_keys) if not name.endswith(".position_ids")]
    if odd:
        raise UsageError(
            f"{weights}: tensor {odd[0]!r} is missing, or belongs to no part of ImageReward; fetch it again"
        )
    return model.to(device).eval()


class ImageRewardPackage(image_reward.ImageReward):
    """The mean reward. No options."""

    @property
    def cache_key(self) -> str:
        if importlib.util.find_spec("ImageReward") is None:
            raise Unavailable(
                "the package image-reward is not installed: it needs an environment of its own, without the extra"
                f" metrics: {install('image-reward')}"
            )
        return f"image-reward-package-{importlib.metadata.version('image-reward')}@{self.digests}, 224 bicubic"

    def scorer(self) -> Scorer:
        try:
            network, vocabulary = self.published_files
            return PackageScorer(load(network, vocabulary, self.context.device))
        except ImportError as e:
            raise Unavailable(
                f"the package image-reward cannot be imported ({e}): in an environment of its own,"
                f" {install('image-reward')}"
            ) from e
