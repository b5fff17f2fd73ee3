"""The blocks of a Transformer from fused kernels, for a decode pass with a cache; and the tuning of their tiles on a
device, where each product of few rows is timed with every candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from specbench.engine.kernels import launch
from specbench.engine.kernels.attention import Counters, attend
from specbench.engine.kernels.elementwise import _rms_norm, _rotate, _swiglu
from specbench.engine.kernels.products import FEW, _few, _few_qkv, _many, _many_qkv
from specbench.engine.kernels.tiles import (
    Kind,
    T,
    Tile,
    Tiles,
    attention_candidates,
    candidates,
    fastest,
    parts,
)
from specbench.engine.masks import TreeMask

#: Up to this number of rows and weights a product is computed here; larger ones are left to cuBLAS.
MOST_ROWS, MOST_WEIGHTS = 16, 1 << 23
#: The numbers of SwiGLU, and the most heads, that one program computes.
_SWIGLU, _ROTATED = 1024, 4


class Stream:
    """The residual stream of a pass, (rows, dim): a value, and a summand that is still to be added to it. A product by
    cuBLAS leaves its sum to the next norm, which reads both anyway."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.pending: Tensor | None = None

    def summed(self) -> Tensor:
        if self.pending is not None:
            self.value, self.pending = self.value + self.pending, None
        return self.value


