"""Segment verification (SJD-SV, arXiv 2609.13245): runs of rising probability are kept or cut as a whole. Not lossless.

The paper itself was not available; this follows a second-hand account. Our own choices are named in `Segment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.rules.base import at, normalise
from specbench.decoding.shape import DraftShape
from specbench.decoding.verify.base import Case, Verification, VerificationResult, chain_probs
from specbench.decoding.verify.block import ratios
from specbench.engine.ops import take
from specbench.errors import UsageError


class Segment(Verification):
    """Token x_i of a chain has probability t_i = p_i(x_i) and was drawn with probability q_i(x_i). The chain is split
    into maximal runs in which t_i does not fall. For the part b .. e of a run that begins at b, only g .. e is tested,
    where g is the last position with t_g + .. + t_e >= alpha (t_b + .. + t_e). The part is kept if

        u < prod_{i = g .. e} t_i / q_i(x_i),

    and then all of it is kept, including b .. g - 1. If a run is not kept as a whole, the accepted path ends with the
    longest part of it that is kept, if any, and the next token comes from Norm([p - q]_+). Own choices: the parts of a
    run share the number u of its first token, every part has its own g, and the tokens before g are not tested at all,
    even if the target never gives them.

    The run depends on t, so the test is not lossless, except for a chain of one token, where it is the token-wise test.
    """

    name = "segment"

    def __init__(self, alpha: float = 0.8) -> None:
        self.alpha = alpha

    def decide(self, case: Case) -> VerificationResult:
        p, draft = case.p, case.draft
        token, q = draft.tokens[:, 1:], chain_probs(draft)
        t = at(p[:, :-1], token)
        exists, ratio = ratios(t, at(q, token), draft.valid[:, 1:])
        exists = exists.long().cumprod(1).bool()
        chance, begin, end = parts(t, ratio, exists, self.alpha)
        kept = exists & (case.u[:, 1:].gather(1, begin) < chance)
        index = torch.arange(1, p.shape[1], device=p.device)  # the numbers of the nodes
        cut = torch.where(end & ~kept, index, p.shape[1]).amin(1, keepdim=True)  # the end of the first run that is cut
        length = torch.where(kept & (index <= cut), index, 0).amax(
            1, keepdim=True
        )  # earlier runs are kept to their end
        whole = exists.sum(1, keepdim=True)
        at_end, end_node = take(p, length), length.clamp_max(p.shape[1] - 2)
        residual = normalise((at_end - take(q, end_node)).clamp_min(0), at_end)
        next_probs = torch.where((length < whole).unsqueeze(-1), residual, at_end)
        first = torch.where(exists & (begin == 0), chance, 0).amax(1)  # of the part that contains the first token
        return case.verdict(torch.minimum(index, length), length, next_probs, first)


def parts(t: Tensor, ratio: Tensor, exists: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """For the part of a run that ends at each token of a chain: the probability (B, L) with which it is kept, the index
    (B, L) of the run's first token, and whether the run ends there (B, L) bool. t, ratio (B, L): the target's
    probability of each token, and its ratio to the draft's; exists (B, L) bool: false after the end of the chain."""
    index = torch.arange(t.shape[1], device=t.device)
    falls = torch.cat([torch.ones_like(exists[:, :1]), t[:, 1:] < t[:, :-1]], 1)
    begin = torch.where(falls, index, 0).cummax(1).values
    following = torch.cat([exists[:, 1:] & ~falls[:, 1:], torch.zeros_like(exists[:, :1])], 1)
    inside = (index <= index[:, None]) & (index >= begin.unsqueeze(-1))  # (B, end of the part, token)
    mass = torch.where(inside, t.unsqueeze(1), 0).flip(-1).cumsum(-1).flip(-1)  # from a token to the part's end
    enough = inside & (mass >= alpha * mass.gather(2, begin.unsqueeze(-1)))
    tested = inside & (index >= torch.where(enough, index, 0).amax(-1, keepdim=True))
    chance = torch.where(tested, ratio.unsqueeze(1).double(), 1).prod(-1).clamp_max(1)  # t rises: 0 is never times inf
    return chance.to(t.dtype), begin, exists & ~following


def build(cfg: Mapping[str, Any], shape: DraftShape) -> Verification:
    if cfg["rule"] != "exact":
        raise UsageError(
            f"verification=segment is a rule by itself and combines only with rule exact, and the method has rule"
            f" {cfg['rule']}: use verification=token, or rule=exact"
        )
    if not shape.tree.is_chain:
        raise UsageError(
            f"verification=segment needs a chain, and drafter {cfg['drafter']} drafts a tree: use verification=token,"
            " or a drafter of chains (sjd with width=1, draft_model, eagle, eagle3)"
        )
    if cfg["alpha"] > 1:
        raise UsageError(
            f"verification=segment tests at most a whole run: alpha must be 1 or less (got {cfg['alpha']})"
        )
    return Segment(cfg["alpha"])
