"""How drafts of continuous tokens are made and verified.

Acceptance criteria (ERRATA, CSpD). `criterion="exact"`: the two trajectories share their noise down to x_1, so a token
is verified by p(x_0 | x_1^p) / q(x_0 | x_1^q). `criterion="paper"`: the same times the factor Sigma of Eqs. 4 and 5,
which biases the distribution. `criterion="path"`: Eq. 1 read literally, the ratio of the trajectories' densities under
the two models. It is exact as well, and the target needs no trajectory of its own to verify one: only the moments along
the draft's, all in one call. All arithmetic is in log densities.

Only `verify="causal"` (the target's distribution of a token is conditioned on the drafted ones before it) with
`on_reject="stop"` is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specbench.decoding.continuous.sessions import ContinuousModel
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.trees import chain_paths
from specbench.errors import UsageError


@dataclass(frozen=True)
class NoiseParameters:
    """The parameters of conf/model/base/masked.yaml that decoding needs: the temperature of the noise, whether the last
    step of the head is sampled, too, and the number of passes in which the target alone fills an image (None: one per
    token)."""

    temperature: float
    final_noise: bool
    iterations: int | None = None


@dataclass(frozen=True)
class ContinuousRule:
    """tokens_per_pass: how many tokens the target draws in each pass when it draws alone; empty is one (MAR draws
        several at once, independently of each other, which is another distribution).
    gamma: tokens per draft.
    prefill: share of the image that the target draws alone before drafting begins.
    align: the two models share their noise (criteria `exact` and `paper`).
    inner_temperature: divides the distance from a mean before densities are compared (the released code uses 42; 1 is
        off).
    verification: of drafts token by token, or as a block (see decide.py).
    tries: how many drafts have a first token of their own, each tried after the ones before were rejected (see
        decide.py).
    proposals: the most proposals for the token after a rejection. After them the last one, a sample of the target, is
        used.
    temperature: of the noise of every step, but not of x_T.
    final_noise: the last step is drawn too, since a density needs it. MAR's own sampler ends with a mean.
    """

    tokens_per_pass: tuple[int, ...] = ()
    gamma: int = 0
    prefill: float = 0.0
    align: bool = True
    criterion: str = "exact"
    verify: str = "causal"
    on_reject: str = "stop"
    inner_temperature: float = 1.0
    verification: str = "token"
    tries: int = 1
    proposals: int = 100
    temperature: float = 1.0
    final_noise: bool = True

    def __post_init__(self) -> None:
        if self.gamma and self.tokens_per_pass:
            raise UsageError("a draft is verified token by token: use iterations=null with it")
        if self.gamma and self.temperature == 0:
            raise UsageError(
                "temperature=0 leaves no densities to compare; use method=vanilla, or a temperature above 0"
            )
        if self.gamma and self.criterion == "path" and not self.final_noise:
            raise UsageError("criterion=path also needs a density of the last step: use final_noise=true")
        if self.gamma and self.criterion == "path" and self.inner_temperature != 1:
            raise UsageError("inner_temperature is for criterion=exact or paper: leave it out")
        several, block = self.tries > 1, self.verification == "block"
        if several and block:
            raise UsageError("verification=block decides on one draft: use tries=1 with it")
        if (several or block) and not self.exact:
            raise UsageError(
                f"{f'tries={self.tries}' if several else 'verification=block'} needs a rule that is exact:"
                " criterion=path or exact, verify=causal, on_reject=stop, inner_temperature=1 and final_noise=true"
            )

    @property
    def exact(self) -> bool:
        """Whether the tokens have the target's distribution."""
        if self.gamma == 0:
            return True
        plain = self.inner_temperature == 1 and self.final_noise and self.criterion in ("exact", "path")
        return plain and self.verify == "causal" and self.on_reject == "stop"


@dataclass(frozen=True)
class CSpDDraft:
    """The parameters of conf/drafter/cspd.yaml: a smaller model of continuous tokens drafts."""

    gamma: int
    prefill: float
    align: bool

    @property
    def shape(self) -> DraftShape:
        return DraftShape(build_tree(chain_paths(self.gamma)), passes=self.gamma)

    def build(self, model: Any) -> ContinuousModel:
        network: ContinuousModel = model.drafter_network("cspd")
        return network


@dataclass(frozen=True)
class DensityRule:
    """The parameters of conf/rule/density.yaml."""

    criterion: str
    verify: str
    on_reject: str
    inner_temperature: float
    tries: int
    proposals: int

    def build(self, draft: CSpDDraft, verification: str, temperature: float, final_noise: bool) -> ContinuousRule:
        """The rule for these drafts; see `ContinuousRule`. UsageError for parameters that do not fit together."""
        return ContinuousRule(
            **vars(draft), **vars(self), verification=verification, temperature=temperature, final_noise=final_noise
        )


def tokens_per_iteration(length: int, iterations: int) -> list[int]:
    """The number of tokens that each iteration of MAR's cosine schedule draws (reference README (32)); their sum is
    `length`."""
    if not 1 <= iterations <= length:
        raise UsageError(f"an image of {length} tokens takes 1 to {length} iterations (got {iterations})")
    remaining, counts = length, []
    for step in range(1, iterations):
        after = max(1, min(remaining - 1, math.floor(length * math.cos(math.pi / 2 * step / iterations))))
        counts.append(remaining - after)
        remaining = after
    return [*counts, remaining]
