"""Targets with one vocabulary for text and images: Chameleon (Lumina-mGPT, Anole), Emu3, Emu3.5, Janus-Pro, SimpleAR
and GLM-Image's autoregressive stage.

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
from specbench.models.transformer import BlockConfig, init_weights, line_rotary, rotary_table


@dataclass(frozen=True)
class UnifiedConfig:
    """A Llama over one vocabulary. qk_norm, norms, qkv_bias and head_size: see `BlockConfig`; head_hidden: see
    `Language`. sections: numbers of a head's pairs that time, row and column rotate (M-RoPE), see `unified.places`; if
    empty, all pairs are rotated by the position in the sequence."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    ffn_hidden: int
    vocab_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: int | Literal["rms"] = 0
    norms: Literal["before", "after", "both"] = "before"
    head_hidden: int = 0
    qkv_bias: bool = False
    head_size: int = 0
    sections: tuple[int, ...] = ()

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
            head_size=self.head_size,
            rotated=2 * sum(self.sections),
        )


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of an image. ids (V,) int64: their vocabulary ids (codes first, then the grammar's tokens, then
    padding); width: positions per row; grids: (rows, columns) of the grids that the image's codes fill one after the
    other, for M-RoPE. Positions of other tokens continue after the grids."""

    ids: Tensor
    grammar: Grammar
    width: int
    grids: tuple[tuple[int, int], ...] = ()


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


def places(prefix: int, grids: Sequence[tuple[int, int]], positions: int) -> Tensor:
    """(time, row, column), (positions, 3) int64, of the positions of a sequence.

    The first `prefix` positions are text: all three coordinates are equal and increase by one. Then follow the grids.
    In a grid that begins at p, a code has (p, p + row, p + column), and the position after the grid is p + max(rows,
    columns) (huggingface/transformers@d8c1e284, glm_image/modular_glm_image.py). After the grids, positions are text.
    """
    parts = [torch.arange(prefix)[:, None].expand(-1, 3)]
    position = prefix
    for rows, columns in grids:
        row, column = torch.arange(rows * columns) // columns, torch.arange(rows * columns) % columns
        parts.append(position + torch.stack([torch.zeros_like(row), row, column], -1))
        position += max(rows, columns)
    beyond = max(0, positions - sum(map(len, parts)))
    return torch.cat([*parts, torch.arange(position, position + beyond)[:, None].expand(-1, 3)])[:positions]


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


class Prompted(Language):
    """A Transformer whose prefix is the token ids of a prompt."""

    def condition(self, conditioning: Prompts, guided: bool) -> Prefix:
        ids, valid = conditioning.ids, conditioning.valid
        if guided:
            ids, valid = torch.cat([ids, conditioning.no_ids]), torch.cat([valid, conditioning.no_valid])
        return Prefix(self.tok_embeddings(ids), valid, ids)


class Unified(Prompted):
    _ids: Tensor

    def __init__(self, cfg: UnifiedConfig, image: ImageTokens) -> None:
        super().__init__()
        self.cfg, self.image = cfg, image
        self.grammar, self.length, self.width = image.grammar, len(image.grammar), image.width
        self.skips_padding = not cfg.sections
        self.register_buffer("_ids", image.ids, persistent=False)
        self._build(cfg.block, cfg.n_layer, cfg.vocab_size, len(image.ids), cfg.head_hidden)
        init_weights(self)

    def ids(self, tokens: Tensor) -> Tensor:
        return self._ids[tokens]

    def rope(self, positions: int, prefix: int) -> Tensor:
        """Without M-RoPE, positions count from the first valid one. With M-RoPE, they count from the beginning of the
        padding, so that one table works for any padding: attention only depends on differences."""
        c = self.cfg
        if not c.sections:
            return line_rotary(positions, self.block.head_dim, c.rope_base)
        return rotary_table(places(prefix, self.image.grids, positions), c.sections, self.block.head_dim, c.rope_base)

    def token_ids(self) -> Tensor:
        self._ids = self._ids.to(self.output.weight.device)
        return self._ids
