"""The interface of acceptance rules, and the operations on distributions that they share.

Distributions are (..., V) float32, tokens and depths (...) int64. Depth counts drafted positions from 1. The q of a
deterministic candidate, which was not sampled, is a point mass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.engine.ops import sum_last
from specbench.engine.state import put
from specbench.errors import UsageError, check_choice

#: Distances between codes.
MEASURES = ("l2", "cosine", "random")


class Rule(Protocol):
    """A rule defines two things for a candidate x that was drawn from q, at a node whose current distribution is r: the
    probability of accepting x, and the distribution that replaces r when x is rejected.

    `deterministic` rules do not change the distribution; the longest of the paths that they accept counts. At
    temperature 0 a rule with `uses_pre_argmax_probs` decides by the distribution before the arg max. `constants` names
    the attributes that hold tensors. `residual_by_token`: whether the residual depends on the token that was rejected.
    """

    name: str
    deterministic: bool = False
    uses_pre_argmax_probs: bool = False
    constants: tuple[str, ...] = ()
    residual_by_token: bool = True

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Probability (...) of accepting `token`."""
        ...

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """Probability (..., V) of accepting each token of the vocabulary: `accept`, token by token. For the statistics
        of a step, not for the step itself."""
        shape, size = r.shape, r.shape[-1]
        token = torch.arange(size, device=r.device).expand(shape)
        r, q = (x.unsqueeze(-2).expand(*shape, size) for x in (r, q))
        return self.accept(r, q, token, depth.unsqueeze(-1).expand(shape))

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """The residual distribution (..., V), normalised, after `token` was rejected."""
        ...

    def accept_and_residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """`accept` and `residual` together, for rules that compute something for both."""
        return self.accept(r, q, token, depth), self.residual(r, q, token, depth)

    def output_distribution(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """The distribution (..., V) of the token that follows a node with one candidate, drawn from q. Only for rules
        whose residual does not depend on the rejected token."""
        accepted = q * self.acceptance(p, q, depth)
        token = torch.zeros_like(depth)  # any token
        return accepted + (1 - sum_last(accepted)).unsqueeze(-1) * self.residual(p, q, token, depth)

    def open(self, device: torch.device) -> None:
        """Move the rule's tensors to the device of a decoding that starts; a recorded step cannot move them."""
        put(self, device)

    def relaxation(self) -> Relaxation | Threshold | None:
        """What the fused kernels need in order to compute the rule. None: they cannot compute it, and tensor code
        does."""
        return None


@dataclass(frozen=True)
class Neighbours:
    """The tokens whose mass is added to the mass of a token x.

    near (V, n) int64: the neighbours of every token, nearest first; the first k may count. A token that is its
    own first neighbour has none. A neighbour counts while s, the mass of it and of all nearer ones, is inside a bound.
    measure: the bounded quantity: "mass" s, "share" s / r(x), or "divergence" the Jensen-Shannon divergence (nats) of
    the distributions before and after s moves to x. closed: whether `limit` itself is inside.
    """

    near: Tensor
    k: int
    measure: str
    limit: float
    closed: bool


@dataclass(frozen=True)
class Relaxation:
    """What the fused kernels compute for a rule that accepts x with min(1, (f r(x) + g) / q(x)).

    residual: names the distribution after a rejection, and f:

    - "vanilla" Norm[r - q]_+ (Cool-SD's Eq. 11), "optimal" Cool-SD's Eq. 10, "target" r; f is the value of the depth.
    - "band" Norm[low r - q]_+, with low and f = high of `rules.band`, whose ratio is the value of the depth.
    - "budget" the same, with the widest band whose KL(e | p) is at most the value of the depth, in nats.
    - "paper", "released", "released_p": see `rules.lantern.Lantern`; f is 1.

    values (n,) float32: by depth, from 0 on, the last one for deeper positions; None: 1 at every depth. g is the mass
    of the `neighbours`, 0 without them.
    """

    residual: str
    values: Tensor | None = None
    neighbours: Neighbours | None = None


@dataclass(frozen=True)
class Threshold:
    """What the fused kernels compute for a deterministic rule: x is accepted if r(x) is 1 or more than min(epsilon,
    alpha exp(-H(r))). With `neighbours`, x is accepted instead if r(x) plus their mass is at least every token's r."""

    epsilon: float = 0.0
    alpha: float = 0.0
    neighbours: Neighbours | None = None


def neighbours(codebook: Tensor, k: int, proximity: str = "l2") -> Tensor:
    """The k nearest other codes of every code, (V, min(k, C - 1)) int64, nearest first, ties by code number.

    codebook (V, d) with C codes; a token without a code (a row of NaN) has no neighbour except itself.
    "l2" and "cosine" are distances in the codebook; "random" is LANTERN's control (Table 4), a fixed shuffle.
    UsageError for another proximity and for k < 1.
    """
    check_choice("proximity", proximity, MEASURES)
    if k < 1:
        raise UsageError(f"k must be an integer of at least 1 (got {k})")
    codes = codebook.detach().to("cpu", torch.float32).contiguous()
    k = min(k, int((~codes.isnan().any(-1)).sum()) - 1)
    return _compute(codes, k, proximity).to(codebook.device)


def _compute(codebook: Tensor, k: int, proximity: str, chunk: int = 1024) -> Tensor:
    rows_with_code = (~codebook.isnan().any(-1)).nonzero().flatten()
    table = torch.arange(len(codebook))[:, None].repeat(1, k)
    codes, size = codebook[rows_with_code], len(rows_with_code)
    if proximity == "cosine":
        codes = F.normalize(codes, dim=-1)
    rng = torch.Generator().manual_seed(0)
    rows = []
    for start in range(0, size, chunk):
        block = codes[start : start + chunk].double()
        if proximity == "random":
            far = torch.rand(len(block), size, generator=rng, dtype=torch.float64)
        elif proximity == "cosine":
            far = 1 - block @ codes.double().T
        else:
            far = torch.cdist(block, codes.double(), compute_mode="donot_use_mm_for_euclid_dist")
        index = torch.arange(start, start + len(block))
        far[torch.arange(len(block)), index] = torch.inf  # sorted last
        rows.append(far.sort(dim=-1, stable=True).indices[:, :k])
    table[rows_with_code] = rows_with_code[torch.cat(rows)]
    return table


@dataclass(frozen=True)
class RuleContext:
    """What a rule may need from the rest of the method: the height of the drafts, the target's codebook (V, d), whether
    decoding is greedy, the function that computes a codebook's neighbour tables (see `neighbours`), the target's input
    embeddings of its tokens (V, d), without which the codebook replaces them, and the sampling's `top_n_sigma`."""

    height: int
    codebook: Callable[[], Tensor]
    greedy: bool = False
    neighbours: Callable[[Tensor, int, str], Tensor] = neighbours
    embeddings: Callable[[], Tensor] | None = None
    top_n_sigma: float | None = None

    def embedding(self) -> Tensor:
        return (self.embeddings or self.codebook)()


def at(probs: Tensor, token: Tensor) -> Tensor:
    """probs[..., token], (...)."""
    return probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def normalise(mass: Tensor, fallback: Tensor) -> Tensor:
    """Norm(mass), or `fallback` where the mass is zero (after a rejection of probability zero)."""
    total = sum_last(mass).unsqueeze(-1)
    return torch.where(total > 1e-30, mass / total.clamp_min(1e-30), fallback)


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) with 0/0 = 1 (ERRATA, Cool-SD 6)."""
    return torch.where(q > 0, p / q, torch.ones_like(q)).clamp_max(1.0)
