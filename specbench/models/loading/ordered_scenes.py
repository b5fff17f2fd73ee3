"""The embedded class-conditional model that decodes in random orders: ARPG's architecture over the tokens of the
embedded VQ tokenizer, trained on the single objects of *scenes*."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.data import scenes, scenes_classes
from specbench.models import scenes_config
from specbench.models.arpg import ARPG
from specbench.models.llamagen import ClassConditioning, LlamaGenConfig
from specbench.models.loading.bundle import Bundle
from specbench.models.orders import GroupOrder
from specbench.models.pixels import to_uint8
from specbench.models.vq import VQConfig, VQModel


class ScenesArpg(Bundle):
    """The model for a pipeline."""

    resolution = scenes.SIZE

    def __init__(self, cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__({**cfg, "reduced": False}, device, dtype)
        self.tokenizer = self._load("tokenizer", VQModel, VQConfig, torch.float32)
        self.target = self._load("arpg", ARPG, LlamaGenConfig, dtype)
        self.target.order = GroupOrder.of(cfg, self.target.cfg.side)

    def _load(self, kind: str, module: Any, config: Any, dtype: torch.dtype) -> Any:
        if self.folder is None:
            return self.random(
                lambda: module(scenes_config.ARPG if kind == "arpg" else scenes_config.VQ), sum(kind.encode()), dtype
            )
        return self.embedded(kind, module, config, dtype)

    def codebook(self) -> Tensor:
        return self.tokenizer.codebook()

    def encode(self, prompts: list[str]) -> ClassConditioning:
        """prompts: class names ("red circle") or numbers."""
        return ClassConditioning(torch.tensor(scenes_classes.numbers_in(prompts, self.name), device=self.device))

    def decode_image(self, tokens: Tensor) -> np.ndarray:
        return to_uint8(self.tokenizer.decode(tokens))


def tokens_of_image(cfg: Mapping[str, Any]) -> int:
    """Number of tokens of an image. Loads nothing."""
    return scenes_config.ARPG.block_size
