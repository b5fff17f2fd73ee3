"""Token-wise verification of drafts: acceptance, the walk along the accepted path and the next token in one kernel, or
in two kernels for deterministic rules, whose longest path counts; and the updates that follow a verdict."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch
from specbench.engine.kernels.drawing import Written, end_walk, of_draft, verdict_memory
from specbench.engine.kernels.relaxed import budget_limits, gathered, lower_limit, near_constants, residual_mass

#: Tokens that a program reads at once; the compiler's options.
_BLOCK, _OPTIONS = 4096, launch.DISTRIBUTIONS


@triton.jit
def _left(r_row, q_row, at, vocabulary, token, sampled, omega, low, RESIDUAL: tl.constexpr):
    """The residual mass of tokens `at` after `token` was rejected, not normalised."""
    r = tl.load(r_row + at, mask=at < vocabulary, other=0.0)
    q = tl.load(q_row + at, mask=at < tl.where(sampled, vocabulary, 0), other=0.0)
    if (RESIDUAL == "band") | (RESIDUAL == "budget"):
        r = low * r
    mass = r - tl.where(sampled, q, tl.where(at == token, 1.0, 0.0))
    if RESIDUAL == "optimal":
        mass = tl.maximum(mass, (1 - omega) * r, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(mass, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _verify(
    DRAFT, TREE, U, OWN, VALUES, NEAR, VERDICT, REST, WORK, sizes, deepest, near_stride, cleared, k, limit,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
    MEASURE: tl.constexpr, CLOSED: tl.constexpr, NEAR_BLOCK: tl.constexpr,
):  # fmt: skip
    """One image, from the root down, one sibling after the other. NEXT holds the residual distribution of the node
    whose children are tried, once one of them was rejected; REST the distribution that the next sibling was drawn from,
    unless OWN has the distribution of every node; WORK a residual distribution before it is normalised."""
    P, Q, TOKENS, VALID, SAMPLED = DRAFT
    PATH, LENGTH, CHOSEN, NEXT, FIRST = VERDICT
    nodes, inner, height, tree_rows, vocabulary = sizes
    MOVES: tl.constexpr = (RESIDUAL == "paper") | (RESIDUAL == "released") | (RESIDUAL == "released_p")
    row = tl.program_id(0).to(tl.int64)
    children, slots = TREE[0] + (row % tree_rows) * inner * WIDTH, TREE[1] + (row % tree_rows) * nodes
    here, probs, chosen = row * nodes, P + row * nodes * vocabulary, CHOSEN + row * (height + 1)
    next_row, rest_row, work_row = NEXT + row * vocabulary, REST + row * vocabulary, WORK + row * vocabulary
    tokens, ranks = tl.arange(0, BLOCK), tl.arange(0, WIDE)
    node, length, rank = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    inner_index = tl.load(slots)  # the node's index among the inner ones, -1 at the end of the walk
    r_row, q_row, untouched = probs, Q + row * inner * vocabulary, tl.full([], 1, tl.int32)
    while inner_index >= 0:
        child = tl.load(children + inner_index * WIDTH + rank)
        at = tl.maximum(child, 0)
        if OWN is not None:
            q_row = OWN + (row * (nodes - 1) + tl.maximum(at - 1, 0)) * vocabulary
        token, sampled = tl.load(TOKENS + here + at), tl.load(SAMPLED + here + at) != 0
        omega = tl.full([], 1.0, tl.float32)
        if VALUES is not None:
            omega = tl.load(VALUES + tl.minimum(length + 1, deepest))
        q_token = tl.load(q_row + token, mask=sampled, other=1.0)
        live = (child >= 0) & (tl.load(VALID + here + at) != 0) & (q_token > 0)
        low = tl.full([], 1.0, tl.float32)
        if RESIDUAL == "band":
            if live:
                if sampled:
                    low = lower_limit(r_row, q_row, vocabulary, omega, BLOCK)
                else:
                    low = tl.div_rn(low, 1 + (omega - 1) * tl.load(r_row + token))
            omega = omega * low
        if RESIDUAL == "budget":
            budget = tl.where(live, omega, 0.0)
            low, omega = budget_limits(
                r_row, q_row, vocabulary, token, sampled, budget, BLOCK // 2
            )  # half a block, because it computes five sums
        r_token = omega * tl.load(r_row + token)
        if NEAR is not None:
            near, gain, count = NEAR + token * near_stride, tl.zeros_like(r_token), tl.full([], 0, tl.int32)
            if live:
                gain, count = gathered(r_row, near, token, r_token, k, limit, MEASURE, CLOSED, NEAR_BLOCK)
            accept = tl.div_rn(r_token + gain, tl.where(q_token > 0, q_token, 1.0))
        else:
            accept = tl.div_rn(r_token, tl.where(q_token > 0, q_token, 1.0))
        accept = tl.where(live, tl.minimum(accept, 1.0, propagate_nan=tl.PropagateNan.ALL), 0.0)
        if (length == 0) & (rank == 0):
            tl.store(FIRST + row, accept)
        accepted = live & (tl.load(U + row * 2 * nodes + at) < accept)
        rank += 1
        if accepted:
            tl.store(PATH + row * height + length, child)
            tl.store(chosen + length, token)
            node, length, rank, untouched = child, length + 1, rank * 0, untouched * 0 + 1
            inner_index = tl.load(slots + child)
            r_row = probs + child * vocabulary
            q_row = Q + (row * inner + tl.maximum(inner_index, 0)) * vocabulary
        else:
            if live:
                if MOVES:
                    mass = residual_mass(
                        work_row, r_row, q_row, near, cleared, vocabulary, token, sampled, q_token, count, BLOCK,
                        NEAR_BLOCK, RESIDUAL,
                    )  # fmt: skip
                elif RESIDUAL == "target":
                    mass = 0 * low
                else:
                    total = tl.zeros([BLOCK], tl.float32)
                    for start in range(0, vocabulary, BLOCK):
                        i = start + tokens
                        total += _left(r_row, q_row, i, vocabulary, token, sampled, omega, low, RESIDUAL)
                    mass = tl.sum(total, 0)
                    tl.debug_barrier()  # no thread writes a value that another one still reads
                if mass > 1e-30:
                    for start in range(0, vocabulary, BLOCK):
                        i = start + tokens
                        if MOVES:
                            left = tl.load(work_row + i, mask=i < vocabulary)
                        else:
                            left = _left(r_row, q_row, i, vocabulary, token, sampled, omega, low, RESIDUAL)
                        tl.store(next_row + i, left / mass, mask=i < vocabulary)
                    r_row = next_row
                    untouched = untouched * 0
                if (WIDTH > 1) and (OWN is None):
                    kids = tl.load(
                        children + inner_index * WIDTH + ranks, mask=(ranks >= rank) & (ranks < WIDTH), other=-1
                    )
                    further = tl.load(SAMPLED + here + tl.maximum(kids, 0)) != 0
                    if tl.max(((kids >= 0) & further).to(tl.int32), 0) > 0:  # drawn from the rest
                        total = tl.zeros([BLOCK], tl.float32)
                        for start in range(0, vocabulary, BLOCK):
                            i = start + tokens
                            total += tl.load(q_row + i, mask=(i < vocabulary) & (i != token), other=0.0)
                        others = tl.sum(total, 0)
                        tl.debug_barrier()
                        exhausted = others <= 1e-30  # no further sibling can be tried
                        for start in range(0, vocabulary, BLOCK):
                            i = start + tokens
                            q = tl.load(q_row + i, mask=(i < vocabulary) & (i != token), other=0.0)
                            q = tl.where(exhausted, 0.0, q / tl.where(exhausted, 1.0, others))
                            tl.store(rest_row + i, q, mask=i < vocabulary)
                        q_row = rest_row
                tl.debug_barrier()
            if rank == WIDTH:
                inner_index = inner_index * 0 - 1
    if untouched > 0:
        tl.debug_barrier()  # NEXT may have been read for the last accepted token
        for start in range(0, vocabulary, BLOCK):
            i = start + tokens
            tl.store(next_row + i, tl.load(r_row + i, mask=i < vocabulary), mask=i < vocabulary)
        tl.debug_barrier()
    end_walk(
        PATH + row * height, LENGTH + row, chosen, TOKENS + here, node, length, height, next_row,
        tl.load(U + row * 2 * nodes + nodes), vocabulary, DEEP, BLOCK,
    )  # fmt: skip


def verify(p: Tensor, draft: Any, u: Tensor, relaxation: Any) -> Written:
    """Verify a draft like `decoding.verify.TokenWise`, with a rule that has a `Relaxation`; returns the fields of a
    VerificationResult. p (B, M, V) float32; u (B, 2, M): the uniforms of the candidates, then the next token's (the
    first one is used)."""
    tree, values, (arguments, topology, sizes) = draft.tree, relaxation.values, of_draft(p, draft)
    verdict = verdict_memory(p, tree.height)
    next_probs = verdict[3]
    rest = torch.empty_like(next_probs) if tree.width > 1 else next_probs  # not written
    work = next_probs if relaxation.neighbours is None else torch.empty_like(next_probs)
    near, stride, cleared, k, limit, *bound = near_constants(relaxation.neighbours)
    launch.start(_verify, (len(p),),
        arguments, topology, u.contiguous(), draft.node_probs, values, near, verdict, rest, work, sizes,
        0 if values is None else len(values) - 1, stride, cleared, k, limit, tree.width,
        triton.next_power_of_2(tree.width), triton.next_power_of_2(tree.height + 1),
        min(_BLOCK, triton.next_power_of_2(p.shape[2])), relaxation.residual, *bound, **_OPTIONS,
    )  # fmt: skip
    return verdict


@triton.jit
def _accept(
    P, DRAFT, TREE, NEAR, ACCEPTED, sizes, epsilon, alpha, near_stride, k, limit,
    MEASURE: tl.constexpr, CLOSED: tl.constexpr, BLOCK: tl.constexpr, NEAR_BLOCK: tl.constexpr,
):  # fmt: skip
    """One node: 1 if the rule, which decides by P, accepts its token, else 0."""
    nodes, _, _, tree_rows, vocabulary = sizes
    here = tl.program_id(0).to(tl.int64)
    row, node, at = here // nodes, here % nodes, tl.arange(0, BLOCK)
    accepted = tl.full([], 0, tl.int32)
    if (node > 0) & (tl.load(DRAFT[3] + here) != 0):
        r_row = P + (row * nodes + tl.load(TREE[3] + row % tree_rows * nodes + node)) * vocabulary
        token = tl.load(DRAFT[2] + here)
        r_token = tl.load(r_row + token)
        if NEAR is not None:
            near = NEAR + token * near_stride
            gain, _ = gathered(r_row, near, token, r_token, k, limit, MEASURE, CLOSED, NEAR_BLOCK)
            more = tl.zeros([BLOCK], tl.int32)  # (no neighbour is more probable than all of them together)
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
    DRAFT, TREE, U, ACCEPTED, MARK, VERDICT, sizes,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, NODES: tl.constexpr, DEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One image. MARK: whether a node passed; then 2 if a longest path goes through it."""
    P, Q, TOKENS, VALID, SAMPLED = DRAFT
    CHILDREN, SLOT, INNER, PARENT, DEPTH = TREE
    PATH, LENGTH, CHOSEN, NEXT, FIRST = VERDICT
    nodes, inner, height, tree_rows, vocabulary = sizes
    row = tl.program_id(0).to(tl.int64)
    tree, here = row % tree_rows, row * nodes
    children, slots, parents = CHILDREN + tree * inner * WIDTH, SLOT + tree * nodes, PARENT + tree * nodes
    tokens, mark, chosen = TOKENS + here, MARK + here, CHOSEN + row * (height + 1)
    n, ranks = tl.arange(0, NODES), tl.arange(0, WIDE)
    drafted = (n > 0) & (n < nodes)
    parent = tl.load(parents + n, mask=drafted, other=0)
    inner_index = tl.load(slots + parent)
    sampled = tl.load(SAMPLED + here + n, mask=drafted, other=0) != 0
    live = drafted & (inner_index >= 0) & (tl.load(VALID + here + n, mask=drafted, other=0) != 0)
    q = Q + (row * inner + tl.maximum(inner_index, 0)) * vocabulary + tl.load(tokens + n, mask=live, other=0)
    live &= tl.load(q, mask=live & sampled, other=1.0) > 0
    accept = tl.load(ACCEPTED + here + n, mask=live, other=0).to(tl.float32)
    passed = live & (tl.load(U + row * 2 * nodes + n, mask=drafted, other=1.0) < accept)
    tl.store(FIRST + row, tl.sum(tl.where(n == tl.load(children), accept, 0.0), 0))
    tl.store(mark + n, (passed | (n == 0)).to(tl.int32), mask=n < nodes)
    tl.debug_barrier()
    above, reached = parent, passed
    for _ in range(height):
        reached &= tl.load(mark + above) != 0
        above = tl.load(parents + above)
    depth = tl.where(reached, tl.load(DEPTH + tree * nodes + n, mask=drafted, other=0), 0)
    length = tl.max(depth, 0)
    tl.debug_barrier()  # no thread writes a value that another one still reads
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
        tl.load(U + row * 2 * nodes + nodes), vocabulary, DEEP, BLOCK,
    )  # fmt: skip


