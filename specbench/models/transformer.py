"""The Llama-shaped Transformer of all autoregressive targets and drafters, which are configurations of it.

Parameter names are LlamaGen's official names; q_norm and k_norm are Chameleon's. The module is stateless: caches,
positions and masks are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.masks import TreeMask
from specbench.engine.ops import Kernels, KVCache, attention, linear, silu


@dataclass(frozen=True)
class BlockConfig:
    """rotary: which coordinates of a head form a rotated pair, (2i, 2i + 1) or (i, i + head_dim / 2); qk_norm: rows of
    the LayerNorm on queries and keys, where a row is used by equally many heads (1: shared by all; 0: no norm); norms:
    whether attention and feed-forward have norms before or after (Chameleon's `swin_norm`); qkv_bias: whether queries,
    keys and values have biases."""

    dim: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    norm_eps: float = 1e-5
    rotary: Literal["interleaved", "halves"] = "interleaved"
    qk_norm: int = 0
    norms: Literal["before", "after"] = "before"
    qkv_bias: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


class RMSNorm(nn.Module):
    """Normalises in float32, casts back, then multiplies by the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, kernels: Kernels | None = None) -> Tensor:
        if kernels is not None:
            return kernels.rms_norm(x, self)
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * self.weight


def grid_rotary(side: int, head_dim: int, prefix: int, extra: int = 0, base: float = 10000.0) -> Tensor:
    """LlamaGen's rotary table (prefix + side*side + extra, head_dim / 2, 2) of (cos, sin), float32.

    The row of a cell rotates the first half of the pairs, the column the second half. Prefix positions are all zero
    (cos = sin = 0), so their keys and queries vanish, as in the trained model (reference README (1), (2)). `extra` rows
    repeat the last cell, for draft nodes beyond the image's end, whose results are discarded.
    """
    half = head_dim // 2
    freqs = 1.0 / base ** (torch.arange(0, half, 2).float() / half)
    angles = torch.arange(side).float()[:, None] * freqs  # (side, head_dim / 4)
    rows = angles[:, None].expand(side, side, -1)
    cols = angles[None].expand(side, side, -1)
    grid = torch.cat([rows, cols], -1).reshape(side * side, -1)
    cells = torch.stack([grid.cos(), grid.sin()], -1)
    return torch.cat([torch.zeros(prefix, *cells.shape[1:]), cells, cells[-1:].expand(extra, -1, -1)])


def line_rotary(positions: int, head_dim: int, base: float) -> Tensor:
    """The one-dimensional rotary table (positions, head_dim / 2, 2) of (cos, sin), float32."""
    pairs = head_dim // 2
    freqs = 1.0 / base ** (torch.arange(0, 2 * pairs, 2).float() / (2 * pairs))
    angles = torch.arange(positions).float()[:, None] * freqs
    return torch.stack([angles.cos(), angles.sin()], -1)


def rope_factors(table: Tensor, rotary: str) -> Tensor:
    """Converts a rotary table (rows or 1, n, head_dim / 2, 2) to the form of `rotate`, for all heads: complex if pairs
    are adjacent."""
    return (torch.view_as_complex(table) if rotary == "interleaved" else table).unsqueeze(2)


def rotate(x: Tensor, rope_factors: Tensor, rotary: str) -> Tensor:
    """Rotate the pairs of x (rows, n, heads, head_dim) by a `rope_factors` table; see `BlockConfig`."""
    if rotary == "interleaved":
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rope_factors).flatten(-2).type_as(x)
    cos, sin = rope_factors.unbind(-1)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)


