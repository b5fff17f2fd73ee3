"""Verification of several chains from one root (PathSpec, arXiv 2606.10492)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.rules.base import at, normalise, ratio
from specbench.decoding.verify.base import Case, Verification, VerificationResult, Verified
from specbench.decoding.verify.token import TokenWise
from specbench.engine.ops import sum_last, take
from specbench.errors import UsageError


class Longest(Verification):
    """Each of K chains is verified alone, with its own random numbers, and the longest accepted one is committed, the
    first at a tie, with its residual after the rejection. This is what the released code does. It is not lossless: the
    chain is chosen by what it accepted.

    delta: relaxes the acceptance of a chain's token x at a node with distribution p (PathRelax) to min(1, (p(x) + delta
    / (K - 1) sum of p(y)) / q(x)), over the tokens y of the other chains at its depth. 0: no relaxation.
    """

    name = "chains"

    def __init__(self, delta: float = 0.0) -> None:
        self.delta = delta

    def decide(self, case: Case) -> VerificationResult:
        p, draft, tree = case.p, case.draft, case.draft.tree
        assert draft.node_probs is not None
        num_chains, parent = tree.width, tree.parent[:, 1:].expand(len(p), -1)
        token, q = draft.tokens[:, 1:], draft.node_probs
        chance = ratio(self._mass(take(p, parent), token, num_chains), at(q, token))
        accepted = draft.valid[:, 1:] & (case.u[:, 1:] < chance)
        lengths = accepted.unflatten(1, (-1, num_chains)).long().cumprod(1).sum(1)
        chain = torch.arange(num_chains, device=p.device)
        best = (lengths * num_chains - chain).argmax(1, keepdim=True)
        length = lengths.gather(1, best)
        depth = torch.arange(tree.height, device=p.device)
        nodes = 1 + depth * num_chains + best
        path = torch.where(length > 0, nodes.gather(1, torch.minimum(depth, length - 1).clamp_min(0)), 0)
        at_end, node = take(p, path[:, -1:]), nodes.gather(1, length.clamp_max(tree.height - 1))
        rejected = (length < tree.height) & draft.valid.gather(1, node)
        left = normalise((at_end - take(q, node - 1)).clamp_min(0), at_end)
        next_probs = torch.where(rejected.unsqueeze(-1), left, at_end)
        return case.verdict(path, length, next_probs, torch.where(draft.valid[:, 1], chance[:, 0], 0.0))

    def _mass(self, p: Tensor, token: Tensor, num_chains: int) -> Tensor:
        """The probabilities (B, K L) that are compared with the drafter's, for tokens (B, K L) at nodes with
        distributions p (B, K L, V)."""
        own = at(p, token)
        if not self.delta:
            return own
        of_depth = token.unflatten(1, (-1, num_chains)).repeat_interleave(num_chains, 1)
        return own + self.delta / (num_chains - 1) * (sum_last(p.gather(-1, of_depth)) - own)


@dataclass(frozen=True)
class Choice:
    """The parameters of conf/verification/chains.yaml."""

    select: str
    path_delta: float

    def build(self, verified: Verified) -> Verification:
        verified.check_rule("chains")
        if not verified.shape.independent:
            raise UsageError(
                f"verification=chains needs several chains from one root, and drafter {verified.drafter} does not draft"
                " them: use drafter=pathspec, or verification=token"
            )
        if self.select == "longest":
            return Longest(self.path_delta)
        if self.path_delta:
            raise UsageError("path_delta needs select=longest: add it, or leave path_delta= out")
        return TokenWise()
