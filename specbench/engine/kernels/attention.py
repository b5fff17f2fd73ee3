"""Attention of the few positions of a decode pass to a cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch
from specbench.engine.kernels.launch import gdc_launch_dependents, gdc_wait
from specbench.engine.kernels.products import dot
from specbench.engine.kernels.tiles import Tiles
from specbench.engine.masks import TreeMask

#: The most programs that share the keys of a head; the last of them reads the partial sums of all.
_MOST_SPLITS = 16
#: The number of multiprocessors that is assumed without a device (an H100 and an H200 have it).
_PROCESSORS = 132


@cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a CUDA device: the number of attention programs that it runs at once."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _add_keys(q, K, V, at, here, seen, scale, top, total, out):
    """The running softmax after the keys at `at` (BS, BD): top and total (BQ,), out (BQ, BD). Scores are in base 2.
    seen: which of the keys count."""
    k = tl.load(K + at, mask=here, other=0.0)
    v = tl.load(V + at, mask=here, other=0.0)
    score = tl.where(seen, dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32)) * scale, -1e30)
    higher = tl.maximum(top, tl.max(score, 1))
    p, fade = tl.exp2(score - higher[:, None]), tl.exp2(top - higher)
    out = dot(p.to(v.dtype), v, out * fade[:, None])
    return higher, total * fade + tl.sum(p, 1), out


@triton.jit
def _attend(
    Q, K, V, START, ROOT, AMONG, OUT, PART, TOP, SUM, ARRIVED,
    nodes, slots, trees, tree_stride, node_stride, wide, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    SPLITS: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BQ queries of all heads that share keys, over one of SPLITS contiguous ranges of the row's keys. The last program
    to finish a head and a block of queries combines the ranges, and resets its counter to zero.

    Every position sees the committed keys, so the loop over them has neither a mask nor a branch. The keys of the tree
    come after them.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, kv, split = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1)
    group = HEADS // KV
    i = tl.program_id(2) * BQ + tl.arange(0, BQ)
    node, here, d, j = i // group, i < group * nodes, tl.arange(0, BD), tl.arange(0, BS)
    query = (row * nodes + node) * HEADS + kv * group + i % group
    cell = query[:, None] * DIM + d[None, :]
    inside = here[:, None] & (d < DIM)[None, :]
    q = tl.load(Q + cell, mask=inside, other=0.0)
    start, root = tl.load(START + row).to(tl.int32), tl.load(ROOT + row).to(tl.int32)
    begin, end = tl.minimum(start, root), root + wide
    share = tl.cdiv(tl.cdiv(end - begin, BS), SPLITS) * BS
    low = begin + split * share
    high = tl.minimum(low + share, end)
    base = tl.program_id(0).to(tl.int64) * slots * DIM
    top = tl.full([BQ], -1e30, tl.float32)
    total = tl.zeros([BQ], tl.float32)
    out = tl.zeros([BQ, BD], tl.float32)
    committed = tl.minimum(high, root)
    for first in range(tl.maximum(low, start), committed, BS):
        key = first + j
        at = base + key[:, None] * DIM + d[None, :]
        stored, seen = (key < committed)[:, None] & (d < DIM)[None, :], (key < committed)[None, :]
        top, total, out = _add_keys(q, K, V, at, stored, seen, scale, top, total, out)
    among = AMONG + (row % trees) * tree_stride + node * node_stride
    for first in tl.range(tl.maximum(low, root), high, BS, num_stages=1):
        key = first + j
        at = base + key[:, None] * DIM + d[None, :]
        listed = here[:, None] & (key < high)[None, :]
        seen = tl.load(among[:, None] + (key - root)[None, :], mask=listed, other=0) != 0
        top, total, out = _add_keys(
            q, K, V, at, (key < high)[:, None] & (d < DIM)[None, :], seen, scale, top, total, out
        )
    if SPLITS == 1:
        tl.store(OUT + cell, (out / total[:, None]).to(OUT.dtype.element_ty), mask=inside)
    else:
        part = query * SPLITS
        tl.store(PART + (part + split)[:, None] * DIM + d[None, :], out, mask=inside)
        tl.store(TOP + part + split, top, mask=here)
        tl.store(SUM + part + split, total, mask=here)
        counter = ARRIVED + tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
        tl.debug_barrier()  # all threads store before the counter changes
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            highest = tl.full([BQ], -1e30, tl.float32)
            for s in tl.static_range(SPLITS):
                highest = tl.maximum(highest, tl.load(TOP + part + s, mask=here, other=-1e30, cache_modifier=".cg"))
            total = tl.zeros([BQ], tl.float32)
            out = tl.zeros([BQ, BD], tl.float32)
            for s in tl.range(0, SPLITS, loop_unroll_factor=UNROLL):
                weight = tl.exp2(tl.load(TOP + part + s, mask=here, other=0.0, cache_modifier=".cg") - highest)
                total += weight * tl.load(SUM + part + s, mask=here, other=1.0, cache_modifier=".cg")
                partial = tl.load(
                    PART + (part + s)[:, None] * DIM + d[None, :], mask=inside, other=0.0, cache_modifier=".cg"
                )
                out += weight[:, None] * partial
            tl.store(OUT + cell, (out / total[:, None]).to(OUT.dtype.element_ty), mask=inside)
            tl.store(counter, 0)


class Counters:
    """Counters at zero, for each device: every kernel that counts resets them. A captured graph holds their addresses,
    so they are never freed."""

    __slots__ = ("_allocated", "_least")  # not part of a decoding's state

    def __init__(self, least: int = 1 << 14) -> None:
        self._least = least
        self._allocated: dict[torch.device, list[Tensor]] = {}

    def on(self, device: torch.device, count: int) -> Tensor:
        """At least `count` counters (count,) int32."""
        allocated = self._allocated.setdefault(device, [])
        if not allocated or len(allocated[-1]) < count:
            allocated.append(torch.zeros(max(count, self._least), dtype=torch.int32, device=device))
        return allocated[-1]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, counters: Counters, tiles: Tiles, dependent: bool = False
) -> Tensor:
    """Attention of q (R, n, heads, head dim), contiguous, to a cache's k and v (R, kv heads, slots, head dim) where
    `mask` allows: (R, n, heads, head dim). Every position must see at least one key.

    Programs for one row and kv head: as many ranges of keys as fill the device, times blocks of at most 128 queries.
    Each block reads the keys once.
    """
    (rows, nodes, heads, dim), (_, kv, slots, _) = q.shape, k.shape
    queries, among = nodes * heads // kv, mask.among
    tile = tiles.attention(rows * kv, queries, dim, q.dtype, launch.can_depend(q.device))
    blocks = triton.cdiv(queries, tile.queries)
    splits = tile.waves * processors(q.device) // (rows * kv * blocks)
    splits = max(1, min(splits, _MOST_SPLITS, triton.cdiv(slots, tile.keys)))
    out = torch.empty_like(q)
    part = top = total = q.new_empty(0, dtype=torch.float32)
    if splits > 1:
        part = torch.empty(rows * nodes * heads * splits, dim, device=q.device)
        top, total = torch.empty(2, rows * nodes * heads * splits, device=q.device)
    arguments: tuple[Any, ...] = (
        q, k, v, mask.start, mask.root, among.view(torch.uint8), out, part, top, total,
        counters.on(q.device, rows * kv * blocks), nodes, slots, len(among), among.stride(0), among.stride(1),
        among.shape[2], dim**-0.5 * 1.4426950408889634,
        heads, kv, dim, max(16, triton.next_power_of_2(dim)), tile.queries, tile.keys, splits,
        min(splits, 8) if tile.queries * dim <= 2048 else 1,
    )  # fmt: skip
    launch.start(
        _attend, (rows * kv, splits, blocks), *arguments,
        dependent=dependent, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
