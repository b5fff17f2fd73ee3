"""The draft's distribution, clipped to a band around the target's. At a given acceptance no other emitted distribution
is nearer to the target's, whatever f-divergence measures it (docs/band.md).

The emitted distribution is e = clip(q, low p, high p), low <= 1 <= high, with sum e = 1. A token drawn from q is
accepted with min(1, high p / q), and after a rejection a token is drawn from Norm[low p - q]_+. Together these emit e.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.rules.base import Relaxation, Rule, RuleContext, at, normalise, ratio
from specbench.decoding.shape import DraftShape
from specbench.engine.ops import sum_last
from specbench.errors import UsageError

#: The largest log(high / low). At this ratio nearly all rejected tokens are tokens that the target cannot give.
_MOST = 40.0
#: The relative precision of `low`: float32's.
_PRECISION = 6e-8
#: q / p of a token that the target cannot give; no `high` is as large.
_NEVER = 1e30


class _Clipped(Rule):
    """A rule that emits clip(q, low p, high p)."""

    residual_by_token = False

    def limits(self, r: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """low and high (...) of the nodes whose candidates at `depth` were drawn from q."""
        raise NotImplementedError

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return _accept(r, q, token, self.limits(r, q, depth)[1])

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return ratio(self.limits(r, q, depth)[1].unsqueeze(-1) * r, q)

    def output_distribution(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        low, high = self.limits(p, q, depth)
        return q.clamp(low.unsqueeze(-1) * p, high.unsqueeze(-1) * p)

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return _residual(r, q, self.limits(r, q, depth)[0])

    def accept_and_residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.limits(r, q, depth)
        return _accept(r, q, token, high), _residual(r, q, low)


def _accept(r: Tensor, q: Tensor, token: Tensor, high: Tensor) -> Tensor:
    return ratio(high * at(r, token), at(q, token))


def _residual(r: Tensor, q: Tensor, low: Tensor) -> Tensor:
    return normalise((low.unsqueeze(-1) * r - q).clamp_min(0), r)


class Band(_Clipped):
    """Depth i has its own s_i = high / low = exp(strength (1 + decay + .. + decay^(L - i))). Keeping an early token
    saves more, because the tokens after it can then be kept, too. strength 0 is exact speculative sampling. A list of
    decays has one for each depth except the last: log s_i = strength + decay_i log s_{i+1}."""

    name = "band"
    constants = ("spread",)

    def __init__(self, strength: float, decay: float | Sequence[float], length: int) -> None:
        """length: L, the height of the drafts; deeper positions use s_L."""
        exponents = [min(_MOST, x) for x in log_ratios(strength, decay, length)]
        self.halvings = math.ceil(max(0.0, math.log2(max(exponents) / _PRECISION))) if strength else 0
        self.spread = torch.tensor([1.0, *map(math.exp, exponents)])

    def relaxation(self) -> Relaxation:
        return Relaxation("band", self.spread)

    def limits(self, r: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        spread = self.spread[depth.clamp_max(len(self.spread) - 1)]
        low = lower_limit(r, q, spread, self.halvings)
        return low, spread * low


def log_ratios(strength: float, decay: float | Sequence[float], length: int) -> list[float]:
    """log s_1 .. log s_L of a `Band`. UsageError for a list of decays whose length is not L - 1."""
    if isinstance(decay, float | int):
        return [strength * sum(decay**j for j in range(length - i + 1)) for i in range(1, length + 1)]
    if len(decay) != length - 1:
        raise UsageError(
            f"a list of decays has one for each depth of a draft except the last, and a draft has {length} depths: give"
            f" {length - 1} numbers instead of {len(decay)}, or one number for all depths"
        )
    values = [strength]
    for factor in reversed(decay):
        values.insert(0, strength + factor * values[0])
    return values


def lower_limit(p: Tensor, q: Tensor, spread: Tensor, halvings: int) -> Tensor:
    """The root (...) of sum clip(q, low p, spread low p) = 1 in low, by bisection from [1 / spread, 1]; the sum grows
    with low. spread (...)."""
    spread = spread.unsqueeze(-1)
    least, most = 1 / spread, torch.ones_like(spread)
    for _ in range(halvings):
        low = (least * most).sqrt()
        raised = low * p
        enough = sum_last(q.clamp(raised, spread * raised)).unsqueeze(-1) >= 1
        least, most = torch.where(enough, least, low), torch.where(enough, low, most)
    return most.squeeze(-1)


class Mentored(_Clipped):
    """Mentored decoding (V. Tran-Thien 2023): at every node the widest band with KL(e | p) <= budget, in nats.

    If the tokens are sorted by q / p, a band raises the first ones to low p and lowers the last ones to high p; it
    rejects as much mass as it raises. So sums over the sorted tokens give `high` and the divergence for any `low`, and
    both grow as `low` falls from 1.
    """

    name = "mentored"
    constants = ("budgets",)

    def __init__(self, budget: float) -> None:
        self.budget, self.halvings = budget, math.ceil(-math.log2(_PRECISION)) if budget else 0
        self.budgets = torch.tensor([budget])

    def relaxation(self) -> Relaxation:
        return Relaxation("budget", self.budgets)

    def limits(self, r: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        nodes = SortedNodes(r, q)
        least, most = nodes.ratios[..., :1].clamp_max(1), torch.ones_like(r[..., :1])
        for _ in range(self.halvings):
            low = (least + most) / 2
            inside = nodes.band(low)[1] <= self.budget
            least, most = torch.where(inside, least, low), torch.where(inside, low, most)
        high = torch.where(most < 1, nodes.band(most)[0], 1.0)
        return most.squeeze(-1), high.squeeze(-1)


def least_divergence(p: Tensor, q: Tensor, accepted: Tensor) -> Tensor:
    """The least KL(e | p) (...) with which a node can accept a token drawn from q with probability `accepted` (...). It
    is the divergence of the band that accepts as much: 0 for the acceptance of the exact rule, and at most that of the
    band which accepts everything that the target can give."""
    return SortedNodes(p, q).divergence((1 - accepted).unsqueeze(-1)).squeeze(-1).clamp_min(0)


class SortedNodes:
    """Nodes with their tokens sorted by q / p.

    ratios (..., V): q / p.
    p_below, q_below, logs (..., V + 1): sums of p, q and q log(q / p) over the first tokens.
    p_above, q_above: sums of p and q over the tokens from an index on.
    rejected (..., V): the rejected mass if `high` is a token's ratio, in reverse order, so that it ascends.
    never (..., 1): mass of q where the target has none.
    """

    def __init__(self, p: Tensor, q: Tensor) -> None:
        ratios, order = torch.where(p > 0, (q / p).clamp_max(_NEVER), _NEVER).sort(-1)
        p, q = p.gather(-1, order), q.gather(-1, order)
        self.ratios, self.p_below, self.q_below = ratios, _below(p), _below(q)
        self.logs = _below(torch.xlogy(q, ratios))
        self.p_above, self.q_above = (_below(x.flip(-1)).flip(-1) for x in (p, q))
        lowered = self.q_above[..., 1:] - ratios * self.p_above[..., 1:]
        self.never = sum_last(torch.where(p > 0, 0.0, q)).unsqueeze(-1)
        self.rejected = torch.where(ratios < _NEVER, lowered, -1.0).flip(-1)

    def band(self, low: Tensor) -> tuple[Tensor, Tensor]:
        """`high` and KL(e | p), (..., 1) each, of the bands with this `low`. The divergence is infinite if a band would
        accept a token that the target cannot give."""
        first = torch.searchsorted(self.ratios, low)
        return self._band(first, low, low * self.p_below.gather(-1, first) - self.q_below.gather(-1, first))

    def divergence(self, mass: Tensor) -> Tensor:
        """KL(e | p) (..., 1) of the bands that reject this mass (..., 1), limited to what bands can reject."""
        unit = torch.ones_like(mass)
        last = torch.searchsorted(self.ratios, unit)
        most = self.p_below.gather(-1, last) - self.q_below.gather(-1, last)  # the exact rule's rejected mass
        mass = torch.maximum(torch.minimum(mass, most), self.never)
        raised = self.ratios * self.p_below[..., :-1] - self.q_below[..., :-1]  # if `low` is the token's ratio
        first = torch.searchsorted(raised, mass)
        low = (mass + self.q_below.gather(-1, first)) / self.p_below.gather(-1, first).clamp_min(1e-30)
        return self._band(first, torch.minimum(low, unit), mass)[1]

    def _band(self, first: Tensor, low: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """`band`, for bands that raise the first tokens to low p and so reject `mass`."""
        p_raised = self.p_below.gather(-1, first)
        last = self.ratios.shape[-1] - torch.searchsorted(self.rejected, mass, right=True)
        lowered = self.q_above.gather(-1, last) - mass
        high = (lowered / self.p_above.gather(-1, last).clamp_min(1e-30)).clamp(1, _NEVER)
        unchanged = self.logs.gather(-1, last) - self.logs.gather(-1, first)
        divergence = torch.xlogy(low * p_raised, low) + unchanged + lowered * high.log()
        return high, torch.where(mass >= self.never, divergence, torch.inf)


def _below(x: Tensor) -> Tensor:
    """Sums (..., V + 1) of the first 0, 1, .. entries of x (..., V)."""
    return F.pad(x.cumsum(-1), (1, 0))


@dataclass(frozen=True)
class BandRule:
    """The parameters of conf/rule/band.yaml."""

    strength: float
    decay: float | list[float]

    def check(self, shape: DraftShape) -> None:
        """UsageError for a list of decays that does not fit the height of the drafts, which is the schedule's L. Also
        for drafts without fixed depths."""
        log_ratios(self.strength, self.decay, shape.schedule_length("band"))

    def build(self, context: RuleContext) -> Rule:
        return Band(self.strength, self.decay, max(1, context.height))


@dataclass(frozen=True)
class MentoredRule:
    """The parameters of conf/rule/mentored.yaml."""

    budget: float

    def build(self, context: RuleContext) -> Rule:
        return Mentored(self.budget)
