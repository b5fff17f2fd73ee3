"""The embedded text-to-image model: text encoder, LlamaGen target, tokenizer, and its drafters, from the shipped
weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.config.registry import weights_folder
from specbench.data.scenes import to_uint8
from specbench.errors import UsageError
from specbench.models.llamagen import Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.loading import checkpoints
from specbench.models.loading.drafters import Drafters
from specbench.models.scenes_config import CONFIGS, TARGET
from specbench.models.text import TextConfig, TextEncoder
from specbench.models.vq import VQConfig, VQModel


class ScenesModel(Drafters):
    """What a pipeline needs from a text-to-image model; drafters are loaded when a method needs them."""

    name = "llamagen_scenes"
    resolution = 64
    target: LlamaGen

    def __init__(
        self, weights: str, device: torch.device, dtype: torch.dtype, drafter_weights: str | None = None
    ) -> None:
        """weights: "embedded", "random", or a folder with the same files."""
        self.device, self.dtype = device, dtype
        self.drafter_weights = Path(drafter_weights) if drafter_weights else None
        self.folder = weights_folder({"model": "llamagen_scenes", "weights": weights})
        if self.folder is not None and not self.folder.is_dir():
            raise UsageError(
                f"weights={weights} is not a folder (use embedded, random, or a folder with scenes_*.safetensors)"
            )
        self.text = self._load("text", TextEncoder, TextConfig, torch.float32)
        self.target = self._load("target", LlamaGen, LlamaGenConfig, dtype)
        self.tokenizer = self._load("tokenizer", VQModel, VQConfig, torch.float32)

    def _load(self, kind: str, module: type, config: type, dtype: torch.dtype) -> Any:
        if self.folder is None:
            torch.manual_seed(sum(kind.encode()))
            built = module(CONFIGS[kind]())
        else:
            path = self.folder / f"scenes_{kind}.safetensors"
            built = checkpoints.load(path, f"scenes-{kind}", module, config)
        return built.to(self.device, dtype).eval().requires_grad_(False)

    def codes(self, images: Tensor) -> Tensor:
        """By the tokenizer in bfloat16, as `make train-scenes` does it: some codes of the table are so close together
        that float32 chooses others, which decode alike, but which the target was not trained on."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.tokenizer.encode(images.to(self.device))

    def drafter_path(self, part: str) -> Path | None:
        return None if self.folder is None else self.folder / f"scenes_{part}.safetensors"

    def smaller(self) -> LlamaGen:
        return LlamaGen(CONFIGS["draft"]())

    def codebook(self) -> Tensor:
        """The code vectors (V, d) that rules measure proximity in: the table as stored (reference README (18)). This
        tokenizer's are of unit length, so that l2 and cosine name the same neighbours."""
        return self.tokenizer.quantize.embedding.weight.float()

    @torch.inference_mode()
    def encode(self, prompts: list[str]) -> Conditioning:
        """Features of each prompt, encoded alone: they do not depend on the batch."""
        rows = [self.text(self.text.tokenize([p]).to(self.device)) for p in prompts]
        features = torch.cat(rows).to(self.dtype)
        return Conditioning(features, torch.ones(features.shape[:2], dtype=torch.bool, device=self.device))

    @torch.inference_mode()
    def pixels(self, tokens: Tensor) -> np.ndarray:
        """Images (B, 64, 64, 3) uint8 of tokens (B, 256), each decoded on its own."""
        return np.concatenate([to_uint8(self.tokenizer.decode(row[None].to(self.device))) for row in tokens])


def tokens_of_image(cfg: Mapping[str, Any]) -> int:
    """Tokens of an image; loads nothing."""
    return TARGET.block_size


def load(cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> ScenesModel:
    return ScenesModel(cfg["weights"], device, dtype, cfg.get("drafter_weights"))
