"""The statistics of decoding images of continuous tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class ContinuousTrace:
    """Per-step statistics. accepted, offered, first, start, reach (B, L), by step, zero beyond `steps`: draft tokens
    accepted, draft tokens that could be verified, the probability of accepting the first, its index in the order of
    generation, and how many were verified. Of several drafts they are those of the one that was followed.

    order (B, L): the positions of the tokens in the order of generation. kept, verified (B, L) bool, in that order:
    whether a token was an accepted draft, and whether a draft was verified for it. proposals: of every token after a
    rejection, the number of the target's proposals, by image; fallbacks (B,): those for which they did not suffice.
    draft_s: seconds spent on drafting; made (B,): tokens drafted, including those that were never verified.
    """

    accepted: Tensor
    offered: Tensor
    first: Tensor
    start: Tensor
    reach: Tensor
    order: Tensor
    kept: Tensor
    verified: Tensor
    proposals: list[list[int]]
    fallbacks: Tensor
    draft_s: float
    made: Tensor
