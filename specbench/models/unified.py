"""Targets with one vocabulary for text and images: Chameleon (Lumina-mGPT, Anole), Emu3, Janus-Pro and SimpleAR.

The prefix is the token ids of a prompt, padded on the left. Image tokens follow in raster order, with the grammar's
tokens (new lines, the image's end) between and after them. Only the head's rows of image tokens are kept, because the
grammar forbids all others: a decode step reads less, and its distribution is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specbench.models.language import Grammar, Language, Prefix
from specbench.models.transformer import BlockConfig, init_weights, line_rotary


@dataclass(frozen=True)
class UnifiedConfig:
    """A Llama over one vocabulary. qk_norm, norms and qkv_bias: see `BlockConfig`; head_hidden: see `Language`."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    ffn_hidden: int
    vocab_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: int = 0
    norms: Literal["before", "after"] = "before"
    head_hidden: int = 0
    qkv_bias: bool = False

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(
            self.dim,
            self.n_head,
            self.n_kv_head,
            self.ffn_hidden,
            self.norm_eps,
            "halves",
            qk_norm=self.qk_norm,
            norms=self.norms,
            qkv_bias=self.qkv_bias,
        )


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of an image. ids (V,) int64: their vocabulary ids (codes first, then the grammar's tokens, then
    padding); width: positions per row."""

    ids: Tensor
    grammar: Grammar
    width: int


#: A vocabulary of at least `LARGE` tokens is padded to a multiple of `ALIGNED`. Rows of float32 or bfloat16 numbers are
#: then aligned, and a GPU reads 16 bytes at once. (Without padding, a row of 8,194 numbers takes a load per number.)
LARGE, ALIGNED = 1024, 16


def image_tokens(codes: Tensor, rows: int, columns: int, new_line: int | None, tail: Sequence[int]) -> ImageTokens:
    """An image of rows x columns codes with the vocabulary ids `codes` (C,). The id new_line, if any, ends every row,
    including the last. The ids of `tail` follow the image (reference README (23), (28)). A large vocabulary is padded
    with tokens that the grammar never allows; they have the id of the first code."""
    count = len(codes)
    grammar_ids = ([] if new_line is None else [new_line]) + list(tail)
    row = [-1] * columns + ([] if new_line is None else [count])
    tail_tokens = range(count + len(grammar_ids) - len(tail), count + len(grammar_ids))
    forced = torch.tensor(row * rows + list(tail_tokens))
    ids = torch.cat([codes.cpu().long(), torch.tensor(grammar_ids, dtype=torch.int64)])
    if len(ids) >= LARGE:
        ids = torch.cat([ids, ids[:1].expand(-len(ids) % ALIGNED)])
    return ImageTokens(ids, Grammar(count, forced), len(row))


@dataclass
class Prompts:
    """Token ids of N prompts, padded on the left: ids (N, P) int64 and valid (N, P) bool, and the same for the
    unconditional (or negative) prompts."""

    ids: Tensor
    valid: Tensor
    no_ids: Tensor
    no_valid: Tensor

    def __len__(self) -> int:
        return len(self.ids)


class Unified(Language):
    """A Transformer whose prefix is the token ids of a prompt."""

    skips_padding = True
    _ids: Tensor

    def __init__(self, cfg: UnifiedConfig, image: ImageTokens) -> None:
        super().__init__()
        self.cfg, self.image = cfg, image
        self.grammar, self.length, self.width = image.grammar, len(image.grammar), image.width
        self.register_buffer("_ids", image.ids, persistent=False)
        self._build(cfg.block, cfg.n_layer, cfg.vocab_size, len(image.ids), cfg.head_hidden)
        init_weights(self)

    def condition(self, conditioning: Prompts, guided: bool) -> Prefix:
        ids, valid = conditioning.ids, conditioning.valid
        if guided:
            ids, valid = torch.cat([ids, conditioning.no_ids]), torch.cat([valid, conditioning.no_valid])
        return Prefix(self.tok_embeddings(ids), valid, ids)

    def ids(self, tokens: Tensor) -> Tensor:
        return self._ids[tokens]

    def rope(self, positions: int, prefix: int) -> Tensor:
        return line_rotary(positions, self.block.head_dim, self.cfg.rope_base)

    def token_ids(self) -> Tensor:
        self._ids = self._ids.to(self.output.weight.device)
        return self._ids
