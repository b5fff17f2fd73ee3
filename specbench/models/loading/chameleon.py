"""Lumina-mGPT and Anole: Chameleon, a Llama with norms on queries and keys and one vocabulary for text and images.

Facts: reference README (19) to (26) and the manifests of Lumina-mGPT-7B-768, Anole-7b-v0.1-hf and chameleon_vqgan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.loading.bundle import UnifiedModel
from specbench.models.loading.image_tokenizers import load_autoencoder
from specbench.models.loading.prompts import ChameleonIds, anole_prompt, lumina_prompt
from specbench.models.loading.text_official import ChameleonText, hashed_ids
from specbench.models.loading.unified_official import padded, read
from specbench.models.unified import ImageTokens, Prompts, Unified, UnifiedConfig, image_tokens

PATCH = 16  # pixels per side of a code
FIRST_CODE = 4  # where there is no tokenizer
LUMINA_SIZES, ANOLE_SIZE = (512, 768, 1024), 512

FULL = UnifiedConfig(4096, 32, 32, 32, 11008, 65536, qk_norm=1)
REDUCED = UnifiedConfig(64, 2, 2, 2, 96, 9216, qk_norm=1)
REDUCED_CODES, REDUCED_SIZE = 64, 64


def lumina_image(codes: Tensor, width: int, height: int, ids: ChameleonIds | None = None) -> ImageTokens:
    """The grammar after the size tokens: rows of codes, each with its new line, then the image's end."""
    ids = ids or ChameleonIds()
    return image_tokens(codes, height // PATCH, width // PATCH, ids.new_line, [ids.image_end])


def anole_image(codes: Tensor, side: int, ids: ChameleonIds | None = None) -> ImageTokens:
    """A square of codes, then the image's end."""
    return image_tokens(codes, side // PATCH, side // PATCH, None, [(ids or ChameleonIds()).image_end])


class Chameleon(UnifiedModel):
    tokenizer: vq.VQModel

    def __init__(self, cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.lumina = "instruction" in cfg
        size = cfg["size"] if self.lumina else ANOLE_SIZE
        if self.lumina and size not in LUMINA_SIZES:
            raise UsageError(f"size must be one of {', '.join(map(str, LUMINA_SIZES))} (got {size})")
        self.resolution = REDUCED_SIZE if self.reduced else size
        self.prompt_length: int = cfg["prompt_length"]
        self.instruction: str = cfg.get("instruction", "")
        self.unconditional: str = cfg.get("unconditional", "header")
        self.text: ChameleonText | None = None
        self.ids = ChameleonIds()
        if self.folder is None:
            shape = vq.CHAMELEON.reduced(REDUCED_CODES) if self.reduced else vq.CHAMELEON
            self.tokenizer = self.random(lambda: vq.VQModel(shape), 2, torch.float32)
            codes = torch.arange(FIRST_CODE, FIRST_CODE + shape.codebook_size)
            base = REDUCED if self.reduced else FULL
            base = base if self.lumina else replace(base, qk_norm=base.n_head)  # Anole's norms have a row a head
            self.image = self._image(codes)
            self.target = self.random(lambda: Unified(base, self.image), 1, dtype)
            return
        file = self.part("tokenizer") / "vqgan.ckpt"
        self.tokenizer = load_autoencoder(vq.VQModel, vq.CHAMELEON, file, device, llamagen=False)
        self.text = ChameleonText(self.part("tokenizer"))
        self.ids = self.text.ids()
        self.image = self._image(self.text.codes(self.tokenizer.cfg.codebook_size))
        self.target = read(self.part("target"), self.image, device, dtype)

    def _image(self, codes: Tensor) -> ImageTokens:
        side = self.resolution
        return lumina_image(codes, side, side, self.ids) if self.lumina else anole_image(codes, side, self.ids)

    def encode(self, prompts: list[str]) -> Prompts:
        def hashed(text: str) -> list[int]:
            return hashed_ids(text, self.ids.size, self.target.cfg.vocab_size)

        encode = self.text.encode if self.text else hashed
        side = self.resolution
        if self.lumina:
            settings = side, side, self.instruction, self.ids, self.unconditional
            given = [lumina_prompt(encode, p, *settings) for p in prompts]
        else:
            given = [anole_prompt(encode, p, self.ids) for p in prompts]
        return padded(given, self.prompt_length, self.ids.pad, self.device)

    def decode_image(self, codes: Tensor) -> np.ndarray:
        return vq.truncated(self.tokenizer.decode(codes))


def tokens_of_image(cfg: Mapping[str, Any]) -> int:
    """Tokens of an image, rows of codes with a new line each and the image's end; loads nothing."""
    side = cfg.get("size", 512) // 16
    return int(side * (side + 1) + 1)
