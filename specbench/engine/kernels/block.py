"""The blocks of a Transformer from fused kernels, for a decode pass with a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from specbench.engine.kernels import elementwise, launch, products
from specbench.engine.kernels.attention import Counters, attend
from specbench.engine.kernels.tiles import Tile, Tiles, parts
from specbench.engine.masks import TreeMask

#: Rows and weights up to which a product is done here; beyond, by cuBLAS.
MOST_ROWS, MOST_WEIGHTS = 16, 1 << 23


def small(rows: int, weight: Tensor) -> bool:
    """Whether a product of so many rows is done here."""
    return rows <= MOST_ROWS and weight.numel() <= MOST_WEIGHTS


class Stream:
    """The residual stream of a pass, (rows, dim): a value, and what has yet to be added to it. A product by cuBLAS
    leaves its sum to the next norm, which reads both anyway."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.pending: Tensor | None = None

    def summed(self) -> Tensor:
        if self.pending is not None:
            self.value, self.pending = self.value + self.pending, None
        return self.value


class LayerKernels:
    """The kernels of a Transformer's layers. `dependent`: whether a kernel may begin before the one in front of it has
    ended, where the device can (compute capability 9.0 and newer)."""

    def __init__(self, tiles: Tiles | None = None, dependent: bool = True) -> None:
        self.tiles, self.dependent = tiles or Tiles(), dependent
        self.counters = Counters()

    def _start(self, kernel: Any, grid: tuple[int, ...], at: torch.device, *given: Any, **options: Any) -> None:
        launch.start(kernel, grid, *given, dependent=self.dependent and launch.can_depend(at), **options)

    def blocks(
        self, blocks: Sequence[Any], flat: Tensor, context: Any, aux_hidden_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs of a stack of `Block`s with a cache for positions flat (R n, dim), and those of the blocks numbered
        `aux_hidden_layers`."""
        stream, aux = Stream(flat), []
        for number, one in enumerate(blocks):
            self._block(one, stream, context, number)
            if number in aux_hidden_layers:
                aux.append(stream.summed())
        return stream.summed(), aux

    def _block(self, one: Any, stream: Stream, context: Any, layer: int) -> None:
        attention, feed = one.attention, one.feed_forward
        before, between = (None, None) if one.post_norm else (one.attention_norm, one.ffn_norm)
        q = self._queries(attention, before, stream, context, layer)
        cache, mask = context.cache, context.mask
        assert isinstance(mask, TreeMask), "fused kernels take the masks of decode passes alone"
        dependent = self.dependent and launch.can_depend(q.device)
        attended = attend(q, cache.k[layer], cache.v[layer], mask, self.counters, self.tiles, dependent)
        self._add(attended.view(len(stream.value), -1), attention.wo.weight, stream, one.attention_norm, one.post_norm)
        inner = self._gated(stream, between, feed.w1.weight, feed.w3.weight)
        self._add(inner, feed.w2.weight, stream, one.ffn_norm, one.post_norm)

    def _queries(self, attention: Any, norm: Any, stream: Stream, context: Any, layer: int) -> Tensor:
        """Queries (R, n, heads, head dim) after norm and rotary embedding; keys and values go to the cache."""
        c, weight, cache = attention.cfg, attention.wqkv.weight, context.cache
        rope, slots = context.rope, context.slots
        k, v, half = cache.k[layer], cache.v[layer], c.head_dim // 2
        rows, width, at = context.rows * context.nodes, weight.shape[1], weight.device
        q = stream.value.new_empty(context.rows, context.nodes, c.n_heads, c.head_dim)
        rope_stride = 0 if len(rope) == 1 else rope.stride(0)
        assert rope[0].is_contiguous() and slots.stride(1) == 1
        sizes = context.nodes, k.shape[2], rope_stride, slots.stride(0)
        heads = c.n_heads, c.n_kv_heads, half
        if c.qk_norm or not small(rows, weight):
            qkv = self._product(stream, norm, weight)
            norms: list[Tensor] = [qkv] * 4
            if c.qk_norm:
                norms = [attention.q_norm.weight, attention.q_norm.bias, attention.k_norm.weight, attention.k_norm.bias]
            self._start(elementwise._rotate, (rows, c.n_heads + 2 * c.n_kv_heads), at,
                qkv, rope, slots, *norms, q, k, v, *sizes, max(1, c.qk_norm), max(1, min(c.qk_norm, c.n_kv_heads)),
                *heads, triton.next_power_of_2(half), c.rotary == "halves", c.qk_norm > 0, num_warps=1,
            )  # fmt: skip
            return q
        x, scale, eps = _unsummed(stream, norm, weight)
        pairs = len(weight) // 2
        tile = self.tiles.product("qkv", rows, pairs, width, x.dtype)
        grid, options = (triton.cdiv(pairs, tile.over),), {"num_warps": tile.warps, "num_stages": tile.stages}
        last = (*heads, c.rotary == "halves", scale is not weight)
        if rows <= products.FEW:
            self._start(products._few_qkv, grid, at,
                x, weight, scale, rope, slots, q, k, v, eps, *sizes, rows, tile.over, width, *parts(width), *last,
                **options,
            )  # fmt: skip
        else:
            self._start(products._many_qkv, grid, at,
                x, weight, scale, rope, slots, q, k, v, rows, eps, *sizes, _block_rows(rows), tile.over, tile.deep,
                width, *last, **options,
            )  # fmt: skip
        return q

    def _product(
        self, stream: Stream, norm: Any, weight: Tensor, gate: Tensor | None = None, tile: Tile | None = None
    ) -> Tensor:
        """norm(stream) @ weight.T, or with a `gate` (out, in) SwiGLU of both products, of which weight's is activated."""
        rows = len(stream.value)
        if not small(rows, weight):
            x = self._normed(stream, norm)
            y = F.linear(x, weight)
            return y if gate is None else self._swiglu(y, F.linear(x, gate))
        x, scale, eps = _unsummed(stream, norm, weight)
        kind = "add" if gate is None else "gate"
        return self._small(kind, x, weight, weight if gate is None else gate, scale, eps, None, tile)

    def _small(
        self, kind: str, x: Tensor, weight: Tensor, gate: Tensor, scale: Tensor, eps: float, residual: Tensor | None,
        tile: Tile | None,
    ) -> Tensor:  # fmt: skip
        """A product in one kernel; `scale`: the norm's weight, or `weight` for none."""
        (rows, width), out = x.shape, len(weight)
        tile = tile or self.tiles.product(kind, rows, out, width, x.dtype)
        y = x.new_empty(rows, out)
        flags = scale is not weight, gate is not weight, residual is not None
        given = x, weight, gate, scale, y if residual is None else residual, y
        grid, options = (triton.cdiv(out, tile.over),), {"num_warps": tile.warps, "num_stages": tile.stages}
        if rows <= products.FEW:
            self._start(products._few, grid, x.device,
                *given, out, eps, rows, tile.over, width, *parts(width), *flags, **options,
            )  # fmt: skip
        else:
            self._start(products._many, grid, x.device,
                *given, rows, out, eps, _block_rows(rows), tile.over, tile.deep, width, *flags, **options,
            )  # fmt: skip
        return y

    def _gated(self, stream: Stream, norm: Any, weight: Tensor, gate: Tensor) -> Tensor:
        return self._product(stream, norm, weight, gate)

    def _add(self, x: Tensor, weight: Tensor, stream: Stream, norm: Any, post_norm: bool) -> None:
        """Add x @ weight.T, normed where the norm comes after, to the stream."""
        if post_norm:
            y = self._product(Stream(x), None, weight)
            stream.value = self.rms_norm(y, norm, stream.summed())
        elif small(len(x), weight):
            residual = stream.summed()
            stream.value = self._small("add", x, weight, weight, weight, 0.0, residual, None)
        else:
            stream.summed()
            stream.pending = F.linear(x, weight)

    def _normed(self, stream: Stream, norm: Any) -> Tensor:
        """norm(stream), contiguous; what was pending is part of the stream afterwards."""
        if norm is None or isinstance(norm, nn.Identity):
            return stream.summed()
        if stream.pending is None:
            return self.rms_norm(stream.value, norm)
        total, y = torch.empty_like(stream.value), torch.empty_like(stream.value)
        self._norm(stream.value, norm, stream.pending, total, y, before=True)
        stream.value, stream.pending = total, None
        return y

    def rms_norm(self, x: Tensor, norm: Any, residual: Tensor | None = None) -> Tensor:
        """As of `RMSNorm`, of x (..., dim); `residual`, of the same shape, is added."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self._norm(x, norm, x if residual is None else residual, y, y, after=residual is not None)
        return y

    def _norm(
        self, x: Tensor, norm: Any, residual: Tensor, total: Tensor, y: Tensor, before: bool = False, after: bool = False
    ) -> None:
        width = x.shape[-1]
        self._start(elementwise._rms_norm, (x.numel() // width,), x.device,
            x, norm.weight, residual, total, y, norm.eps, width, triton.next_power_of_2(width), before, after,
            num_warps=8 if width > 2048 else 4,
        )  # fmt: skip

    def _swiglu(self, a: Tensor, b: Tensor) -> Tensor:
        y = torch.empty_like(a)
        self._start(elementwise._swiglu, (triton.cdiv(a.numel(), 1024),), a.device, a, b, y, a.numel(), 1024)
        return y


def _unsummed(stream: Stream, norm: Any, weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """The rows for a product with the norm in its kernel, the norm's weight (or, for none, the product's), and eps."""
    normed = isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity)
    return stream.summed().contiguous(), norm.weight if normed else weight, norm.eps if normed else 0.0


def _block_rows(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))
