"""Selected-path block verification: one of several siblings is followed, and the path is verified as a chain whose
tokens were drawn from the distribution that results from the selection. Lossless; related to arXiv 2602.16961."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.rules.base import normalise
from specbench.decoding.sampling import PROBABILITY_BITS
from specbench.decoding.shape import DraftShape
from specbench.decoding.verify.base import Case, Draft, Verification, VerificationResult, check_exact, one_hot
from specbench.decoding.verify.block import RELAXED, passing, ratios
from specbench.engine.ops import sum_last, take
from specbench.errors import UsageError

#: Sums of probabilities that differ by less count as equal.
_SAME = 1e-6


class Selected(Verification):
    """At a node with K children drawn from q, the child with the largest p / q is followed with probability lam, else
    the first child. The followed child has the distribution e = (1 - lam) q + lam b, where b is the distribution of the
    best draw: of K draws with replacement, or of two without. The path from the root to a leaf is verified like in
    `block.BlockVerification`, with e instead of q.

    lam may depend on everything that is known above the children. `select` None takes the value among 0, 1 / grid .. 1
    with the largest sum min(P p, e). A rule that emits a distribution in closed form, given that its candidate is drawn
    from e, uses that distribution instead of p, as in block verification.
    """

    name = "selected"

    def __init__(self, select: float | None = None, grid: int = 8) -> None:
        self.select, self.grid = select, grid

    def decide(self, case: Case) -> VerificationResult:
        """The random numbers with the next token's tag choose the children, from the second number on."""
        p, draft, rule, u, tree = case.p, case.draft, case.rule, case.u, case.draft.tree
        if tree.width > 2 and not draft.replacement:
            raise ValueError("selection needs siblings that were drawn with replacement, or pairs")
        if case.kernels is not None and rule.name == "exact":
            return VerificationResult(*case.kernels.select(p, draft, case.numbers, self.select, self.grid, _SAME))
        node = length = torch.zeros_like(draft.tokens[:, :1])
        mass, ended = torch.ones_like(u[:, :1]), torch.zeros_like(draft.valid[:, :1])
        visited, shares = [node], []
        for depth in range(tree.height):
            p_node = take(p, node).squeeze(1)
            kids, tokens, q = _children(draft, node)
            continues = ~ended & (kids >= 0).any(1, keepdim=True)
            chooses = case.u_next[:, depth + 1 : depth + 2]
            child, e, share = self._select(p_node, q, mass, kids, tokens, chooses, draft.replacement)
            shares.append(torch.where(continues, share, torch.nan))
            token = draft.tokens.gather(1, child)
            output_distribution = rule.output_distribution(p_node, e, torch.full_like(length[:, 0], depth + 1))
            live, ratio = ratios(output_distribution.gather(1, token), e.gather(1, token), continues)
            left = (output_distribution * mass).sub_(e).clamp_min_(0)
            passes = torch.where(continues, passing(sum_last(left)[:, None], mass), mass)
            passed = ~ended & (u.gather(1, node) < passes)
            left = torch.where(continues, normalise(left, p_node), p_node)
            if depth == 0:  # the root always passes
                accepted = rule.accept(p_node, q, tokens[:, 0], torch.ones_like(length[:, 0]))
                first, next_probs = torch.where(kids[:, 0] >= 0, accepted, 0), left
            else:
                length = torch.where(passed, depth, length)
                next_probs = torch.where(passed, left, next_probs)
            ended = ~continues
            mass = torch.where(live, (mass * ratio).clamp_max(1), 0)
            node = torch.where(continues, child, node)
            visited.append(node)
        passed = ~ended & (u.gather(1, node) < mass)  # a leaf at the largest depth
        length = torch.where(passed, tree.height, length)
        next_probs = torch.where(passed, take(p, node).squeeze(1), next_probs)
        steps = torch.arange(1, tree.height + 1, device=p.device)
        path = torch.cat(visited, 1).gather(1, torch.minimum(steps, length))
        verdict = case.verdict(path, length, next_probs.unsqueeze(1), first)
        verdict.share = torch.cat(shares, 1).nanmean(1)
        return verdict

    def _select(
        self, p: Tensor, q: Tensor, mass: Tensor, kids: Tensor, tokens: Tensor, u: Tensor, replacement: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The child that is followed (B, 1), its distribution e (B, V), and lam (B, 1), NaN without a choice. p, q (B,
        V); mass, u (B, 1); kids, tokens (B, W), -1 for none."""
        exists = kids >= 0
        ranks = torch.arange(kids.shape[1], device=p.device)
        if kids.shape[1] == 1:
            return kids.clamp_min(0), q, torch.full_like(mass, torch.nan)
        count = exists.sum(1, keepdim=True)
        order = torch.where(q > 0, p / q, torch.inf).sort(dim=-1, stable=True).indices
        best = best_of(q, order, count, kids.shape[1]) if replacement else best_of_pair(q, order)
        share = self._share(p, q, best, mass)
        share = torch.where(count > 1, share, torch.nan)
        e = torch.where(count > 1, q + share * (best - q), q)
        place = torch.empty_like(order).scatter_(1, order, torch.arange(p.shape[1], device=p.device).expand_as(order))
        place = torch.where(exists, place.gather(1, tokens), -1)
        eligible = torch.where(u < share, exists & (place == place.amax(1, keepdim=True)), exists)
        rank = torch.where(eligible, ranks, kids.shape[1]).amin(1, keepdim=True)
        return kids.gather(1, rank.clamp_max(kids.shape[1] - 1)).clamp_min(0), e, share

    def _share(self, p: Tensor, q: Tensor, best: Tensor, mass: Tensor) -> Tensor:
        """lam (B, 1)."""
        if self.select is not None:
            return torch.full_like(mass, self.select)
        weighted, more = p * mass, best - q
        shares = torch.arange(self.grid + 1, device=p.device) / self.grid
        accepted = torch.stack([sum_last(torch.minimum(weighted, q + share * more)) for share in shares], 1)
        largest = accepted >= accepted.amax(1, keepdim=True) - _SAME  # the smallest share of these
        return torch.where(largest, shares, 1).amin(1, keepdim=True)


def _children(draft: Draft, node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The children (B, W) of nodes (B, 1), -1 for none; their tokens (B, W); and the distribution (B, V) that the
    tokens were drawn from."""
    tree, rows = draft.tree, len(node)
    slot = tree.slot.expand(rows, -1).gather(1, node)
    kids = take(tree.children.expand(rows, -1, -1), slot.clamp_min(0)).squeeze(1)
    q = take(draft.probs, slot.clamp_min(0)).squeeze(1)
    tokens = draft.tokens.gather(1, kids.clamp_min(0))
    if draft.sampled is not None:
        sampled = draft.sampled.gather(1, kids[:, :1].clamp_min(0))
        q = torch.where(sampled, q, one_hot(tokens[:, 0], q.shape[-1]))
    exists = (slot >= 0) & draft.valid.gather(1, kids.clamp_min(0)) & (q.gather(1, tokens) > 0)
    return torch.where(exists, kids, -1), tokens, q


def best_of(q: Tensor, order: Tensor, count: Tensor, most: int) -> Tensor:
    """The distribution (B, V) of the token that comes last in `order` (B, V) among `count` (B, 1) <= `most` tokens
    drawn from q (B, V) with replacement.

    With c the cumulative q including a token and c' without it, b = q sum_{j < K} c^j c'^(K - 1 - j). The probabilities
    are integers, as in `sampling.draw_exactly`: their sums do not depend on the order of summation.
    """
    parts = (q * 2.0**PROBABILITY_BITS).long().gather(1, order)
    after = parts.cumsum(1)
    total = after[:, -1:].double()
    upto, before = after / total, (after - parts) / total
    power = factor = torch.ones_like(upto)
    for k in range(1, most):
        power = power * upto
        factor = torch.where(k < count, factor * before + power, factor)
    probs = (parts / total * factor).float()
    return torch.empty_like(probs).scatter_(1, order, probs)


def best_of_pair(q: Tensor, order: Tensor) -> Tensor:
    """The distribution (B, V) of the token that comes last in `order` (B, V) among two different tokens drawn from q
    (B, V), the second without replacement. Token x has q(x) (sum of q / (1 - q) over the tokens before x + sum of q
    over them / (1 - q(x)))."""
    parts = (q.double() / q.double().sum(1, keepdim=True)).gather(1, order)
    odds = parts / (1 - parts).clamp_min(1e-30)
    before, odds_before = (x.cumsum(1) - x for x in (parts, odds))
    probs = (parts * odds_before + odds * before).float()
    return torch.empty_like(probs).scatter_(1, order, probs)


def build(cfg: Mapping[str, Any], shape: DraftShape) -> Verification:
    check_exact(cfg, shape, RELAXED)
    pairs = cfg["select_from"] == "pair"
    if not shape.tree.is_chain and not shape.samples_siblings:
        raise UsageError(
            "verification=selected needs siblings that are sampled with replacement or in pairs, and drafter"
            f" {cfg['drafter']} does not sample them so: use verification=traversal, or drafter=eagle_tree or"
            " eagle3_tree"
        )
    if pairs and shape.tree.width > 2:
        raise UsageError(
            f"select_from=pair needs nodes with two children at most, and the tree has {shape.tree.width}: use"
            " select_from=replacement, or another tree="
        )
    select = None if cfg["select"] == "auto" else cfg["select"]
    return Selected(select, cfg["select_grid"])
