"""Fused kernels (Triton) of a decoding step on CUDA, for few rows: they read every weight and every key once, and
almost nothing else. Each computes the same as the plain functions of `models.transformer` and `decoding.sampling`,
which stay the specification; they are used with `engine=triton` (`ops.Kernels`).

Measurements behind the choices: results/bench. A kernel that depends on another costs about a microsecond in a graph,
whatever it does, so the norm, SwiGLU and the sum with the residual are part of the matrix product that reads or
produces them; from a few million weights on cuBLAS reads faster than these products do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

#: Rows and weights up to which a product is done here; beyond, by cuBLAS.
MOST_ROWS, MOST_WEIGHTS = 16, 1 << 23
#: Rows up to which products are sums of scalars; above, the matrix units take 16 rows at once.
_FEW = 4
#: Queries per attention program, keys that it reads at once, and programs that share the keys of a head.
_QUERIES, _KEYS, _SPLITS = 64, 64, 16
#: The largest vocabulary whose distribution one program can hold.
MOST_TOKENS = 1 << 16


@triton.jit
def _load_rows(X, NORM, scale, rm, rk, rows, k, width, NORMED: tl.constexpr):
    """Inputs (BM, BK) at columns k + rk, after the norm."""
    inside = (rm < rows)[:, None] & (k + rk < width)[None, :]
    x = tl.load(X + rm[:, None] * width + (k + rk)[None, :], mask=inside, other=0.0)
    if NORMED:
        weight = tl.load(NORM + k + rk, mask=k + rk < width, other=0.0)
        x = (x.to(tl.float32) * scale[:, None]).to(x.dtype) * weight[None, :]
    return x


@triton.jit
def _add_product(acc, x, W, rn, rk, k, count, width, MATRIX: tl.constexpr):
    """acc + x (BM, BK) times the weights' columns; scalars are summed at the end, acc (BM, BN, BK)."""
    inside = (rn < count)[:, None] & (k + rk < width)[None, :]
    w = tl.load(
        W + rn[:, None].to(tl.int64) * width + (k + rk)[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
    )
    if MATRIX:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    else:
        acc += x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    return acc


@triton.jit
def _project(
    X, W, W3, NORM, RES, Y, rows, count, width, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    rn, rm, rk = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    scale = tl.zeros([BM], tl.float32)
    if NORMED:
        for k in range(0, width, BK):
            x = _load_rows(X, NORM, scale, rm, rk, rows, k, width, False).to(tl.float32)
            scale += tl.sum(x * x, 1)
        scale = tl.rsqrt(scale / width + eps)
    if MATRIX:
        acc = tl.zeros([BM, BN], tl.float32)
        acc3 = tl.zeros([BM, BN], tl.float32)
    else:
        acc = tl.zeros([BM, BN, BK], tl.float32)
        acc3 = tl.zeros([BM, BN, BK], tl.float32)
    for k in range(0, width, BK):
        x = _load_rows(X, NORM, scale, rm, rk, rows, k, width, NORMED)
        acc = _add_product(acc, x, W, rn, rk, k, count, width, MATRIX)
        if GATED:
            acc3 = _add_product(acc3, x, W3, rn, rk, k, count, width, MATRIX)
    if not MATRIX:
        acc = tl.sum(acc, 2)
        if GATED:
            acc3 = tl.sum(acc3, 2)
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc3
    cell = rm[:, None] * count + rn[None, :]
    inside = (rm < rows)[:, None] & (rn < count)[None, :]
    if ADDED:
        acc += tl.load(RES + cell, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + cell, acc.to(Y.dtype.element_ty), mask=inside)


def project(
    x: Tensor,
    weight: Tensor,
    norm: nn.Module | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """norm(x) @ weight.T of x (rows, in): (rows, out); with a `gate` (out, in) SwiGLU of the two products, of which
    weight's is activated; `residual` (rows, out) is added. norm: an RMSNorm, or none."""
    normed = not isinstance(norm, nn.Identity | None)
    rows, width = x.shape
    if rows > MOST_ROWS or weight.numel() > MOST_WEIGHTS:
        x = x if norm is None else rms_norm(x, norm)
        if residual is not None:
            return torch.addmm(residual, x, weight.T)
        y = F.linear(x, weight)
        return y if gate is None else swiglu(y, F.linear(x, gate))
    count, matrix = len(weight), rows > _FEW
    y = x.new_empty(rows, count)
    block = max(16, triton.next_power_of_2(rows)) if matrix else triton.next_power_of_2(rows)
    over, deep = (16, 256) if matrix else (4, 512)
    scale: Any = norm
    _project[(triton.cdiv(count, over),)](
        x, weight, weight if gate is None else gate, scale.weight if normed else weight,
        x if residual is None else residual, y, rows, count, width, scale.eps if normed else 0.0,
        block, over, min(deep, max(16, triton.next_power_of_2(width))),
        normed, gate is not None, residual is not None, matrix, num_warps=4, num_stages=4 if matrix else 2,
    )  # fmt: skip
    return y


@triton.jit
def _rms_norm(X, NORM, RES, Y, width, eps, BLOCK: tl.constexpr, ADDED: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    given = tl.load(X + row + at, mask=at < width, other=0.0)
    x = given.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    y = (x * scale).to(given.dtype) * tl.load(NORM + at, mask=at < width, other=0.0)
    if ADDED:
        y += tl.load(RES + row + at, mask=at < width, other=0.0)
    tl.store(Y + row + at, y, mask=at < width)


def rms_norm(x: Tensor, norm: Any, residual: Tensor | None = None) -> Tensor:
    """As of `RMSNorm`, or of an identity instead, of x (..., dim); `residual`, of the same shape, is added."""
    if isinstance(norm, nn.Identity):
        return x if residual is None else x + residual
    x, width = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    _rms_norm[(x.numel() // width,)](
        x, norm.weight, x if residual is None else residual, y, width, norm.eps,
        triton.next_power_of_2(width), residual is not None,
    )  # fmt: skip
    return y


@triton.jit
def _swiglu(A, B, Y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(A + at, mask=at < count, other=0.0).to(tl.float32)
    b = tl.load(B + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(Y + at, (a * tl.sigmoid(a) * b).to(Y.dtype.element_ty), mask=at < count)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b of contiguous tensors of one shape."""
    y = torch.empty_like(a)
    _swiglu[(triton.cdiv(a.numel(), 1024),)](a, b, y, a.numel(), 1024)
    return y


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
    _attend[(rows * kv, splits, triton.cdiv(queries, block))](
        q, k, v, mask.expand(rows, 1, nodes, slots).contiguous().view(torch.uint8), part, top, total, nodes, slots,
        dim**-0.5, heads, kv, dim, wide, block, _KEYS, splits, num_warps=8 if block > 32 else 4, num_stages=2,
    )  # fmt: skip
    out = torch.empty_like(q)
    _combine[(rows * nodes * heads,)](part, top, total, out, dim, wide, splits, num_warps=2)
    return out


def block(one: Any, flat: Tensor, context: Any, layer: int) -> Tensor:
    """As of `Block.forward` with a cache, of positions (R n, dim) without padding."""
    rows, nodes, cache = context.rows, context.nodes, context.cache
    assert cache is not None
    assert context.slots is not None
    assert context.mask is not None
    attention, c, feed = one.attention, one.attention.cfg, one.feed_forward
    before, between = (None, None) if one.post_norm else (one.attention_norm, one.ffn_norm)
    qkv = project(flat, attention.wqkv.weight, before)
    q = flat.new_empty(rows, nodes, c.n_heads, c.head_dim)
    k, v = cache.k[layer], cache.v[layer]
    norms: list[Tensor] = [qkv] * 4
    if c.qk_norm:
        norms = [attention.q_norm.weight, attention.q_norm.bias, attention.k_norm.weight, attention.k_norm.bias]
    half = c.head_dim // 2
    _rotate[(rows * nodes, c.n_heads + 2 * c.n_kv_heads)](
        qkv, context.rope.contiguous(), context.slots.contiguous(), *norms, q, k, v, nodes, k.shape[2],
        len(context.rope), max(1, c.qk_norm), max(1, min(c.qk_norm, c.n_kv_heads)), c.n_heads, c.n_kv_heads, half,
        triton.next_power_of_2(half), c.rotary == "halves", c.qk_norm > 0, num_warps=1,
    )  # fmt: skip
    attended = attend(q, k, v, context.mask).view(rows * nodes, -1)
    if one.post_norm:
        flat = rms_norm(project(attended, attention.wo.weight), one.attention_norm, flat)
        inner = project(flat, feed.w1.weight, None, feed.w3.weight)
        return rms_norm(project(inner, feed.w2.weight), one.ffn_norm, flat)
    flat = project(attended, attention.wo.weight, residual=flat)
    inner = project(flat, feed.w1.weight, between, feed.w3.weight)
    return project(inner, feed.w2.weight, residual=flat)


@triton.jit
def _probs(LOGITS, PROBS, count, temperature, top_k, BLOCK: tl.constexpr, CUT: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * count, tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row + at, mask=at < count, other=-float("inf")).to(tl.float32) / temperature + 0.0
    if CUT:
        bits = x.to(tl.int32, bitcast=True)
        rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # ordered as the numbers are
        low = tl.min(rank, 0).to(tl.int64)
        high = tl.max(rank, 0).to(tl.int64)
        for _ in range(32):  # low: the largest bound that at least top_k of them reach so far
            middle = (low + high + 1) >> 1
            enough = tl.sum((rank >= middle.to(tl.int32)).to(tl.int32), 0) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        x = tl.where(rank >= low.to(tl.int32), x, -float("inf"))
    y = tl.exp(x - tl.max(x, 0))
    tl.store(PROBS + row + at, y / tl.sum(y, 0), mask=at < count)


def probs(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """As of `Sampling.probs` at a temperature above 0 and without top-p: logits (..., V), at most `MOST_TOKENS`."""
    logits, vocabulary = logits.contiguous(), logits.shape[-1]
    out = torch.empty(logits.shape, device=logits.device)
    cut = top_k is not None and top_k < vocabulary
    _probs[(logits.numel() // vocabulary,)](
        logits, out, vocabulary, temperature, top_k or 0, triton.next_power_of_2(vocabulary), cut, num_warps=16
    )
    return out


@triton.jit
def _left(R, Q, base, at, inside, token, sampled, omega, OPTIMAL: tl.constexpr):
    """The residual mass of tokens `at` after `token` was rejected, not normalised."""
    r = tl.load(R + base + at, mask=inside, other=0.0)
    q = tl.load(Q + base + at, mask=inside, other=0.0)
    q = tl.where(sampled, q, tl.where(at == token, 1.0, 0.0))
    mass = r - q
    if OPTIMAL:
        mass = tl.maximum(mass, (1 - omega) * r)
    return tl.where(inside, tl.maximum(mass, 0.0), 0.0)


@triton.jit
def _decide(
    R, Q, TOKENS, VALID, SAMPLED, U, CHILDREN, DEPTH, OMEGA, CHILD, FIRST, nodes, inner, tree_rows, vocabulary,
    deepest, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OPTIMAL: tl.constexpr,
):  # fmt: skip
    """An inner node of a row, sibling after sibling. R holds its distribution, then its residual distribution; Q the
    distribution from which the next sibling was drawn."""
    row, which = tl.program_id(0) // inner, tl.program_id(0) % inner
    shape = row % tree_rows
    base, tokens = tl.program_id(0).to(tl.int64) * vocabulary, tl.arange(0, BLOCK)
    accepted_child = tl.full([], -1, tl.int64)
    for m in tl.static_range(WIDTH):
        child = tl.load(CHILDREN + (shape * inner + which) * WIDTH + m)
        node = tl.maximum(child, 0)
        here = row * nodes + node
        token, sampled = tl.load(TOKENS + here), tl.load(SAMPLED + here) != 0
        depth = tl.minimum(tl.load(DEPTH + shape * nodes + node), deepest)
        omega = tl.load(OMEGA + depth)
        p_token = tl.load(R + base + token)
        q_token = tl.where(sampled, tl.load(Q + base + token), 1.0)
        live = (child >= 0) & (tl.load(VALID + here) != 0) & (accepted_child < 0) & (q_token > 0)
        accept = tl.minimum(tl.where(q_token > 0, omega * p_token / tl.where(q_token > 0, q_token, 1.0), 1.0), 1.0)
        accepted = live & (tl.load(U + here) < accept)
        if (m == 0) & (which == 0):
            tl.store(FIRST + row, tl.where(live, accept, 0.0))
        accepted_child = tl.where(accepted, child, accepted_child)
        if live & (accepted_child < 0):
            total, rest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocabulary, BLOCK):
                at = start + tokens
                total += _left(R, Q, base, at, at < vocabulary, token, sampled, omega, OPTIMAL)
                if m + 1 < WIDTH:  # the next sibling was drawn from the rest
                    rest += tl.load(Q + base + at, mask=(at < vocabulary) & (at != token), other=0.0)
            mass, others = tl.sum(total, 0), tl.sum(rest, 0)
            tl.debug_barrier()  # no thread writes what another one still reads
            for start in range(0, vocabulary, BLOCK):
                at = start + tokens
                left = _left(R, Q, base, at, at < vocabulary, token, sampled, omega, OPTIMAL)
                if mass > 1e-30:
                    tl.store(R + base + at, left / mass, mask=at < vocabulary)
                if m + 1 < WIDTH:
                    q = tl.load(Q + base + at, mask=at < vocabulary, other=0.0)
                    if others > 1e-30:
                        tl.store(Q + base + at, tl.where(at == token, 0.0, q / others), mask=at < vocabulary)
            tl.debug_barrier()
    tl.store(CHILD + tl.program_id(0), accepted_child)


def decide(r: Tensor, q: Tensor, draft: Any, u: Tensor, omega: Tensor, optimal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As of `verify._decide` for a `Relaxed` rule: r (B, I, V) float32 the distributions of the inner nodes,
    overwritten with the residual distributions; q (B, I, V) float32; u (B, M)."""
    tree, (rows, inner, vocabulary) = draft.tree, r.shape
    assert r.is_contiguous()
    q = q.clone(memory_format=torch.contiguous_format) if tree.width > 1 else q.contiguous()
    accepted_child = torch.empty(rows, inner, dtype=torch.int64, device=r.device)
    first = torch.empty(rows, device=r.device)
    valid = draft.valid.contiguous().view(torch.uint8)
    sampled = torch.ones_like(valid) if draft.sampled is None else draft.sampled.contiguous().view(torch.uint8)
    _decide[(rows * inner,)](
        r, q, draft.tokens.contiguous(), valid, sampled, u.contiguous(), tree.children.contiguous(),
        tree.depth.contiguous(), omega, accepted_child, first, draft.tokens.shape[1], inner,
        len(tree.children), vocabulary, len(omega) - 1, tree.width,
        min(4096, triton.next_power_of_2(vocabulary)), optimal, num_warps=8,
    )  # fmt: skip
    return accepted_child, r, first
