"""A token drawn by one program from a distribution in memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def parts(p):
    """Probabilities as integers, as of `decoding.sampling.draw_exactly`."""
    return tl.where(p > 0, p * 274877906944.0, 0.0).to(tl.int64)  # 2**38


@triton.jit
def draw_row(ROW, u, count, BLOCK: tl.constexpr):
    """As of `decoding.sampling.draw_exactly`: the token (int64) drawn with uniform u from ROW (count,) float32."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        total += parts(tl.load(ROW + start + at, mask=start + at < count, other=0.0))
    wanted = ((u * 8388608.0).to(tl.int64) * tl.sum(total, 0)) >> 23
    before, token = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64) + count - 1
    for start in range(0, count, BLOCK):
        some = parts(tl.load(ROW + start + at, mask=start + at < count, other=0.0))
        after = before + tl.sum(some, 0)
        if (before <= wanted) & (after > wanted):
            token = start + tl.sum((before + tl.cumsum(some, 0) <= wanted).to(tl.int64), 0)
        before = after
    return token
