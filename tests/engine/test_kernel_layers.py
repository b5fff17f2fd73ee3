"""The fused kernels of a layer against float64; without a GPU they run in Triton's interpreter. Memory that a kernel
does not write is NaN (`poisoned`), and so is memory that it must not read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.engine import ops
from specbench.engine.masks import TreeMask
from specbench.models.transformer import Block, BlockConfig, FeedForward, RMSNorm, grid_rotary, line_rotary, run_blocks

pytest.importorskip("triton")
from gpu_checks.parity import poisoned

from specbench.engine.kernels import FusedKernels, attention, block
from specbench.engine.kernels.block import LayerKernels, Stream
from specbench.engine.kernels.tiles import Tile, Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Relative error of one rounding: half a unit in the last place for bfloat16, and a whole unit where Triton's
#: interpreter truncates. A float32 sum of some hundred numbers in another order counts as one rounding of 2**-20.
ROUNDING = {torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7, torch.float32: 2.0**-20}
DTYPES = list(ROUNDING)


@pytest.fixture(autouse=True)
def in_poisoned_memory() -> Iterator[None]:
    with poisoned():
        yield


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def within(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Checks that every difference is at most the bound of its element."""
    off = (actual.double() - expected).abs() - bound
    assert bool((off <= 0).all()), f"{float(off.nan_to_num(nan=torch.inf).max())} beyond the bound"


