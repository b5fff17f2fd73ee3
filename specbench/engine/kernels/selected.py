"""Selected-path verification: the order of the tokens at every inner node, the distribution of the best of its
children, and the walk to the node that ends the accepted path, with the next token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch
from specbench.engine.kernels.drawing import draw_row, of_draft, parts, verdict_memory

#: Tokens that a program reads at once: unordered, in their order with sums in float64, and with _SHARES shares for
#: each; the compiler's options.
_BLOCK, _ORDERED, _PIECE, _OPTIONS = 4096, 1024, 512, launch.DISTRIBUTIONS
_SHARES = tl.constexpr(16)


@triton.jit
def _drafter(Q, at, vocabulary, sampled, token):
    """q of tokens `at`; a point mass on `token` if it is deterministic."""
    q = tl.load(Q + at, mask=at < tl.where(sampled, vocabulary, 0), other=0.0)
    return tl.where(sampled, q, tl.where(at == token, 1.0, 0.0))


@triton.jit
def _ratio(p, q):
    return tl.where(q > 0, tl.div_rn(p, tl.where(q > 0, q, 1.0)), float("inf"))


@triton.jit
def _ratios(DRAFT, TREE, OUT, sizes, width, BLOCK: tl.constexpr):
    """p / q of a block of tokens at one inner node, by which they are ordered."""
    P, Q, TOKENS, VALID, SAMPLED = DRAFT
    CHILDREN, SLOT, INNER, PARENT, DEPTH = TREE
    nodes, inner, height, tree_rows, vocabulary = sizes
    here, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, tree = here // inner, here // inner % tree_rows
    slot = tree * inner + here % inner
    child = row * nodes + tl.maximum(tl.load(CHILDREN + slot * width), 0)
    p = tl.load(P + (row * nodes + tl.load(INNER + slot)) * vocabulary + at, mask=at < vocabulary, other=0.0)
    q = _drafter(Q + here * vocabulary, at, vocabulary, tl.load(SAMPLED + child) != 0, tl.load(TOKENS + child))
    tl.store(OUT + here * vocabulary + at, _ratio(p, q), mask=at < vocabulary)


@triton.jit
def _children(DRAFT, first_node, Q, KIDS, vocabulary, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """The children of an inner node with distribution Q, for the row whose nodes begin at `first_node`: their numbers,
    tokens and q, which of them exist, whether they were sampled, and the first child's token."""
    TOKENS, VALID, SAMPLED = DRAFT[2] + first_node, DRAFT[3] + first_node, DRAFT[4] + first_node
    k = tl.arange(0, WIDE)
    kids = tl.load(KIDS + k, mask=k < WIDTH, other=-1)
    existing = tl.maximum(kids, 0)
    first = tl.maximum(tl.load(KIDS), 0)
    sampled, token = tl.load(SAMPLED + first) != 0, tl.load(TOKENS + first)
    tokens = tl.load(TOKENS + existing)
    q = _drafter(Q, tokens, vocabulary, sampled, token)
    exists = (kids >= 0) & (tl.load(VALID + existing) != 0) & (q > 0)
    return kids, tokens, q, exists, sampled, token


