"""Block and traversal verification: the mass with which every node passes, then the path to the node that passes, and
the next token."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch
from specbench.engine.kernels.drawing import Written, draw_row, of_draft, verdict_memory

#: Tokens that a program reads at once; the compiler's options.
_BLOCK, _OPTIONS = 4096, launch.DISTRIBUTIONS

#: For every child of an inner node, KEPT holds the mass with which it was tried, the sum R of [mass p - q]_+ (-1 if the
#: child does not exist), and the sum of the remaining q.
_FACTS = 3


@triton.jit
def _left(P, Q, at, inside, KIDS, TOKENS, SAMPLED, KEPT, count):
    """p and q, not normalised, of tokens `at` after the first `count` children of a node were rejected."""
    p, q = tl.load(P + at, mask=inside, other=0.0), tl.load(Q + at, mask=inside, other=0.0)
    for k in range(count):
        child = tl.maximum(tl.load(KIDS + k), 0)
        mass, kept, share = tl.load(KEPT + 3 * k), tl.load(KEPT + 3 * k + 1), tl.load(KEPT + 3 * k + 2)
        token, sampled = tl.load(TOKENS + child), tl.load(SAMPLED + child) != 0
        point = tl.where(at == token, 1.0, 0.0)
        residual = tl.maximum(mass * p - tl.where(sampled, q / share, point), 0.0, propagate_nan=tl.PropagateNan.ALL)
        p = tl.where(kept > 1e-30, residual / tl.where(kept > 1e-30, kept, 1.0), p)
        q = tl.where(at == token, tl.where(kept >= 0, 0.0, q), q)
    return p, q


@triton.jit(do_not_specialize=("depth",))  # one binary for all levels of a tree
def _try_children(
    DRAFT, TREE, MASS, KEPT, FIRST, sizes, depth, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One inner node of `depth`: the masses with which its children are entered, and its own remaining mass."""
    P, Q, TOKENS, VALID, SAMPLED = DRAFT
    CHILDREN, SLOT, INNER, PARENT, DEPTH = TREE
    nodes, inner, height, tree_rows, vocabulary = sizes
    here = tl.program_id(0).to(tl.int64)
    row, tree = here // inner, here // inner % tree_rows
    node = tl.load(INNER + tree * inner + here % inner)
    if tl.load(DEPTH + tree * nodes + node) == depth:
        kids, kept = CHILDREN + (tree * inner + here % inner) * WIDTH, KEPT + here * WIDTH * 3
        tokens, valid, sampled_row = TOKENS + row * nodes, VALID + row * nodes, SAMPLED + row * nodes
        p_row, q_row = P + (row * nodes + node) * vocabulary, Q + here * vocabulary
        mass, share = tl.load(MASS + row * nodes + node), tl.full([], 1.0, tl.float32)
        if depth == 0:
            mass = mass * 0 + 1
        for k in range(WIDTH):
            child = tl.load(kids + k)
            token, sampled = tl.load(tokens + tl.maximum(child, 0)), tl.load(sampled_row + tl.maximum(child, 0)) != 0
            p, q = _left(p_row, q_row, token, token >= 0, kids, tokens, sampled_row, kept, k)
            q = tl.where(sampled, tl.where(share > 1e-30, tl.div_rn(q, share), 0.0), 1.0)
            live = (child >= 0) & (tl.load(valid + tl.maximum(child, 0)) != 0) & (q > 0)
            ratio = tl.minimum(tl.div_rn(p, tl.where(live, q, 1.0)), 1e30, propagate_nan=tl.PropagateNan.ALL)
            entered = tl.where(live, tl.minimum(mass * ratio, 1.0, propagate_nan=tl.PropagateNan.ALL), 0.0)
            if child >= 0:
                tl.store(MASS + row * nodes + child, entered)
            if (depth == 0) & (k == 0):
                tl.store(FIRST + row, entered)
            left = tl.full([], -1.0, tl.float32)
            tl.store(kept + 3 * k, mass)
            tl.store(kept + 3 * k + 2, share)
            if live:
                total, others = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
                for start in range(0, vocabulary, BLOCK):
                    i = start + tl.arange(0, BLOCK)
                    p_i, q_i = _left(p_row, q_row, i, i < vocabulary, kids, tokens, sampled_row, kept, k)
                    q_drawn = tl.where(sampled, q_i / share, tl.where(i == token, 1.0, 0.0))
                    total += tl.maximum(mass * p_i - q_drawn, 0.0, propagate_nan=tl.PropagateNan.ALL)
                    others += tl.where(i == token, 0.0, q_i)
                left = tl.sum(total, 0)
                share = tl.sum(others, 0)
                among = left + (1 - mass)
                mass = tl.where(among == 0, 1.0, left / tl.where(among == 0, 1.0, among))
            tl.store(kept + 3 * k + 1, left)
            tl.debug_barrier()  # all threads see the values that the next child needs
        tl.store(MASS + row * nodes + node, mass)


