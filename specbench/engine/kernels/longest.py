"""Verification by a deterministic rule: which nodes it accepts, the longest path of these and the next token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch, neighbours
from specbench.engine.kernels.neighbours import gathered
from specbench.engine.kernels.verdicts import draft_flags, end_walk, verdict_memory

#: Tokens that a program reads at once; the compiler's options.
_BLOCK, _OPTIONS = 4096, launch.DISTRIBUTIONS


@triton.jit
def _accept(
    P, TOKENS, VALID, PARENT, NEAR, ACCEPTED, nodes, tree_rows, vocabulary, epsilon, alpha, near_stride, k, limit,
    MEASURE: tl.constexpr, CLOSED: tl.constexpr, BLOCK: tl.constexpr, NEAR_BLOCK: tl.constexpr,
):  # fmt: skip
    """One node: 1 if the rule accepts its token, else 0."""
    here = tl.program_id(0).to(tl.int64)
    row, node, at = here // nodes, here % nodes, tl.arange(0, BLOCK)
    accepted = tl.full([], 0, tl.int32)
    if (node > 0) & (tl.load(VALID + here) != 0):
        r_row = P + (row * nodes + tl.load(PARENT + row % tree_rows * nodes + node)) * vocabulary
        token = tl.load(TOKENS + here)
        r_token = tl.load(r_row + token)
        if NEAR is not None:
            near = NEAR + token * near_stride
            gain, _ = gathered(r_row, near, token, r_token, k, limit, MEASURE, CLOSED, NEAR_BLOCK)
            more = tl.zeros([BLOCK], tl.int32)  # (a neighbour is not more probable than all of them)
            for start in range(0, vocabulary, BLOCK):
                r = tl.load(r_row + start + at, mask=start + at < vocabulary, other=0.0)
                more += tl.where(r <= r_token + gain, 0, 1)
            accepted = (tl.sum(more, 0) == 0).to(tl.int32)
        else:
            parts = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocabulary, BLOCK):
                r = tl.load(r_row + start + at, mask=start + at < vocabulary, other=0.0)
                parts -= r * tl.log(tl.where(r > 0, r, 1.0))
            least = tl.minimum(alpha * tl.exp(-tl.sum(parts, 0)), epsilon, propagate_nan=tl.PropagateNan.ALL)
            accepted = ((r_token > least) | (r_token >= 1)).to(tl.int32)
    tl.store(ACCEPTED + here, accepted)


@triton.jit
def _longest(
    P, Q, TOKENS, VALID, SAMPLED, U, CHILDREN, SLOT, PARENT, DEPTH, ACCEPTED, MARK, PATH, LENGTH, CHOSEN, NEXT, FIRST,
    nodes, inner, height, tree_rows, vocabulary, u_stride,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, NODES: tl.constexpr, DEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One image. MARK: of a node, whether it passed; then 2 where a longest path goes through it."""
    row = tl.program_id(0).to(tl.int64)
    tree, here = row % tree_rows, row * nodes
    children, slots, parents = CHILDREN + tree * inner * WIDTH, SLOT + tree * nodes, PARENT + tree * nodes
    tokens, mark, chosen = TOKENS + here, MARK + here, CHOSEN + row * (height + 1)
    n, ranks = tl.arange(0, NODES), tl.arange(0, WIDE)
    drafted = (n > 0) & (n < nodes)
    parent = tl.load(parents + n, mask=drafted, other=0)
    which = tl.load(slots + parent)
    sampled = tl.load(SAMPLED + here + n, mask=drafted, other=0) != 0
    live = drafted & (which >= 0) & (tl.load(VALID + here + n, mask=drafted, other=0) != 0)
    q = Q + (row * inner + tl.maximum(which, 0)) * vocabulary + tl.load(tokens + n, mask=live, other=0)
    live &= tl.load(q, mask=live & sampled, other=1.0) > 0
    accept = tl.load(ACCEPTED + here + n, mask=live, other=0).to(tl.float32)
    passed = live & (tl.load(U + row * u_stride + n, mask=drafted, other=1.0) < accept)
    tl.store(FIRST + row, tl.sum(tl.where(n == tl.load(children), accept, 0.0), 0))
    tl.store(mark + n, (passed | (n == 0)).to(tl.int32), mask=n < nodes)
    tl.debug_barrier()
    above, reached = parent, passed
    for _ in range(height):
        reached &= tl.load(mark + above) != 0
        above = tl.load(parents + above)
    depth = tl.where(reached, tl.load(DEPTH + tree * nodes + n, mask=drafted, other=0), 0)
    length = tl.max(depth, 0)
    tl.debug_barrier()  # no thread writes what another one still reads
    above = tl.where(depth == length, n, 0).to(tl.int64)
    for _ in range(length):
        tl.store(mark + above, above * 0 + 2, mask=above > 0)
        above = tl.load(parents + above)
    tl.debug_barrier()
    node, d = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    while d < length:
        kids = tl.load(children + tl.load(slots + node) * WIDTH + ranks, mask=ranks < WIDTH, other=-1)
        on = (kids >= 0) & (tl.load(mark + tl.maximum(kids, 0)) == 2)
        node = tl.sum(tl.where(ranks == tl.min(tl.where(on, ranks, WIDE), 0), kids, 0), 0)  # the earliest
        tl.store(PATH + row * height + d, node)
        tl.store(chosen + d, tl.load(tokens + node))
        d += 1
    p_row, next_row = P + (here + node) * vocabulary, NEXT + row * vocabulary
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(next_row + i, tl.load(p_row + i, mask=i < vocabulary), mask=i < vocabulary)
    end_walk(
        PATH + row * height, LENGTH + row, chosen, tokens, node, length, height, p_row,
        tl.load(U + row * u_stride + nodes), vocabulary, DEEP, BLOCK,
    )  # fmt: skip


