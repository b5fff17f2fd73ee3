"""Verification: recursive rejection sampling over a draft tree, as tensor code without a host round trip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.rng import TAGS, RandomStreams
from specbench.decoding.rules.base import Rule, at, normalise
from specbench.decoding.sampling import draw
from specbench.decoding.trees import Tree
from specbench.engine.ops import Kernels, take

# Tags of a step's random numbers, the first two drawn together; drafters use DRAFT and above, windows also the last.
# EMITTED: of the statistics of what is emitted.
VERIFY, NEXT, DRAFT, EMITTED = 0, 1, 2, TAGS - 2


@dataclass
class Draft:
    """What a drafter proposes for B rows.

    tokens (B, M) int64, the root's own token first; probs (B, I, V) float32: per inner node the distribution from which
    its children were sampled, without replacement, in the order of the children; sampled (B, M) bool or None for all:
    False marks a deterministic token (its distribution is a point mass); valid (B, M) bool: nodes that exist in this
    step, where the ancestors of a valid node are valid.
    """

    tree: Tree
    tokens: Tensor
    probs: Tensor
    valid: Tensor
    sampled: Tensor | None = None


@dataclass
class Verdict:
    """path (B, D) int64: the accepted nodes by depth (beyond `length`: the last of them); length (B,) int64: accepted
    draft tokens; tokens (B, D + 1): the accepted tokens and, at `length`, the recovered or bonus token; next_probs
    (B, V): the distribution of that token; first (B,): the probability with which the rule accepts the first candidate,
    0 where there is none."""

    path: Tensor
    length: Tensor
    tokens: Tensor
    next_probs: Tensor
    first: Tensor

    @property
    def path_with_root(self) -> Tensor:
        """The accepted path (B, D + 1) with the root in front."""
        return torch.cat([torch.zeros_like(self.length)[:, None], self.path], 1)


def one_hot(token: Tensor, size: int) -> Tensor:
    return torch.zeros(*token.shape, size, device=token.device).scatter_(-1, token.unsqueeze(-1), 1.0)


def verify(
    p: Tensor,
    draft: Draft,
    rule: Rule,
    rng: RandomStreams,
    step: Tensor,
    pre_argmax_probs: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Verdict:
    """Accept or reject the draft's nodes against the target's distributions p (B, M, V); `step` (B,) keys the random
    numbers.

    The children of all inner nodes are verified in parallel (their random numbers are independent), sibling after
    sibling; then the accepted path is read off. For exact rules the tokens have the target's distribution (Cool-SD,
    Theorem 1, for chains; by recursion over siblings drawn without replacement, for trees). `pre_argmax_probs`
    (B, M, V) are the distributions by which a rule with `uses_pre_argmax_probs` decides, where they are not p; the
    recovered or bonus token always comes from p. `kernels` replace the plain code where the rule allows it.
    """
    tree, nodes = draft.tree, p.shape[1]
    both = rng.uniforms(step, VERIFY, NEXT - VERIFY + 1, nodes)
    u, u_next = both.unbind(1)  # of the candidates and the next token
    if not tree.height:  # nothing to decide
        next_token, none = draw(p[:, 0], u_next[:, 0], kernels).unsqueeze(1), torch.zeros_like(step)
        return Verdict(none.new_empty(len(p), 0), none, next_token, p[:, 0], none)
    if kernels is not None and (relaxation := rule.relaxation()) is not None:
        return Verdict(*kernels.verify(p, draft, both, *relaxation))
    decided_by = p if pre_argmax_probs is None else pre_argmax_probs
    accepted_child, residual, first = _decide(decided_by, draft, rule, u)
    slot = tree.slot.expand(len(p), -1)
    path, length = _accepted_path(tree, accepted_child, slot)
    last = path[:, -1:]
    next_probs = take(p, last)
    if not rule.deterministic:
        at_slot = slot.gather(1, last)
        next_probs = torch.where(at_slot.unsqueeze(-1) >= 0, take(residual, at_slot.clamp_min(0)), next_probs)
    next_token = draw(next_probs, u_next[:, :1], kernels)
    tokens = torch.cat([draft.tokens.gather(1, path), next_token], 1).scatter(1, length, next_token)
    return Verdict(path, length.squeeze(1), tokens, next_probs.squeeze(1), first)


def _decide(p: Tensor, draft: Draft, rule: Rule, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted child of each inner node (B, I), -1 for none; the residual distribution of each inner node
    (B, I, V); and the probability of accepting the first candidate (B,). u (B, M) uniforms."""
    tree = draft.tree
    rows, nodes, vocab = p.shape
    inner = tree.inner.expand(rows, -1)
    residual, q = take(p, inner), draft.probs
    children, depths = tree.children.expand(rows, -1, -1), tree.depth.expand(rows, -1)
    accepted_child = torch.full_like(inner, -1)
    first = p.new_zeros(rows)
    passed: list[Tensor] = []  # per sibling, the candidates that the rule keeps
    for m, parents in enumerate(tree.parents_per_rank):  # the inner nodes that may have an m-th child
        child = _head(children, parents)[:, :, m]
        node = child.clamp_min(0)
        token, depth = draft.tokens.gather(1, node), depths.gather(1, node)
        r, q_m, undecided = _head(residual, parents), _head(q, parents), _head(accepted_child, parents)
        live = (child >= 0) & draft.valid.gather(1, node) & (undecided < 0)
        if draft.sampled is not None:
            sampled = draft.sampled.gather(1, node)
            q_m = torch.where(sampled.unsqueeze(-1), q_m, one_hot(token, vocab))
        live &= at(q_m, token) > 0  # a distribution with fewer tokens than children has no more candidates
        accept = rule.accept(r, q_m, token, depth)
        accepted = live & (u.gather(1, node) < accept)
        if m == 0:  # the root is the first inner node
            first = torch.where(live[:, 0], accept[:, 0], first)
        if rule.deterministic:  # siblings do not compete: the longest path is accepted
            passed.append(F.pad(torch.where(accepted, child, -1), (0, inner.shape[1] - parents), value=-1))
            continue
        accepted_child = _with_head(accepted_child, torch.where(accepted, child, undecided))
        rejected = (live & ~accepted).unsqueeze(-1)
        residual = _with_head(residual, torch.where(rejected, rule.residual(r, q_m, token, depth), r))
        if m + 1 < tree.width:  # the next sibling was drawn from the rest
            q, token, rejected = (_head(x, tree.parents_per_rank[m + 1]) for x in (q, token, rejected))
            q = torch.where(rejected, normalise(q.scatter(-1, token.unsqueeze(-1), 0.0), q), q)
    if passed:
        accepted_child = _longest(torch.stack(passed, -1), inner, nodes, tree.height)
    return accepted_child, residual, first