class HeadNorm(nn.Module):
    """LayerNorm over head_dim with weight and bias (rows, head_dim). A row is used by heads / rows consecutive heads
    (reference README (19))."""

    def __init__(self, rows: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, head_dim))
        self.bias = nn.Parameter(torch.zeros(rows, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, n, heads, head_dim)."""
        heads_per_row = x.shape[2] // len(self.weight)
        weight, bias = self.weight.repeat_interleave(heads_per_row, 0), self.bias.repeat_interleave(heads_per_row, 0)
        return F.layer_norm(x, x.shape[-1:], eps=1e-5) * weight + bias


@dataclass(frozen=True)
class AttentionContext:
    """The arguments that all blocks of a pass share, for R rows of n positions.

    rope (R or 1, n, head_dim / 2, 2), and its `rope_factors`; mask (R, 1, n, keys): bool, True = may attend, or numbers
    that are added to the scores, or None: causal over the positions (training); cache: its first slots are the keys;
    slots (R, n) int64: where the keys are stored. If the cache has fused kernels, the mask of a decode pass must be a
    `TreeMask`.
    """

    rows: int
    nodes: int
    rope: Tensor
    rope_factors: Tensor
    mask: Tensor | TreeMask | None
    cache: KVCache | None
    slots: Tensor | None


class Attention(nn.Module):
    def __init__(self, cfg: BlockConfig) -> None:
        super().__init__()
        self.cfg = cfg
        if cfg.qk_norm:
            self.q_norm = HeadNorm(cfg.qk_norm, cfg.head_dim)
            self.k_norm = HeadNorm(min(cfg.qk_norm, cfg.n_kv_heads), cfg.head_dim)
        self.wqkv = nn.Linear(cfg.dim, (cfg.n_heads + 2 * cfg.n_kv_heads) * cfg.head_dim, bias=cfg.qkv_bias)
        self.wo = nn.Linear(cfg.n_heads * cfg.head_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor, context: AttentionContext, layer: int) -> Tensor:
        """x (N, dim) -> (N, dim)."""
        c, positions = self.cfg, context.rows * context.nodes
        heads = linear(x, self.wqkv.weight, self.wqkv.bias).view(context.rows, context.nodes, -1, c.head_dim)
        qk, v = heads.split((c.n_heads + c.n_kv_heads, c.n_kv_heads), 2)
        if c.qk_norm:
            q, k = qk.split((c.n_heads, c.n_kv_heads), 2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        q, k = rotate(qk, context.rope_factors, c.rotary).transpose(1, 2).split((c.n_heads, c.n_kv_heads), 1)
        v = v.transpose(1, 2)
        assert not isinstance(context.mask, TreeMask)
        if context.cache is None:
            y = attention(q, k, v, context.mask)
        else:
            assert context.slots is not None
            y = context.cache.attend(layer, context.slots, q, k, v, context.mask)
        return linear(y.transpose(1, 2).reshape(positions, -1), self.wo.weight)


class FeedForward(nn.Module):
    def __init__(self, cfg: BlockConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)
        self.w3 = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)
        self.w2 = nn.Linear(cfg.ffn_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, dim) -> (N, dim)."""
        return linear(silu(linear(x, self.w1.weight)) * linear(x, self.w3.weight), self.w2.weight)

    def joined(self) -> Tensor:
        """The weights of w1, then of w3, (2 ffn_dim, dim), in contiguous memory, so that one product reads both. From
        then on, w1 and w3 are views of it."""
        first, second = self.w1.weight, self.w3.weight
        contiguous = first.storage_offset() + first.numel() == second.storage_offset()
        if not contiguous or first.untyped_storage()._cdata != second.untyped_storage()._cdata:
            joined = torch.cat([first.detach(), second.detach()])
            first.data, second.data = joined.chunk(2)
        return first.detach().as_strided((2 * len(first), first.shape[1]), first.stride())


class Block(nn.Module):
    """Attention and SwiGLU. A norm that the configuration does not have is an identity. `input_norm=False` drops the
    first norm (first layer of an EAGLE drafter)."""

    def __init__(self, cfg: BlockConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.attention = Attention(cfg)
        self.feed_forward = FeedForward(cfg)

        def norm(present: bool) -> nn.Module:
            return RMSNorm(cfg.dim, cfg.norm_eps) if present else nn.Identity()

        before = cfg.norms == "before"
        self.attention_norm, self.ffn_norm = norm(before and input_norm), norm(before)
        self.attention_after, self.ffn_after = norm(not before), norm(not before)

    def forward(self, x: Any, context: AttentionContext, layer: int) -> Any:
        """x (N, dim): the positions of all rows, concatenated -> (N, dim). With fused kernels, x is their `stream`."""
        if context.cache is not None and context.cache.kernels is not None:
            return context.cache.kernels.block(self, x, context, layer)
        h = x + self.attention_after(self.attention(self.attention_norm(x), context, layer))
        return h + self.ffn_after(self.feed_forward(self.ffn_norm(h)))


def run_blocks(
    blocks: nn.ModuleList,
    x: Tensor,
    rope: Tensor,
    mask: Tensor | TreeMask | None = None,
    cache: KVCache | None = None,
    slots: Tensor | None = None,
    aux_hidden_layers: Sequence[int] = (),
) -> Tensor:
    """Outputs (R, n, dim) of inputs x (R, n, dim). With `aux_hidden_layers`, followed by the outputs of the blocks with
    these numbers: (R, n, dim * (1 + layers)). For the other arguments see `AttentionContext`."""
    rows, nodes, dim = x.shape
    first: Any = blocks[0]  # all blocks have the same rotary embedding
    kernels = None if cache is None else cache.kernels
    if isinstance(mask, TreeMask) and kernels is None:
        assert cache is not None
        mask = mask.bias(cache.read(mask, first.attention.cfg.n_heads), x.dtype)
    context = AttentionContext(rows, nodes, rope, rope_factors(rope, first.attention.cfg.rotary), mask, cache, slots)
    flat: Any = x.reshape(-1, dim)
    if kernels is not None:
        flat = kernels.stream(flat)
    aux = []
    for i, block in enumerate(blocks):
        flat = block(flat, context, i)
        if i in aux_hidden_layers:
            aux.append(flat if kernels is None else flat.summed())
    if kernels is not None:
        flat = flat.summed()
    if aux:
        flat = torch.cat([flat, *aux], -1)
    return flat.view(rows, nodes, -1)


def init_weights(module: nn.Module) -> None:
    """Sets weights to normal numbers with standard deviation 0.02, and biases to zero; norms stay at one."""
    for m in module.modules():
        if isinstance(m, nn.Linear | nn.Embedding):
            nn.init.normal_(m.weight, std=0.02)
        if isinstance(m, nn.Linear) and m.bias is not None:
            nn.init.zeros_(m.bias)
