"""The operations between the large products of a layer, which cuBLAS computes: norms with the residual's sum, SwiGLU,
and the rotary embedding that stores keys and values in the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from specbench.engine.kernels.launch import gdc_launch_dependents, gdc_wait


@triton.jit
def _rms_norm(
    X, NORM, RES, SUM, Y, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Y = norm(X). BEFORE: the norm of X + RES, which is stored in SUM; AFTER: RES is added to the normed rows."""
    if PDL:
        gdc_launch_dependents()
    row, at = tl.program_id(0).to(tl.int64) * WIDTH, tl.arange(0, BLOCK)
    weight = tl.load(NORM + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    loaded = tl.load(X + row + at, mask=at < WIDTH, other=0.0)
    x = loaded.to(tl.float32)
    residual = x
    if BEFORE or AFTER:
        residual = tl.load(RES + row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    if BEFORE:
        total = (x + residual).to(loaded.dtype)
        tl.store(SUM + row + at, total, mask=at < WIDTH)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = (x * scale).to(loaded.dtype).to(tl.float32) * weight
    if AFTER:
        y = y.to(loaded.dtype).to(tl.float32) + residual
    tl.store(Y + row + at, y.to(loaded.dtype), mask=at < WIDTH)


@triton.jit
def _swiglu(X, Y, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """silu(a) * b of rows that contain a, then b, each of `width` numbers."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, at = tl.program_id(0).to(tl.int64) * width, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(X + 2 * row + at, mask=at < width, other=0.0).to(tl.float32)
    b = tl.load(X + 2 * row + width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(Y + row + at, (a * tl.sigmoid(a) * b).to(Y.dtype.element_ty), mask=at < width)


@triton.jit
def _rotate(
    QKV, ROPE, SLOTS, QW, QB, KW, KB, Q, K, V, eps, nodes, slots, rope_stride, slot_stride, q_rows, k_rows,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    HALVES: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one position, all of queries, of keys or of values: norm, rotate, and store in the queries or the
    caches. NORMED: whether a LayerNorm comes first."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position, leading = tl.program_id(0), tl.program_id(1) * GROUP
    head, i = leading + tl.arange(0, GROUP)[:, None], tl.arange(0, BLOCK)[None, :]
    row, node, here = position // nodes, position % nodes, i < HALF
    if HALVES:
        first = i
        second = i + HALF
    else:
        first = 2 * i
        second = 2 * i + 1
    base = QKV + (position * (HEADS + 2 * KV) + head) * (2 * HALF)
    loaded = tl.load(base + first, mask=here, other=0.0)
    a, b = loaded.to(tl.float32), tl.load(base + second, mask=here, other=0.0).to(tl.float32)
    slot = tl.load(SLOTS + row * slot_stride + node)
    if leading < HEADS + KV:
        if NORMED:
            mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / (2 * HALF))[:, None]
            a, b = tl.where(here, a - mean, 0.0), tl.where(here, b - mean, 0.0)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
            if leading < HEADS:
                weight, bias, norm_row = QW, QB, head // (HEADS // q_rows)
            else:
                weight, bias, norm_row = KW, KB, (head - HEADS) // (KV // k_rows)
            weight += norm_row * (2 * HALF)
            bias += norm_row * (2 * HALF)
            a, b = a * scale, b * scale
            a, b = a * tl.load(weight + first, mask=here, other=0.0), b * tl.load(weight + second, mask=here, other=0.0)
            a += tl.load(bias + first, mask=here, other=0.0)
            b += tl.load(bias + second, mask=here, other=0.0)
            a, b = a.to(loaded.dtype).to(tl.float32), b.to(loaded.dtype).to(tl.float32)
        angle = ROPE + row * rope_stride + (node * HALF + i) * 2
        cos, sin = tl.load(angle, mask=here, other=0.0), tl.load(angle + 1, mask=here, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    if leading < HEADS:
        out = Q + (position * HEADS + head) * (2 * HALF)
    else:
        if leading < HEADS + KV:
            out = K + ((row * KV + head - HEADS).to(tl.int64) * slots + slot) * (2 * HALF)
        else:
            out = V + ((row * KV + head - HEADS - KV).to(tl.int64) * slots + slot) * (2 * HALF)
    tl.store(out + first, a.to(loaded.dtype), mask=here)
    tl.store(out + second, b.to(loaded.dtype), mask=here)