# a width of two unlike parts: scalars, the matrix units, more rows than these kernels take; two parts alike, and one
@pytest.mark.parametrize(
    ("rows", "shape", "dtype"),
    [
        *((rows, (33, 40), dtype) for rows, dtype in zip((1, 2, 3, 4, 6, 16, 17), itertools.cycle(DTYPES))),
        *((rows, shape, dtype) for rows, shape in ((2, (20, 600)), (6, (20, 64))) for dtype in DTYPES),
    ],
)
@torch.inference_mode()
def test_products(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """An output is one rounding of a sum. With a norm, the matrix units take inputs that were rounded once more, and
    cuBLAS takes inputs with three roundings: a relative error of every summand."""
    (out, width), rounding = shape, ROUNDING[dtype]
    x, residual = normal(rows, width, dtype=dtype), normal(rows, out, seed=3, dtype=dtype)
    weight, gate = normal(out, width, seed=1, dtype=dtype) / 8, normal(out, width, seed=2, dtype=dtype) / 8
    norm = RMSNorm(width, 1e-5).to(DEVICE, dtype)
    norm.weight.copy_(1 + 0.1 * normal(width, seed=4))
    kernels = LayerKernels()
    wide, w, g = x.double(), weight.double(), gate.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    want, size = normed @ w.T, normed.abs() @ w.T.abs()
    gated, gated_size = normed @ g.T, normed.abs() @ g.T.abs()
    within(kernels._product(Stream(x), None, weight), wide @ w.T, 2 * rounding * (wide.abs() @ w.T.abs()))
    within(kernels._product(Stream(x), norm, weight), want, 4 * rounding * size)
    # SiLU's slope is at most 1.1; the path through cuBLAS has three roundings
    bound = 4 * rounding * (1.1 * size * gated.abs() + F.silu(want).abs() * gated_size) + 3 * rounding
    feed = FeedForward(BlockConfig(width, 1, 1, out)).to(DEVICE, dtype)
    feed.w1.weight.copy_(weight)
    feed.w3.weight.copy_(gate)
    within(kernels._gated(Stream(x), norm, feed), F.silu(want) * gated, bound)
    stream = Stream(residual)
    kernels._add(x, weight, stream, None)
    assert (stream.pending is None) == (rows <= 16)
    total, size = wide @ w.T + residual.double(), wide.abs() @ w.T.abs() + residual.double().abs()
    within(Stream.summed(stream), total, 3 * rounding * size)


@torch.inference_mode()
def test_joining_weights_does_not_change_them() -> None:
    feed = FeedForward(BlockConfig(8, 1, 1, 12)).requires_grad_(False)
    first, second = feed.w1.weight.clone(), feed.w3.weight.clone()
    assert torch.equal(feed.joined(), torch.cat([first, second]))
    memory = feed.joined().data_ptr()
    assert (feed.w1.weight.data_ptr(), feed.joined().data_ptr()) == (memory, memory)  # joined once
    assert torch.equal(feed.w1.weight, first)
    assert torch.equal(feed.w3.weight, second)
    feed.load_state_dict({name: x + 1 for name, x in feed.state_dict().items()})
    assert torch.equal(feed.joined(), torch.cat([first, second]) + 1)
    feed.w3.weight.data = second  # at another address
    assert torch.equal(feed.joined(), torch.cat([first + 1, second]))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_norm_sums_what_is_pending(dtype: torch.dtype) -> None:
    x, more, kernels = normal(3, 50, dtype=dtype), normal(3, 50, seed=1, dtype=dtype), LayerKernels()
    norm = RMSNorm(50, 1e-5).to(DEVICE, dtype)
    norm.weight.copy_(1 + 0.1 * normal(50, seed=4))
    stream = Stream(x)
    stream.pending = more
    normed = kernels._normed(stream, norm)
    assert stream.pending is None
    tolerance = {"rtol": 4 * ROUNDING[dtype], "atol": 4 * ROUNDING[dtype]}  # the numbers are of order one
    torch.testing.assert_close(stream.value, x + more, **tolerance)
    torch.testing.assert_close(normed, norm(stream.value), **tolerance)
    torch.testing.assert_close(kernels.rms_norm(x, norm, more), norm(x) + more, **tolerance)
    assert torch.equal(kernels.rms_norm(x, torch.nn.Identity()), x)


SHAPES = [
    # heads, kv heads, head dim, nodes, slots
    (2, 2, 16, 1, 150),
    (4, 2, 16, 6, 150),  # queries of a group side by side
    (3, 3, 20, 26, 130),  # a head dim that is no power of two
    (4, 1, 16, 33, 130),  # several blocks of queries
    (2, 2, 32, 65, 200),  # a window of 64 and its root: two blocks of keys in the tree
]


@pytest.mark.parametrize(
    ("heads", "kv", "dim", "nodes", "slots", "dtype"),
    [(*shape, dtype) for shape, dtype in zip(SHAPES, itertools.cycle(DTYPES))],
)
@torch.inference_mode()
def test_attention(heads: int, kv: int, dim: int, nodes: int, slots: int, dtype: torch.dtype) -> None:
    """Four rows with padding and different roots, one of them at the first valid position; two trees, one per image.
    The weights are rounded once, and so is the output."""
    q = normal(4, nodes, heads, dim, dtype=dtype)
    start = torch.tensor([0, 7, 40, 3], device=DEVICE)
    root = torch.tensor([slots - nodes, 30, 40, slots - nodes - 9], device=DEVICE)
    among = normal(2, nodes, nodes, seed=3) > 0.3
    among |= torch.eye(nodes, dtype=torch.bool, device=DEVICE)
    mask = TreeMask(start, root, among)
    k, v = (normal(4, kv, slots, dim, seed=seed, dtype=dtype) for seed in (1, 2))
    seen = mask.dense(torch.arange(slots, device=DEVICE))
    wide = [x.double() for x in (q.transpose(1, 2), k, v)]
    plain = ops.attention(*wide, seen).transpose(1, 2)
    size = ops.attention(*wide[:2], wide[2].abs(), seen).transpose(1, 2)
    keys = torch.arange(slots, device=DEVICE)
    unread = (keys < start[:, None]) | (keys >= root[:, None] + nodes)
    for cache in (k, v):
        cache.masked_fill_(unread[:, None, :, None], torch.nan)
    counters = attention.Counters(64)
    actual = attention.attend(q, k, v, mask, counters, Tiles())
    within(actual, plain, 2 * ROUNDING[dtype] * size + 1e-6)
    assert bool(counters._allocated)
    assert all(not bool(x.any()) for buffers in counters._allocated.values() for x in buffers)


@torch.inference_mode()
def test_attention_to_a_part_of_a_tree_that_starts_in_the_padding() -> None:
    """Two rows of a chain. The first two positions of one row are padding; a second mask has only two of the
    positions."""
    q, k, v = normal(2, 4, 2, 16), normal(2, 2, 40, 16, seed=1), normal(2, 2, 40, 16, seed=2)
    positions = torch.tensor([[10, 11, 12, 13], [10, 11, 12, 13]], device=DEVICE)
    chain = TreeMask.chain(torch.tensor([0, 12], device=DEVICE), positions)
    part = replace(chain, among=chain.among[:, 1:3])
    for mask, queries in ((chain, q), (part, q[:, 1:3].contiguous())):
        plain = ops.attention(queries.transpose(1, 2), k, v, mask.dense(torch.arange(40, device=DEVICE))).transpose(
            1, 2
        )
        actual = attention.attend(queries, k, v, mask, attention.Counters(), Tiles())
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-5)


BLOCKS = {
    "llamagen": BlockConfig(32, 2, 2, 48),
    "grouped": BlockConfig(64, 4, 2, 48, rotary="halves"),
    "odd": BlockConfig(60, 3, 3, 50, rotary="halves"),
    "chameleon": BlockConfig(64, 4, 4, 48, rotary="halves", qk_norm=4),
    "shared norms": BlockConfig(64, 4, 2, 48, rotary="halves", qk_norm=1),
    "biased": BlockConfig(64, 4, 2, 48, rotary="halves", qkv_bias=True),
    "post": BlockConfig(64, 4, 4, 48, rotary="halves", qk_norm=4, norms="after"),
}


class WideTiles(Tiles):
    """Few programs: the interpreter needs milliseconds for each."""

    def product(self, kind: str, rows: int, out: int, width: int, dtype: torch.dtype) -> Tile:
        return replace(super().product(kind, rows, out, width, dtype), over=16)


