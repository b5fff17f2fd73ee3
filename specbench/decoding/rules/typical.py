"""Typical acceptance, the rule of Medusa (Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.rules.base import Rule, Setting, Threshold, at
from specbench.engine.ops import sum_last


class Typical(Rule):
    """Accept x where r(x) > min(epsilon, alpha exp(-H(r))), H the entropy in nats; of these paths the longest
    counts, and the next token has the target's distribution.

    The drafter's distribution is not used. A token of probability 1 is always accepted, so at temperature 0 a token is
    accepted exactly where it is the arg max.
    """

    name = "typical"
    deterministic = True
    residual_by_token = False

    def __init__(self, epsilon: float = 0.09, alpha: float = 0.3) -> None:
        self.epsilon, self.alpha = epsilon, alpha

    def relaxation(self) -> Threshold:
        return Threshold(self.epsilon, self.alpha)

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        own, least = at(r, token), self._least(r)
        return ((own > least) | (own >= 1)).to(r.dtype)

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """As of `Rule`."""
        return ((r > self._least(r).unsqueeze(-1)) | (r >= 1)).to(r.dtype)

    def _least(self, r: Tensor) -> Tensor:
        """The probability (...) that a token must exceed."""
        entropy = sum_last(torch.special.entr(r))
        return (self.alpha * (-entropy).exp()).clamp_max(self.epsilon)

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return r


def build(cfg: Mapping[str, Any], setting: Setting) -> Rule:
    return Typical(cfg["epsilon"], cfg["alpha"])