@triton.jit
def _masses(
    DRAFT, MASS, KEPT, FIRST, nodes, vocabulary, DEEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One node of a chain: the mass with which it passes. Node i follows node i - 1."""
    P, Q, TOKENS, VALID, SAMPLED = DRAFT
    here = tl.program_id(0).to(tl.int64)
    row, node = here // nodes, here % nodes
    tokens, p_row, q_row = TOKENS + row * nodes + 1, P + row * nodes * vocabulary, Q + row * (nodes - 1) * vocabulary
    d = tl.arange(0, DEEP)
    drafted = d < nodes - 1
    token, sampled = (
        tl.load(tokens + d, mask=drafted, other=0),
        tl.load(SAMPLED + row * nodes + 1 + d, mask=drafted, other=0),
    )
    at = d.to(tl.int64) * vocabulary + token
    p, q = tl.load(p_row + at, mask=drafted, other=0.0), tl.load(q_row + at, mask=drafted & (sampled != 0), other=1.0)
    live = drafted & (tl.load(VALID + row * nodes + 1 + d, mask=drafted, other=0) != 0) & (q > 0)
    ratio = tl.minimum(tl.div_rn(p, tl.where(live, q, 1.0)), 1e30, propagate_nan=tl.PropagateNan.ALL)
    ratio = tl.where(live, ratio, 0.0)
    # the least product of ratios that end here, or 1; in logarithms, since a product can overflow
    logs = tl.cumsum(tl.where(d < node, tl.log(ratio.to(tl.float64)), 0.0), 0, reverse=True)
    mass = tl.exp(tl.minimum(_least(logs), 0.0, propagate_nan=tl.PropagateNan.ALL)).to(tl.float32)
    if node == 0:
        first = tl.sum(tl.where(d == 0, ratio, 0.0), 0)
        tl.store(FIRST + row, tl.minimum(first, 1.0, propagate_nan=tl.PropagateNan.ALL))
    passes = mass
    if node < nodes - 1:
        left, continues = tl.full([], -1.0, tl.float32), tl.sum(tl.where((d == node) & live, 1, 0), 0) > 0
        if continues:
            next_token, was_sampled = tl.load(tokens + node), tl.load(SAMPLED + row * nodes + 1 + node) != 0
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocabulary, BLOCK):
                i = start + tl.arange(0, BLOCK)
                inside = i < vocabulary
                q_drawn = tl.load(q_row + node * vocabulary + i, mask=inside, other=0.0)
                q_drawn = tl.where(was_sampled, q_drawn, tl.where(i == next_token, 1.0, 0.0))
                p_i = tl.load(p_row + node * vocabulary + i, mask=inside, other=0.0)
                total += tl.maximum(mass * p_i - q_drawn, 0.0, propagate_nan=tl.PropagateNan.ALL)
            left = tl.sum(total, 0)
            among = left + (1 - mass)
            passes = tl.where(among == 0, 1.0, left / tl.where(among == 0, 1.0, among))
        kept = KEPT + (row * (nodes - 1) + node) * 3
        tl.store(kept, mass)
        tl.store(kept + 1, left)
        tl.store(kept + 2, 1.0)
    tl.store(MASS + here, passes)


@triton.jit
def _least(x):
    """The minimum of x; NaN if x has one."""
    return tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), tl.min(x, 0))


@triton.jit
def _conclude(
    DRAFT, TREE, U, ORDER, MASS, KEPT, VERDICT, sizes,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One image: the first node in post-order that passes."""
    P, Q, TOKENS, VALID, SAMPLED = DRAFT
    CHILDREN, SLOT, INNER, PARENT, DEPTH = TREE
    PATH, LENGTH, CHOSEN, NEXT, FIRST = VERDICT
    nodes, inner, height, tree_rows, vocabulary = sizes
    row = tl.program_id(0).to(tl.int64)
    tree = row % tree_rows
    tokens, sampled, chosen = TOKENS + row * nodes, SAMPLED + row * nodes, CHOSEN + row * (height + 1)
    at = tl.arange(0, WIDE)
    there = at < nodes
    passed = tl.load(U + row * 2 * nodes + at, mask=there, other=1.0) < tl.load(
        MASS + row * nodes + at, mask=there, other=0.0
    )
    order = tl.load(ORDER + tree * nodes + at, mask=there, other=nodes)
    order = tl.where((passed | (at == 0)) & there, order, nodes)
    node = tl.max(tl.where(order == tl.min(order, 0), at, 0), 0).to(tl.int64)
    length = tl.load(DEPTH + tree * nodes + node)
    slot_or_none = tl.load(SLOT + tree * nodes + node)
    p_row, next_row, slot = P + (row * nodes + node) * vocabulary, NEXT + row * vocabulary, tl.maximum(slot_or_none, 0)
    q_row, kept = Q + (row * inner + slot) * vocabulary, KEPT + (row * inner + slot) * WIDTH * 3
    kids, count = CHILDREN + (tree * inner + slot) * WIDTH, tl.where(slot_or_none >= 0, WIDTH, 0)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        p, _ = _left(p_row, q_row, i, i < vocabulary, kids, tokens, sampled, kept, count)
        tl.store(next_row + i, p, mask=i < vocabulary)
    tl.debug_barrier()
    next_token = draw_row(next_row, tl.load(U + row * 2 * nodes + nodes), vocabulary, BLOCK)
    above, d = node, length - 1
    while d >= 0:
        tl.store(PATH + row * height + d, above)
        tl.store(chosen + d, tl.load(tokens + above))
        above = tl.load(PARENT + tree * nodes + above)
        d -= 1
    depth = tl.arange(0, DEEP)
    beyond = (depth >= length) & (depth < height)
    tl.store(PATH + row * height + depth, tl.zeros([DEEP], tl.int64) + node, mask=beyond)
    tl.store(LENGTH + row, length)
    token = tl.where((depth == length) | (depth == height), next_token, tl.load(tokens + node))
    tl.store(chosen + depth, token, mask=(depth >= length) & (depth <= height))


def verify_block(p: Tensor, draft: Any, u: Tensor) -> Written:
    """See `decoding.verify.block`; returns the fields of a VerificationResult. p (B, M, V) float32; u (B, 2, M): the
    uniforms of the nodes, then the next token's (the first one is used)."""
    rows, nodes, vocabulary = p.shape
    arguments, mass, facts, verdict = _prepared(p, draft)
    launch.start(_masses, (rows * nodes,),
        arguments[0], mass, facts, verdict[4], nodes, vocabulary,
        triton.next_power_of_2(nodes), min(_BLOCK, triton.next_power_of_2(vocabulary)), **_OPTIONS,
    )  # fmt: skip
    return _concluded(draft, u, draft.tree.post_order, arguments, mass, facts, verdict)


def traverse(p: Tensor, draft: Any, u: Tensor, order: Tensor) -> Written:
    """See `decoding.verify.traversal`; returns the fields of a VerificationResult. p, u: see `verify_block`; order (R,
    M): the number of every node in post-order."""
    arguments, mass, facts, verdict = _prepared(p, draft)
    topology, sizes = arguments[1:]
    for depth in range(draft.tree.height):
        launch.start(_try_children, (len(p) * sizes[1],),
            arguments[0], topology, mass, facts, verdict[4], sizes, depth, draft.tree.width,
            min(_BLOCK, triton.next_power_of_2(p.shape[2])), **_OPTIONS,
        )  # fmt: skip
    return _concluded(draft, u, order, arguments, mass, facts, verdict)


def _prepared(p: Tensor, draft: Any) -> tuple[Any, Tensor, Tensor, Written]:
    """The result of `of_draft`, and memory for the masses, for `_FACTS` and for the verdict."""
    facts = p.new_empty(len(p), *draft.tree.children.shape[1:], _FACTS)
    return of_draft(p, draft), p.new_zeros(p.shape[:2]), facts, verdict_memory(p, draft.tree.height)


def _concluded(
    draft: Any, u: Tensor, order: Tensor, arguments: Any, mass: Tensor, facts: Tensor, verdict: Written
) -> Written:
    """The verdict that follows from the masses (B, M) with which nodes pass."""
    arguments, topology, sizes = arguments
    nodes, _, height, _, vocabulary = sizes
    launch.start(_conclude, (len(mass),),
        arguments, topology, u.contiguous(), order.contiguous(), mass, facts, verdict, sizes, draft.tree.width,
        triton.next_power_of_2(nodes), triton.next_power_of_2(height + 1),
        min(_BLOCK, triton.next_power_of_2(vocabulary)), **_OPTIONS,
    )  # fmt: skip
    return verdict
