"""Thresholds that depend on the entropy of the target's distribution: Medusa's typical acceptance, and entropy-aware
acceptance for SJD."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.special import entr

from specbench.decoding.rules.base import Rule, RuleContext, Threshold, at, normalise
from specbench.engine.ops import sum_last


class Typical(Rule):
    """Typical acceptance, the rule of Medusa (Cai et al. 2024): accept x if r(x) > min(epsilon, alpha exp(-H(r))),
    where H is the entropy in nats. The longest accepted path counts, and the next token has the target's distribution.

    The drafter's distribution is not used. A token of probability 1 is always accepted. So at temperature 0 a token is
    accepted exactly if it is the arg max.
    """

    name = "typical"
    deterministic = True
    residual_by_token = False

    def __init__(self, epsilon: float = 0.09, alpha: float = 0.3) -> None:
        self.epsilon, self.alpha = epsilon, alpha

    def relaxation(self) -> Threshold:
        return Threshold(self.epsilon, self.alpha)

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        probability, least = at(r, token), self._least(r)
        return ((probability > least) | (probability >= 1)).to(r.dtype)

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return ((r > self._least(r).unsqueeze(-1)) | (r >= 1)).to(r.dtype)

    def _least(self, r: Tensor) -> Tensor:
        """The probability (...) that a token must exceed."""
        entropy = sum_last(entr(r))
        return (self.alpha * (-entropy).exp()).clamp_max(self.epsilon)

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return r


class EntropyAware(Rule):
    """Entropy-aware acceptance (arXiv 2510.09012), designed for SJD, strict where the target is uncertain: accept x if
    r(x) / q(x) > (e / pivot) (0.5 + (u - 0.5) (1 - e / calm)), where u is uniform and e is the entropy of r in nats.
    After a rejection continue from Norm([r - q]_+), as SJD does.

    The paper prints a factor 1 - 16 e, which is negative for almost any e. It must mean 1 - e / 16, so `calm` is 16.
    The paper does not say which residual follows. At an entropy of `calm` and above the threshold is not random; a
    vocabulary of 9 million tokens has that entropy.
    """

    name = "entropy"
    residual_by_token = False

    def __init__(self, pivot: float = 8.0, calm: float = 16.0) -> None:
        self.pivot, self.calm = pivot, calm

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return self._chance(at(r, token), at(q, token), sum_last(entr(r)))

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return self._chance(r, q, sum_last(entr(r)).unsqueeze(-1))

    def _chance(self, p: Tensor, q: Tensor, entropy: Tensor) -> Tensor:
        """For tokens with probabilities p under the target and q under the drafter: the share of u below the value at
        which the threshold is p / q. The formula is multiplied out, because q and the entropy may be zero."""
        spread = (1 - entropy / self.calm).clamp_min(1e-6)
        scale = q * entropy.clamp_min(0)
        share = (self.pivot * p - 0.5 * scale) / (scale * spread) + 0.5
        return share.nan_to_num(1.0, 1.0, 0.0).clamp(0, 1) * (p > 0)

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return normalise((r - q).clamp_min(0), r)


@dataclass(frozen=True)
class TypicalRule:
    """The parameters of conf/rule/typical.yaml."""

    epsilon: float
    alpha: float

    def build(self, context: RuleContext) -> Rule:
        return Typical(self.epsilon, self.alpha)


@dataclass(frozen=True)
class EntropyRule:
    """The parameters of conf/rule/entropy.yaml."""

    pivot: float
    calm: float

    def build(self, context: RuleContext) -> Rule:
        return EntropyAware(self.pivot, self.calm)
