"""Products of few rows with a weight matrix. The RMSNorm before it, and SwiGLU, the sum with the residual or the rotary
embedding after it, are part of the same kernel.

Up to `FEW` rows a program reads its share of the weights at once: all loads come before the first sum and before it
waits for the activations. With more rows, the matrix units take 16 rows at once, and the loop over the inputs is
pipelined; the program requests its first weights before it waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbench.engine.kernels.launch import INTERPRETED, gdc_launch_dependents, gdc_wait

#: Up to this number of rows products are sums of scalars.
FEW = 4


@triton.jit
def dot(x, y, total):
    """total + x @ y in float32. Triton's interpreter cannot multiply matrices of bfloat16."""
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def _weights(W, rows, at, WIDTH: tl.constexpr, FIRST: tl.constexpr, BK: tl.constexpr):
    """Weights (BN, BK) of the matrix rows `rows` (BN,), at the inputs FIRST + at."""
    address = W + rows[:, None].to(tl.int64) * WIDTH + (FIRST + at)[None, :]
    if FIRST + BK <= WIDTH:
        weights = tl.load(address, eviction_policy="evict_first")
    else:
        weights = tl.load(address, mask=(FIRST + at < WIDTH)[None, :], other=0.0, eviction_policy="evict_first")
    return weights


@triton.jit
def _inputs(X, row, at, WIDTH: tl.constexpr, FIRST: tl.constexpr, BK: tl.constexpr):
    """Inputs (1, BK) float32 of one row."""
    address = X + row * WIDTH + (FIRST + at)[None, :]
    if FIRST + BK <= WIDTH:
        inputs = tl.load(address)
    else:
        inputs = tl.load(address, mask=(FIRST + at < WIDTH)[None, :], other=0.0)
    return inputs.to(tl.float32)


@triton.jit
def _sums(w, v, x, u, PB: tl.constexpr):
    """Sums (BN,) float32 of weights w (BN, PA) times inputs x (1, PA), and v (BN, PB) times u (1, PB)."""
    if PB == 0:
        total = tl.sum(w * x, 1)
    elif w.shape[1] == v.shape[1]:
        total = tl.sum(w * x + v * u, 1)
    else:
        total = tl.sum(w * x, 1) + tl.sum(v * u, 1)
    return total


@triton.jit
def _row(
    w, v, w2, v2, x, u, g, h, eps, WIDTH: tl.constexpr, PB: tl.constexpr, PAIRED: tl.constexpr, NORMED: tl.constexpr
):
    """The products (BN,) of one row with one or two sets of weights, after the norm, whose scale is applied last."""
    if NORMED:
        square = tl.sum(x * x, 1)
        if PB:
            square += tl.sum(u * u, 1)
        scale = tl.rsqrt(square / WIDTH + eps)
        x, u = x * g, u * h
    y = _sums(w, v, x, u, PB)
    z = y
    if PAIRED:
        z = _sums(w2, v2, x, u, PB)
    if NORMED:
        y, z = y * scale, z * scale
    return y, z