def verify_longest(
    p: Tensor, decided_by: Tensor, draft: Any, u: Tensor, threshold: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Verify a draft as `decoding.verify.TokenWise` does, by a rule with a `Threshold`: the fields of a Verdict.
    p, decided_by (B, M, V) float32: what the next token is drawn from, and what the rule decides by; u (B, 2, M): the
    uniforms of the candidates, then, first of its row, that of the next token."""
    tree, (rows, nodes, vocabulary), p = draft.tree, p.shape, p.contiguous()
    inner, height, block = tree.children.shape[1], tree.height, min(_BLOCK, triton.next_power_of_2(vocabulary))
    tokens, parent, (valid, sampled) = draft.tokens.contiguous(), tree.parent, draft_flags(draft)
    accepted, mark = (tokens.new_empty(rows, nodes, dtype=torch.int32) for _ in range(2))
    near, stride, _, k, limit, measure, closed, near_block = neighbours.constants(threshold.neighbours)
    launch.start(_accept, (rows * nodes,),
        decided_by.contiguous(), tokens, valid, parent.contiguous(), near, accepted, nodes, len(parent), vocabulary,
        float(threshold.epsilon), float(threshold.alpha), stride, k, limit, measure, closed, block, near_block,
        **_OPTIONS,
    )  # fmt: skip
    path, length, chosen, next_probs, first = verdict = verdict_memory(p, height)
    launch.start(_longest, (rows,),
        p, draft.probs.contiguous(), tokens, valid, sampled, u.contiguous(), tree.children.contiguous(),
        tree.slot.contiguous(), parent.contiguous(), tree.depth.contiguous(), accepted, mark, path, length, chosen,
        next_probs, first, nodes, inner, height, len(tree.children), vocabulary, 2 * nodes,
        tree.width, triton.next_power_of_2(tree.width), triton.next_power_of_2(nodes),
        triton.next_power_of_2(height + 1), block, **_OPTIONS,
    )  # fmt: skip
    return verdict
