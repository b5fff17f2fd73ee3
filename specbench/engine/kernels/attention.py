"""Rotary embedding, and attention of few queries to the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch

#: Queries per attention program, keys that it reads at once, and programs that share the keys of a head.
_QUERIES, _KEYS, _SPLITS = 64, 64, 16


@triton.jit
def _rotate(
    QKV, TABLE, SLOTS, QW, QB, KW, KB, Q, K, V, nodes, slots, table_rows, q_rows, k_rows,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one position: norm, rotate, and store in the queries or the caches."""
    position, head = tl.program_id(0), tl.program_id(1)
    row, node, i = position // nodes, position % nodes, tl.arange(0, BLOCK)
    here = i < HALF
    if HALVES:
        first = i
        second = i + HALF
    else:
        first = 2 * i
        second = 2 * i + 1
    base = QKV + (position * (HEADS + 2 * KV) + head) * (2 * HALF)
    given = tl.load(base + first, mask=here, other=0.0)
    a, b = given.to(tl.float32), tl.load(base + second, mask=here, other=0.0).to(tl.float32)
    slot = tl.load(SLOTS + position)
    if head < HEADS + KV:
        if NORMED:
            mean = (tl.sum(a, 0) + tl.sum(b, 0)) / (2 * HALF)
            a, b = tl.where(here, a - mean, 0.0), tl.where(here, b - mean, 0.0)
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + 1e-5)
            if head < HEADS:
                weight, bias, which = QW, QB, head // (HEADS // q_rows)
            else:
                weight, bias, which = KW, KB, (head - HEADS) // (KV // k_rows)
            weight += which * (2 * HALF)
            bias += which * (2 * HALF)
            a = a * scale * tl.load(weight + first, mask=here, other=0.0) + tl.load(bias + first, mask=here, other=0.0)
            b = b * scale * tl.load(weight + second, mask=here, other=0.0) + tl.load(
                bias + second, mask=here, other=0.0
            )
            a, b = a.to(given.dtype).to(tl.float32), b.to(given.dtype).to(tl.float32)
        angle = TABLE + (((row % table_rows) * nodes + node) * HALF + i) * 2
        cos, sin = tl.load(angle, mask=here, other=0.0), tl.load(angle + 1, mask=here, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    if head < HEADS:
        out = Q + (position * HEADS + head) * (2 * HALF)
    else:
        if head < HEADS + KV:
            out = K + ((row * KV + head - HEADS).to(tl.int64) * slots + slot) * (2 * HALF)
        else:
            out = V + ((row * KV + head - HEADS - KV).to(tl.int64) * slots + slot) * (2 * HALF)
    tl.store(out + first, a.to(given.dtype), mask=here)
    tl.store(out + second, b.to(given.dtype), mask=here)


@triton.jit
def _attend(
    Q, K, V, MASK, PART, TOP, SUM, nodes, slots, scale, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr,
    BD: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Some queries of all heads that share keys, over every SPLITS-th block of keys. Blocks that no query sees are not
    read."""
    row, kv, split = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1)
    group = HEADS // KV
    i = tl.program_id(2) * BQ + tl.arange(0, BQ)
    node, here, d, j = i // group, i < group * nodes, tl.arange(0, BD), tl.arange(0, BS)
    held = (d < DIM)[None, :]
    query = (row * nodes + node) * HEADS + kv * group + i % group
    q = tl.load(Q + query[:, None] * DIM + d[None, :], mask=here[:, None] & held, other=0.0)
    base = tl.program_id(0).to(tl.int64) * slots * DIM
    seen_by = MASK + (row * nodes + node) * slots
    top = tl.full([BQ], -1e30, tl.float32)
    total = tl.zeros([BQ], tl.float32)
    out = tl.zeros([BQ, BD], tl.float32)
    for start in range(split * BS, slots, SPLITS * BS):
        key = start + j
        seen = tl.load(seen_by[:, None] + key[None, :], mask=here[:, None] & (key < slots)[None, :], other=0) != 0
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            at = base + key[:, None] * DIM + d[None, :]
            k = tl.load(K + at, mask=(key < slots)[:, None] & held, other=0.0)
            v = tl.load(V + at, mask=(key < slots)[:, None] & held, other=0.0)
            score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1e30)
            higher = tl.maximum(top, tl.max(score, 1))
            p, fade = tl.exp(score - higher[:, None]), tl.exp(top - higher)
            total = total * fade + tl.sum(p, 1)
            out = out * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = higher
    part = query * SPLITS + split
    tl.store(PART + part[:, None] * DIM + d[None, :], out, mask=here[:, None] & held)
    tl.store(TOP + part, top, mask=here)
    tl.store(SUM + part, total, mask=here)


@triton.jit
def _combine(PART, TOP, SUM, OUT, DIM: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr):
    query, s, d = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, BD)
    top = tl.load(TOP + query * SPLITS + s)
    share = tl.exp(top - tl.max(top, 0))
    part = tl.load(PART + (query * SPLITS + s)[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0)
    total = tl.sum(tl.load(SUM + query * SPLITS + s) * share, 0)
    tl.store(OUT + query * DIM + d, (tl.sum(part * share[:, None], 0) / total).to(OUT.dtype.element_ty), mask=d < DIM)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of q (R, n, heads, head dim) to a cache's k and v (R, kv heads, slots, head dim) where mask
    (R, 1, n, slots) bool allows: (R, n, heads, head dim). Every query must see a key."""
    (rows, nodes, heads, dim), (_, kv, slots, _) = q.shape, k.shape
    splits = min(_SPLITS, triton.next_power_of_2(triton.cdiv(slots, _KEYS)))
    queries = nodes * heads // kv
    block = min(_QUERIES, max(16, triton.next_power_of_2(queries)))
    wide = max(16, triton.next_power_of_2(dim))
    each = rows * nodes * heads * splits
    part = torch.empty(each, dim, device=q.device)
    top, total = torch.empty(2, each, device=q.device)
    launch.start(_attend, (rows * kv, splits, triton.cdiv(queries, block)),
        q, k, v, mask.expand(rows, 1, nodes, slots).contiguous().view(torch.uint8), part, top, total, nodes, slots,
        dim**-0.5, heads, kv, dim, wide, block, _KEYS, splits, num_warps=8 if block > 32 else 4, num_stages=2,
    )  # fmt: skip
    out = torch.empty_like(q)
    launch.start(_combine, (rows * nodes * heads,), part, top, total, out, dim, wide, splits, num_warps=2)
    return out
