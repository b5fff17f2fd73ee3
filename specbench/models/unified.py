"""Targets with one vocabulary for text and images: Chameleon (Lumina-mGPT, Anole), Emu3, Janus-Pro and
SimpleAR.

The prefix is a prompt's token ids, padded on the left; image tokens follow in raster order with the grammar's own
tokens (new lines, the image's end) between and after them. Of the head only the rows of image tokens are kept, since
the grammar forbids every other: a decode step reads less, and its distribution is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.models.language import Grammar, Language, Prefix
from specbench.models.transformer import BlockConfig, init_weights, line_rotary


@dataclass(frozen=True)
class UnifiedConfig:
    """A Llama over one vocabulary. qk_norm: rows of the LayerNorm on queries and keys (0: none). qkv_bias: as of
    `BlockConfig`; head_hidden: as of `Language`."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    ffn_hidden: int
    vocab_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: int = 0
    post_norm: bool = False
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
            self.qk_norm,
            self.post_norm,
            self.qkv_bias,
        )


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of an image: ids (V,) int64 names them in the vocabulary (codes first, then the grammar's own, then
    padding), and `width` is the positions in a row."""

    ids: Tensor
    grammar: Grammar
    width: int


#: Tokens from which an image's vocabulary is padded, and what its size is then a multiple of: a row of float32 or
#: bfloat16 numbers is aligned, so that a GPU reads 16 bytes of it at once. (Without, each number of 8,194 is a load.)
LARGE, ALIGNED = 1024, 16


def image_tokens(codes: Tensor, rows: int, columns: int, new_line: int | None, tail: Sequence[int]) -> ImageTokens:
    """An image of rows x columns codes whose vocabulary ids are codes (C,). With new_line, that id ends every row, the
    last one too; the ids of `tail` follow the image (reference README (23), (28)). A large vocabulary ends with tokens
    that the grammar allows nowhere; they bear the id of the first code."""
    count = len(codes)
    own = ([] if new_line is None else [new_line]) + list(tail)
    row = [-1] * columns + ([] if new_line is None else [count])
    behind = range(count + len(own) - len(tail), count + len(own))
    forced = torch.tensor(row * rows + list(behind))
    ids = torch.cat([codes.cpu().long(), torch.tensor(own, dtype=torch.int64)])
    if len(ids) >= LARGE:
        ids = torch.cat([ids, ids[:1].expand(-len(ids) % ALIGNED)])
    return ImageTokens(ids, Grammar(count, forced), len(row))


@dataclass
class Prompts:
    """Token ids of N prompts, padded on the left: ids (N, P) int64 and valid (N, P) bool, and the same of the
    unconditional (or negative) prompts."""

    ids: Tensor
    valid: Tensor
    no_ids: Tensor
    no_valid: Tensor

    def __len__(self) -> int:
        return len(self.ids)


class Prompted(Language):
    """A Transformer whose prefix is the token ids of a prompt, of the same number of positions for all, which count
    from the first valid one."""

    rope_base: float

    def reserve(self, positions: int) -> None:
        device = self.norm.weight.device
        if self._rope is None or len(self._rope) < positions or self._rope.device != device:
            self._rope = line_rotary(positions, self.block.head_dim, self.rope_base).to(device)

    def rope_at(self, positions: Tensor, padding: Tensor) -> Tensor:
        """Positions count from the first valid one."""
        assert self._rope is not None, "reserve() comes first"
        return self._rope[(positions - padding).clamp_min(0)]

    def condition(self, conditioning: Prompts, guided: bool) -> Prefix:
        ids, valid = conditioning.ids, conditioning.valid
        if guided:
            ids, valid = torch.cat([ids, conditioning.no_ids]), torch.cat([valid, conditioning.no_valid])
        return Prefix(self.tok_embeddings(ids), valid, ids)


class Unified(Prompted):
    _ids: Tensor

    def __init__(self, cfg: UnifiedConfig, image: ImageTokens) -> None:
        super().__init__()
        self.cfg, self.image, self.rope_base = cfg, image, cfg.rope_base
        self.grammar, self.length, self.width = image.grammar, len(image.grammar), image.width
        self.register_buffer("_ids", image.ids, persistent=False)
        self._build(cfg.block, cfg.n_layer, cfg.vocab_size, len(image.ids), cfg.head_hidden)
        init_weights(self)

    def ids(self, tokens: Tensor) -> Tensor:
        return self._ids[tokens]

    def tables(self) -> tuple[Tensor | None, Tensor, bool]:
        assert self._rope is not None, "reserve() comes first"
        self._ids = self._ids.to(self._rope.device)
        return self._ids, self._rope, True