def verify_longest(p: Tensor, decided_by: Tensor, draft: Any, u: Tensor, threshold: Any) -> Written:
    """Verify a draft like `decoding.verify.TokenWise`, with a rule that has a `Threshold`; returns the fields of a
    VerificationResult. p, decided_by (B, M, V) float32: the distributions from which the next token is drawn, and by
    which the rule decides; u (B, 2, M): the uniforms of the candidates, then the next token's (the first one is
    used)."""
    tree, (rows, nodes, vocabulary), (arguments, topology, sizes) = draft.tree, p.shape, of_draft(p, draft)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    accepted, mark = torch.empty(2, rows, nodes, dtype=torch.int32, device=p.device)
    near, stride, _, k, limit, measure, closed, near_block = near_constants(threshold.neighbours)
    launch.start(_accept, (rows * nodes,),
        decided_by.contiguous(), arguments, topology, near, accepted, sizes, float(threshold.epsilon),
        float(threshold.alpha), stride, k, limit, measure, closed, block, near_block, **_OPTIONS,
    )  # fmt: skip
    verdict = verdict_memory(p, tree.height)
    launch.start(_longest, (rows,),
        arguments, topology, u.contiguous(), accepted, mark, verdict, sizes, tree.width,
        triton.next_power_of_2(tree.width), triton.next_power_of_2(nodes), triton.next_power_of_2(tree.height + 1),
        block, **_OPTIONS,
    )  # fmt: skip
    return verdict


