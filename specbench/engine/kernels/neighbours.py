"""The mass of a token's neighbours in the codebook (LANTERN), gathered by one program."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

#: Neighbours that a program reads at once.
_BLOCK = 1024


@triton.jit
def _divergence(r_token, moved):
    """What `rules.lantern._divergence` computes."""
    half = r_token + moved / 2
    least = tl.maximum(half, 1e-38)
    part = r_token * tl.log(tl.maximum(r_token, 1e-38) / least)
    rest = (r_token + moved) * tl.log(tl.maximum(r_token + moved, 1e-38) / least)
    return 0.5 * (moved * 0.6931471805599453 + part + rest)


@triton.jit
def gathered(r_row, near, token, r_token, k, limit, MEASURE: tl.constexpr, CLOSED: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of the neighbours of `token` that count, and their number; see `rules.base.Neighbours`. near: the row of
    `token` in the table; r_token: its probability."""
    ranks, size = tl.arange(0, BLOCK), tl.where(tl.load(near) == token, 0, k)
    before, gain, count = tl.zeros_like(r_token), tl.zeros_like(r_token), tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK):
        code = tl.load(near + start + ranks, mask=start + ranks < size, other=0)
        mass = tl.load(r_row + code, mask=start + ranks < size, other=0.0)
        upto, bound = before + tl.cumsum(mass, 0), limit
        if MEASURE == "share":
            bound = limit * r_token
        if MEASURE == "divergence":
            upto = _divergence(r_token, upto)
        if CLOSED:
            inside = upto <= bound
        else:
            inside = upto < bound
        inside &= start + ranks < size
        gain += tl.sum(tl.where(inside, mass, 0 * mass), 0)  # NaN stays
        count += tl.sum(inside.to(tl.int32), 0)
        before += tl.sum(mass, 0)
    return gain, count


@triton.jit
def residual_mass(
    WORK, r_row, q_row, near, cleared, vocabulary, token, sampled, q_token, count,
    BLOCK: tl.constexpr, NEAR_BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Write to WORK the residual mass after `token` was rejected, and return its sum; near as in `gathered`, which gave
    `count`; cleared: how many neighbours the released code clears. Where nothing is left of what that samples from,
    nothing is cleared. The token itself has no residual mass, or it could not have been rejected."""
    ranks, mass = tl.arange(0, NEAR_BLOCK), tl.zeros_like(q_token)
    until, tries = count, tl.full([], 0, tl.int32)
    if RESIDUAL != "paper":
        until = tl.where(count > 0, cleared, 0)
    while tries < 2:
        for start in range(0, vocabulary, BLOCK):
            i = start + tl.arange(0, BLOCK)
            r = tl.load(r_row + i, mask=i < vocabulary, other=0.0)
            q = tl.load(q_row + i, mask=i < tl.where(sampled, vocabulary, 0), other=0.0)
            left = r - tl.where(sampled, q, tl.where(i == token, 1.0, 0.0))
            tl.store(WORK + i, tl.maximum(left, 0.0, propagate_nan=tl.PropagateNan.ALL), mask=i < vocabulary)
        tl.debug_barrier()
        for start in range(0, until, NEAR_BLOCK):
            inside = start + ranks < until
            code = tl.load(near + start + ranks, mask=inside, other=0)
            left = tl.zeros([NEAR_BLOCK], tl.float32)
            if RESIDUAL == "released":  # cleared in r where the token was chosen, else in q
                left = tl.load(r_row + code, mask=start + ranks < tl.where(q_token < 1, until, 0), other=0.0)
            tl.store(WORK + code, left, mask=inside)
        tl.debug_barrier()
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            i = start + tl.arange(0, BLOCK)
            total += tl.load(WORK + i, mask=i < vocabulary, other=0.0)
        mass = tl.sum(total, 0)
        tl.debug_barrier()  # no thread writes what another one still reads
        tries = tl.where((mass > 1e-30) | (until == 0) | (RESIDUAL == "paper"), 2, tries + 1)
        until = 0 * until
    return mass


def constants(neighbours: Any) -> tuple[Any, ...]:
    """What kernels take for a `rules.base.Neighbours`, or for None: the table, its stride, its number of columns, k,
    the limit, MEASURE, CLOSED and NEAR_BLOCK."""
    if neighbours is None:
        return None, 0, 0, 0, 0.0, "", False, 16
    near = neighbours.near if neighbours.near.stride(1) == 1 else neighbours.near.contiguous()
    block = min(_BLOCK, max(16, triton.next_power_of_2(near.shape[1])))
    return (
        near, near.stride(0), near.shape[1], neighbours.k, float(neighbours.limit), neighbours.measure,
        neighbours.closed, block,
    )  # fmt: skip
