"""Emu3.5-Image: Emu3's text vocabulary and grammar of rows, norms on queries and keys, and IBQ's image tokenizer.

Facts: baaivision/Emu3.5@8fcf1da4, src/emu3p5/modeling_emu3.py (an RMSNorm of each head's queries and keys before the
rotary embedding), src/utils/logits_processor.py (ids, grammar, guidance), src/utils/generation_utils.py (pixels) and
configs/example_config_t2i.py (prompts, sampling). The network has 31.2 billion parameters in blocks and 2.9 billion in
tables, the published numbers (arXiv 2510.26583); a loaded file gives its own sizes.

The official guidance mixes log-probabilities; here, logits are mixed. Both differ by a constant per row, so the
distributions are the same. Officially, the image's first tokens ("rows*columns" between its start and the first code)
are sampled unless a size is set; here, they are part of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.models import vq
from specbench.models.language import Grammar
from specbench.models.loading.bundle import shape_of
from specbench.models.loading.emu3 import FIRST_CODE, IMAGE_END, NEW_LINE, TEXT_IDS, Emu3Ids, Emu3Text
from specbench.models.loading.image_tokenizers import load_autoencoder
from specbench.models.loading.text_official import hashed_ids
from specbench.models.loading.unified_official import Encode, Prompt, UnifiedModel, instructed
from specbench.models.pixels import truncated
from specbench.models.unified import ImageTokens, UnifiedConfig, image_tokens

SIDE = 64  # rows and columns of codes: 1024 x 1024 pixels
#: IBQ (arXiv 2412.02692). The codebook's 131,072 vectors of 256 numbers and the two 1x1 convolutions are from the
#: official code. Widths, depths and the level with attention are from a port of its encoder (Apertus 1.5's vision
#: tokenizer in transformers); the tensors of a file replace widths and depths.
IBQ = vq.VQConfig(
    ch=256,
    num_res_blocks=4,
    codebook_size=131072,
    codebook_embed_dim=256,
    codebook_l2_norm=False,
)

_QWEN: dict[str, Any] = {"rope_base": 1e6, "norm_eps": 1e-6, "qk_norm": "rms"}
REDUCED_CODES, REDUCED_SIDE = 64, 4
REDUCED = UnifiedConfig(32, 2, 2, 1, 64, FIRST_CODE + REDUCED_CODES, head_size=24, **_QWEN)


def full(model: str) -> UnifiedConfig:
    """The network of the published size."""
    return shape_of(model, UnifiedConfig, vocab_size=FIRST_CODE + IBQ.codebook_size, **_QWEN)


@dataclass(frozen=True)
class Emu35Ids(Emu3Ids):
    """Special ids of a prompt. answer_start is <|extra_100|>."""

    answer_start: int = 151746


def image(codes: Tensor, rows: int, columns: int) -> ImageTokens:
    """Rows of codes with new lines between them, and the image's end after the last row."""
    tokens = image_tokens(codes, rows, columns, NEW_LINE, [IMAGE_END])
    forced = tokens.grammar.forced
    return replace(tokens, grammar=Grammar(len(codes), torch.cat([forced[:-2], forced[-1:]])))


def emu35_prompt(encode: Encode, prompt: str, rows: int, columns: int, instruction: str, negative: str) -> Prompt:
    """[bos] instruction [answer start] [image start] "rows*columns" as text [image]. The unconditional prompt has
    `negative` instead of the instruction. `instruction` contains {prompt}."""
    ids = Emu35Ids()
    frame = [ids.answer_start, ids.boi, *encode(f"{rows}*{columns}"), ids.img]
    return Prompt([ids.bos, *encode(instructed(instruction, prompt)), *frame], [ids.bos, *encode(negative), *frame])


class Emu35(UnifiedModel):
    tokenizer: vq.VQModel
    pad = Emu35Ids.pad

    def __init__(self, cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.instruction, self.negative = cfg["instruction"], cfg["negative"]
        self.text: Encode = lambda text: hashed_ids(text, 0, TEXT_IDS)
        if self.folder is None:
            self.tokenizer = self.random_pixels(IBQ, REDUCED_CODES)
        else:
            file = self.part("tokenizer") / "model.ckpt"
            self.tokenizer = load_autoencoder(vq.VQModel, IBQ, file, device, llamagen=False)
            self.text = Emu3Text(self.part("target")).encode
        self.side = REDUCED_SIDE if self.reduced else SIDE
        self.resolution = self.side * self.tokenizer.cfg.downsample
        codes = torch.arange(FIRST_CODE, FIRST_CODE + self.tokenizer.cfg.codebook_size)
        self.image = image(codes, self.side, self.side)
        self.target = self.loaded_target(REDUCED if self.reduced else full(self.name))

    def prompt(self, text: str) -> Prompt:
        return emu35_prompt(self.text, text, self.side, self.side, self.instruction, self.negative)

    def decode_image(self, codes: Tensor) -> np.ndarray:
        return truncated(self.tokenizer.decode(codes))


def tokens_of_image(cfg: Mapping[str, Any]) -> int:
    """Number of tokens of an image: rows of codes, each followed by a new line or the image's end. Loads nothing."""
    return SIDE * (SIDE + 1)