@triton.jit
def _advance(
    HISTORY, COUNT, STEPS, TOKENS, LENGTH, COUNT_BEFORE, STEPS_BEFORE, ACTIVE, total, history_size, reach,
    DEEP: tl.constexpr
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, DEEP)
    count, steps = tl.load(COUNT + row), tl.load(STEPS + row)
    active = count < total
    tokens = tl.load(TOKENS + row * reach + i, mask=i < tl.where(active, reach, 0), other=0)
    tl.store(HISTORY + row * history_size + count + i, tokens, mask=i < reach)
    tl.store(COUNT_BEFORE + row, count)
    tl.store(STEPS_BEFORE + row, steps)
    tl.store(ACTIVE + row, active.to(tl.uint8))
    tl.debug_barrier()  # all threads have read the values that are overwritten
    tl.store(COUNT + row, tl.where(active, count + tl.load(LENGTH + row) + 1, count))
    tl.store(STEPS + row, steps + active.to(tl.int64))


def advance(
    history: Tensor, num_committed: Tensor, steps: Tensor, tokens: Tensor, length: Tensor, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `parallel_positions.Raster.advance`; for the tokens (B, D + 1) and the length (B,) of a verdict."""
    rows, reach = tokens.shape
    before, steps_before = torch.empty_like(num_committed), torch.empty_like(steps)
    active = torch.empty(rows, dtype=torch.bool, device=num_committed.device)
    launch.start(_advance, (rows,),
        history, num_committed, steps, tokens.contiguous(), length.contiguous(), before, steps_before,
        active.view(torch.uint8), total, history.shape[1], reach, triton.next_power_of_2(reach), num_warps=1,
    )  # fmt: skip
    return before, steps_before, active


@triton.jit
def _keep(
    K, V, PATH, LENGTH, COUNT, first, rows, images, heads, slots, dim, height,
    CHUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head of one row and layer. Nodes of a path have rising numbers, so no slot is overwritten before the chunk in
    which it is read."""
    here = tl.program_id(0).to(tl.int64)
    image = here // heads % rows % images
    length, root, d = tl.load(LENGTH + image), tl.load(COUNT + image) + first, tl.arange(0, WIDE)
    for start in range(0, length, CHUNK):
        i = start + tl.arange(0, CHUNK)
        node = tl.load(PATH + image * height + i, mask=i < length, other=0)
        moves = tl.where((i < length) & (node != i + 1), dim, 0)
        if tl.max(moves, 0) > 0:
            base, inside = here * slots * dim, d[None, :] < moves[:, None]
            source = base + (root + node)[:, None] * dim + d[None, :]
            target = base + (root + i + 1)[:, None] * dim + d[None, :]
            k, v = tl.load(K + source, mask=inside, other=0.0), tl.load(V + source, mask=inside, other=0.0)
            tl.debug_barrier()  # no thread writes a value that another one still reads
            tl.store(K + target, k, mask=inside)
            tl.store(V + target, v, mask=inside)
            tl.debug_barrier()


def keep(k: Tensor, v: Tensor, path: Tensor, length: Tensor, num_committed: Tensor, first: int) -> None:
    """See `KVCache.keep`; k, v (layers, rows, heads, slots, head dim)."""
    layers, rows, heads, slots, dim = k.shape
    launch.start(_keep, (layers * rows * heads,),
        k, v, path.contiguous(), length.contiguous(), num_committed, first, rows, len(num_committed), heads, slots, dim,
        path.shape[1], 8, triton.next_power_of_2(dim),
    )  # fmt: skip
