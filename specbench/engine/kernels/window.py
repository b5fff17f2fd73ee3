"""The window of Jacobi decoding: its positions are renewed, new ones are initialised, and the draft's tokens are
written."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch
from specbench.engine.kernels.drawing import (
    draw_residual,
    draw_row,
    most_probable,
    race,
    stream,
    take_largest,
    uniform,
    write_scores,
)

#: Tokens that a program reads at once; the compiler's options.
_BLOCK, _OPTIONS = 4096, launch.DISTRIBUTIONS
#: Origins of a position's distribution that are not nodes of the last draft; -3 - k is the k-th of the past.
_UNIFORM, _POINT, _PAST = tl.constexpr(-1), tl.constexpr(-2), tl.constexpr(-3)


@triton.jit
def _node(PATH, MAIN, FIRST_CHILD, length, previous, height, branching):
    """See `PACWindow._first_path`, at depth `previous`: the node whose distribution the position after it has. PATH
    (height,) of one row."""
    node = tl.load(MAIN + previous)
    if previous < branching:
        above = tl.where(length > 0, tl.load(PATH + height - 1), 0)
        for depth in range(length, previous + 1):
            child = tl.load(FIRST_CHILD + above)
            above = tl.where(child >= 0, child, tl.load(MAIN + depth))
        node = tl.where(length <= previous, above, node)
    return node


@triton.jit
def _start(
    P, PAST, UNIFORM, HISTORY, PATH, MAIN, FIRST_CHILD, row, offset, known, count, length, key, stream_number, nodes,
    height, vocabulary, codes, side, past, held, branching,
    INIT: tl.constexpr, SAMPLES: tl.constexpr, DRAWS: tl.constexpr, POINTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `Window._begin`: a position that has no distribution yet. Returns its distribution and origin, its
    token, the offset whose token it repeats, and whether its token is drawn from the distribution instead."""
    position, last = count + offset, count + known - 1
    from_position, orphan = position, position >= 0
    if INIT == 1:  # from the left neighbour, or the first position of the row of the image
        start = position - position % side
        from_position, orphan = tl.maximum(start, last), last < start
    if INIT == 2:  # from the position above
        up = (position - last + side - 1) // side * side
        orphan = position < up
        from_position = tl.where(orphan, position % side, position - up)
    inside = tl.minimum(tl.maximum(from_position - count, 0), height - 1)
    probs, origin, token, source, drawn = UNIFORM, tl.full([], _POINT, tl.int64), offset * 0, offset, 0
    if SAMPLES:
        if orphan:
            if POINTS:
                place = uniform(stream(key, stream_number), offset)
                token = draw_row(UNIFORM, place, vocabulary, BLOCK)
            else:
                origin, drawn = tl.full([], _UNIFORM, tl.int64), 1
        else:
            if from_position < count:  # the distribution of a committed token
                at = tl.minimum(tl.maximum(from_position - count + past, 0), past - 1)
                origin = _PAST - at
                probs = PAST + (row * past + at) * vocabulary
            else:
                before = tl.minimum(length + inside, height - 1)
                origin = _node(PATH + row * height, MAIN, FIRST_CHILD, length, before, height, branching)
                probs = P + (row * nodes + origin) * vocabulary
            drawn = 1
            if SAMPLES == 2:
                token, drawn = most_probable(probs, vocabulary, BLOCK), 0
                origin = tl.full([], _POINT, tl.int64)
    else:
        if orphan:
            u = uniform(stream(key, stream_number + 2), from_position)
            token = tl.minimum((u * codes).to(tl.int64), codes - 1)
            if (from_position == position) & (not POINTS):
                origin = tl.full([], _UNIFORM, tl.int64)
                if DRAWS:
                    drawn = 1
        else:
            if from_position < count:
                token = tl.load(HISTORY + row * held + tl.minimum(tl.maximum(from_position, 0), held - 1))
            else:
                source = inside
    return probs, origin, token, source, drawn


