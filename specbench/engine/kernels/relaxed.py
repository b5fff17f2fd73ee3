"""The parts of relaxed rules for one node, computed by one program: limits of the bands of `decoding.rules.band`, and
the mass of a token's neighbours in the codebook (LANTERN)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

#: Neighbours that a program reads at once.
_NEIGHBOURS = 1024


@triton.jit
def lower_limit(r_row, q_row, vocabulary, spread, BLOCK: tl.constexpr):
    """See `rules.band.lower_limit`. A pass over the row sums the raised, kept and lowered parts at `low`. The root for
    these sums is the next `low`, and the solution once it no longer moves. If it leaves the interval of the root, and
    in every second pass from the ninth on, the interval is halved instead."""
    tokens, passes = tl.arange(0, BLOCK), tl.full([], 0, tl.int32)
    low = tl.full([], 1.0, tl.float32)
    least, most = tl.div_rn(low, spread), low
    if spread > 1:
        low = tl.sqrt(least)
    else:
        passes += 64
    while passes < 64:
        moved, kept = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            r = tl.load(r_row + start + tokens, mask=start + tokens < vocabulary, other=0.0)
            q = tl.load(q_row + start + tokens, mask=start + tokens < vocabulary, other=0.0)
            raised, lowered = q < low * r, q > spread * (low * r)
            moved += tl.where(raised, r, tl.where(lowered, spread * r, 0.0))
            kept += tl.where(raised | lowered, 0.0, q + 0 * r)  # NaN stays
        slope, same = tl.sum(moved, 0), tl.sum(kept, 0)
        root = tl.div_rn(1.0 - same, tl.maximum(slope, 1e-30))
        enough = low * slope + same >= 1
        least, most = tl.where(enough, least, low), tl.where(enough, low, most)
        done = (tl.abs(root - low) <= 1e-7 * low) | (most - least <= 1e-7 * most) | (slope == 0) | (root != root)
        halve = (root <= least) | (root >= most) | ((passes >= 8) & (passes % 2 == 0))
        low = tl.where(done, tl.where(root != root, 1.0, low), tl.where(halve, tl.sqrt(least * most), root))
        passes = tl.where(done, 64, passes + 1)
    return low


@triton.jit
def _sums(r_row, q_row, vocabulary, token, sampled, low, high, BLOCK: tl.constexpr):
    """For the band from `low` to `high`: sums of r and q over the raised tokens, the same over the lowered ones, and
    the sum of q log(q / r) over the others. q is a point mass on `token` unless `sampled`."""
    r_up, q_up = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    r_down, q_down = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    logs = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        r = tl.load(r_row + at, mask=at < vocabulary, other=0.0)
        q = tl.load(q_row + at, mask=at < tl.where(sampled, vocabulary, 0), other=0.0)
        q = tl.where(sampled, q, tl.where(at == token, 1.0, 0.0))
        raised, lowered = q < low * r, q > high * r
        r_up += tl.where(raised, r, 0.0)
        q_up += tl.where(raised, q, 0.0)
        r_down += tl.where(lowered, r, 0.0)
        q_down += tl.where(lowered, q, 0.0)
        positive = (q > 0) & (r > 0)
        unchanged = q * tl.log(tl.where(positive, q, 1.0) / tl.where(positive, r, 1.0))
        logs += tl.where(raised | lowered, 0.0, unchanged + 0 * r)  # NaN stays
    return tl.sum(r_up, 0), tl.sum(q_up, 0), tl.sum(r_down, 0), tl.sum(q_down, 0), tl.sum(logs, 0)


@triton.jit
def budget_limits(r_row, q_row, vocabulary, token, sampled, budget, BLOCK: tl.constexpr):
    """See `rules.band.Mentored.limits`; here without sorting: low and high of the widest band e with KL(e | r) <=
    budget. q is a point mass on `token` unless `sampled`.

    First without `high`: tokens that r cannot give must be rejected. This sets the least `low`, which Newton's method
    finds from above (the mass that a band raises is convex in `low`). If that band is too far from r, `low` is between
    it and 1. For each `low`, `high` is such that the lowered mass equals the raised mass, again by Newton's method,
    from below except in the first step. Then KL(e | r), whose slope is -sum(r raised) log(high / low), gives the next
    `low`. If it leaves the interval, and every second time from the 13th on, the interval is halved instead. Usually
    this takes ten passes.
    """
    least, most = tl.full([], 0.0, tl.float32), tl.full([], 1.0, tl.float32)
    low, high, passes = least, most * 1e30, tl.full([], 0, tl.int32)
    free, below, steps = passes == 0, passes != 0, passes
    if budget <= 0:
        low, high, passes = most, most, passes + 200
    while passes < 200:
        r_up, q_up, r_down, q_down, logs = _sums(r_row, q_row, vocabulary, token, sampled, low, high, BLOCK)
        rejected = low * r_up - q_up
        raising = low * r_up * tl.log(tl.maximum(low, 1e-30)) + logs
        passes += 1
        if free:
            following = tl.div_rn(q_down + q_up, tl.maximum(r_up, 1e-30))
            unknown, first = raising != raising, (low == 0) & (q_down > 0)
            further = first | ((low > 0) & (following < low * (1 - 1e-7)))
            done = unknown | ((raising <= budget) & (further == 0))
            free = further
            least = tl.where(further, least, low)
            begin = tl.maximum(tl.div_rn(1.0, 1 + tl.sqrt(2 * budget)), (low + 1) / 2)
            low = tl.where(unknown | first, 1.0, tl.where(further, following, tl.where(done, low, begin)))
            high = tl.where(unknown, 1.0, tl.where(further | done, high, tl.div_rn(1.0, tl.maximum(low, 1e-30))))
            passes = tl.where(done, 200, passes)
        else:
            lowered = q_down - rejected
            over = (r_down == 0) & (lowered < 0)  # no lowered token can come from r
            root = tl.minimum(tl.maximum(tl.div_rn(lowered, tl.maximum(r_down, 1e-30)), 1.0), 1e30)
            root = tl.where(over, tl.where(below, high, 1.0), root)
            settled = (root <= high * (1 + 1e-6)) & (below | ((root >= high * (1 - 1e-6)) & (over == 0)))
            below = settled == 0
            if settled:
                excess = raising + lowered * tl.log(root) - budget
                least, most = tl.where(excess <= 0, least, low), tl.where(excess <= 0, low, most)
                slope = r_up * tl.log(tl.div_rn(root, low))
                following = low + tl.div_rn(excess, tl.maximum(slope, 1e-30))
                done = (tl.abs(following - low) <= 5e-7 * low) | (most - least <= 1e-7 * most) | (excess != excess)
                inside = (following > least) & (following < most) & ((steps < 12) | (steps % 2 == 0))
                following = tl.where(inside, following, (least + most) / 2)
                change = tl.div_rn(r_up * (following - low), tl.maximum(r_down, 1e-30))
                root = tl.where(done, root, tl.minimum(tl.maximum(root - change, 1.0), 1e30))
                low, passes, steps = tl.where(done, low, following), tl.where(done, 200, passes), steps + 1
            high = root
    return low, high


@triton.jit
def _divergence(r_token, moved):
    """See `rules.lantern._divergence`."""
    half = r_token + moved / 2
    least = tl.maximum(half, 1e-38)
    part = r_token * tl.log(tl.maximum(r_token, 1e-38) / least)
    other_part = (r_token + moved) * tl.log(tl.maximum(r_token + moved, 1e-38) / least)
    return 0.5 * (moved * 0.6931471805599453 + part + other_part)


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
    """Write the residual mass after `token` was rejected to WORK, and return its sum. near: as in `gathered`, which
    gave `count`; cleared: how many neighbours the released code clears. If nothing would be left to sample from,
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
            if RESIDUAL == "released":  # cleared in r if the token was deterministic, else in q
                left = tl.load(r_row + code, mask=start + ranks < tl.where(q_token < 1, until, 0), other=0.0)
            tl.store(WORK + code, left, mask=inside)
        tl.debug_barrier()
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            i = start + tl.arange(0, BLOCK)
            total += tl.load(WORK + i, mask=i < vocabulary, other=0.0)
        mass = tl.sum(total, 0)
        tl.debug_barrier()  # no thread writes a value that another one still reads
        tries = tl.where((mass > 1e-30) | (until == 0) | (RESIDUAL == "paper"), 2, tries + 1)
        until = 0 * until
    return mass


def near_constants(neighbours: Any) -> tuple[Any, ...]:
    """The arguments that kernels take for a `rules.base.Neighbours`, or for None: the table, its stride, its number of
    columns, k, the limit, MEASURE, CLOSED and NEAR_BLOCK."""
    if neighbours is None:
        return None, 0, 0, 0, 0.0, "", False, 16
    near = neighbours.near if neighbours.near.stride(1) == 1 else neighbours.near.contiguous()
    block = min(_NEIGHBOURS, max(16, triton.next_power_of_2(near.shape[1])))
    return (
        near, near.stride(0), near.shape[1], neighbours.k, float(neighbours.limit), neighbours.measure,
        neighbours.closed, block,
    )  # fmt: skip