def _head(x: Tensor, count: int) -> Tensor:
    """x[:, :count], or x itself where that is all of it."""
    return x if x.shape[1] == count else x[:, :count]


def _with_head(x: Tensor, head: Tensor) -> Tensor:
    """x with its first entries replaced, perhaps in place."""
    if x.shape == head.shape:
        return head
    x[:, : head.shape[1]] = head
    return x


def _accepted_path(tree: Tree, accepted_child: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """The accepted nodes by depth (B, D), beyond the end the last of them, and their number (B, 1), from the accepted
    child of each inner node (B, I), -1 for none; slot (B, M): a node's index among the inner ones."""
    if tree.is_chain:  # node d + 1 is the child of node d
        length = (accepted_child >= 0).long().cumprod(1).sum(1, keepdim=True)
        return torch.minimum(torch.arange(1, tree.height + 1, device=length.device), length), length
    node = length = accepted_child.new_zeros(len(accepted_child), 1)
    path: list[Tensor] = []
    for _ in range(tree.height):
        at_slot = slot.gather(1, node)
        child = torch.where(at_slot >= 0, accepted_child.gather(1, at_slot.clamp_min(0)), at_slot)
        accepted = (child >= 0) & (length == len(path))
        node = torch.where(accepted, child, node)
        length = length + accepted
        path.append(node)
    return torch.cat(path, 1), length


def _longest(passed: Tensor, inner: Tensor, nodes: int, height: int) -> Tensor:
    """Per inner node (B, I), of its children that passed (B, I, W; -1 else), the one with the longest passed path below
    it, the earlier one at a tie; -1 where none passed."""
    reach = torch.zeros(len(passed), nodes, dtype=torch.int64, device=passed.device)
    below = passed.clamp_min(0).flatten(1)
    gain = torch.full_like(passed, -1)
    for _ in range(height):
        gain = torch.where(passed >= 0, reach.gather(1, below).view_as(passed) + 1, 0)
        reach = reach.scatter(1, inner, gain.amax(-1))
    order = torch.arange(passed.shape[-1], device=passed.device)
    best = (gain * len(order) - order).argmax(-1, keepdim=True)
    return passed.gather(-1, best).squeeze(-1)
