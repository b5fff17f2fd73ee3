"""The model of an embedded world: LlamaGen target, tokenizer, text encoder of captions, and its drafters, from the
shipped weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.config import registry
from specbench.config.run_config import RunConfig
from specbench.data import fashion, worlds
from specbench.data.base import Item
from specbench.engine.half import bfloat16_products
from specbench.models.llamagen import ClassConditioning, Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.loading.bundle import Bundle
from specbench.models.loading.drafter_networks import Drafters
from specbench.models.pixels import to_uint8
from specbench.models.scenes_config import WORLDS
from specbench.models.text import TextConfig, TextEncoder
from specbench.models.vq import VQConfig, VQModel


class EmbeddedModel(Drafters, Bundle):
    """A model for a pipeline, without the encoder of its prompts. Drafters are loaded when a method needs them."""

    target: LlamaGen

    def __init__(self, cfg: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.resolution = worlds.world(self.world).size
        self.target = self._load("target", LlamaGen, LlamaGenConfig, dtype)
        self.tokenizer = self._load("tokenizer", VQModel, VQConfig, torch.float32)

    def _load(self, kind: str, module: type, config: type, dtype: torch.dtype) -> Any:
        if self.folder is not None:
            return self.embedded(kind, module, config, dtype)
        torch.manual_seed(sum(kind.encode()))
        shapes = WORLDS[self.world]
        shape = shapes.text(self.world) if kind == "text" else getattr(shapes, kind)
        return module(shape).to(self.device, dtype).eval().requires_grad_(False)

    def codes(self, images: Tensor) -> Tensor:
        """Uses the tokenizer in bfloat16, like `make train-scenes`. Some codes are so close together that float32
        chooses others: these decode to nearly the same image, but the target was not trained on them."""
        with bfloat16_products(self.device):
            return self.tokenizer.encode(images.to(self.device))

    def drafter_path(self, part: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.world}_{part}.safetensors"

    def smaller(self) -> LlamaGen:
        return LlamaGen(WORLDS[self.world].draft)

    def codebook(self) -> Tensor:
        """The stored table. Its vectors have unit length, so l2 and cosine give the same neighbours."""
        return self.tokenizer.codebook()

    def decode_image(self, tokens: Tensor) -> np.ndarray:
        return to_uint8(self.tokenizer.decode(tokens))


class ScenesModel(EmbeddedModel):
    """The text-to-image model of a drawn world."""

    def __init__(self, cfg: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.text = self._load("text", TextEncoder, TextConfig, torch.float32)

    def unread_tokens(self, prompt: str) -> int:
        return self.text.unread(prompt)

    @torch.inference_mode()
    def encode(self, prompts: list[str]) -> Conditioning:
        """Features of the prompts. Each prompt is encoded separately, so they do not depend on the batch."""
        rows = [self.text(self.text.tokenize([p]).to(self.device)) for p in prompts]
        features = torch.cat(rows).to(self.dtype)
        return Conditioning(features, torch.ones(features.shape[:2], dtype=torch.bool, device=self.device))


class FashionModel(EmbeddedModel):
    """The class-conditional model of photographs."""

    @classmethod
    def check_prompts(cls, cfg: RunConfig, items: Sequence[Item]) -> None:
        """Raises UsageError for a prompt that names no class. Loads nothing."""
        fashion.numbers_in([item.prompt for item in items], cfg.model)

    def encode(self, prompts: list[str]) -> ClassConditioning:
        """prompts: class names ("ankle boot") or numbers."""
        return ClassConditioning(torch.tensor(fashion.numbers_in(prompts, self.name), device=self.device))


def tokens_of_image(cfg: RunConfig) -> int:
    """Number of tokens of an image. Loads nothing."""
    return WORLDS[registry.world_of(cfg)].target.block_size
