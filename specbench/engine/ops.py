"""Tensor primitives. In float32 on the CPU their results do not depend on how many rows are computed together."""

from __future__ import annotations

import math
import mmap
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specbench.engine.invariance import product
from specbench.engine.masks import TreeMask
from specbench.engine.state import Buffer, Buffers

#: The fused kernels of a step. An engine chooses them, and a decoding passes them on to its sampling, its verification
#: and the caches of its networks. None: the plain functions. (Nothing imports them if Triton is not installed.)
if TYPE_CHECKING:
    from specbench.engine.kernels import FusedKernels

    Kernels: TypeAlias = FusedKernels
else:
    Kernels = Any


#: Devices on which a shape may depend on values. On others a step may be recorded, and so has fixed shapes.
DYNAMIC_SHAPES = ("cpu",)


def take(x: Tensor, index: Tensor) -> Tensor:
    """The entries `index` (rows, n) int64 of x (rows, m, d): (rows, n, d)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for x (..., in). In float32 on the CPU without gradients, a row's result does not depend on
    the other rows; see `specbench.engine.invariance`."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_grad_enabled() or isinstance(x, FakeTensor):
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return product(flat, weight, bias).view(*x.shape[:-1], len(weight))


#: From this length on ATen splits a single sum among threads, but not several sums: the result would depend on the
#: number of rows.
_SHARED_SUM, _PIECE = 1 << 15, 1 << 10


def sum_last(x: Tensor) -> Tensor:
    """Sum of x (..., n) over its last dimension, (...). On the CPU a long sum consists of short ones."""
    if x.device.type != "cpu" or x.shape[-1] < _SHARED_SUM:
        return x.sum(-1)
    return F.pad(x, (0, -x.shape[-1] % _PIECE)).unflatten(-1, (-1, _PIECE)).sum(-1).sum(-1)


def silu(x: Tensor) -> Tensor:
    """SiLU. On the CPU without gradients a value does not depend on its index. (ATen's fused kernels compute the ends
    of each thread's share in another way; exp does not.)"""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.silu(x)
    return torch.exp(-x).add_(1).reciprocal_().mul_(x)


def gelu(x: Tensor) -> Tensor:
    """The exact GELU; like `silu` independent of the index."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.gelu(x)
    return torch.erf(x * 0.5**0.5).add_(1).mul_(x).mul_(0.5)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation; like `silu` independent of the index."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.gelu(x, approximate="tanh")
    inner = (x * x).mul_(0.044715).add_(1).mul_(x).mul_((2 / torch.pi) ** 0.5)
    return torch.tanh(inner).add_(1).mul_(x).mul_(0.5)


def multiply_add(x: Tensor, factor: Tensor, summand: Tensor) -> Tensor:
    """x * factor + summand. On other devices than the CPU it is one kernel, which rounds once."""
    if x.device.type == "cpu" or torch.is_grad_enabled():
        return x * factor + summand
    return torch.addcmul(summand, x, factor)


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention by plain matrix products: forward and backward, several times as fast as the fused CPU kernel."""
    with torch.autocast(q.device.type, enabled=False):  # autocast would move the softmax to float32
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        scores = scores.masked_fill(~mask, -1e4) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1) @ v.to(q.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True) -> Tensor:
    """Scaled dot-product attention. q (rows, heads, n, d); k and v (rows, kv heads, keys, d); mask: bool, or values
    that are added to the scores, or None: causal, or all keys."""
    causal = causal and mask is None
    if q.device.type == "cpu" and torch.is_grad_enabled() and q.shape[1] == k.shape[1]:
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
            mask = mask.tril_() if causal else mask
        return _written_out(q, k, v, mask)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


#: Attention reads a multiple of this many slots of a cache.
_SLOTS = 64


