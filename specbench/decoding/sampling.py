"""From logits to distributions, and from distributions to tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.rng import BITS, exponential
from specbench.engine.ops import Kernels

#: Of a probability as an integer: 2**38 times the sum of a distribution times 2**BITS fits in an int64.
PROBABILITY_BITS = 38


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Tokens (...) int64 from distributions (..., V) float32 by inversion with uniforms u (...). Tokens of probability
    zero are never drawn.

    On the CPU a sequential sum gives the cumulative distribution. Elsewhere floating-point sums depend on how they
    are split among threads, are not monotone, and end at tokens of probability zero; there it is `draw_exactly`.
    """
    if probs.device.type != "cpu":
        return draw_exactly(probs, u)
    cdf = probs.cumsum(-1)
    wanted = u.unsqueeze(-1) * cdf[..., -1:]
    return _drawn(cdf, wanted)


def draw_exactly(probs: Tensor, u: Tensor) -> Tensor:
    """As `draw`, by sums of integers, whose result depends on no order: bit-reproducible in any batch and engine. u are
    multiples of 2**-BITS; the sum of a distribution is below 4.

    A probability is rounded down to a multiple of 2**-38. That moves the distribution by a total variation of at most
    V 2**-38 (1e-6 at 200,000 tokens), less than the grid of the uniforms does, here and on the CPU: V 2**-24, since
    a token is given by p 2**23 of their 2**23 values, rounded up or down.
    """
    # scaling by a power of two is exact; NaN counts as zero
    parts = torch.where(probs > 0, probs * 2.0**PROBABILITY_BITS, 0.0).long()
    cdf = parts.cumsum(-1)
    wanted = ((u * 2.0**BITS).long().unsqueeze(-1) * cdf[..., -1:]) >> BITS  # rounded down: below the sum
    return _drawn(cdf, wanted)


def _drawn(cdf: Tensor, wanted: Tensor) -> Tensor:
    """The first token (...) whose cumulative sum, of cdf (..., V), exceeds what is `wanted` (..., 1)."""
    return torch.searchsorted(cdf, wanted, right=True).squeeze(-1).clamp_max(cdf.shape[-1] - 1)


def draw_distinct(probs: Tensor, u: Tensor, count: int) -> Tensor:
    """`count` tokens (..., count) drawn without replacement from distributions (..., V), in the order drawn (Gumbel
    top-k with exponentials: the smallest of e_i / p_i come first). u (..., V) uniforms.

    Where a distribution has fewer than `count` tokens of positive probability, the rest have probability zero: a
    verifier must treat them as absent (`probs.gather(...) > 0`).
    """
    noise = exponential(u.clamp(max=1 - 2.0**-23))
    return (probs / noise).topk(count, dim=-1).indices


@dataclass(frozen=True)
class Sampling:
    """From logits to probabilities, in LlamaGen's order: guidance, temperature, top-k (ties kept), top-p, softmax.

    temperature 0 is greedy: a point mass on the largest logit. top_k None and top_p 1 are off. kernels: those of the
    engine, which replace the plain code where they can.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    cfg_scale: float = 1.0
    kernels: Kernels | None = field(default=None, repr=False, compare=False)

    @property
    def guided(self) -> bool:
        return self.cfg_scale != 1.0

    @cached_property
    def unfiltered(self) -> Sampling:
        """The same without top-k and top-p, at temperature 1 where decoding is greedy."""
        return replace(self, temperature=self.temperature or 1.0, top_k=None, top_p=1.0)

    def distributions(self, logits: Tensor, session: Any, positions: Tensor) -> Distributions:
        """The distributions of the tokens at image positions (B, n), from a head's logits (R, n, V) as they are;
        `session` knows the image grammar."""
        guided = session.constrain(self.apply_guidance(logits), positions)
        return Distributions(self.probs(guided), guided, self)

    def apply_guidance(self, logits: Tensor) -> Tensor:
        """Guided logits (B, ...) float32 of rows (2B, ...): conditional first, then unconditional; u + s (c - u). (In
        bfloat16 the mixture would be rounded to 8 bits, which moves a distribution by 0.003 to 0.012.)"""
        logits = logits.float()
        if not self.guided:
            return logits
        cond, uncond = logits.chunk(2)
        return uncond + self.cfg_scale * (cond - uncond)

    def probs(self, logits: Tensor) -> Tensor:
        """Probabilities (..., V) float32 of guided logits (..., V)."""
        logits = logits.float()
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        if self.top_p == 1 and self.kernels is not None and logits.shape[-1] <= self.kernels.MOST_TOKENS:
            return self.kernels.probs(logits, self.temperature, self.top_k)
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            floor = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < floor, -torch.inf)
        if self.top_p < 1:
            ordered, index = logits.sort(dim=-1, descending=True)
            p = ordered.softmax(-1)
            outside = (p.cumsum(-1) - p) > self.top_p  # keep the token that crosses the threshold
            logits = logits.masked_fill(torch.zeros_like(outside).scatter_(-1, index, outside), -torch.inf)
        return logits.softmax(-1)

    def filtered_probs(self, full: Tensor) -> Tensor:
        """The probabilities (..., V) that `probs` returns, from those that `unfiltered.probs` returns."""
        if self == self.unfiltered:
            return full
        return replace(self, temperature=0.0 if self.temperature == 0 else 1.0).probs(full.log())


@dataclass(frozen=True, eq=False)
class Distributions:
    """Distributions of the tokens that follow n nodes of B images: p (B, n, V) float32 after all that `sampling` does;
    logits (B, n, V) float32 after guidance and image grammar."""

    p: Tensor
    logits: Tensor
    sampling: Sampling

    def unfiltered(self) -> Tensor:
        """The distributions (B, n, V) before top-k and top-p, at temperature 1 where decoding is greedy."""
        return self.p if self.sampling == self.sampling.unfiltered else self.sampling.unfiltered.probs(self.logits)

    def log_prob(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Natural-log probabilities (B, k) float32, at least log 1e-38, of tokens (B, k) after nodes (B, k), under the
        distributions of `unfiltered`."""
        if self.sampling == self.sampling.unfiltered:
            found = self.p.flatten(1).gather(1, nodes * self.p.shape[-1] + tokens)
        else:
            row = torch.arange(len(nodes), device=nodes.device)[:, None]
            rows = self.sampling.unfiltered.probs(self.logits[row, nodes])
            found = rows.gather(2, tokens.unsqueeze(-1)).squeeze(-1)
        return found.clamp_min(1e-38).log()
