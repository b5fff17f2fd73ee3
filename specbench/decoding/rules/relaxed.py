"""Exact speculative sampling; its relaxations by a factor per depth, UniformRSD and Cool-SD; and the ratio test of
Lumina-mGPT 2's Jacobi mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.rules.base import Relaxation, Rule, RuleContext, at, normalise, ratio
from specbench.decoding.sampling import within_sigma
from specbench.decoding.shape import DraftShape
from specbench.errors import UsageError, check_choice


class Relaxed(Rule):
    """Relaxed speculative decoding with a factor per depth (Cool-SD, Eq. 12): accept with min(1, omega_i r(x) / q(x)).

    omega = 1 everywhere is exact speculative decoding (Eqs. 1, 2), a constant is UniformRSD (Eq. 13), a falling
    schedule is Cool-SD (Eq. 16). `resample="optimal"` continues from Eq. 10, Norm([r - q f]_+) = Norm([max(r - q, (1 -
    omega) r)]_+), which minimises the bound of Eq. 8 for any omega. `"vanilla"` continues from Eq. 11, Norm([r - q]_+),
    which Proposition 1 derives only for omega >= 1.
    """

    constants = ("omega",)
    residual_by_token = False

    def __init__(self, name: str, omega: list[float], resample: str = "optimal") -> None:
        """omega[i - 1] is the factor of depth i; deeper positions use the last one."""
        self.name = name
        self.resample = resample
        self.omega = torch.tensor([1.0, *omega], dtype=torch.float32)

    def output_distribution(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return p if self.name == "exact" else super().output_distribution(p, q, depth)

    def relaxation(self) -> Relaxation:
        return Relaxation(self.resample, self.omega)

    def _omega(self, depth: Tensor) -> Tensor:
        return self.omega[depth.clamp_max(len(self.omega) - 1)]

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return ratio(self._omega(depth) * at(r, token), at(q, token))

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return ratio(self._omega(depth).unsqueeze(-1) * r, q)

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        mass = r - q
        if self.resample == "optimal":
            mass = torch.maximum(mass, (1 - self._omega(depth)).unsqueeze(-1) * r)
        return normalise(mass.clamp_min(0), r)


def exact() -> Relaxed:
    """Lossless speculative sampling (Cool-SD Algorithm 1, Eqs. 1 and 2)."""
    return Relaxed("exact", [1.0])


def uniform(delta: float, resample: str = "optimal") -> Relaxed:
    """UniformRSD (Eq. 13): the same factor at every depth."""
    return Relaxed("uniform", [delta], resample)


def cool(
    delta: float,
    length: int,
    nu: float = 0.7,
    schedule: str = "exponential",
    floor: float = 0.0,
    resample: str = "optimal",
    linear_length: int = 8,
) -> Relaxed:
    """Cool-SD: a schedule over `length` depths whose mean is `delta`, never below `floor` (the paper has 0)."""
    return Relaxed("cool", cool_schedule(delta, length, nu, schedule, floor, linear_length), resample)


def cool_schedule(
    delta: float, length: int, nu: float, schedule: str, floor: float = 0.0, linear_length: int = 8
) -> list[float]:
    """omega_1 .. omega_L. Exponential (Eq. 16): delta L e^{-nu i} / sum_j e^{-nu j}. Linear (Eq. 17): delta L w_i / sum
    w with w_i = (l - i) / (l (l + 1)), where l is `linear_length`, 8 in the paper, so L < l."""
    check_choice("schedule", schedule, ("exponential", "linear"))
    depths = range(1, length + 1)
    if schedule == "exponential":
        weights = [math.exp(-nu * i) for i in depths]
    else:
        if length >= linear_length:
            raise UsageError(
                f"schedule=linear is defined for drafts shorter than linear_length={linear_length}, not {length}; raise"
                " linear_length, or use schedule=exponential"
            )
        weights = [(linear_length - i) / (linear_length * (linear_length + 1)) for i in depths]
    scale = delta * length / sum(weights)
    return [max(floor, scale * w) for w in weights]


class Redraw(Rule):
    """Accept x with min(1, r(x) / q(x)), as the exact rule does.

    `resample="target"` continues from r. Lumina-mGPT 2's code means Norm[r - min(q, 0.99)]_+, but takes r whenever that
    mass is below 1 before it is normalised, so in effect always. The distribution passes the sampler's filters once
    more: top-k changes nothing then, but the filter `top_n_sigma` does, on log r. "vanilla" continues from Norm[r -
    q]_+ and is exact (SimpleAR).
    """

    name = "redraw"
    residual_by_token = False

    def __init__(self, resample: str = "target", top_n_sigma: float | None = None) -> None:
        self.resample, self.top_n_sigma = resample, top_n_sigma

    def relaxation(self) -> Relaxation | None:
        filtered = self.resample == "target" and self.top_n_sigma is not None
        return None if filtered else Relaxation(self.resample)

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return ratio(at(r, token), at(q, token))

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return ratio(r, q)

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        if self.resample == "vanilla":
            return normalise((r - q).clamp_min(0), r)
        return r if self.top_n_sigma is None else within_sigma(r.log(), self.top_n_sigma).softmax(-1)


@dataclass(frozen=True)
class ExactRule:
    """conf/rule/exact.yaml."""

    def build(self, context: RuleContext) -> Rule:
        return exact()


@dataclass(frozen=True)
class UniformRule:
    """The parameters of conf/rule/uniform.yaml."""

    delta: float
    resample: str

    def build(self, context: RuleContext) -> Rule:
        return uniform(self.delta, self.resample)


@dataclass(frozen=True)
class CoolRule:
    """The parameters of conf/rule/cool.yaml."""

    delta: float
    nu: float
    schedule: str
    linear_length: int
    floor: float
    resample: str

    def omega(self, height: int) -> list[float]:
        """The relaxation of each position; the height of the drafts is the schedule's L. UsageError for a schedule that
        is not defined for it."""
        return cool_schedule(self.delta, max(1, height), self.nu, self.schedule, self.floor, self.linear_length)

    def check(self, shape: DraftShape) -> None:
        self.omega(shape.schedule_length("cool"))

    def build(self, context: RuleContext) -> Rule:
        return Relaxed("cool", self.omega(context.height), self.resample)


@dataclass(frozen=True)
class RedrawRule:
    """The parameters of conf/rule/redraw.yaml."""

    resample: str

    def build(self, context: RuleContext) -> Rule:
        return Redraw(self.resample, context.top_n_sigma)
