"""Verification: recursive rejection sampling over a draft tree, as tensor code without a host round trip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.rules.base import Rule, at, normalise
from specbench.decoding.sampling import RandomStreams, draw
from specbench.decoding.trees import Tree
from specbench.engine.ops import kernels as fused_kernels
from specbench.engine.ops import take

# Purposes of a step's random numbers, the first two drawn together; drafters use DRAFT and above.
VERIFY, NEXT, DRAFT = 0, 1, 2


@dataclass
class Draft:
    """What a drafter proposes for B rows.

    tokens (B, M) int64, the root's own token first; laws (B, I, V) float32: per inner node the distribution from which
    its children were sampled, without replacement, in the order of the children; drawn (B, M) bool or None for all:
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
    draft tokens; tokens (B, D + 1): the accepted tokens and, at `length`, the recovered or bonus token; law (B, V): the
    distribution of that token; first (B,): the probability with which the rule kept the first candidate, 0 where there
    was none."""

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
    p: Tensor, draft: Draft, rule: Rule, rng: RandomStreams, step: Tensor, pre_argmax_probs: Tensor | None = None
) -> Verdict:
    """Accept or reject the draft's nodes against the target's distributions p (B, M, V); `step` (B,) keys the random
    numbers.

    The children of all inner nodes are verified in parallel (their random numbers are independent), sibling after
    sibling; then the accepted path is read off. For exact rules the tokens have the target's distribution (Cool-SD,
    Theorem 1, for chains; by recursion over siblings drawn without replacement, for trees). `judged` (B, M, V) are the
    distributions by which a `soft` rule decides, where they are not p; the recovered or bonus token always comes from
    p.
    """
    tree, nodes = draft.tree, p.shape[1]
    u, after = rng.uniforms(step, VERIFY, NEXT - VERIFY + 1, nodes).unbind(1)  # for the candidates, and for NEXT
    if not tree.height:  # nothing to decide
        following, none = draw(p[:, 0], after[:, 0]).unsqueeze(1), torch.zeros_like(step)
        return Verdict(none.new_zeros(len(p), 0), none, following, p[:, 0], p.new_zeros(len(p)))
    taken, r, first = _decide(p if pre_argmax_probs is None else pre_argmax_probs, draft, rule, u)
    slot = tree.slot.expand(len(p), -1)
    path, length = _walk(tree, taken, slot)
    here = path[:, -1:]
    last = take(p, here)
    if not rule.deterministic:
        at_slot = slot.gather(1, here)
        last = torch.where(at_slot.unsqueeze(-1) >= 0, take(r, at_slot.clamp_min(0)), last)
    following = draw(last, after[:, :1])
    tokens = torch.cat([draft.tokens.gather(1, path), following], 1).scatter(1, length, following)
    return Verdict(path, length.squeeze(1), tokens, last.squeeze(1), first)


def _decide(p: Tensor, draft: Draft, rule: Rule, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted child of each inner node (B, I), -1 for none; the residual distribution of each inner node
    (B, I, V); and the probability of keeping the first candidate (B,). u (B, M) uniforms."""
    tree = draft.tree
    rows, nodes, vocab = p.shape
    inner = tree.inner.expand(rows, -1)
    r = take(p, inner)
    q = draft.probs
    if (kernels := fused_kernels()) is not None and (factors := getattr(rule, "factors", None)) is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.decide(r, q, draft, u, *factors(r.device))
        return found
    children, depth = tree.children.expand(rows, -1, -1), tree.depth.expand(rows, -1)
    taken = torch.full_like(inner, -1)
    first = p.new_zeros(rows)
    passed: list[Tensor] = []  # per sibling, the candidates that the rule keeps
    for m, some in enumerate(tree.parents_per_rank):  # the inner nodes that may have an m-th child
        child = _head(children, some)[:, :, m]
        node = child.clamp_min(0)
        token = draft.tokens.gather(1, node)
        before, law, free = _head(r, some), _head(q, some), _head(taken, some)
        live = (child >= 0) & draft.valid.gather(1, node) & (free < 0)
        if draft.sampled is not None:
            drawn = draft.sampled.gather(1, node)
            law = torch.where(drawn.unsqueeze(-1), law, one_hot(token, vocab))
        live &= at(law, token) > 0  # a distribution with fewer tokens than children has no more candidates
        place = depth.gather(1, node)
        chance = rule.accept(before, law, token, place)
        kept = live & (u.gather(1, node) < chance)
        if m == 0:  # the root is the first inner node
            first = torch.where(live[:, 0], chance[:, 0], first)
        if rule.deterministic:  # siblings do not compete: the longest path is accepted
            passed.append(F.pad(torch.where(kept, child, -1), (0, inner.shape[1] - some), value=-1))
            continue
        taken = _with_head(taken, torch.where(kept, child, free))
        lost = (live & ~kept).unsqueeze(-1)
        r = _with_head(r, torch.where(lost, rule.residual(before, law, token, place), before))
        if m + 1 < tree.width:  # the next sibling was drawn from the rest
            left, gone, lost = (_head(x, tree.parents_per_rank[m + 1]) for x in (q, token, lost))
            q = torch.where(lost, normalise(left.scatter(-1, gone.unsqueeze(-1), 0.0), left), left)
    if passed:
        taken = _longest(torch.stack(passed, -1), inner, nodes, tree.height)
    return taken, r, first


def _head(x: Tensor, count: int) -> Tensor:
    """x[:, :count], or x itself where that is all of it."""
    return x if x.shape[1] == count else x[:, :count]


def _with_head(x: Tensor, head: Tensor) -> Tensor:
    """x with its first entries replaced, perhaps in place."""
    if x.shape == head.shape:
        return head
    x[:, : head.shape[1]] = head
    return x


def _walk(tree: Tree, taken: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """The accepted nodes by depth (B, D), beyond the end the last of them, and their number (B, 1), from the accepted
    child of each inner node, taken (B, I), -1 for none; slot (B, M): a node's index among the inner ones."""
    rows = len(taken)
    if tree.is_chain:  # node d + 1 is the child of node d
        length = (taken >= 0).long().cumprod(1).sum(1, keepdim=True)
        offsets = torch.arange(1, tree.height + 1, device=taken.device)
        return torch.minimum(offsets, length), length
    here, length = taken.new_zeros(rows, 1), taken.new_zeros(rows, 1)
    path: list[Tensor] = []
    for _ in range(tree.height):
        at_slot = slot.gather(1, here)
        onward = torch.where(at_slot >= 0, taken.gather(1, at_slot.clamp_min(0)), at_slot)
        moved = (onward >= 0) & (length == len(path))
        here = torch.where(moved, onward, here)
        length = length + moved
        path.append(here)
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