@cache
def _beginning_suffices(nodes: int, heads: int, kv_heads: int, dim: int, keys: int, slots: int, threads: int) -> bool:
    """Whether attention over the first `keys` slots of a cache, float32 on the CPU, has the same bits as attention over
    all `slots` with the others masked. A matrix library may add up in another order when the number of keys changes. It
    is measured once for each shape, as in `specbench.engine.invariance`."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.empty(4, n, h, dim).uniform_(-1, 1, generator=rng).transpose(1, 2)
        for n, h in ((nodes, heads), (slots, kv_heads), (slots, kv_heads))
    )
    k, v, mask = k.contiguous(), v.contiguous(), (torch.arange(slots) < keys).expand(4, 1, nodes, -1)
    return torch.equal(attention(q, k[:, :, :keys], v[:, :, :keys], mask[..., :keys]), attention(q, k, v, mask))


#: Pages that a forked process does not share. On Windows all pages are like that, and the argument does not exist.
_OWN_PAGES = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros. On the CPU only written parts take memory, because the space for a whole image may be gigabytes."""
    if like.device.type != "cpu" or isinstance(like, FakeTensor) or 0 in shape:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    pages = mmap.mmap(-1, math.prod(shape) * like.element_size(), **_OWN_PAGES)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


def _bits(x: Tensor) -> Tensor:
    """The same memory, with 16-bit floats on the CPU viewed as integers. For such floats torch's scatter reads and
    writes the whole tensor, which takes a thousand times as long as the entries that are stored."""
    return x.view(torch.int16) if x.element_size() == 2 and x.device.type == "cpu" else x


class KVCache:
    """Static keys and values of every layer: (rows, kv heads, slots, head dim) each, written by slot index.

    kernels: used by the blocks that use this cache.
    """

    kernels: Kernels | None = None

    def __init__(self, layers: int, rows: int, heads: int, slots: int, head_dim: int, like: Tensor) -> None:
        shape = (layers, rows, heads, slots, head_dim)
        self.k, self.v = _zeros(shape, like), _zeros(shape, like)

    @property
    def slots(self) -> int:
        return self.k.shape[3]

    def buffers(self, halves: int) -> Buffers:
        """The tensors that steps read or write (see `engine.state`)."""
        return {"k": Buffer(self.k, 1, halves), "v": Buffer(self.v, 1, halves)}

    def read(self, mask: TreeMask, heads: int) -> int:
        """How many slots, from the first on, attention reads in a pass with `mask` and this number of query heads: all,
        or on the CPU as few as give the same bits."""
        k, (kv_heads, slots, dim) = self.k, self.k.shape[2:]
        plain = k.device.type == "cpu" and k.dtype == torch.float32 and not isinstance(k, FakeTensor)
        if not plain or torch.is_grad_enabled():
            return slots
        keys = -(-(int(mask.root.max()) + mask.among.shape[-1]) // _SLOTS) * _SLOTS
        shape = (mask.among.shape[1], heads, kv_heads, dim, keys, slots, torch.get_num_threads())
        return keys if keys < slots and _beginning_suffices(*shape) else slots

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (rows, heads, n, head dim) at `slots` (rows, n) int64. Returns the layer's entire cache."""
        index = slots[:, None, :, None].expand_as(k)
        layer_k, layer_v = self.k[layer], self.v[layer]
        _bits(layer_k).scatter_(2, index, _bits(k))
        _bits(layer_v).scatter_(2, index, _bits(v))
        return layer_k, layer_v

    def attend(self, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of q (rows, heads, n, head dim) over the slots of the mask, after k and v are written; see `write`
        and `attention`."""
        layer_k, layer_v = self.write(layer, slots, k, v)
        keys = None if mask is None else mask.shape[-1]
        return attention(q, layer_k[:, :, :keys], layer_v[:, :, :keys], mask)

    def keep(self, path: Tensor, length: Tensor, num_committed: Tensor, first: int) -> None:
        """Keep what the nodes of an accepted path wrote. Node m of a draft is stored in slot `first` + num_committed +
        m. The first `length` (B,) nodes of path (B, D), which are accepted, move to the slots after the root's,
        in all layers at once. Rows are B, or 2B in two halves."""
        if self.kernels is not None:
            self.kernels.keep(self.k, self.v, path, length, num_committed, first)
            return
        layers, rows, heads, _, dim = self.k.shape
        root, offsets = num_committed[:, None] + first, torch.arange(1, path.shape[1] + 1, device=path.device)
        source = root + torch.where(offsets <= length[:, None], path, offsets)
        halves = rows // len(path)
        src = source.repeat(halves, 1)[None, :, None, :, None].expand(layers, rows, heads, -1, dim)
        dst = (root + offsets).repeat(halves, 1)[None, :, None, :, None].expand_as(src)
        for stored in (_bits(self.k), _bits(self.v)):
            stored.scatter_(3, dst, stored.gather(3, src))