@triton.jit
def _best(
    DRAFT, TREE, ORDER, OUT, sizes,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, REPLACEMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The distribution of `decoding.verify.selected.best_of` or, without replacement, `best_of_pair`, at one inner node
    with several children."""
    nodes, inner, height, tree_rows, vocabulary = sizes
    here, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, tree = here // inner, here // inner % tree_rows
    probs, order, out = DRAFT[1] + here * vocabulary, ORDER + here * vocabulary, OUT + here * vocabulary
    _, _, _, exists, sampled, token = _children(
        DRAFT, row * nodes, probs, TREE[0] + (tree * inner + here % inner) * WIDTH, vocabulary, WIDTH, WIDE
    )
    count = tl.sum(exists.to(tl.int32), 0)
    if count > 1:
        if REPLACEMENT:
            whole = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocabulary, BLOCK):
                at = start + lane
                whole += parts(_drafter(probs, at, vocabulary, sampled, token))
            total, before = tl.sum(whole, 0).to(tl.float64), tl.full([], 0, tl.int64)
            for start in range(0, vocabulary, BLOCK):
                inside = start + lane < vocabulary
                at = tl.load(order + start + lane, mask=inside, other=0)
                block = tl.where(inside, parts(_drafter(probs, at, vocabulary, sampled, token)), 0)
                after = before + tl.cumsum(block, 0)
                upto, without = after.to(tl.float64) / total, (after - block).to(tl.float64) / total
                power = tl.full([BLOCK], 1.0, tl.float64)
                factor = power
                for k in tl.static_range(1, WIDTH):
                    power = power * upto
                    factor = tl.where(k < count, factor * without + power, factor)
                tl.store(out + at, (block.to(tl.float64) / total * factor).to(tl.float32), mask=inside)
                before += tl.sum(block, 0)
        else:
            sums = tl.zeros([BLOCK], tl.float64)
            for start in range(0, vocabulary, BLOCK):
                at = start + lane
                sums += _drafter(probs, at, vocabulary, sampled, token).to(tl.float64)
            total = tl.sum(sums, 0)
            mass = tl.full([], 0.0, tl.float64)
            odds_mass = mass
            for start in range(0, vocabulary, BLOCK):
                inside = start + lane < vocabulary
                at = tl.load(order + start + lane, mask=inside, other=0)
                block = tl.where(inside, _drafter(probs, at, vocabulary, sampled, token).to(tl.float64), 0.0) / total
                odds = block / tl.maximum(1 - block, 1e-30, propagate_nan=tl.PropagateNan.ALL)
                before, odds_before = mass + tl.cumsum(block, 0) - block, odds_mass + tl.cumsum(odds, 0) - odds
                tl.store(out + at, (block * odds_before + odds * before).to(tl.float32), mask=inside)
                mass += tl.sum(block, 0)
                odds_mass += tl.sum(odds, 0)


@triton.jit
def _path_distribution(Q, BEST, at, vocabulary, share, mixed, sampled, token):
    """e of tokens `at`: q or, with `mixed`, the mixture of q and the distribution of the best child."""
    q = _drafter(Q, at, vocabulary, sampled, token)
    best = tl.load(BEST + at, mask=at < tl.where(mixed, vocabulary, 0), other=0.0)
    return tl.where(mixed, q + share * (best - q), q)


@triton.jit
def _kept_by_shares(P, Q, BEST, KEPT, mass, sampled, token, vocabulary, grid, PIECE: tl.constexpr):
    """The sums of min(mass p, e) for the shares 0, 1 / grid .. 1."""
    for begin in range(0, grid + 1, _SHARES):
        step = begin + tl.arange(0, _SHARES)
        share = tl.div_rn(step.to(tl.float32), tl.zeros([_SHARES], tl.float32) + grid)[:, None]
        kept = tl.zeros([_SHARES, PIECE], tl.float32)
        for start in range(0, vocabulary, PIECE):
            at = start + tl.arange(0, PIECE)
            inside = at < vocabulary
            q = _drafter(Q, at, vocabulary, sampled, token)
            more = tl.load(BEST + at, mask=inside, other=0.0) - q
            weighted = mass * tl.load(P + at, mask=inside, other=0.0)
            e = q[None, :] + share * more[None, :]
            least = tl.minimum(weighted[None, :], e, propagate_nan=tl.PropagateNan.ALL)
            kept += tl.where(inside[None, :], least, 0.0)
        tl.store(KEPT + step, tl.sum(kept, 1), mask=step <= grid)


@triton.jit
def _walk(
    DRAFT, TREE, BEST, U, KEPT, VERDICT, SHARE, sizes, grid, select, same,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, GRID: tl.constexpr, AUTO: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One image, from the root along the followed children to a leaf. For the last node that passes it stores: `end`,
    its depth, its mass, its share, its remaining sum, and whether it has children."""
    P, Q, TOKENS, VALID, SAMPLED = DRAFT
    CHILDREN, SLOT, INNER, PARENT, DEPTH = TREE
    PATH, LENGTH, CHOSEN, NEXT, FIRST = VERDICT
    nodes, inner, height, tree_rows, vocabulary = sizes
    row, k, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, BLOCK)
    tree = row % tree_rows
    tokens_row, sampled_row = TOKENS + row * nodes, SAMPLED + row * nodes
    u, path, chosen = U + row * 2 * nodes, PATH + row * height, CHOSEN + row * (height + 1)
    p_rows, next_row = P + row * nodes * vocabulary, NEXT + row * vocabulary
    node, depth, goes = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 1, tl.int32)
    mass, shares, choices = tl.full([], 1.0, tl.float32), tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    end, length, end_mass, end_share, end_left = node, depth, mass, shares, shares
    end_mixed, end_inner = choices, choices
    tl.store(FIRST + row, 0.0)
    while goes > 0:
        slot_or_none = tl.load(SLOT + tree * nodes + node)
        slot = tl.maximum(slot_or_none, 0)
        probs, best = Q + (row * inner + slot) * vocabulary, BEST + (row * inner + slot) * vocabulary
        p_row = p_rows + node * vocabulary
        kids, tokens, q, exists, sampled, first_token = _children(
            DRAFT, row * nodes, probs, CHILDREN + (tree * inner + slot) * WIDTH, vocabulary, WIDTH, WIDE
        )
        exists = exists & (slot_or_none >= 0)
        count = tl.sum(exists.to(tl.int32), 0)
        passes, share, left = mass, tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        mixed, child, entered = count * 0, node, mass
        if count > 0:
            ratio = _ratio(tl.load(p_row + tokens), q)
            if depth == 0:
                first = tl.sum(tl.where(exists & (k == 0), ratio, 0.0), 0)
                tl.store(FIRST + row, tl.minimum(first, 1.0, propagate_nan=tl.PropagateNan.ALL))
            eligible = exists
            if WIDTH > 1:  # noqa: SIM102  (a constant of the compiler)
                if count > 1:
                    mixed += 1
                    share += select
                    if AUTO:
                        kept_row = KEPT + row * (grid + 1)
                        _kept_by_shares(
                            p_row, probs, best, kept_row, mass, sampled, first_token, vocabulary, grid, PIECE
                        )
                        tl.debug_barrier()
                        g = tl.arange(0, GRID)
                        kept = tl.load(kept_row + g, mask=g <= grid, other=-float("inf"))
                        level = (kept >= tl.max(kept, 0) - same) & (tl.sum((kept != kept).to(tl.int32), 0) == 0)
                        least = tl.min(tl.where(level, g, grid), 0)
                        share = tl.div_rn(least.to(tl.float32), tl.zeros_like(share) + grid)
                        tl.debug_barrier()  # no thread writes a value that another one still reads
                    shares += share
                    choices += 1
                    if tl.load(u + nodes + depth + 1) < share:
                        # the last in the order of the tokens; equal ratios are ordered by token number
                        ratio = tl.where(ratio != ratio, float("inf"), ratio)
                        last = exists & (ratio == tl.max(tl.where(exists, ratio, -1.0), 0))
                        token = tl.max(tl.where(last, tokens, -1), 0)
                        eligible = last & (tokens == token)
            rank = tl.min(tl.where(eligible, k, WIDTH), 0)
            rank = tl.minimum(rank, WIDTH - 1)
            child = tl.maximum(tl.sum(tl.where(k == rank, kids, 0), 0), 0)
            token = tl.load(tokens_row + child)
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocabulary, BLOCK):
                at = start + lane
                e = _path_distribution(probs, best, at, vocabulary, share, mixed > 0, sampled, first_token)
                p = tl.load(p_row + at, mask=at < vocabulary, other=0.0)
                total += tl.maximum(mass * p - e, 0.0, propagate_nan=tl.PropagateNan.ALL)
            left = tl.sum(total, 0)
            among = left + (1 - mass)
            passes = tl.where(among == 0, 1.0, left / tl.where(among == 0, 1.0, among))
            e = _path_distribution(probs, best, token, vocabulary, share, mixed > 0, sampled, first_token)
            ratio_here = tl.minimum(_ratio(tl.load(p_row + token), e), 1e30, propagate_nan=tl.PropagateNan.ALL)
            entered = tl.minimum(mass * ratio_here, 1.0, propagate_nan=tl.PropagateNan.ALL)
            entered = tl.where(e > 0, entered, 0.0)
        passed = (depth == 0) | (tl.load(u + node) < passes)
        end, length = tl.where(passed, node, end), tl.where(passed, depth, length)
        end_mass, end_share = tl.where(passed, mass, end_mass), tl.where(passed, share, end_share)
        end_left, end_mixed = tl.where(passed, left, end_left), tl.where(passed, mixed, end_mixed)
        end_inner = tl.where(passed, count, end_inner)
        if count > 0:
            tl.store(path + depth, child)
            tl.store(chosen + depth, tl.load(tokens_row + child))
        goes = tl.where(count > 0, 1, 0)
        depth += goes
        node, mass = child, entered
    tl.store(SHARE + row, tl.where(choices > 0, shares / choices, float("nan")))
    slot = tl.maximum(tl.load(SLOT + tree * nodes + end), 0)
    probs, best = Q + (row * inner + slot) * vocabulary, BEST + (row * inner + slot) * vocabulary
    p_row, first = p_rows + end * vocabulary, tl.maximum(tl.load(CHILDREN + (tree * inner + slot) * WIDTH), 0)
    sampled, first_token = tl.load(sampled_row + first) != 0, tl.load(tokens_row + first)
    for start in range(0, vocabulary, BLOCK):
        at = start + lane
        inside = at < vocabulary
        p = tl.load(p_row + at, mask=inside, other=0.0)
        e = _path_distribution(probs, best, at, vocabulary, end_share, end_mixed > 0, sampled, first_token)
        residual = tl.maximum(end_mass * p - e, 0.0, propagate_nan=tl.PropagateNan.ALL) / tl.maximum(end_left, 1e-30)
        tl.store(next_row + at, tl.where((end_inner > 0) & (end_left > 1e-30), residual, p), mask=inside)
    tl.debug_barrier()
    next_token = draw_row(next_row, tl.load(u + nodes), vocabulary, BLOCK)
    d = tl.arange(0, DEEP)
    beyond = (d >= length) & (d < height)
    tl.store(path + d, tl.zeros([DEEP], tl.int64) + end, mask=beyond)
    tl.store(LENGTH + row, length)
    token = tl.where((d == length) | (d == height), next_token, tl.load(tokens_row + end))
    tl.store(chosen + d, token, mask=(d >= length) & (d <= height))