def _blocks(cfg: BlockConfig, first: bool, dtype: torch.dtype) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList([Block(cfg, input_norm=first), Block(cfg)]).to(DEVICE)
    for p in blocks.parameters():
        p.add_(0.2 * normal(*p.shape))
    return blocks.to(dtype)


# Two rows of nodes: computed by sums of scalars, by the matrix units, and by cuBLAS.
@pytest.mark.parametrize(
    ("name", "first", "nodes", "large"),
    [
        *((name, True, nodes, large) for name in BLOCKS for nodes, large in ((1, False), (3, True))),
        *((name, True, 6, False) for name in BLOCKS if not (BLOCKS[name].qk_norm or BLOCKS[name].qkv_bias)),
        ("llamagen", False, 1, False),
    ],
)
@torch.inference_mode()
def test_blocks_and_their_cache(
    name: str, first: bool, nodes: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(block, "MOST_WEIGHTS", 0)
    cfg, rows, slots = BLOCKS[name], 2, 24
    blocks = _blocks(cfg, first, torch.float32)
    table = grid_rotary(4, cfg.head_dim, 2, 8) if cfg.rotary == "interleaved" else line_rotary(slots, cfg.head_dim, 1e4)
    root = torch.tensor([4, 9], device=DEVICE)
    at = root[:, None] + torch.arange(nodes, device=DEVICE)
    x, mask = normal(rows, nodes, cfg.dim), TreeMask.chain(torch.tensor([0, 3], device=DEVICE), at)
    rope = table.to(DEVICE)[at if first else at[:1]]  # one per row, or the same for all
    plain, fused = (ops.KVCache(2, rows, cfg.n_kv_heads, slots, cfg.head_dim, x) for _ in range(2))
    for cache in (plain, fused):
        cache.k.copy_(normal(*cache.k.shape, seed=7))
        cache.v.copy_(normal(*cache.v.shape, seed=8))
    fused.kernels = FusedKernels(WideTiles())
    actual, expected = (run_blocks(blocks, x, rope, mask, cache, at, (0,)) for cache in (fused, plain))
    # float32 sums in another order: an error of 1e-5 for numbers of order one, and about a hundred of them are added
    torch.testing.assert_close((actual, fused.k, fused.v), (expected, plain.k, plain.v), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_no_pass_moves_weights() -> None:
    """The recording of a pass with few rows holds the weights' addresses, and a pass with many rows reads the weights,
    too."""
    cfg, rows, slots = BLOCKS["llamagen"], 2, 24
    blocks, table = _blocks(cfg, True, torch.float32), grid_rotary(4, cfg.head_dim, 2, 8).to(DEVICE)
    cache = ops.KVCache(2, rows, cfg.n_kv_heads, slots, cfg.head_dim, normal(1))
    cache.kernels = FusedKernels(WideTiles())
    addresses = []
    for nodes in (1, block.MOST_ROWS // rows + 1):
        at = torch.arange(nodes, device=DEVICE).expand(rows, -1)
        mask = TreeMask.chain(torch.zeros(rows, dtype=torch.int64, device=DEVICE), at)
        run_blocks(blocks, normal(rows, nodes, cfg.dim), table[at], mask, cache, at, ())
        addresses.append([p.data_ptr() for p in blocks.parameters()])
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("nodes", [1, 6])
@torch.inference_mode()
def test_blocks_in_bfloat16(nodes: int) -> None:
    """The fused blocks differ from float64 no more than the plain ones do: they round at fewer points than PyTorch.
    (The interpreter truncates: twice the error of a rounding, always with the same sign.)"""
    cfg, rows, slots = BLOCKS["llamagen"], 2, 24
    blocks, at = _blocks(cfg, True, torch.bfloat16), torch.tensor([[4], [9]], device=DEVICE)
    at = at + torch.arange(nodes, device=DEVICE)
    rope = grid_rotary(4, cfg.head_dim, 2, 8).to(DEVICE)[at]
    mask = TreeMask.chain(torch.tensor([0, 3], device=DEVICE), at)
    x = normal(rows, nodes, cfg.dim, dtype=torch.bfloat16)
    outs: list[Any] = []
    for dtype, kernels in ((torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, FusedKernels(WideTiles()))):
        cache = ops.KVCache(2, rows, cfg.n_kv_heads, slots, cfg.head_dim, x.to(dtype))
        cache.k.copy_(normal(*cache.k.shape, seed=7, dtype=torch.bfloat16))
        cache.v.copy_(normal(*cache.v.shape, seed=8, dtype=torch.bfloat16))
        cache.kernels = kernels
        outs.append(run_blocks(blocks.to(dtype), x.to(dtype), rope, mask, cache, at).double())
    exact, plain, fused = outs
    assert float((fused - exact).norm()) < (1.1 if DEVICE == "cuda" else 3) * float((plain - exact).norm())
