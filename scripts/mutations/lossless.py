"""Mistakes in block, traversal and selected verification, each of which has been made somewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mutations import Mutant, Patches, mutant
from mutations.discrete import sort_siblings, verified
from specbench.decoding.rules.base import at, normalise
from specbench.decoding.verify import Case, block, traversal
from specbench.decoding.verify.block import BlockVerification
from specbench.decoding.verify.selected import Selected
from specbench.engine.ops import take

MUTANTS: list[Mutant] = []
_mutant = partial(mutant, MUTANTS)

# --- chains -----------------------------------------------------------------------------------------------------------


def _products(ratio: Tensor) -> Tensor:
    """1 and the products (B, L + 1) of the first ratios (B, L)."""
    return F.pad(ratio.double().cumprod(1).float(), (1, 0), value=1.0)


@_mutant("eagle_block", "the running product of ratios is not capped at 1")
def block_without_a_cap(patch: Patches) -> None:
    patch.set(block, "masses", _products)


@_mutant("eagle_block", "the mass of a block is the product of min(1, p / q)")
def block_of_minima(patch: Patches) -> None:
    patch.set(block, "masses", lambda ratio: _products(ratio.clamp_max(1)))


@_mutant("eagle_block", "every node of a block passes with its mass P, not with R / (R + 1 - P)")
def block_passes_with_its_mass(patch: Patches) -> None:
    patch.set(block, "passing", lambda left, mass: mass)


@_mutant("eagle_block", "the last token of a block passes with min(1, p / q), not with P")
def block_tests_the_last_token_alone(patch: Patches) -> None:
    patch.wrap(block, "masses", lambda f, ratio: torch.cat([f(ratio)[:, :-1], ratio[:, -1:].clamp_max(1)], 1))


@_mutant("eagle_block", "a block ends before the first node that fails, not at the last one that passes")
def block_ends_at_the_first_failure(patch: Patches) -> None:
    patch.set(block, "last_passed", lambda passed: passed.long().cumprod(1).sum(1, keepdim=True) - 1)


@_mutant("eagle_block", "the token after a block comes from Norm([p - q]_+), not from Norm([P p - q]_+)")
def block_with_the_residual_of_a_token(patch: Patches) -> None:
    def around(original: Any, case: Case, path: Tensor, length: Tensor, probs: Tensor, first: Tensor) -> Any:
        last = case.draft.tree.height
        here, end = take(case.p, length), length.clamp_max(last - 1)
        residual = normalise((here - take(case.draft.probs, end)).clamp_min(0), here)
        return original(case, path, length, torch.where((length < last).unsqueeze(-1), residual, probs), first)

    patch.wrap(Case, "verdict", around)


@_mutant("eagle_block", "the nodes of a chain share one random number")
def block_of_one_number(patch: Patches) -> None:
    def around(original: Any, self: Any, case: Case) -> Any:
        nodes = case.numbers[:, :1, 1:2].expand_as(case.numbers[:, :1])
        return original(self, replace(case, numbers=torch.cat([nodes, case.numbers[:, 1:]], 1)))

    patch.wrap(BlockVerification, "decide", around)


# --- trees ------------------------------------------------------------------------------------------------------------


@_mutant("eagle_traversal", "every sibling is entered with the mass that it would have as the first one")
def traversal_of_first_masses(patch: Patches) -> None:
    first: list[Tensor] = []  # p, q and mass before the first sibling; p after the one tried last

    def around(original: Any, p: Tensor, q: Tensor, mass: Tensor, token: Tensor, exists: Tensor) -> Any:
        if not first or p is not first[3]:
            first[:] = p, q, mass, p
        live, entered, left, remains = original(p, q, mass, token, exists)
        entered = original(*first[:3], token, exists)[1]
        first[3] = left
        return live, entered, left, remains

    patch.wrap(traversal, "tried", around)


@_mutant("eagle_traversal", "the mass of a node stays as it is when a child is rejected")
def traversal_keeps_its_mass(patch: Patches) -> None:
    patch.set(traversal, "passing", lambda left, mass: mass)


@_mutant("eagle_traversal", "the mass with which a child is entered is not capped at 1")
def traversal_without_a_cap(patch: Patches) -> None:
    def around(original: Any, p: Tensor, q: Tensor, mass: Tensor, token: Tensor, exists: Tensor) -> Any:
        live, _, *rest = original(p, q, mass, token, exists)
        return live, torch.where(live, mass * at(p, token) / at(q, token), 0), *rest

    patch.wrap(traversal, "tried", around)


@_mutant("eagle_traversal", "after a rejection the mass is R over the draft's mass that is left")
def traversal_divides_by_the_draft(patch: Patches) -> None:
    def around(original: Any, p: Tensor, q: Tensor, mass: Tensor, token: Tensor, exists: Tensor) -> Any:
        live, entered, left, _ = original(p, q, mass, token, exists)
        kept = (p * mass.unsqueeze(-1) - q).clamp_min(0).sum(-1)
        share = (kept / (1 - at(q, token)).clamp_min(1e-9)).clamp_max(1)
        return live, entered, left, torch.where(live, share, mass)

    patch.wrap(traversal, "tried", around)


@_mutant("eagle_traversal", "the token after an inner node comes from the target's distribution, not from what is left")
def traversal_ends_with_the_target(patch: Patches) -> None:
    patch.set(traversal, "remaining", lambda p, left, slot, node: take(p, node))


@_mutant("eagle_traversal", "the q of the next sibling still holds the rejected one")
def traversal_keeps_the_rejected_token(patch: Patches) -> None:
    patch.set(traversal, "without", lambda q, rejected: q)


@_mutant("eagle_traversal", "the q of the next sibling is not renormalised")
def traversal_does_not_renormalise(patch: Patches) -> None:
    patch.set(traversal, "without", lambda q, rejected: q.scatter(-1, rejected.unsqueeze(-1), 0.0))


@_mutant("eagle_traversal", "q is restricted to the siblings that were drafted")
def traversal_of_the_drafted_tokens(patch: Patches) -> None:
    def restricted(p: Tensor, draft: Any) -> tuple[Tensor, Any]:
        children = draft.tree.children.expand(len(p), -1, -1)
        tokens = draft.tokens.gather(1, children.clamp_min(0).flatten(1)).view_as(children)
        drafted = torch.zeros_like(draft.probs).scatter_add_(-1, tokens, (children >= 0).float()).clamp_max(1)
        return p, replace(draft, probs=normalise(draft.probs * drafted, draft.probs))

    verified(patch, restricted)


@_mutant("eagle_traversal", "siblings are tried by falling probability, not in the order in which they were drawn")
def traversal_of_sorted_siblings(patch: Patches) -> None:
    sort_siblings(patch)


@_mutant("eagle_selected", "the token that is followed is tested against q, as if it had not been selected")
def selection_is_forgotten(patch: Patches) -> None:
    def around(original: Any, self: Any, p: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        child, _, share = original(self, p, q, *rest)
        return child, q, share

    patch.wrap(Selected, "_select", around)


@_mutant("eagle_selected", "the sibling with the largest p is followed, not that with the largest p / q")
def selection_by_probability(patch: Patches) -> None:
    def around(original: Any, self: Any, *given: Any) -> tuple[Tensor, ...]:
        p, _, _, kids, tokens, *_ = given
        best = torch.where(kids >= 0, p.gather(1, tokens), -1.0).argmax(1, keepdim=True)
        _, e, share = original(self, *given)
        return kids.gather(1, best).clamp_min(0), e, share

    patch.wrap(Selected, "_select", around)