def select(
    p: Tensor, draft: Any, u: Tensor, share: float | None, grid: int, same: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Verify a draft with the exact rule, as `decoding.verify.selected` does; returns the fields of a
    VerificationResult. p (B, M, V) float32; u (B, 2, M): the uniforms of the nodes, then that of the next token and, by
    depth, those that choose children; share, grid: see `Selected`; same: sums that differ by less count as equal."""
    width, block = draft.tree.width, min(_BLOCK, triton.next_power_of_2(p.shape[2]))
    arguments, topology, sizes = of_draft(p, draft)
    q, cells = arguments[1], len(p) * sizes[1]
    wide, best = triton.next_power_of_2(width), q
    if width > 1:
        ratios, best = torch.empty(2, *q.shape, device=p.device)
        launch.start(_ratios, (cells, triton.cdiv(p.shape[2], block)),
            arguments, topology, ratios, sizes, width, block, num_warps=8,
        )  # fmt: skip
        order = ratios.sort(dim=-1, stable=True).indices
        launch.start(_best, (cells,),
            arguments, topology, order, best, sizes, width, wide, draft.replacement, min(_ORDERED, block), **_OPTIONS,
        )  # fmt: skip
    verdict = verdict_memory(p, draft.tree.height)
    shares = torch.empty_like(verdict[4])
    launch.start(_walk, (len(p),),
        arguments, topology, best, u.contiguous(), p.new_empty(len(p), grid + 1), verdict, shares, sizes, grid,
        0.0 if share is None else share, same, width, wide, triton.next_power_of_2(draft.tree.height + 1),
        triton.next_power_of_2(grid + 1), share is None, block, min(_PIECE, block), **_OPTIONS,
    )  # fmt: skip
    return *verdict, shares
