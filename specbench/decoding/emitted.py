"""What a method really emits: at every visited node the distribution e of the token that follows there, and how far it
is from the target's distribution p.

Every emitted token belongs to one visited node of its step: an accepted candidate to its parent, the recovered or bonus
token to the last accepted node. Given p and the distributions q that the node's candidates were drawn from, e is known,
whatever was drawn. For one candidate, kept with probability f(x), and residuals G_y,

    e = q f + sum over y of q(y) (1 - f(y)) G_y.

Siblings are drawn without replacement, so what follows a rejection of y depends on y. A node without candidates has
e = p. The sum over rejected tokens is exact where there are few, else an average over draws (see `Emitted`). This is
token-wise verification, and block verification of a chain emits the same. Other ways are not measured: `selected`
relaxes against another q.

e is the distribution given all that determined p, q and the depth of the node. That of a prefix alone is an average of
such e, so by convexity its divergence is at most the mean of theirs, and by the chain rule the sum over positions of
the mean KL(e || p) is at least KL(method || target) of whole sequences; equal to it where the prefix determines e.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
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
from specbench.engine.ops import sum_last, take

#: Sequences of rejected tokens of a node up to which their sum is exact.
_EXACT = 64
#: Entries of (rows, nodes, draws, V) that are held at once.
_AT_ONCE = 1 << 22
#: Masses up to this, which may be rounding of float32, do not count in the largest ratio.
_ROUNDING = 1e-6


def distances(p: Tensor, e: Tensor) -> Tensor:
    """Total variation of e (..., V) and p (..., V); KL(e || p) in nats over the tokens with p > 0; and the mass of e
    elsewhere, where the divergence is infinite: (3, ...).

    The sum is over e log(e / p) - e + p: never negative, and rounding of the distributions' sums does not count.
    """
    change, there = e - p, p > 0
    relative = change / p.clamp_min(1e-37)
    near = p * relative.square() * (0.5 - relative / 6 + relative.square() / 12)  # to 1e-9 where it is used
    far = e * (e.clamp_min(1e-38) / p.clamp_min(1e-38)).log() - change
    kl = torch.where(there, torch.where(relative.abs() < 1e-2, near, far), 0.0)
    return torch.stack([0.5 * sum_last(change.abs()), sum_last(kl), sum_last(torch.where(there, 0.0, e))])


def largest_ratio(p: Tensor, e: Tensor) -> Tensor:
    """The largest e / p (...) of tokens with p > 0, at least 1."""
    return torch.where(p > 0, (e - _ROUNDING) / p, 0.0).amax(-1).clamp_min(1)


@dataclass
class Nodes:
    """n visited nodes of B rows: p, q (B, n, V), of which q is that of the children; tokens, live (B, n, K): the
    children's tokens, and which of them exist; depth (B, n): the children's; sampled: whether the tokens were drawn
    from q, else each is a point mass."""

    p: Tensor
    q: Tensor
    tokens: Tensor
    live: Tensor
    depth: Tensor
    sampled: bool


class _Rejections:
    """S sequences of rejected siblings at each of n nodes, one as long as no token counts: what is left of the target's
    and the drafter's distributions, r and q (B, n, S, V); weight (B, n, S): the probability of getting there, of a draw
    given its tokens; left (B, n, S) bool: q has tokens left, of those with fewer tokens than children."""

    def __init__(self, nodes: Nodes) -> None:
        self.r, self.q = nodes.p.unsqueeze(2), nodes.q.unsqueeze(2)
        self.weight = torch.ones_like(self.r[..., 0])
        self.left = torch.ones_like(self.weight, dtype=torch.bool)

    def add_every(self, live: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Go on with every token that can be rejected next, with mass `rejected` (B, n, S, V), where a candidate is
        `live` (B, n, S); returns these tokens and `live`, (B, n, S V)."""
        vocab = self.r.shape[-1]
        token = torch.arange(vocab, device=live.device).expand(*live.shape, -1).flatten(2)
        none = one_hot(torch.zeros_like(live, dtype=torch.int64), vocab)  # without a candidate, one goes on
        mass = torch.where(live.unsqueeze(-1), rejected, none)
        self.weight = (self.weight.unsqueeze(-1) * mass).flatten(2)
        self.r, self.q, self.left = (x.repeat_interleave(vocab, 2) for x in (self.r, self.q, self.left))
        return token, live.repeat_interleave(vocab, 2)

    def add_draws(self, live: Tensor, rejected: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """As `add_every`, with one draw per sequence, u (B, n, S)."""
        self.add_all(live, rejected)
        self.weight, self.left, live = (x.expand_as(u) for x in (self.weight, self.left, live))
        self.r, self.q, rejected = (x.expand(*u.shape, -1) for x in (self.r, self.q, rejected))
        return draw(normalise(rejected, self.q), u), live

    def add_all(self, live: Tensor, rejected: Tensor) -> None:
        """Go on after a rejection, whatever the token was."""
        self.weight = torch.where(live, self.weight * sum_last(rejected), self.weight)


def distributions(nodes: Nodes, rule: Rule, u: Tensor) -> Tensor:
    """The distributions e (B, n, H, V). H is 1 where they are exact; else 2, averages over two independent halves of
    the draws of rejected tokens, with uniforms u (B, n, K, S), S even."""
    siblings, vocab = nodes.tokens.shape[-1], nodes.p.shape[-1]
    followed = siblings - 1 + rule.residual_by_token if nodes.sampled else 0  # rejections after which the token counts
    exact = vocab**followed <= _EXACT
    now, e = _Rejections(nodes), torch.zeros_like(nodes.p.unsqueeze(2))
    for m in range(siblings):
        token, depth = nodes.tokens[:, :, m, None], nodes.depth.unsqueeze(2)
        if not nodes.sampled:
            now.q = one_hot(token, vocab)
        live = now.left & nodes.live[:, :, m, None]
        kept = now.q * rule.acceptance(now.r, now.q, depth.expand_as(now.weight))
        e = e + _average(torch.where(live.unsqueeze(-1), now.weight.unsqueeze(-1) * kept, 0.0), exact)
        rejected = now.q - kept
        if m >= followed:
            now.add_all(live, rejected)
        elif exact:
            token, live = now.add_every(live, rejected)
        else:
            token, live = now.add_draws(live, rejected, u[:, :, m])
        token = token.expand_as(now.weight)
        residual = rule.residual(now.r, now.q, token, depth.expand_as(now.weight))
        now.r = torch.where(live.unsqueeze(-1), residual, now.r)
        if nodes.sampled and m + 1 < siblings:  # the next sibling was drawn from the rest
            rest = without(now.q, token)
            now.left = now.left & (at(rest, token) == 0)
            now.q = torch.where(live.unsqueeze(-1), rest, now.q)
    return e + _average(now.weight.unsqueeze(-1) * now.r, exact)


def _average(x: Tensor, exact: bool) -> Tensor:
    """Of what S sequences of rejected tokens contribute (B, n, S, V): their sum, or the averages of two halves. Added
    one after the other, so that a row's bits do not depend on the other rows."""
    if x.shape[2] == 1:
        return x
    if exact:
        return reduce(add, x.split(1, 2))
    halves = x.unflatten(2, (2, -1))
    return reduce(add, halves.unbind(3)) / halves.shape[3]


@dataclass(frozen=True)
class Emitted:
    """How far what a rule emits is from the target, step by step. draws: of rejected tokens of a node, where their sum
    is not exact; rounded up to an even number.

    A divergence is convex in e, so that of an average over draws is too large. With D(A), D(B) of two halves of the
    draws, 2 D(A and B) - (D(A) + D(B)) / 2 has no bias of second order in e: it can be slightly negative. It is noisier
    than an exact value; draws of images are independent, so the noise is part of the spread over images.
    """

    rule: Rule
    rng: RandomStreams
    draws: int

    def step(self, draft: Draft, verdict: VerificationResult, found: Distributions, step: Tensor) -> Tensor:
        """Of the nodes of the accepted path, the root first (5, B, D + 1): the `distances`; the least divergence with
        which the node's token could be accepted as often (`least_divergence`); and the `largest_ratio`. Of the entries
        beyond its end, anything. NaN where they are not computed: a deterministic rule on sampled trees; the least
        divergence of several candidates and of deterministic ones. `step` (B,) keys the random numbers."""
        tree, path = draft.tree, verdict.path_with_root
        sampled = draft.sampled is None and found.sampling.temperature > 0
        if self.rule.deterministic and not (tree.is_chain and sampled):
            return self._longest(verdict, found, known=not sampled)
        draws, parts = 2 * -(-self.draws // 2), []
        u = self.rng.uniform(step, EMITTED, tree.height, tree.width, draws)
        for some, width in self._depths(tree, found.p.shape[-1] * len(path), draws):
            nodes = _visited(draft, found.p, path[:, some], width)
            e = distributions(nodes, self.rule, u[:, some, :width])
            least = self._least(nodes)
            parts.append(torch.cat([_corrected(nodes.p, e), torch.stack([least, largest_ratio(nodes.p, e.mean(2))])]))
        none = torch.zeros_like(parts[0][..., :1])  # after a full draft the target's own distribution
        none[4] = 1
        return torch.cat([*parts, none], 2)

    def _depths(self, tree: Tree, size: int, draws: int) -> Iterator[tuple[slice, int]]:
        """Depths of a tree that are computed together, and the most children of a node there: not single candidates
        with siblings, nor more than fit in memory; `size`: entries of all rows at one depth."""
        widths, depth = [width for _, width in tree.levels], 0
        while depth < tree.height:
            begin, siblings = depth, widths[depth] > 1
            most = max(1, _AT_ONCE // (size * (draws if siblings or self.rule.residual_by_token else 1)))
            while depth < tree.height and (widths[depth] > 1) == siblings and depth - begin < most:
                depth += 1
            yield slice(begin, depth), max(widths[begin:depth])

    def _least(self, nodes: Nodes) -> Tensor:
        """The least divergence (B, n) of the nodes' acceptance."""
        if nodes.tokens.shape[-1] > 1 or not nodes.sampled:
            return torch.full_like(nodes.p[..., 0], torch.nan)
        accepted = sum_last(nodes.q * self.rule.acceptance(nodes.p, nodes.q, nodes.depth))
        return torch.where(nodes.live[..., 0], least_divergence(nodes.p, nodes.q, accepted), 0.0)

    @staticmethod
    def _longest(verdict: VerificationResult, found: Distributions, known: bool) -> Tensor:
        """Of a rule with which the longest accepted path counts, on candidates that are point masses: e is a point mass
        on the token where the path goes on, and p at its end."""
        p = take(found.p, verdict.path_with_root)
        depth = torch.arange(p.shape[1], device=p.device)
        on = (depth < verdict.length[:, None]).unsqueeze(-1)
        e = torch.where(on, one_hot(verdict.tokens, p.shape[-1]), p)
        every = torch.stack([*distances(p, e), torch.full_like(p[..., 0], torch.nan), largest_ratio(p, e)])
        return every if known else torch.full_like(every, torch.nan)


def _visited(draft: Draft, p: Tensor, path: Tensor, width: int) -> Nodes:
    """The nodes of a path (B, n), with at most `width` children each."""
    tree, rows = draft.tree, len(path)
    slot = tree.slot.expand(rows, -1).gather(1, path)
    children = take(tree.children.expand(rows, -1, -1), slot.clamp_min(0))[..., :width]
    node = children.clamp_min(0).flatten(1)
    tokens, valid = (x.gather(1, node).view_as(children) for x in (draft.tokens, draft.valid))
    live = (children >= 0) & valid & (slot >= 0).unsqueeze(-1)
    depth = tree.depth.expand(rows, -1).gather(1, path) + 1
    return Nodes(take(p, path), take(draft.probs, slot.clamp_min(0)), tokens, live, depth, draft.sampled is None)


def _corrected(p: Tensor, e: Tensor) -> Tensor:
    """The `distances` (3, B, n) of distributions e (B, n, H, V) as `distributions` gives them; see `Emitted`."""
    if e.shape[2] == 1:
        return distances(p, e[:, :, 0])
    both, a, b = (distances(p, x) for x in (e.mean(2), *e.unbind(2)))
    return 2 * both - (a + b) / 2