class LayerKernels:
    """The kernels of a Transformer's layers. `dependent`: a kernel may begin before the previous one has ended, if the
    device supports it (compute capability 9.0 and newer)."""

    def __init__(self, tiles: Tiles | None = None, dependent: bool = True) -> None:
        self.tiles, self.dependent = tiles or Tiles(), dependent
        self.counters = Counters()

    def small(self, rows: int, weight: Tensor) -> bool:
        """Whether a kernel of this package computes a product of this number of rows with this weight."""
        return rows <= MOST_ROWS and weight.numel() <= MOST_WEIGHTS

    def depends(self, device: torch.device) -> bool:
        return self.dependent and launch.can_depend(device)

    def block(self, block: Any, stream: Stream, context: Any, layer: int) -> Stream:
        """`Block.forward` with a cache, for positions (R n, dim); returns `stream`."""
        attention, feed = block.attention, block.feed_forward
        q = self._queries(attention, block.attention_norm, stream, context, layer)
        cache, mask = context.cache, context.mask
        assert isinstance(mask, TreeMask), "fused kernels take only the masks of decode passes"
        k, v, dependent = cache.k[layer], cache.v[layer], self.depends(q.device)
        attended = attend(q, k, v, mask, self.counters, self.tiles, dependent)
        self._add(attended.view(len(stream.value), -1), attention.wo.weight, stream, block.attention_after)
        inner = self._gated(stream, block.ffn_norm, feed)
        self._add(inner, feed.w2.weight, stream, block.ffn_after)
        return stream

    def _queries(self, attention: Any, norm: Any, stream: Stream, context: Any, layer: int) -> Tensor:
        """Queries (R, n, heads, head dim) after norm and rotary embedding. Keys and values are written to the cache."""
        c, weight, cache = attention.cfg, attention.wqkv.weight, context.cache
        rope, slots = context.rope, context.slots
        k, v, half = cache.k[layer], cache.v[layer], c.head_dim // 2
        rows, width, dependent = context.rows * context.nodes, weight.shape[1], self.depends(weight.device)
        q = stream.value.new_empty(context.rows, context.nodes, c.n_heads, c.head_dim)
        rope_stride = 0 if len(rope) == 1 else rope.stride(0)
        assert rope[0].is_contiguous()
        assert context.nodes == 1 or slots.stride(1) == 1
        sizes = context.nodes, k.shape[2], rope_stride, slots.stride(0)
        heads = c.n_heads, c.n_kv_heads, half
        if c.qkv_bias or c.qk_norm or not self.small(rows, weight):
            if c.qkv_bias:  # cuBLAS adds it
                qkv = F.linear(self._normed(stream, norm), weight, attention.wqkv.bias)
            else:
                qkv = self._product(stream, norm, weight)
            norms, rows_of_norms = _head_norms(attention, qkv)
            group = math.gcd(c.n_heads, c.n_kv_heads, _ROTATED)
            launch.start(_rotate, (rows, (c.n_heads + 2 * c.n_kv_heads) // group),
                qkv, rope, slots, *norms, q, k, v, 1e-5, *sizes, *rows_of_norms, *heads, group,
                triton.next_power_of_2(half), c.rotary == "halves", c.qk_norm > 0, dependent=dependent, num_warps=1,
            )  # fmt: skip
            return q
        x, scale, eps = _unsummed(stream, norm, weight)
        pairs = len(weight) // 2
        tile = self.tiles.product("qkv", rows, pairs, width, x.dtype)
        grid, options = (triton.cdiv(pairs, tile.over),), _options(tile, dependent)
        last = (*heads, c.rotary == "halves", scale is not weight)
        if rows <= FEW:
            launch.start(_few_qkv, grid,
                x, weight, scale, rope, slots, q, k, v, eps, *sizes, rows, tile.over, width, *parts(width), *last,
                **options,
            )  # fmt: skip
        else:
            launch.start(_many_qkv, grid,
                x, weight, scale, rope, slots, q, k, v, rows, eps, *sizes, _block_rows(rows), tile.over, tile.deep,
                width, *last, **options,
            )  # fmt: skip
        return q

    def _product(self, stream: Stream, norm: Any, weight: Tensor) -> Tensor:
        """norm(stream) @ weight.T."""
        if not self.small(len(stream.value), weight):
            return F.linear(self._normed(stream, norm), weight)
        x, scale, eps = _unsummed(stream, norm, weight)
        return self._small("add", x, weight, weight, scale, eps, None)

    def _gated(self, stream: Stream, norm: Any, feed: Any) -> Tensor:
        """SwiGLU of the products of norm(stream) with the weights w1, which is activated, and w3 of a `FeedForward`."""
        # For any number of rows: a later pass must not move weights whose addresses are recorded.
        joined = feed.joined()
        weight, gate = feed.w1.weight, feed.w3.weight
        if not self.small(len(stream.value), weight):
            return self._swiglu(F.linear(self._normed(stream, norm), joined))
        x, scale, eps = _unsummed(stream, norm, weight)
        return self._small("gate", x, weight, gate, scale, eps, None)

    def _small(
        self, kind: str, x: Tensor, weight: Tensor, gate: Tensor, scale: Tensor, eps: float, residual: Tensor | None
    ) -> Tensor:
        """A product in one kernel. scale: the norm's weight, or `weight` without a norm."""
        (rows, width), out = x.shape, len(weight)
        tile = self.tiles.product(kind, rows, out, width, x.dtype)
        y = x.new_empty(rows, out)
        flags = scale is not weight, gate is not weight, residual is not None
        tensors = x, weight, gate, scale, y if residual is None else residual, y
        grid, options = (triton.cdiv(out, tile.over),), _options(tile, self.depends(x.device))
        if rows <= FEW:
            launch.start(_few, grid,
                *tensors, out, eps, rows, tile.over, width, *parts(width), *flags, **options,
            )  # fmt: skip
        else:
            launch.start(_many, grid,
                *tensors, rows, out, eps, _block_rows(rows), tile.over, tile.deep, width, *flags, **options,
            )  # fmt: skip
        return y

    def _add(self, x: Tensor, weight: Tensor, stream: Stream, norm: Any) -> None:
        """Add norm(x @ weight.T) to the stream."""
        if norm is not None and not isinstance(norm, nn.Identity):
            y = self._product(Stream(x), None, weight)
            stream.value = self.rms_norm(y, norm, stream.summed())
        elif self.small(len(x), weight):
            residual = stream.summed()
            stream.value = self._small("add", x, weight, weight, weight, 0.0, residual)
        else:
            stream.summed()
            stream.pending = F.linear(x, weight)

    def _normed(self, stream: Stream, norm: Any) -> Tensor:
        """norm(stream), contiguous. Afterwards the pending summand is part of the stream."""
        if norm is None or isinstance(norm, nn.Identity):
            return stream.summed()
        if stream.pending is None:
            return self.rms_norm(stream.value, norm)
        total, y = torch.empty_like(stream.value), torch.empty_like(stream.value)
        self._norm(stream.value, norm, stream.pending, total, y, before=True)
        stream.value, stream.pending = total, None
        return y

    def rms_norm(self, x: Tensor, norm: Any, residual: Tensor | None = None) -> Tensor:
        """`RMSNorm`, or an identity, of x (..., dim). `residual`, of the same shape, is added."""
        if isinstance(norm, nn.Identity):
            return x if residual is None else x + residual
        x = x.contiguous()
        y = torch.empty_like(x)
        self._norm(x, norm, x if residual is None else residual, y, y, after=residual is not None)
        return y

    def _norm(
        self,
        x: Tensor,
        norm: Any,
        residual: Tensor,
        total: Tensor,
        y: Tensor,
        before: bool = False,
        after: bool = False,
    ) -> None:
        width = x.shape[-1]
        launch.start(_rms_norm, (x.numel() // width,),
            x, norm.weight, residual, total, y, norm.eps, width, triton.next_power_of_2(width), before, after,
            dependent=self.depends(x.device), num_warps=8 if width > 2048 else 4,
        )  # fmt: skip

    def _swiglu(self, rows_of_pairs: Tensor) -> Tensor:
        """SwiGLU (rows, n) of rows (rows, 2 n) that contain first the activated numbers, then the gate."""
        rows, width = len(rows_of_pairs), rows_of_pairs.shape[1] // 2
        y = rows_of_pairs.new_empty(rows, width)
        grid = rows, triton.cdiv(width, _SWIGLU)
        launch.start(_swiglu, grid, rows_of_pairs, y, width, _SWIGLU, dependent=self.depends(rows_of_pairs.device))
        return y


def _head_norms(attention: Any, like: Tensor) -> tuple[list[Tensor], tuple[int, int]]:
    """Weights and biases of the norms on queries and keys (`like` for none), and the number of rows of weights that
    each has."""
    c = attention.cfg
    if not c.qk_norm:
        return [like] * 4, (1, 1)
    norms = [attention.q_norm.weight, attention.q_norm.bias, attention.k_norm.weight, attention.k_norm.bias]
    return norms, (c.qk_norm, min(c.qk_norm, c.n_kv_heads))


def _unsummed(stream: Stream, norm: Any, weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """The rows for a product whose kernel includes the norm, the norm's weight (or without a norm, the product's), and
    eps."""
    normed = isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity)
    return stream.summed().contiguous(), norm.weight if normed else weight, norm.eps if normed else 0.0


def _options(tile: Tile, dependent: bool) -> dict[str, Any]:
    return {"dependent": dependent, "num_warps": tile.warps, "num_stages": tile.stages}


def _block_rows(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def can_measure(device: torch.device) -> bool:
    return device.type == "cuda"


def tune(layers: LayerKernels, blocks: Sequence[Any], nodes: Iterable[int], rows: int, slots: int) -> None:
    """Choose the tiles of passes of `rows` sequences over each number of nodes: for products with the weights of all
    `blocks`, one after the other, so that none stays in a cache, and for attention to caches of `slots` positions. Each
    is recorded as a graph. Tiles that are already tuned are neither measured again nor replaced; new ones are saved.
    Does nothing without CUDA."""
    if not can_measure(blocks[0].attention.wqkv.weight.device):
        return
    table = layers.tiles
    before = len(table.tuned) + len(table.tuned_attention)
    for count in nodes:
        for kind, weight, run in _products(layers, blocks, rows * count):
            out, width = weight.shape
            out = out // 2 if kind == "qkv" else out
            key = table.key(kind, rows * count, out, width, weight.dtype)
            if layers.small(rows * count, weight):
                _choose(table.tuned, key, candidates(kind, rows * count, width, weight.dtype), run)
        heads, queries, like, attend = _attention(layers, blocks, count, rows, slots)
        shape = queries, like.shape[-1], like.dtype
        tried = attention_candidates(*shape, launch.can_depend(like.device))
        _choose(table.tuned_attention, table.attention_key(heads, *shape), tried, attend)
    if len(table.tuned) + len(table.tuned_attention) > before:
        table.save()


def _choose(table: dict[str, T], key: str, tried: Iterable[T], run: Callable[[], None]) -> None:
    """Store in the table, under a key that it does not have yet, the tile with which `run` is fastest."""
    if key in table:
        return

    def timed(tile: T) -> None:
        table[key] = tile
        run()

    best = None
    try:
        best = fastest(tried, timed)
    finally:
        table.pop(key, None)
        if best is not None:
            table[key] = best


def _attention(
    layers: LayerKernels, blocks: Sequence[Any], nodes: int, rows: int, slots: int
) -> tuple[int, int, Tensor, Callable[[], None]]:
    """Attention of `nodes` nodes of each row to a full cache, in as many layers as there are blocks. Returns the number
    of key heads in all rows, the queries that share one, queries (R, n, heads, head dim), and a function that computes
    it."""
    c, like = blocks[0].attention.cfg, blocks[0].attention.wqkv.weight
    q = torch.randn(rows, nodes, c.n_heads, c.head_dim, device=like.device, dtype=like.dtype)
    cache = q.new_zeros(2, len(blocks), rows, c.n_kv_heads, slots + nodes, c.head_dim)
    start = torch.zeros(rows, dtype=torch.int64, device=q.device)
    among = torch.ones(1, nodes, nodes, dtype=torch.bool, device=q.device).tril()
    mask, dependent = TreeMask(start, start + slots, among), layers.depends(q.device)

    def attended() -> None:
        for k, v in zip(*cache, strict=True):
            attend(q, k, v, mask, layers.counters, layers.tiles, dependent)

    return rows * c.n_kv_heads, nodes * c.n_heads // c.n_kv_heads, q, attended


def _products(layers: LayerKernels, blocks: Sequence[Any], rows: int) -> list[tuple[Kind, Tensor, Callable[[], None]]]:
    """The products of a block: kind, weight, and a function that computes them for all blocks."""
    first, like = blocks[0], blocks[0].attention.wqkv.weight
    c = first.attention.cfg
    x = torch.randn(rows, c.dim, device=like.device, dtype=like.dtype)
    heads = torch.randn(rows, c.n_heads * c.head_dim, device=like.device, dtype=like.dtype)
    inner = torch.randn(rows, c.ffn_dim, device=like.device, dtype=like.dtype)
    k, v = x.new_zeros(2, len(blocks), 1, c.n_kv_heads, rows, c.head_dim)
    context = SimpleNamespace(
        rows=1,
        nodes=rows,
        rope=torch.zeros(1, rows, c.head_dim // 2, 2, device=like.device),
        slots=torch.arange(rows, device=like.device)[None],
        cache=SimpleNamespace(k=k, v=v),
    )

    def queries() -> None:
        for i, block in enumerate(blocks):
            layers._queries(block.attention, block.attention_norm, Stream(x), context, i)

    def attended() -> None:
        for block in blocks:
            layers._add(heads, block.attention.wo.weight, Stream(x), None)

    def gates() -> None:
        for block in blocks:
            layers._gated(Stream(x), block.ffn_norm, block.feed_forward)

    def fed() -> None:
        for block in blocks:
            layers._add(inner, block.feed_forward.w2.weight, Stream(x), None)

    products: list[tuple[Kind, Tensor, Callable[[], None]]] = []
    if not (c.qk_norm or c.qkv_bias):
        products.append(("qkv", like, queries))
    return [
        *products,
        ("add", first.attention.wo.weight, attended),
        ("gate", first.feed_forward.w1.weight, gates),
        ("add", first.feed_forward.w2.weight, fed),
    ]
