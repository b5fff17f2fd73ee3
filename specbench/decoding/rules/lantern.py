"""LANTERN and LANTERN++: the mass of a token's neighbours in the codebook counts towards its acceptance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.rules.base import Neighbours, Relaxation, Rule, RuleContext, Threshold, at, normalise, ratio
from specbench.engine import ops

#: Probabilities in a block of distributions when the acceptance of every token is computed; a block fits in a cache.
_BLOCK = 1 << 18
#: Neighbours whose masses are added at once where shapes may depend on values: the number of tokens whose neighbourhood
#: ends within a group does. One by one is faster if there are few.
_GROUP, _FEW = 32, 64

#: Values of `resample` that follow the released code.
_RELEASED = ("released", "released_p")


class Lantern(Rule):
    """Accept x with min(1, sum over A of r / q(x)), where A is x and its nearest neighbours, as many as a bound allows
    (LANTERN, Section 3.3 and Algorithm 1; LANTERN++ as in Cool-SD, Eqs. 3 to 6).

    `bound` limits the mass s that moves from the neighbours to x: "tvd" s < delta; "jsd" the Jensen-Shannon divergence
    (nats) of the distribution before and after < delta; "total" s <= (lam - 1) r(x); "neighbours" s < lam r(x) (ERRATA,
    LANTERN 2).

    `resample` is the distribution after a rejection. "paper": Norm([r' - q]_+), where r' is the distribution after the
    mass moved. "optimal": Cool-SD's Eq. 10, which is Norm([r - q]_+) for every rule that accepts at least as much as
    the exact rule. "released": what LANTERN's code does on LlamaGen and Anole (ERRATA, LANTERN 3; golden
    lantern_acceptance). There "tvd" means s <= delta. If any neighbour is inside the bound, even one without mass, the
    k + 1 nearest are cleared before [r - q]_+: in r, together with x, if x is deterministic (q is a point mass); in q,
    without renormalising it, if x was sampled. "released_p": what the code does on Lumina-mGPT, where they are cleared
    in r in both cases.

    With `greedy` a token is accepted if it is the arg max of r'. (In the released code the neighbours keep their mass.
    It is then less than the mass of x, so it decides nothing.)
    """

    constants = ("near",)

    def __init__(
        self, name: str, near: Tensor, k: int, bound: str, limit: float, resample: str = "paper", greedy: bool = False
    ) -> None:
        """near (V, at least k) int64: the neighbours of every code, nearest first; the first k may count; limit: delta
        or lam."""
        self.name, self.bound, self.limit, self.resample = name, bound, limit, resample
        self.near, self.k = (
            near[:, : k + 1],
            min(k, near.shape[1]),
        )  # the released code clears one neighbour more than it counts
        self.deterministic = self.uses_pre_argmax_probs = greedy
        self.residual_by_token = not greedy and resample != "optimal"

    def relaxation(self) -> Relaxation | Threshold:
        measure, limit = {"tvd": "mass", "jsd": "divergence"}.get(self.bound, "share"), self.limit
        if self.bound == "total":  # the total includes x itself
            limit -= 1
        closed = self.bound == "total" or (self.bound == "tvd" and self.resample in _RELEASED)
        neighbours = Neighbours(self.near, self.k, measure, limit, closed)
        if self.deterministic:
            return Threshold(neighbours=neighbours)
        return Relaxation("vanilla" if self.resample == "optimal" else self.resample, neighbours=neighbours)

    def moved(self, r: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The neighbours of x (..., k), the mass of each that moves to x (..., k), all or nothing, and which of them
        count."""
        near = self.near[token][..., : self.k]
        mass = r.gather(-1, near)
        inside = self._counts(mass.cumsum(-1), at(r, token).unsqueeze(-1))
        inside &= near[..., :1] != token.unsqueeze(-1)  # a token without a code has no neighbour except itself
        return near, mass * inside, inside

    def _counts(self, running: Tensor, own_mass: Tensor) -> Tensor:
        """Whether a neighbour is inside the bound: it and all nearer ones have mass `running`, and x has `own_mass`."""
        if self.bound == "tvd":
            return running <= self.limit if self.resample in _RELEASED else running < self.limit
        if self.bound == "jsd":
            return _divergence(own_mass, running) < self.limit
        return running <= (self.limit - 1) * own_mass if self.bound == "total" else running < self.limit * own_mass

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        near, gain, _ = self.moved(r, token)
        if self.deterministic:
            shifted = self._shifted(r, token, near, gain)
            return (at(shifted, token) >= shifted.amax(-1)).to(r.dtype)
        return ratio(at(r, token) + gain.sum(-1), at(q, token))

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        if self.deterministic:
            return r
        if self.resample == "optimal":
            return normalise((r - q).clamp_min(0), r)
        near, gain, inside = self.moved(r, token)
        if self.resample == "paper":
            return normalise((self._shifted(r, token, near, gain) - q).clamp_min(0), r)
        counted = inside.any(-1, keepdim=True)
        chosen = (at(q, token) >= 1).unsqueeze(-1)
        cleared = self.near[token]
        bare = r.scatter(-1, cleared, 0.0).scatter(-1, token.unsqueeze(-1), 0.0)
        if self.resample == "released_p":
            residual = (r - q).clamp_min(0)
            return normalise(torch.where(counted, (bare - q).clamp_min(0), residual), normalise(residual, r))
        residual = (r - torch.where(counted, q.scatter(-1, cleared, 0.0), q)).clamp_min(0)
        # if the neighbourhood had all the mass, only x is cleared (the released code divides by zero)
        return normalise(torch.where(chosen & counted, bare, residual), normalise(residual, r))

    def _shifted(self, r: Tensor, token: Tensor, near: Tensor, gain: Tensor) -> Tensor:
        """r' (..., V): the mass of A moved to x."""
        return r.scatter_add(-1, near, -gain).scatter_add(-1, token.unsqueeze(-1), gain.sum(-1, keepdim=True))

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        if self.deterministic:
            return super().acceptance(r, q, depth)
        size = len(self.near)
        rows = max(1, _BLOCK // size)
        parts = zip(r.reshape(-1, size).split(rows), q.reshape(-1, size).split(rows), strict=True)
        return torch.cat([ratio(block + self._gains(block), q_block) for block, q_block in parts]).view_as(r)

    def _gains(self, r: Tensor) -> Tensor:
        """The mass that would move to every token (N, V)."""
        by_token = r.t().contiguous()  # (V, N): contiguous over the rows
        running, gain = torch.zeros_like(by_token), torch.zeros_like(by_token)
        open_ = torch.ones_like(by_token, dtype=torch.bool)  # every nearer neighbour counts
        group = _GROUP if r.device.type in ops.DYNAMIC_SHAPES and self.k > _FEW else 1
        for nearest in self.near[:, : self.k].split(group, 1):
            mass = F.embedding_bag(nearest, by_token, mode="sum")
            whole = open_ & self._counts(running + mass, by_token)
            gain += mass * whole
            if group > 1:
                token, row = (open_ & ~whole).nonzero(as_tuple=True)
                masses = by_token[nearest[token], row[:, None]]
                inside = self._counts(running[token, row, None] + masses.cumsum(-1), by_token[token, row, None])
                gain[token, row] += (masses * inside).sum(-1)
            running, open_ = running + mass, whole
        tokens = torch.arange(len(by_token), device=by_token.device)
        return gain.masked_fill_((self.near[:, 0] == tokens)[:, None], 0).t()


def _divergence(own_mass: Tensor, moved: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats between a distribution and the same after mass `moved` was shifted from other
    tokens to one that had `own_mass`. It depends only on these two numbers: each emptied token of mass a adds a ln 2 /
    2."""
    half = own_mass + moved / 2
    part = own_mass * (own_mass.clamp_min(1e-38) / half.clamp_min(1e-38)).log()
    other_part = (own_mass + moved) * ((own_mass + moved).clamp_min(1e-38) / half.clamp_min(1e-38)).log()
    return 0.5 * (moved * math.log(2) + part + other_part)


@dataclass(frozen=True)
class _OfNearCodes:
    """The common parameters of conf/rule/lantern.yaml and lantern_pp.yaml."""

    k: int
    bound: str
    proximity: str
    resample: str

    def _rule(self, name: str, limit: float, context: RuleContext) -> Rule:
        near = context.neighbours(context.codebook(), self.k + 1, self.proximity)
        return Lantern(name, near, self.k, self.bound, limit, self.resample, context.greedy)


@dataclass(frozen=True)
class LanternRule(_OfNearCodes):
    """The parameters of conf/rule/lantern.yaml."""

    delta: float

    def build(self, context: RuleContext) -> Rule:
        return self._rule("lantern", self.delta, context)


@dataclass(frozen=True)
class LanternPPRule(_OfNearCodes):
    """The parameters of conf/rule/lantern_pp.yaml."""

    lam: float

    def build(self, context: RuleContext) -> Rule:
        return self._rule("lantern_pp", self.lam, context)