@triton.jit
def _left_over(probs, previously, vocabulary, BLOCK: tl.constexpr):
    """The mass of the positive part of the difference of two distributions."""
    left = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        r = tl.load(probs + at, mask=at < vocabulary, other=0.0)
        r -= tl.load(previously + at, mask=at < vocabulary, other=0.0)
        left += tl.maximum(r, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(left, 0)


@triton.jit
def _choose(
    P, PROBS, TOKENS, HEIGHTS, PAST, UNIFORM, PATH, LENGTH, DRAFTED, HISTORY, COUNT, STEP, KEY, MAIN, FIRST_CHILD,
    FORCED, DRAWN, SOURCE, ORIGIN, RAISED, nodes, height, vocabulary, codes, side, past, total, held, branching, tags,
    tag, noise_tag, tau,
    INIT: tl.constexpr, SAMPLES: tl.constexpr, COUPLING: tl.constexpr, REFINE: tl.constexpr, GRAMMAR: tl.constexpr,
    POINTS: tl.constexpr, OLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One position of a row. DRAWN: its token, unless it repeats the token of the offset SOURCE; ORIGIN: where its
    distribution comes from; RAISED: its height."""
    row, offset = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length, count, key = tl.load(LENGTH + row), tl.load(COUNT + row), tl.load(KEY + row)
    step = tl.load(STEP + row) * tags  # the number of the step's first random stream
    known = offset * 0  # positions that were in the last window
    if REFINE:
        known = tl.maximum(tl.load(DRAFTED + row) - length, 0)
    position, fresh = count + offset, uniform(stream(key, step + tag + 1), offset)

    # The distribution, from the node before the position, or anew.
    previous = tl.minimum(length + offset, height - 1)
    origin = _node(PATH + row * height, MAIN, FIRST_CHILD, length, previous, height, branching)
    probs, source, token, drawn = P + (row * nodes + origin) * vocabulary, offset, offset * 0, 1
    if offset >= known:
        probs, origin, token, source, drawn = _start(
            P, PAST, UNIFORM, HISTORY, PATH, MAIN, FIRST_CHILD, row, offset, known, count, length, key, step + tag,
            nodes, height, vocabulary, codes, side, past, held, branching, INIT, SAMPLES, COUPLING == 2, POINTS, BLOCK,
        )  # fmt: skip
        if GRAMMAR:
            only = tl.load(FORCED + tl.minimum(tl.maximum(position, 0), total - 1))
            if only >= 0:
                token, source, drawn = only, offset, 0
                origin = tl.full([], _POINT, tl.int64)

    # The token, coupled with the last window's.
    height_now = fresh
    if drawn > 0:
        if COUPLING == 2:
            noise = stream(key, step * 0 + noise_tag)  # the same at every step
            token = race(probs, noise, position * vocabulary, vocabulary, BLOCK)
        else:
            kept, u = 0, fresh
            others, mass = vocabulary * 0, 1.0
            previously = PROBS
            if (COUPLING == 1) or (COUPLING >= 3):  # noqa: SIM102  (a constant of the compiler)
                if offset < known - 1:  # the last known position has a distribution, but no token yet
                    before = row * height + tl.minimum(previous + 1, height - 1)
                    previously = PROBS + before * vocabulary
                    held_token = tl.load(TOKENS + before)
                    p, q = tl.load(probs + held_token), tl.load(previously + held_token)
                    accept = tl.where(q > 0, tl.div_rn(p, tl.where(q > 0, q, 1.0)), 1.0)  # false for NaN
                    if COUPLING == 3:
                        u = tl.load(HEIGHTS + before)
                    keeps = u < accept
                    if COUPLING == 4:
                        keeps = accept > tau
                    if keeps:
                        token = held_token
                        kept = 1
                        if OLD:
                            origin = nodes + before - row * height
                    elif COUPLING != 4:
                        all_left = _left_over(probs, previously, vocabulary, BLOCK)
                        if all_left > 1e-30:
                            others, mass = vocabulary, all_left
            if kept == 0:
                place = uniform(stream(key, step + tag), offset)
                token = draw_residual(probs, previously, others, mass, place, vocabulary, COUPLING % 2 == 1, BLOCK)
            if COUPLING == 3:  # noqa: SIM102
                if offset < known - 1:
                    share = tl.div_rn(tl.load(previously + token), tl.load(probs + token))
                    height_now = tl.where(kept > 0, u * share, share + fresh * (1 - share))
    cell = row * height + offset
    tl.store(DRAWN + cell, token)
    tl.store(SOURCE + cell, source)
    tl.store(ORIGIN + cell, origin)
    if COUPLING == 3:
        tl.store(RAISED + cell, height_now)


@triton.jit
def _write(
    P, BEFORE, PAST, UNIFORM, HISTORY, COUNT, DRAWN, SOURCE, ORIGIN, RAISED, TOKENS, PROBS, HEIGHTS, DRAFT, LEVELS,
    nodes, height, vocabulary, past, held, CHAIN: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the distribution of one position of a row, its token and height. For a chain also the draft's token
    and height."""
    row, offset, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    cell = row * height + offset
    origin = tl.load(ORIGIN + cell)
    token = tl.load(DRAWN + row * height + tl.load(SOURCE + cell))
    probs = P + (row * nodes + tl.maximum(origin, 0)) * vocabulary
    if origin == _UNIFORM:
        probs = UNIFORM
    if origin >= nodes:
        probs = BEFORE + (row * height + origin - nodes) * vocabulary
    if origin <= _PAST:
        probs = PAST + (row * past + _PAST - origin) * vocabulary
    values = tl.load(probs + at, mask=at < tl.where(origin == _POINT, 0, vocabulary), other=0.0)
    values = tl.where(at == tl.where(origin == _POINT, token, -1), 1.0, values)
    tl.store(PROBS + cell * vocabulary + at, values, mask=at < vocabulary)
    if tl.program_id(2) == 0:
        tl.store(TOKENS + cell, token)
        if HIGH:
            tl.store(HEIGHTS + cell, tl.load(RAISED + cell))
        if CHAIN:
            tl.store(DRAFT + cell + row + 1, token)
            if HIGH:
                tl.store(LEVELS + cell + row + 1, tl.load(RAISED + cell))
            if offset == 0:
                if HIGH:
                    tl.store(LEVELS + row * nodes, -1.0)
                root = tl.maximum(tl.load(COUNT + row) - 1, 0)
                tl.store(DRAFT + row * nodes, tl.load(HISTORY + row * held + root))


@triton.jit
def _siblings(
    TOKENS, POOL, SCORES, HEIGHTS, HISTORY, COUNT, STEP, KEY, OFFSETS, CHOICE, DRAFT, LEVELS, nodes, height, deep,
    vocabulary, held, branching, tags, tag,
    WIDTH: tl.constexpr, HIGH: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All candidates of one position of a row: its token, and others drawn without replacement from the remaining
    tokens of POOL, (deep, vocabulary) of a row. They are written to the tokens and heights of the draft's nodes."""
    row, offset = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, i = tl.load(TOKENS + row * height + offset), tl.arange(0, NODES)
    inside = i < nodes - 1
    here = tl.load(OFFSETS + i, mask=inside, other=-1) == offset
    choice = tl.load(CHOICE + i, mask=inside, other=-1)
    tokens = tl.zeros([NODES], tl.int64) + first
    if offset < branching:
        probs = POOL + (row * deep + offset) * vocabulary
        noise = stream(tl.load(KEY + row), tl.load(STEP + row) * tags + tag)
        scores = SCORES + (row * branching + offset) * vocabulary
        write_scores(probs, scores, first, noise, offset * vocabulary, vocabulary, BLOCK)
        for rank in range(1, tl.minimum(WIDTH, vocabulary + 1)):
            token = take_largest(scores, vocabulary, BLOCK)
            tokens = tl.where(choice == rank, token, tokens)
    tl.store(DRAFT + row * nodes + 1 + i, tokens, mask=here)
    if HIGH:
        level = tl.where(choice == 0, tl.load(HEIGHTS + row * height + offset), -1.0)
        tl.store(LEVELS + row * nodes + 1 + i, level, mask=here)
        if offset == 0:
            tl.store(LEVELS + row * nodes, -1.0)
    if offset == 0:
        root = tl.maximum(tl.load(COUNT + row) - 1, 0)
        tl.store(DRAFT + row * nodes, tl.load(HISTORY + row * held + root))


_INITS = {"random": 0, "horizontal_repeat": 1, "horizontal_sample": 1, "vertical_repeat": 2, "vertical_sample": 2}
_INITS |= {"horizontal_mode": 1}
_SAMPLES = {"horizontal_sample": 1, "vertical_sample": 1, "horizontal_mode": 2}
_COUPLINGS = {"none": 0, "maximal": 1, "gumbel": 2, "height": 3, "threshold": 4}


def window(
    drafter: Any, state: Any, history: Tensor, num_committed: Tensor, step: Tensor, tags: int, tag: int, noise: int
) -> tuple[Tensor, Tensor | None]:
    """See `decoding.drafters.window.Window`: renews and initialises the window of its `state` in place. Returns the
    tokens (B, M) and the heights (B, M) of the draft. tags: number of tags of a step; tag: the first one of this
    drafter; noise: the tag of the Gumbel noise."""
    (rows, height, size), nodes, session = state.probs.shape, drafter.tree.nodes, state.session
    drawn, source, origin = torch.empty(3, rows, height, dtype=torch.int64, device=num_committed.device)
    draft, high = torch.empty(rows, nodes, dtype=torch.int64, device=num_committed.device), drafter.coupling == "height"
    raised = torch.empty_like(state.heights)
    levels = torch.empty(rows, nodes, device=num_committed.device) if high else raised
    forced, block = session.forced_tokens, min(_BLOCK, triton.next_power_of_2(size))
    past, key, chain = state.past.shape[1], state.rng.key, drafter.width == 1
    replaced = drafter.replaced(state)
    before = state.probs.clone() if drafter.keeps_old else state.probs
    launch.start(_choose, (rows, height),
        state.p, state.probs, state.tokens, state.heights, state.past, state.uniform, state.path, state.length,
        state.drafted, history, num_committed, step, key, drafter.main, drafter.first_child,
        num_committed if forced is None else forced, drawn, source, origin, raised, nodes, height, size, session.codes,
        state.side, past, 0 if forced is None else len(forced), history.shape[1], drafter.branching, tags, tag, noise,
        drafter.tau, _INITS[drafter.init], _SAMPLES.get(drafter.init, 0), _COUPLINGS[drafter.coupling], drafter.refine,
        forced is not None, drafter.fresh == "point", drafter.keeps_old, block, **_OPTIONS,
    )  # fmt: skip
    launch.start(_write, (rows, height, triton.cdiv(size, block)),
        state.p, before, state.past, state.uniform, history, num_committed, drawn, source, origin, raised, state.tokens,
        state.probs, state.heights, draft, levels, nodes, height, size, past, history.shape[1], chain, high, block,
        num_warps=8,
    )  # fmt: skip
    if not chain:
        pool = state.probs if replaced is None else drafter.pool(state, replaced)
        launch.start(_siblings, (rows, height),
            state.tokens, pool, pool.new_empty(rows, drafter.branching, size), state.heights, history, num_committed,
            step, key, drafter.offsets, drafter.choice, draft, levels, nodes, height, pool.shape[1], size,
            history.shape[1], drafter.branching, tags, tag + 3,
            drafter.width, high, triton.next_power_of_2(nodes), block, **_OPTIONS,
        )  # fmt: skip
    return draft, levels if high else None
