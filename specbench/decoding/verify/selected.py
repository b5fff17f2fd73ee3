"""Selected-path block verification: of several siblings one is followed, and the path is verified as a chain whose
tokens were drawn from the distribution that the selection gives them. Lossless; related to arXiv 2602.16961."""

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

#: What sums of probabilities must differ by to count as different.
_SAME = 1e-6


class Selected(Verification):
    """At a node with K children, drawn from q, the child with the largest p / q is followed with probability lam, else
    the first one. It has the distribution e = (1 - lam) q + lam b, where b is that of the best of the draws: K with
    replacement, or two without. The path from the root to a leaf is verified as by `block.BlockVerification`, with e
    for q. lam may depend on all that is known above the children: `select` None takes, of 0, 1 / grid .. 1, the one
    with the largest sum min(P p, e). A rule that emits a distribution in closed form, given that its candidate is
    drawn from e, has it in the place of p, as there.
    """

    name = "selected"

    def __init__(self, select: float | None = None, grid: int = 8) -> None:
        self.select, self.grid = select, grid

    def decide(self, case: Case) -> VerificationResult:
        """The numbers of the next token's tag choose the children, from the second on."""
        p, draft, rule, u, tree = case.p, case.draft, case.rule, case.u, case.draft.tree
        if tree.width > 2 and not draft.replacement:
            raise ValueError("selection needs siblings that were drawn with replacement, or pairs")
        if case.kernels is not None and rule.name == "exact":
            return VerificationResult(*case.kernels.select(p, draft, case.numbers, self.select, self.grid, _SAME))
        node = length = torch.zeros_like(draft.tokens[:, :1])
        mass, ended = torch.ones_like(u[:, :1]), torch.zeros_like(draft.valid[:, :1])
        visited, shares = [node], []
        for depth in range(tree.height):
            here = take(p, node).squeeze(1)
            kids, tokens, q = _children(draft, node)
            goes_on = ~ended & (kids >= 0).any(1, keepdim=True)
            chooses = case.u_next[:, depth + 1 : depth + 2]
            child, e, share = self._select(here, q, mass, kids, tokens, chooses, draft.replacement)
            shares.append(torch.where(goes_on, share, torch.nan))
            token = draft.tokens.gather(1, child)
            output_distribution = rule.output_distribution(here, e, torch.full_like(length[:, 0], depth + 1))
            live, ratio = ratios(output_distribution.gather(1, token), e.gather(1, token), goes_on)
            left = (output_distribution * mass).sub_(e).clamp_min_(0)
            passes = torch.where(goes_on, passing(sum_last(left)[:, None], mass), mass)
            passed = ~ended & (u.gather(1, node) < passes)
            left = torch.where(goes_on, normalise(left, here), here)
            if depth == 0:  # the root always passes
                kept = rule.accept(here, q, tokens[:, 0], torch.ones_like(length[:, 0]))
                first, next_probs = torch.where(kids[:, 0] >= 0, kept, 0), left
            else:
                length = torch.where(passed, depth, length)
                next_probs = torch.where(passed, left, next_probs)
            ended = ~goes_on
            mass = torch.where(live, (mass * ratio).clamp_max(1), 0)
            node = torch.where(goes_on, child, node)
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
        """The child that is followed (B, 1), its distribution e (B, V) and lam (B, 1), NaN where there is no choice. p,
        q (B, V); mass, u (B, 1); kids, tokens (B, W), -1 for none."""
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
        wanted = torch.where(u < share, exists & (place == place.amax(1, keepdim=True)), exists)
        rank = torch.where(wanted, ranks, kids.shape[1]).amin(1, keepdim=True)
        return kids.gather(1, rank.clamp_max(kids.shape[1] - 1)).clamp_min(0), e, share

    def _share(self, p: Tensor, q: Tensor, best: Tensor, mass: Tensor) -> Tensor:
        """lam (B, 1)."""
        if self.select is not None:
            return torch.full_like(mass, self.select)
        weighted, more = p * mass, best - q
        shares = torch.arange(self.grid + 1, device=p.device) / self.grid
        kept = torch.stack([sum_last(torch.minimum(weighted, q + share * more)) for share in shares], 1)
        level = kept >= kept.amax(1, keepdim=True) - _SAME  # of equal ones the smallest
        return torch.where(level, shares, 1).amin(1, keepdim=True)


def _children(draft: Draft, node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The children (B, W) of nodes (B, 1), -1 for none; their tokens (B, W); and the distribution (B, V) that these
    were drawn from."""
    tree, rows = draft.tree, len(node)
    which = tree.slot.expand(rows, -1).gather(1, node)
    kids = take(tree.children.expand(rows, -1, -1), which.clamp_min(0)).squeeze(1)
    q = take(draft.probs, which.clamp_min(0)).squeeze(1)
    tokens = draft.tokens.gather(1, kids.clamp_min(0))
    if draft.sampled is not None:
        sampled = draft.sampled.gather(1, kids[:, :1].clamp_min(0))
        q = torch.where(sampled, q, one_hot(tokens[:, 0], q.shape[-1]))
    exists = (which >= 0) & draft.valid.gather(1, kids.clamp_min(0)) & (q.gather(1, tokens) > 0)
    return torch.where(exists, kids, -1), tokens, q


def best_of(q: Tensor, order: Tensor, count: Tensor, most: int) -> Tensor:
    """The distribution (B, V) of that of `count` (B, 1) <= `most` tokens drawn from q (B, V), with replacement, which
    comes last in `order` (B, V).

    With c the cumulative q up to and with a token and c' without it, b = q sum_{j < K} c^j c'^(K - 1 - j). The
    probabilities are integers, as in `sampling.draw_exactly`: their sums depend on no order of summation."""
    parts = (q * 2.0**PROBABILITY_BITS).long().gather(1, order)
    after = parts.cumsum(1)
    total = after[:, -1:].double()
    upto, before = after / total, (after - parts) / total
    power = factor = torch.ones_like(upto)
    for k in range(1, most):
        power = power * upto
        factor = torch.where(k < count, factor * before + power, factor)
    found = (parts / total * factor).float()
    return torch.empty_like(found).scatter_(1, order, found)


def best_of_pair(q: Tensor, order: Tensor) -> Tensor:
    """The distribution (B, V) of that of two different tokens, the second drawn from the rest of q (B, V), which comes
    last in `order` (B, V): a token x has q(x) (sum of q / (1 - q) over those before x + sum of q over them / (1 -
    q(x)))."""
    parts = (q.double() / q.double().sum(1, keepdim=True)).gather(1, order)
    odds = parts / (1 - parts).clamp_min(1e-30)
    before, odds_before = (x.cumsum(1) - x for x in (parts, odds))
    found = (parts * odds_before + odds * before).float()
    return torch.empty_like(found).scatter_(1, order, found)


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
