"""What a rule is, and the arithmetic of laws that all of them share.

Laws are (..., V) float32, tokens and depths (...) int64; depth counts drafted places from 1. A candidate that was
chosen and not drawn comes with a point mass as q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specbench.decoding.rules.proximity import neighbours
from specbench.engine.ops import sum_last


class Rule(Protocol):
    """A rule answers two questions about a candidate x of a node whose law (so far) is r and which was drawn from q:
    with which probability is it kept, and which law goes on when it is not.

    `certain` rules decide without randomness and leave the law as it is: of the paths that they keep, the longest is
    taken. With `soft`, and at temperature 0, a rule judges by the law before the arg max is taken.
    """

    name: str
    certain: bool
    soft: bool

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Probability (...) of keeping `token`."""
        ...

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """The law (..., V), normalised, from which to go on after `token` was rejected."""
        ...


@dataclass(frozen=True)
class Setting:
    """What a rule may need to know of the method around it: the height of the drafts, the target's codebook (V, d),
    whether decoding is greedy, and who computes the neighbour tables of a codebook (see `proximity.neighbours`)."""

    height: int
    codebook: Callable[[], Tensor]
    greedy: bool = False
    neighbours: Callable[[Tensor, int, str], Tensor] = neighbours


def at(law: Tensor, token: Tensor) -> Tensor:
    """law[..., token], (...)."""
    return law.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def normalise(mass: Tensor, fallback: Tensor) -> Tensor:
    """Norm(mass); where nothing is left (a rejection that has probability zero), `fallback`."""
    left = sum_last(mass).unsqueeze(-1)
    return torch.where(left > 1e-30, mass / left.clamp_min(1e-30), fallback)


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) with 0/0 = 1 (ERRATA, Cool-SD 6)."""
    return torch.where(q > 0, p / q, torch.ones_like(q)).clamp_max(1.0)
