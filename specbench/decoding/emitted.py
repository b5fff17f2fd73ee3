"""What a method emits: at every visited node the distribution e of the token that follows, and the distance of e from
the target's distribution p.

Every emitted token belongs to one visited node of its step: an accepted candidate belongs to its parent, and the
recovered or bonus token to the last accepted node. Given p and the distributions q that the node's candidates were
drawn from, e can be computed, whatever was drawn. For one candidate, accepted with probability f(x), and residuals G_y,

    e = q f + sum over y of q(y) (1 - f(y)) G_y.

Siblings are drawn without replacement, so what follows a rejection of y depends on y, or each from its own
distribution. A node without candidates has e = p. The sum over rejected tokens is exact if it has few terms, else it is
an average over draws (see `Emitted`). These formulas hold for token-wise verification; block verification of a chain
emits the same. Traversal is not measured.

e is conditional on everything that determines p, q and the depth of the node. The distribution given the prefix alone
is an average of such e. By convexity its divergence is at most the mean of their divergences. By the chain rule, the
sum over positions of the mean KL(e || p) is at least KL(method || target) of whole sequences, with equality if the
prefix determines e.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import add

import torch
from torch import Tensor

from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.band import least_divergence
from specbench.decoding.rules.base import Rule, at, normalise
from specbench.decoding.sampling import Distributions, draw
from specbench.decoding.trees import Tree
from specbench.decoding.verify import EMITTED, Draft, VerificationResult, one_hot
from specbench.decoding.verify.base import without
from specbench.engine import ops
from specbench.engine.ops import sum_last, take

#: The sum over a node's sequences of rejected tokens is exact up to this many sequences.
_EXACT = 64
#: The most entries of a tensor (rows, nodes, draws, V).
_AT_ONCE = 1 << 22
#: Masses up to this may be float32 rounding errors; the largest ratio ignores them.
_ROUNDING = 1e-6


def distances(p: Tensor, e: Tensor) -> Tensor:
    """The distances of e (..., V) from p (..., V), as (5, ...): the total variation; KL(e || p) in nats over the tokens
    with p > 0; the mass of e on the other tokens, where this divergence is infinite; KL(p || e) in nats over the tokens
    with e > 0; and the mass of p on the other tokens, where that one is infinite.

    A divergence is the sum of e log(e / p) - e + p. Its terms are never negative, and rounding errors in the sums of
    the distributions do not matter.
    """
    change, supported, emitted = e - p, p > 0, e > 0
    relative = change / p.clamp_min(1e-37)
    close, square = relative.abs() < 1e-2, relative.square()  # the series are accurate to 1e-8 there
    log = (e.clamp_min(1e-38) / p.clamp_min(1e-38)).log()
    kl = torch.where(close, p * square * (0.5 - relative / 6 + square / 12), e * log - change)
    reverse = torch.where(close, p * square * (0.5 - relative / 3 + square / 4), change - p * log)
    masses = torch.where(supported, 0.0, e), torch.where(emitted, 0.0, p)
    kl, reverse = torch.where(supported, kl, 0.0), torch.where(emitted, reverse, 0.0)
    return torch.stack([sum_last(x) for x in (0.5 * change.abs(), kl, masses[0], reverse, masses[1])])


def largest_ratio(p: Tensor, e: Tensor) -> Tensor:
    """The largest e / p (...) over the tokens with p > 0, at least 1."""
    return torch.where(p > 0, (e - _ROUNDING) / p, 0.0).amax(-1).clamp_min(1)


@dataclass
class Nodes:
    """n visited nodes of B rows. p (B, n, V): the target's distributions; q (B, n, V): the children's; tokens,
    live (B, n, K): the children's tokens, and which children exist; depth (B, n): the children's depth; sampled: the
    tokens were drawn from q, else each is a point mass; own (B, n, K, V): the children's distributions, if each was
    drawn from its own."""

    p: Tensor
    q: Tensor
    tokens: Tensor
    live: Tensor
    depth: Tensor
    sampled: bool
    own: Tensor | None = None


class _Rejections:
    """S sequences of rejected siblings at each of n nodes; S is 1 as long as the result does not depend on the rejected
    tokens. r, q (B, n, S, V): the target's and the drafter's remaining distributions; weight (B, n, S): the probability
    of the sequence, or of its rejections if its tokens were drawn; left (B, n, S) bool: q has tokens left (it has none
    if a node has more children than q has tokens)."""

    def __init__(self, nodes: Nodes) -> None:
        self.r, self.q = nodes.p.unsqueeze(2), nodes.q.unsqueeze(2)
        self.weight = torch.ones_like(self.r[..., 0])
        self.left = torch.ones_like(self.weight, dtype=torch.bool)

    def add_every(self, live: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Extend every sequence by every token that can be rejected next, with mass `rejected` (B, n, S, V), where a
        candidate is `live` (B, n, S). Returns these tokens and `live`, (B, n, S V)."""
        vocab = self.r.shape[-1]
        token = torch.arange(vocab, device=live.device).expand(*live.shape, -1).flatten(2)
        none = one_hot(torch.zeros_like(live, dtype=torch.int64), vocab)  # without a candidate, one sequence remains
        mass = torch.where(live.unsqueeze(-1), rejected, none)
        self.weight = (self.weight.unsqueeze(-1) * mass).flatten(2)
        self.r, self.q, self.left = (x.repeat_interleave(vocab, 2) for x in (self.r, self.q, self.left))
        return token, live.repeat_interleave(vocab, 2)

    def add_draws(self, live: Tensor, rejected: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Like `add_every`, with one drawn token per sequence; u (B, n, S): uniforms."""
        self.add_all(live, rejected)
        self.weight, self.left, live = (x.expand_as(u) for x in (self.weight, self.left, live))
        self.r, self.q, rejected = (x.expand(*u.shape, -1) for x in (self.r, self.q, rejected))
        return draw(normalise(rejected, self.q), u), live

    def add_all(self, live: Tensor, rejected: Tensor) -> None:
        """Continue after a rejection whose token does not matter."""
        self.weight = torch.where(live, self.weight * sum_last(rejected), self.weight)


def distributions(nodes: Nodes, rule: Rule, u: Tensor, most: int = _EXACT) -> Tensor:
    """The distributions e (B, n, H, V). H is 1 if they are exact: sums over at most `most` sequences of rejected
    tokens. Else H is 2, for averages over two independent halves of the draws of rejected tokens, with uniforms u (B,
    n, K, S), S even; without draws they are NaN."""
    siblings, vocab = nodes.tokens.shape[-1], nodes.p.shape[-1]
    # rejections after which the token counts
    followed = (siblings - 1) * (nodes.own is None or rule.residual_by_token) + rule.residual_by_token
    followed *= nodes.sampled
    exact = vocab**followed <= most
    if not exact and not u.shape[-1]:
        return torch.full_like(nodes.p.unsqueeze(2), torch.nan)
    now, e = _Rejections(nodes), torch.zeros_like(nodes.p.unsqueeze(2))
    for m in range(siblings):
        token, depth = nodes.tokens[:, :, m, None], nodes.depth.unsqueeze(2)
        if not nodes.sampled:
            now.q = one_hot(token, vocab)
        elif nodes.own is not None:
            now.q = nodes.own[:, :, m, None].expand_as(now.r)
        live = now.left & nodes.live[:, :, m, None]
        accepted = now.q * rule.acceptance(now.r, now.q, depth.expand_as(now.weight))
        e = e + _average(torch.where(live.unsqueeze(-1), now.weight.unsqueeze(-1) * accepted, 0.0), exact)
        rejected = now.q - accepted
        if m >= followed:
            now.add_all(live, rejected)
        elif exact:
            token, live = now.add_every(live, rejected)
        else:
            token, live = now.add_draws(live, rejected, u[:, :, m])
        token = token.expand_as(now.weight)
        residual = rule.residual(now.r, now.q, token, depth.expand_as(now.weight))
        now.r = torch.where(live.unsqueeze(-1), residual, now.r)
        if nodes.sampled and m + 1 < siblings and nodes.own is None:  # the next sibling was drawn from the rest
            rest = without(now.q, token)
            now.left = now.left & (at(rest, token) == 0)
            now.q = torch.where(live.unsqueeze(-1), rest, now.q)
    return e + _average(now.weight.unsqueeze(-1) * now.r, exact)


def _average(x: Tensor, exact: bool) -> Tensor:
    """Combines the terms (B, n, S, V) of S sequences of rejected tokens: their sum, or the averages of two halves. They
    are added one after the other, so the bits of a row do not depend on the other rows."""
    if x.shape[2] == 1:
        return x
    if exact:
        return reduce(add, x.split(1, 2))
    halves = x.unflatten(2, (2, -1))
    return reduce(add, halves.unbind(3)) / halves.shape[3]


@dataclass(frozen=True)
class Emitted:
    """The distance of the emitted distributions from the target's, step by step. draws: draws of rejected tokens per
    node where their sum is not exact, rounded up to an even number; 0: only exact values, without `rng`. most: see
    `distributions`.

    A divergence is convex in e, so the divergence of an average over draws is too large. With D(A), D(B) of two halves
    of the draws, 2 D(A and B) - (D(A) + D(B)) / 2 has no bias of second order in e; it can be slightly negative. It is
    noisier than an exact value. Draws of images are independent, so the noise is part of the spread over images.
    """

    rule: Rule
    rng: RandomStreams | None
    draws: int
    most: int = _EXACT

    def step(self, draft: Draft, verdict: VerificationResult, target: Distributions, step: Tensor) -> Tensor:
        """The measures (7, B, D + 1) of the nodes of the accepted path, the root first: the `distances`; the least
        divergence with which the node's token could be accepted as often (`least_divergence`); and the `largest_ratio`.
        Entries after the end of the path are arbitrary. Entries that are not computed are NaN: all of a deterministic
        rule on sampled trees, the least divergence of several or deterministic candidates, and KL(p || e) of averages
        over draws. target: the target's distributions; step (B,): keys the random numbers."""
        tree, path = draft.tree, verdict.path_with_root
        sampled = draft.sampled is None and target.sampling.temperature > 0
        if self.rule.deterministic and not (tree.is_chain and sampled):
            return self._longest(verdict, target, measured=not sampled)
        draws = 2 * -(-self.draws // 2)
        numbers = len(path), tree.height, tree.width, draws
        u = self.rng.uniform(step, EMITTED, *numbers[1:]) if self.rng and draws else target.p.new_zeros(numbers)
        measures = target.p.new_zeros(len(path), tree.height + 1, 7)
        measures[..., -1] = 1  # after a full draft e = p
        for depths, width in _groups(tree):
            rows, depth = _on_path(verdict.length, depths)
            siblings = width > 1 or self.rule.residual_by_token
            terms = (draws or self.most) if siblings else 1
            at_once = max(1, _AT_ONCE // (target.p.shape[-1] * terms))
            for row, at_depth in zip(rows.split(at_once), depth.split(at_once), strict=True):
                nodes = _visited(draft, target.p, row, path[row, at_depth], width)
                e = distributions(nodes, self.rule, u[row, at_depth, :width].unsqueeze(1), self.most)
                further = torch.stack([self._least(nodes), largest_ratio(nodes.p, e.mean(2))])
                measures[row, at_depth] = torch.cat([_corrected(nodes.p, e), further])[..., 0].T
        return measures.permute(2, 0, 1)

    def _least(self, nodes: Nodes) -> Tensor:
        """The least divergence (B, n) with which the nodes' acceptance is possible."""
        if nodes.tokens.shape[-1] > 1 or not nodes.sampled:
            return torch.full_like(nodes.p[..., 0], torch.nan)
        if self.rule.name == "exact":  # nothing accepts more without a divergence
            return torch.zeros_like(nodes.p[..., 0])
        accepted = sum_last(nodes.q * self.rule.acceptance(nodes.p, nodes.q, nodes.depth))
        return torch.where(nodes.live[..., 0], least_divergence(nodes.p, nodes.q, accepted), 0.0)

    @staticmethod
    def _longest(verdict: VerificationResult, target: Distributions, measured: bool) -> Tensor:
        """The measures of a rule that accepts the longest path, on candidates that are point masses: e is a point mass
        on the next token of the path, and p at its end."""
        p = take(target.p, verdict.path_with_root)
        depth = torch.arange(p.shape[1], device=p.device)
        on = (depth < verdict.length[:, None]).unsqueeze(-1)
        e = torch.where(on, one_hot(verdict.tokens, p.shape[-1]), p)
        measures = torch.stack([*distances(p, e), torch.full_like(p[..., 0], torch.nan), largest_ratio(p, e)])
        return measures if measured else torch.full_like(measures, torch.nan)


def _groups(tree: Tree) -> Iterator[tuple[slice, int]]:
    """Groups of neighbouring depths of a tree whose nodes have either single candidates or siblings, and the most
    children of a node in each group."""
    widths = [width for _, width in tree.levels]
    for _, group in groupby(range(tree.height), lambda depth: widths[depth] > 1):
        depths = list(group)
        yield slice(depths[0], depths[-1] + 1), max(widths[depth] for depth in depths)


def _on_path(length: Tensor, depths: slice) -> tuple[Tensor, Tensor]:
    """The rows and the depths (N,) of the visited nodes at these depths: the root and the accepted nodes, whose number
    in a row is `length` (B,). Those after the end of a path, too, on devices without `DYNAMIC_SHAPES`."""
    depth = torch.arange(depths.start, depths.stop, device=length.device)
    visited = depth <= length[:, None] if length.device.type in ops.DYNAMIC_SHAPES else None
    rows, columns = torch.meshgrid(torch.arange(len(length), device=length.device), depth, indexing="ij")
    return (rows.flatten(), columns.flatten()) if visited is None else (rows[visited], columns[visited])


def _visited(draft: Draft, p: Tensor, row: Tensor, node: Tensor, width: int) -> Nodes:
    """Nodes `node` (N,) of rows `row` (N,), with at most `width` children each, as N rows of one node."""
    tree, rows = draft.tree, len(p)
    slot = tree.slot.expand(rows, -1)[row, node]
    children = tree.children.expand(rows, -1, -1)[row, slot.clamp_min(0), :width]
    child = row[:, None], children.clamp_min(0)
    live = (children >= 0) & draft.valid[child] & (slot >= 0)[:, None]
    depth = tree.depth.expand(rows, -1)[row, node] + 1
    q = draft.probs[row, slot.clamp_min(0)]
    p, q, tokens, live, depth = (x.unsqueeze(1) for x in (p[row, node], q, draft.tokens[child], live, depth))
    own = None
    if draft.node_probs is not None and width > 1:
        own = draft.node_probs[row[:, None], (child[1] - 1).clamp_min(0)].unsqueeze(1)
    return Nodes(p, q, tokens, live, depth, draft.sampled is None, own)


def _corrected(p: Tensor, e: Tensor) -> Tensor:
    """The `distances` (5, B, n) of distributions e (B, n, H, V) from `distributions`, without their bias; see
    `Emitted`. KL(p || e) of averages over draws is NaN: it is infinite where a half has not drawn a token."""
    if e.shape[2] == 1:
        return distances(p, e[:, :, 0])
    whole, a, b = (distances(p, x) for x in (e.mean(2), *e.unbind(2)))
    corrected = 2 * whole - (a + b) / 2
    corrected[3:] = torch.nan
    return corrected
