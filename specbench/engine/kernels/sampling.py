"""Distributions from logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch

#: The largest vocabulary whose distribution one program can hold.
MOST_TOKENS = 1 << 16


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
    launch.start(
        _probs,
        (logits.numel() // vocabulary,),
        logits,
        out,
        vocabulary,
        temperature,
        top_k or 0,
        triton.next_power_of_2(vocabulary),
        cut,
        num_warps=16,
    )
    return out
