"""Token-wise verification: recursive rejection sampling over a draft tree, as tensor code without a host round trip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.rules.base import Rule, Threshold, at, normalise
from specbench.decoding.verify.base import (
    Case,
    Draft,
    Verification,
    VerificationResult,
    Verified,
    accepted_path,
    one_hot,
    remaining,
)
from specbench.engine.ops import take


class TokenWise(Verification):
    """The children of all inner nodes are verified in parallel (their random numbers are independent), one sibling
    after the other. Then the accepted path is read from the results. For exact rules the tokens have the target's
    distribution: for chains by Cool-SD, Theorem 1; for trees by recursion over siblings, drawn without replacement or
    each from its own distribution."""

    name = "token"

    def decide(self, case: Case) -> VerificationResult:
        p, draft, rule, kernels = case.p, case.draft, case.rule, case.kernels
        relaxation = None if kernels is None else rule.relaxation()
        if isinstance(relaxation, Threshold) and draft.node_probs is not None:
            relaxation = None  # its kernel reads one distribution for all siblings
        if kernels is not None and isinstance(relaxation, Threshold):
            return VerificationResult(*kernels.verify_longest(p, case.decided_by, draft, case.numbers, relaxation))
        if kernels is not None and relaxation is not None:
            return VerificationResult(*kernels.verify(p, draft, case.numbers, relaxation))
        accepted_child, residual, first = _decide(case.decided_by, draft, rule, case.u)
        slot = draft.tree.slot.expand(len(p), -1)
        path, length = accepted_path(draft.tree, accepted_child, slot)
        last = path[:, -1:]
        next_probs = take(p, last) if rule.deterministic else remaining(p, residual, slot, last)
        return case.verdict(path, length, next_probs, first)


@dataclass(frozen=True)
class Choice:
    """conf/verification/token.yaml."""

    def build(self, verified: Verified) -> Verification:
        return TokenWise()


def _decide(p: Tensor, draft: Draft, rule: Rule, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted child of each inner node (B, I), -1 for none; the residual distribution of each inner node (B, I,
    V); and the probability of accepting the first candidate (B,). u (B, M): uniforms."""
    tree = draft.tree
    rows, nodes, vocab = p.shape
    inner = tree.inner.expand(rows, -1)
    residual, q = take(p, inner), draft.probs
    children, depths = tree.children.expand(rows, -1, -1), tree.depth.expand(rows, -1)
    accepted_child = torch.full_like(inner, -1)
    first = p.new_zeros(rows)
    passed: list[Tensor] = []  # per sibling, the candidates that the rule accepts
    for m, parents in enumerate(tree.parents_per_rank):  # the inner nodes that may have an m-th child
        child = _head(children, parents)[:, :, m]
        node = child.clamp_min(0)
        token, depth = draft.tokens.gather(1, node), depths.gather(1, node)
        r, q_m, undecided = _head(residual, parents), _head(q, parents), _head(accepted_child, parents)
        live = (child >= 0) & draft.valid.gather(1, node) & (undecided < 0)
        if m > 0 and draft.node_probs is not None:
            q_m = take(draft.node_probs, (node - 1).clamp_min(0))
        if draft.sampled is not None:
            sampled = draft.sampled.gather(1, node)
            q_m = torch.where(sampled.unsqueeze(-1), q_m, one_hot(token, vocab))
        live &= at(q_m, token) > 0  # a distribution with fewer tokens than children has no more candidates
        accept, left = rule.accept_and_residual(r, q_m, token, depth)
        accepted = live & (u.gather(1, node) < accept)
        if m == 0:  # the root is the first inner node
            first = torch.where(live[:, 0], accept[:, 0], first)
        if rule.deterministic:  # siblings do not compete: the longest path is accepted
            passed.append(F.pad(torch.where(accepted, child, -1), (0, inner.shape[1] - parents), value=-1))
            continue
        accepted_child = _with_head(accepted_child, torch.where(accepted, child, undecided))
        rejected = (live & ~accepted).unsqueeze(-1)
        residual = _with_head(residual, torch.where(rejected, left, r))
        if m + 1 < tree.width and draft.node_probs is None:  # the next sibling was drawn from the rest
            q, token, rejected = (_head(x, tree.parents_per_rank[m + 1]) for x in (q, token, rejected))
            rest = q.scatter(-1, token.unsqueeze(-1), 0.0)
            # zero where nothing is left: the token that was rejected is drawn again, and cannot be tried again
            q = torch.where(rejected, normalise(rest, torch.zeros_like(rest)), q)
    if passed:
        accepted_child = _longest(torch.stack(passed, -1), inner, nodes, tree.height)
    return accepted_child, residual, first


def _head(x: Tensor, count: int) -> Tensor:
    """x[:, :count], or x itself if it has no more entries."""
    return x if x.shape[1] == count else x[:, :count]


def _with_head(x: Tensor, head: Tensor) -> Tensor:
    """x with its first entries replaced, in place if there are more."""
    if x.shape == head.shape:
        return head
    x[:, : head.shape[1]] = head
    return x


def _longest(passed: Tensor, inner: Tensor, nodes: int, height: int) -> Tensor:
    """For each inner node, the child (B, I) with the longest passed path below it, among its children that passed (B,
    I, W; -1 for the others). The first one at a tie; -1 if none passed."""
    reach = torch.zeros(len(passed), nodes, dtype=torch.int64, device=passed.device)
    below = passed.clamp_min(0).flatten(1)
    gain = torch.full_like(passed, -1)
    for _ in range(height):
        gain = torch.where(passed >= 0, reach.gather(1, below).view_as(passed) + 1, 0)
        reach = reach.scatter(1, inner, gain.amax(-1))
    order = torch.arange(passed.shape[-1], device=passed.device)
    best = (gain * len(order) - order).argmax(-1, keepdim=True)
    return passed.gather(-1, best).squeeze(-1)
