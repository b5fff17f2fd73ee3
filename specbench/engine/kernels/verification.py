"""Verification of drafts."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch


@triton.jit
def _left(R, Q, base, at, inside, token, sampled, omega, OPTIMAL: tl.constexpr):
    """The residual mass of tokens `at` after `token` was rejected, not normalised."""
    r = tl.load(R + base + at, mask=inside, other=0.0)
    q = tl.load(Q + base + at, mask=inside, other=0.0)
    q = tl.where(sampled, q, tl.where(at == token, 1.0, 0.0))
    mass = r - q
    if OPTIMAL:
        mass = tl.maximum(mass, (1 - omega) * r)
    return tl.where(inside, tl.maximum(mass, 0.0), 0.0)


@triton.jit
def _decide(
    R, Q, TOKENS, VALID, SAMPLED, U, CHILDREN, DEPTH, OMEGA, CHILD, FIRST, nodes, inner, tree_rows, vocabulary,
    deepest, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OPTIMAL: tl.constexpr,
):  # fmt: skip
    """An inner node of a row, sibling after sibling. R holds its distribution, then its residual distribution; Q the
    distribution from which the next sibling was drawn."""
    row, which = tl.program_id(0) // inner, tl.program_id(0) % inner
    shape = row % tree_rows
    base, tokens = tl.program_id(0).to(tl.int64) * vocabulary, tl.arange(0, BLOCK)
    accepted_child = tl.full([], -1, tl.int64)
    for m in tl.static_range(WIDTH):
        child = tl.load(CHILDREN + (shape * inner + which) * WIDTH + m)
        node = tl.maximum(child, 0)
        here = row * nodes + node
        token, sampled = tl.load(TOKENS + here), tl.load(SAMPLED + here) != 0
        depth = tl.minimum(tl.load(DEPTH + shape * nodes + node), deepest)
        omega = tl.load(OMEGA + depth)
        p_token = tl.load(R + base + token)
        q_token = tl.where(sampled, tl.load(Q + base + token), 1.0)
        live = (child >= 0) & (tl.load(VALID + here) != 0) & (accepted_child < 0) & (q_token > 0)
        accept = tl.minimum(tl.where(q_token > 0, omega * p_token / tl.where(q_token > 0, q_token, 1.0), 1.0), 1.0)
        accepted = live & (tl.load(U + here) < accept)
        if (m == 0) & (which == 0):
            tl.store(FIRST + row, tl.where(live, accept, 0.0))
        accepted_child = tl.where(accepted, child, accepted_child)
        if live & (accepted_child < 0):
            total, rest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocabulary, BLOCK):
                at = start + tokens
                total += _left(R, Q, base, at, at < vocabulary, token, sampled, omega, OPTIMAL)
                if m + 1 < WIDTH:  # the next sibling was drawn from the rest
                    rest += tl.load(Q + base + at, mask=(at < vocabulary) & (at != token), other=0.0)
            mass, others = tl.sum(total, 0), tl.sum(rest, 0)
            tl.debug_barrier()  # no thread writes what another one still reads
            for start in range(0, vocabulary, BLOCK):
                at = start + tokens
                left = _left(R, Q, base, at, at < vocabulary, token, sampled, omega, OPTIMAL)
                if mass > 1e-30:
                    tl.store(R + base + at, left / mass, mask=at < vocabulary)
                if m + 1 < WIDTH:
                    q = tl.load(Q + base + at, mask=at < vocabulary, other=0.0)
                    if others > 1e-30:
                        tl.store(Q + base + at, tl.where(at == token, 0.0, q / others), mask=at < vocabulary)
            tl.debug_barrier()
    tl.store(CHILD + tl.program_id(0), accepted_child)


def decide(r: Tensor, q: Tensor, draft: Any, u: Tensor, omega: Tensor, optimal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As of `verify._decide` for a `Relaxed` rule: r (B, I, V) float32 the distributions of the inner nodes,
    overwritten with the residual distributions; q (B, I, V) float32; u (B, M)."""
    tree, (rows, inner, vocabulary) = draft.tree, r.shape
    assert r.is_contiguous()
    q = q.clone(memory_format=torch.contiguous_format) if tree.width > 1 else q.contiguous()
    accepted_child = torch.empty(rows, inner, dtype=torch.int64, device=r.device)
    first = torch.empty(rows, device=r.device)
    valid = draft.valid.contiguous().view(torch.uint8)
    sampled = torch.ones_like(valid) if draft.sampled is None else draft.sampled.contiguous().view(torch.uint8)
    launch.start(_decide, (rows * inner,),
        r, q, draft.tokens.contiguous(), valid, sampled, u.contiguous(), tree.children.contiguous(),
        tree.depth.contiguous(), omega, accepted_child, first, draft.tokens.shape[1], inner,
        len(tree.children), vocabulary, len(omega) - 1, tree.width,
        min(4096, triton.next_power_of_2(vocabulary)), optimal, num_warps=8,
    )  # fmt: skip
    return accepted_child, r, first
