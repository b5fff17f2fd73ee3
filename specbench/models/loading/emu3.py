"""Emu3-Gen: a Llama with grouped heads and one vocabulary for text and images.

Facts: reference README (27) to (30) and the manifests of Emu3-Gen and Emu3-VisionTokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.models import emu3_vision, vq
from specbench.models.language import Grammar
from specbench.models.loading import image_tokenizers, official
from specbench.models.loading.bundle import UnifiedModel
from specbench.models.loading.prompts import Emu3Ids, emu3_prompt
from specbench.models.loading.text_official import Emu3Text, hashed_ids
from specbench.models.loading.unified_official import padded, read
from specbench.models.unified import ImageTokens, Prompts, Unified, UnifiedConfig, image_tokens

FIRST_CODE = 151854
NEW_LINE, FRAME_END, IMAGE_END, SEQUENCE_END = 151846, 151847, 151853, 151850
AREA = 720 * 720  # pixels of an image
TEXT_IDS = 151643  # ids below are of text

FULL = UnifiedConfig(4096, 32, 32, 8, 14336, 184622, rope_base=1e6)
REDUCED = UnifiedConfig(32, 2, 2, 1, 64, FIRST_CODE + 64, rope_base=1e6)
REDUCED_CODES, REDUCED_SIDE = 64, 4  # a row of codes


def grid(area: int, ratio: str, patch: int) -> tuple[int, int]:
    """(rows, columns) of codes of an image of about `area` pixels; ratio "width:height", patch: pixels a code."""
    width, height = (int(x) for x in ratio.split(":"))
    unit = math.sqrt(area / (width * height))
    return round(height * unit / patch), round(width * unit / patch)


def image(codes: Tensor, rows: int, columns: int) -> ImageTokens:
    """Rows of codes, each with its new line, then the ends of frame, image and sequence.

    The official constraint forces a new line wherever a row would end, also after the image, which is visible in
    images of one or two columns (golden emu3_image_grammar).
    """
    made = image_tokens(codes, rows, columns, NEW_LINE, [FRAME_END, IMAGE_END, SEQUENCE_END])
    position = torch.arange(1, len(made.grammar) + 1)
    forced = torch.where(position % (columns + 1) == 0, len(codes), made.grammar.forced)
    return replace(made, grammar=Grammar(len(codes), forced))


class Emu3(UnifiedModel):
    def __init__(self, cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.prompt_length: int = cfg["prompt_length"]
        self.suffix, self.negative = cfg["suffix"], cfg["negative"]
        self.text: Emu3Text | None = None
        if self.folder is None:
            values = emu3_vision.reduced(REDUCED_CODES) if self.reduced else emu3_vision.OFFICIAL
            shape = emu3_vision.configured(values)
            self.tokenizer = self.random(lambda: emu3_vision.Emu3Vision(shape), 2, torch.float32)
        else:
            path = self.part("tokenizer")
            shape = emu3_vision.configured(official.config(path))
            self.tokenizer = image_tokenizers.load_emu3_vision(shape, official.open_source(path), device, torch.float32)
        count = len(self.tokenizer.codebook())
        patch = self.tokenizer.downsample
        self.grid = (REDUCED_SIDE, REDUCED_SIDE) if self.reduced else grid(AREA, "1:1", patch)
        self.resolution = self.grid[0] * patch
        self.image = image(torch.arange(FIRST_CODE, FIRST_CODE + count), *self.grid)
        if self.folder is None:
            base = REDUCED if self.reduced else FULL
            self.target = self.random(lambda: Unified(base, self.image), 1, dtype)
        else:
            self.text = Emu3Text(self.part("target"))
            self.target = read(self.part("target"), self.image, device, dtype)

    def encode(self, prompts: list[str]) -> Prompts:
        encode = self.text.encode if self.text else lambda text: hashed_ids(text, 0, TEXT_IDS)
        given = [emu3_prompt(encode, p, *self.grid, self.suffix, self.negative) for p in prompts]
        return padded(given, self.prompt_length, Emu3Ids().pad, self.device)

    def decode_image(self, codes: Tensor) -> np.ndarray:
        return vq.truncated(self.tokenizer.decode(codes, self.grid))