@triton.jit
def _products_of_few(
    X, W, W2, NORM, rows, rows2, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr, PA: tl.constexpr, PB: tl.constexpr,
    PAIRED: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The products (BN,) of up to four rows with the weights' rows `rows`, and if PAIRED with W2's rows at `rows2`,
    else the same products again: a tuple of each. Every load is issued before the first sum."""
    at = tl.arange(0, PA)
    on = at
    w = _weights(W, rows, at, WIDTH, 0, PA)
    v = w
    if PB:
        on = tl.arange(0, PB)
        v = _weights(W, rows, on, WIDTH, PA, PB)
    w2, v2 = w, v
    if PAIRED:
        w2 = _weights(W2, rows2, at, WIDTH, 0, PA)
        v2 = w2
        if PB:
            v2 = _weights(W2, rows2, on, WIDTH, PA, PB)
    g, h = tl.zeros([1, 1], tl.float32), tl.zeros([1, 1], tl.float32)
    if NORMED:
        g = _inputs(NORM, 0, at, WIDTH, 0, PA)
        if PB:
            h = _inputs(NORM, 0, on, WIDTH, PA, PB)
    if PDL:
        gdc_wait()
    x = (_inputs(X, 0, at, WIDTH, 0, PA),)
    for r in tl.static_range(1, ROWS):
        x = x + (_inputs(X, r, at, WIDTH, 0, PA),)
    u = x
    if PB:
        u = (_inputs(X, 0, on, WIDTH, PA, PB),)
        for r in tl.static_range(1, ROWS):
            u = u + (_inputs(X, r, on, WIDTH, PA, PB),)
    w, v, w2, v2 = w.to(tl.float32), v.to(tl.float32), w2.to(tl.float32), v2.to(tl.float32)
    first, second = _row(w, v, w2, v2, x[0], u[0], g, h, eps, WIDTH, PB, PAIRED, NORMED)
    y, z = (first,), (second,)
    for r in tl.static_range(1, ROWS):
        first, second = _row(w, v, w2, v2, x[r], u[r], g, h, eps, WIDTH, PB, PAIRED, NORMED)
        y, z = y + (first,), z + (second,)
    return y, z


@triton.jit
def _prefetch(W, rows, WIDTH: tl.constexpr, AHEAD: tl.constexpr):
    """Request the first AHEAD weights of the matrix rows `rows`, in lines of 128 bytes, into the L2 cache."""
    LINE: tl.constexpr = 1024 // W.dtype.element_ty.primitive_bitwidth
    at = tl.minimum(tl.arange(0, AHEAD // LINE) * LINE, WIDTH - 1)
    address = (W + rows[:, None].to(tl.int64) * WIDTH + at[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _products_of_many(
    X, W, W2, NORM, rm, count, rows, rows2, eps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDTH: tl.constexpr, PAIRED: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The products (BM, BN) of the rows rm < count with the weights' rows `rows`, and if PAIRED with W2's rows at
    `rows2`, by the matrix units. The first weights are requested before the program waits for the activations. (Loading
    them into registers there would make it spill.)"""
    if PDL:
        _prefetch(W, rows, WIDTH, 4 * BK)
        if PAIRED:
            _prefetch(W2, rows2, WIDTH, 4 * BK)
        gdc_wait()
    rk, here = tl.arange(0, BK), (rm < count)[:, None]
    y, z = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    square = tl.zeros([BM, BK], tl.float32)
    x_at, w_at = X + rm[:, None] * WIDTH, W + rows[:, None].to(tl.int64) * WIDTH
    v_at = W2 + rows2[:, None].to(tl.int64) * WIDTH
    for first in range(0, WIDTH, BK):
        at = (first + rk)[None, :]
        if WIDTH % BK == 0:
            x = tl.load(x_at + at, mask=here, other=0.0)
            w = tl.load(w_at + at, eviction_policy="evict_first")
        else:
            x = tl.load(x_at + at, mask=here & (at < WIDTH), other=0.0)
            w = tl.load(w_at + at, mask=at < WIDTH, other=0.0, eviction_policy="evict_first")
        if NORMED:
            wide = x.to(tl.float32)
            square += wide * wide
            x = (wide * tl.load(NORM + at, mask=at < WIDTH, other=0.0).to(tl.float32)).to(x.dtype)
        y = dot(x, tl.trans(w), y)
        if PAIRED:
            if WIDTH % BK == 0:
                v = tl.load(v_at + at, eviction_policy="evict_first")
            else:
                v = tl.load(v_at + at, mask=at < WIDTH, other=0.0, eviction_policy="evict_first")
            z = dot(x, tl.trans(v), z)
    if NORMED:
        scale = tl.rsqrt(tl.sum(square, 1) / WIDTH + eps)[:, None]
        y, z = y * scale, z * scale
    return y, z


@triton.jit
def _finish(y, z, RES, cell, inside, GATED: tl.constexpr, ADDED: tl.constexpr):
    """SwiGLU of y and z, or y and the residual."""
    if GATED:
        y = y * tl.sigmoid(y) * z
    if ADDED:
        y += tl.load(RES + cell, mask=inside, other=0.0).to(tl.float32)
    return y.to(RES.dtype.element_ty)


@triton.jit
def _few(
    X, W, W2, NORM, RES, Y, out, eps, ROWS: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, PA: tl.constexpr,
    PB: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs of ROWS (at most four) rows."""
    if PDL:
        gdc_launch_dependents()
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rows, inside = tl.minimum(rn, out - 1), rn < out
    y, z = _products_of_few(X, W, W2, NORM, rows, rows, eps, ROWS, WIDTH, PA, PB, GATED, NORMED, PDL)
    results = (_finish(y[0], z[0], RES, rn, inside, GATED, ADDED),)
    for r in tl.static_range(1, ROWS):
        results = results + (_finish(y[r], z[r], RES, r * out + rn, inside, GATED, ADDED),)
    for r in tl.static_range(ROWS):
        tl.store(Y + r * out + rn, results[r], mask=inside)


@triton.jit
def _many(
    X, W, W2, NORM, RES, Y, count, out, eps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs of up to BM rows."""
    if PDL:
        gdc_launch_dependents()
    rm, rn = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(rn, out - 1)
    y, z = _products_of_many(X, W, W2, NORM, rm, count, rows, rows, eps, BM, BN, BK, WIDTH, GATED, NORMED, PDL)
    inside = (rm < count)[:, None] & (rn < out)[None, :]
    cell = rm[:, None] * out + rn[None, :]
    tl.store(Y + cell, _finish(y, z, RES, cell, inside, GATED, ADDED), mask=inside)


@triton.jit
def _rotate_pairs(
    a, b, position, pair, inside, where, HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """The pairs (a, b) of queries, keys and values; queries and keys are rotated. Also the slot of keys and
    values. `pair` counts through the heads of queries, keys and values. where: rotary rows, slots, queries, and their
    layout."""
    ROPE, SLOTS, Q, nodes, rope_stride, slot_stride = where
    row, node, head, i = position // nodes, position % nodes, pair // HALF, pair % HALF
    angle = ROPE + row * rope_stride + (node * HALF + i) * 2
    cos = tl.load(angle, mask=inside & (head < HEADS + KV), other=1.0)
    sin = tl.load(angle + 1, mask=inside & (head < HEADS + KV), other=0.0)
    slot = tl.load(SLOTS + row * slot_stride + node + 0 * pair, mask=inside & (head >= HEADS), other=0)
    return (a * cos - b * sin).to(Q.dtype.element_ty), (b * cos + a * sin).to(Q.dtype.element_ty), slot


@triton.jit
def _store_pairs(
    turned, position, pair, inside, Q, K, V, nodes, slots,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Store queries in Q (positions, heads, dim), keys and values in the caches (rows, kv heads, slots, dim)."""
    a, b, slot = turned
    row, head, i = position // nodes, pair // HALF, pair % HALF
    if HALVES:
        first, second = i, i + HALF
    else:
        first, second = 2 * i, 2 * i + 1
    is_query, is_key = inside & (head < HEADS), inside & (head >= HEADS) & (head < HEADS + KV)
    is_value = inside & (head >= HEADS + KV)
    query = Q + (position * HEADS + head) * (2 * HALF)
    tl.store(query + first, a, mask=is_query)
    tl.store(query + second, b, mask=is_query)
    key = K + ((row * KV + head - HEADS).to(tl.int64) * slots + slot) * (2 * HALF)
    tl.store(key + first, a, mask=is_key)
    tl.store(key + second, b, mask=is_key)
    value = V + ((row * KV + head - HEADS - KV).to(tl.int64) * slots + slot) * (2 * HALF)
    tl.store(value + first, a, mask=is_value)
    tl.store(value + second, b, mask=is_value)


@triton.jit
def _pair_rows(pair, HALF: tl.constexpr, HALVES: tl.constexpr):
    """The rows of the weights that give the two coordinates of the pairs."""
    head, i = pair // HALF, pair % HALF
    if HALVES:
        return head * (2 * HALF) + i, head * (2 * HALF) + i + HALF
    return head * (2 * HALF) + 2 * i, head * (2 * HALF) + 2 * i + 1


@triton.jit
def _few_qkv(
    X, W, NORM, ROPE, SLOTS, Q, K, V, eps, nodes, slots, rope_stride, slot_stride,
    ROWS: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, PA: tl.constexpr, PB: tl.constexpr,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN pairs of coordinates of the queries, keys and values of ROWS (at most four) positions."""
    if PDL:
        gdc_launch_dependents()
    pair, pairs = tl.program_id(0) * BN + tl.arange(0, BN), (HEADS + 2 * KV) * HALF
    inside = pair < pairs
    rows_a, rows_b = _pair_rows(tl.minimum(pair, pairs - 1), HALF, HALVES)
    y, z = _products_of_few(X, W, W, NORM, rows_a, rows_b, eps, ROWS, WIDTH, PA, PB, True, NORMED, PDL)
    where = ROPE, SLOTS, Q, nodes, rope_stride, slot_stride
    turned = (_rotate_pairs(y[0], z[0], 0, pair, inside, where, HEADS, KV, HALF),)
    for r in tl.static_range(1, ROWS):
        turned = turned + (_rotate_pairs(y[r], z[r], r, pair, inside, where, HEADS, KV, HALF),)
    for r in tl.static_range(ROWS):
        _store_pairs(turned[r], r, pair, inside, Q, K, V, nodes, slots, HEADS, KV, HALF, HALVES)


@triton.jit
def _many_qkv(
    X, W, NORM, ROPE, SLOTS, Q, K, V, count, eps, nodes, slots, rope_stride, slot_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN pairs of coordinates of the queries, keys and values of up to BM positions."""
    if PDL:
        gdc_launch_dependents()
    rm, pair, pairs = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), (HEADS + 2 * KV) * HALF
    rows_a, rows_b = _pair_rows(tl.minimum(pair, pairs - 1), HALF, HALVES)
    y, z = _products_of_many(X, W, W, NORM, rm, count, rows_a, rows_b, eps, BM, BN, BK, WIDTH, True, NORMED, PDL)
    inside = (rm < count)[:, None] & (pair < pairs)[None, :]
    position, pair = rm[:, None], pair[None, :]
    where = ROPE, SLOTS, Q, nodes, rope_stride, slot_stride
    turned = _rotate_pairs(y, z, position, pair, inside, where, HEADS, KV, HALF)
    _store_pairs(turned, position, pair, inside, Q, K, V, nodes, slots, HEADS, KV, HALF, HALVES)
