"""Block verification (arXiv 2403.10444): a chain is accepted up to the last node that passes, not up to the first that
fails. It is lossless, and no lossless verification accepts more of a chain in expectation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.rules.base import at, normalise
from specbench.decoding.verify.base import Case, Verification, VerificationResult, Verified, chain_probs
from specbench.engine.ops import sum_last, take
from specbench.errors import UsageError

#: The rules whose emitted distribution has a closed form, given p and q of a node.
RELAXED = ("exact", "band", "mentored")


class BlockVerification(Verification):
    """Node i of a chain x_1 .. x_L has the target's distribution p_i and the drafter's q_i of the next token. With

        P_0 = 1,  P_i = min(1, P_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i)),  R_i = sum_x (P_i p_i(x) - q_i(x))_+,

    node i passes if u_i < R_i / (R_i + 1 - P_i), the last one if u_L < P_L, and the root always. The last node that
    passes ends the accepted path. The next token is drawn from Norm (P_i p_i - q_i)_+, or from p_L at the last node.
    Given the tokens up to x_i, node i or a later one passes with probability P_i. For one token this is the token-wise
    test.

    For a rule that emits e_i in closed form at every node i, e_i replaces p_i at the nodes that have a draft token.
    Given the prefix, a token then has the distribution e_i of its node, as in token-wise verification.
    """

    name = "block"

    def decide(self, case: Case) -> VerificationResult:
        p, draft, rule, kernels = case.p, case.draft, case.rule, case.kernels
        exact_kernel = kernels is not None and rule.name == "exact"  # it reads the draft itself
        token, q = draft.tokens[:, 1:], draft.probs if exact_kernel else chain_probs(draft)
        if rule.name != "exact":  # nodes with a draft token emit the rule's output distribution
            live = draft.valid[:, 1:] & (at(q, token) > 0)
            before = rule.output_distribution(p[:, :-1], q, draft.tree.depth[:, 1:].expand_as(token))
            p = torch.cat([torch.where(live.unsqueeze(-1), before, p[:, :-1]), p[:, -1:]], 1)
        if kernels is not None:
            return VerificationResult(*kernels.verify_block(p, draft, case.numbers))
        before = p[:, :-1]
        live, ratio = ratios(at(before, token), at(q, token), draft.valid[:, 1:])
        mass = masses(ratio)
        left = (before * mass[:, :-1, None]).sub_(q).clamp_min_(0)
        passes = torch.cat([torch.where(live, passing(sum_last(left), mass[:, :-1]), mass[:, :-1]), mass[:, -1:]], 1)
        passed = case.u < passes
        passed[:, 0] = True
        length = last_passed(passed)
        at_end, end = take(p, length), length.clamp_max(token.shape[1] - 1)
        continues = ((length == end) & live.gather(1, end)).unsqueeze(-1)
        next_probs = torch.where(continues, normalise(take(left, end), at_end), at_end)
        path = torch.minimum(torch.arange(1, p.shape[1], device=p.device), length)
        return case.verdict(path, length, next_probs, ratio[:, 0].clamp_max(1))


def last_passed(passed: Tensor) -> Tensor:
    """The last node (B, 1) of a chain that passes, from passed (B, M)."""
    return (torch.arange(passed.shape[1], device=passed.device) * passed).amax(1, keepdim=True)


def ratios(p: Tensor, q: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Which drafted tokens exist, and their p / q, else 0, given their probabilities p and q (...)."""
    live = valid & (q > 0)
    return live, torch.where(live, (p / torch.where(live, q, 1)).clamp_max(1e30), 0)


def masses(ratio: Tensor) -> Tensor:
    """P_0 .. P_L (B, L + 1) from p / q of the tokens of a chain (B, L). Computed in logarithms, because a product of a
    few ratios can overflow."""
    return log_masses(ratio.double().log()).exp().to(ratio.dtype)


def log_masses(log_ratio: Tensor) -> Tensor:
    """log P_0 .. log P_L (B, L + 1) from log p / q (B, L): the running sum, minus its largest value so far (at least
    0)."""
    total = F.pad(log_ratio.cumsum(1), (1, 0))
    return total - total.cummax(1).values


def passing(left: Tensor, mass: Tensor) -> Tensor:
    """The probability R / (R + 1 - P) with which a node passes, with 0 / 0 = 1. left, mass (...): R and P."""
    total = left + (1 - mass)
    return torch.where(total == 0, 1, left / total)


@dataclass(frozen=True)
class Choice:
    """conf/verification/block.yaml."""

    def build(self, verified: Verified) -> Verification:
        verified.check_exact("block", RELAXED)
        if not verified.shape.tree.is_chain:
            raise UsageError(
                f"verification=block needs a chain, and drafter {verified.drafter} drafts a tree: use"
                " verification=traversal, or a drafter of chains (draft_model, eagle, eagle3)"
            )
        return BlockVerification()
