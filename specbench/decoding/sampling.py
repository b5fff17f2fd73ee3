"""Logits -> distributions -> tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.rng import BITS, TAGS, RandomStreams
from specbench.engine.ops import Kernels, sum_last

#: Bits of a probability as an integer: 2**38 times the sum of a distribution times 2**BITS fits in an int64.
_PROBABILITY_BITS = 38


def draw(probs: Tensor, u: Tensor, kernels: Kernels | None = None) -> Tensor:
    """Tokens (...) int64 drawn from distributions (..., V) float32 by inversion, with uniforms u (...). Tokens of
    probability zero are never drawn.

    On the CPU a sequential sum gives the cumulative distribution. Elsewhere floating-point sums depend on how they are
    split among threads, are not monotone, and end at tokens of probability zero. So `draw_exactly` is used there, and
    with `kernels`.
    """
    if kernels is not None:
        return kernels.draw(probs, u)
    if probs.device.type != "cpu":
        return draw_exactly(probs, u)
    cdf = probs.cumsum(-1)
    level = u.unsqueeze(-1) * cdf[..., -1:]
    return _first_above(cdf, level)


def draw_exactly(probs: Tensor, u: Tensor) -> Tensor:
    """`draw` by sums of integers. The result does not depend on the order of summation: it is bit-reproducible in any
    batch and engine. u are multiples of 2**-BITS; the sum of a distribution is below 4.

    A probability is rounded down to a multiple of 2**-38. That moves the distribution by a total variation of at most V
    2**-38 (1e-6 at 200,000 tokens). The grid of the uniforms moves it by more, here and on the CPU: by V 2**-24, since
    a token gets p 2**23 of their 2**23 values, rounded up or down.
    """
    # scaling by a power of two is exact; NaN counts as zero
    parts = torch.where(probs > 0, probs * 2.0**_PROBABILITY_BITS, 0.0).long()
    cdf = parts.cumsum(-1)
    level = ((u * 2.0**BITS).long().unsqueeze(-1) * cdf[..., -1:]) >> BITS  # rounded down: below the sum
    return _first_above(cdf, level)


def _first_above(cdf: Tensor, level: Tensor) -> Tensor:
    """The first token (...) whose cumulative sum, of cdf (..., V), exceeds `level` (..., 1)."""
    return torch.searchsorted(cdf, level, right=True).squeeze(-1).clamp_max(cdf.shape[-1] - 1)


def draw_distinct(probs: Tensor, noise: Tensor, count: int) -> Tensor:
    """`count` tokens (..., count) drawn without replacement from distributions (..., V), in the order drawn (Gumbel
    top-k with exponentials: the smallest e_i / p_i come first). noise e (..., V): see `RandomStreams.exponential`.

    If a distribution has fewer than `count` tokens of positive probability, the remaining tokens have probability zero.
    A verifier must treat them as absent (`probs.gather(...) > 0`).
    """
    score = probs / noise
    return score.topk(count, dim=-1).indices if score.device.type == "cpu" else top_exactly(score, count)


def top_exactly(score: Tensor, count: int) -> Tensor:
    """The indices (..., count) of the largest of score (..., n) float32, largest first. Equal scores keep their order,
    which `topk` guarantees only on the CPU. NaN and negative scores count as zero."""
    ordered = torch.where(score > 0, score, 0.0).view(torch.int32).long() << 32
    return (ordered - torch.arange(score.shape[-1], device=score.device)).topk(count, dim=-1).indices


def sample_distinct(probs: Tensor, rng: RandomStreams, step: Tensor, tag: int, count: int) -> Tensor:
    """`draw_distinct` (B, n, count) from probs (B, n, V), with the first numbers of a tag at `step` (B,)."""
    if rng.kernels is not None:
        return rng.kernels.draw_distinct(probs, rng.key, step, TAGS, tag, count)
    return draw_distinct(probs, rng.exponential(step, tag, *probs.shape[1:]), count)


def within_sigma(logits: Tensor, sigmas: float) -> Tensor:
    """Logits (..., V), minus infinity where they are more than `sigmas` root mean squares below the largest one. The
    mean is over the finite logits."""
    finite = logits > -torch.inf
    mean = sum_last(torch.where(finite, logits, 0.0).square()) / finite.sum(-1)
    floor = logits.amax(-1) - sigmas * mean.sqrt()
    return logits.masked_fill(logits < floor.unsqueeze(-1), -torch.inf)


@dataclass(frozen=True)
class Sampling:
    """From logits to probabilities, in LlamaGen's order: guidance, temperature, top-k (ties kept), top-p, softmax.

    temperature: 0 is greedy, a point mass on the largest logit.
    top_k, top_p: None and 1 disable the filters.
    entropy_temperature: (a, b, c) of the entropy-dependent temperature (arXiv 2510.09012), `temperature` * (a exp(-e /
        b) + c). e is the entropy in nats of the guided distribution at temperature 1 after the filters, which then come
        before the temperature.
    top_n_sigma: a third filter, after top-k and top-p. A token stays if its logit is at least the largest minus this
        many sigma. Sigma is the root mean square of the remaining logits (not their standard deviation), as in the
        Jacobi mode of Lumina-mGPT 2.
    kernels: the engine's, which replace the plain code where they can.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    cfg_scale: float = 1.0
    entropy_temperature: tuple[float, float, float] | None = None
    top_n_sigma: float | None = None
    kernels: Kernels | None = field(default=None, repr=False, compare=False)

    @property
    def guided(self) -> bool:
        return self.cfg_scale != 1.0

    @cached_property
    def unfiltered(self) -> Sampling:
        """The same without top-k and top-p. The temperature is 1 if decoding is greedy or the temperature depends on
        the entropy."""
        temperature = self.temperature if self.entropy_temperature is None else 1.0
        return replace(
            self, temperature=temperature or 1.0, top_k=None, top_p=1.0, entropy_temperature=None, top_n_sigma=None
        )

    def distributions(self, logits: Tensor, session: Any, positions: Tensor) -> Distributions:
        """The distributions of the tokens at image positions (B, n), from the raw logits (R, n, V) of a head. `session`
        provides the image grammar."""
        if self._fused is not None:
            scale = self.cfg_scale if self.guided else None
            p = self._fused.probs(
                logits, self.temperature, self.top_k, scale, session.forced_tokens, session.codes, positions
            )
            return Distributions(p, logits, session, positions, self)
        guided = session.constrain(self.apply_guidance(logits), positions)
        return Distributions(self.probs(guided), logits, session, positions, self, guided)

    @property
    def _fused(self) -> Kernels | None:
        """The kernels, if they can replace the plain code for these parameters."""
        plain = (
            self.temperature == 0
            or self.top_p < 1
            or self.entropy_temperature is not None
            or self.top_n_sigma is not None
        )
        return None if plain else self.kernels

    def apply_guidance(self, logits: Tensor) -> Tensor:
        """Guided logits (B, ...) float32 of rows (2B, ...), conditional first, then unconditional: u + s (c - u). (In
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
        if self._fused is not None:
            flat = logits.reshape(1, -1, logits.shape[-1])
            return self._fused.probs(flat, self.temperature, self.top_k).view_as(logits)
        if self.temperature != 1 and self.entropy_temperature is None:
            logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            floor = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < floor, -torch.inf)
        if self.top_p < 1:
            ordered, index = logits.sort(dim=-1, descending=True, stable=True)
            p = ordered.softmax(-1)
            outside = (p.cumsum(-1) - p) > self.top_p  # keep the token that crosses the threshold
            logits = logits.masked_fill(torch.zeros_like(outside).scatter_(-1, index, outside), -torch.inf)
        if self.top_n_sigma is not None:
            logits = within_sigma(logits, self.top_n_sigma)
        if self.entropy_temperature is not None:
            a, b, c = self.entropy_temperature
            entropy = sum_last(torch.special.entr(logits.softmax(-1)))
            logits = logits / (self.temperature * (a * torch.exp(-entropy / b) + c)).unsqueeze(-1)
        return logits.softmax(-1)

    def filtered_probs(self, full: Tensor) -> Tensor:
        """The probabilities (..., V) that `probs` returns, computed from those that `unfiltered.probs` returns.
        top_n_sigma depends on more than these; here it takes their logarithms as logits."""
        if self == self.unfiltered:
            return full
        if self.entropy_temperature is not None:  # `full` has temperature 1
            return self.probs(full.log())
        return replace(self, temperature=0.0 if self.temperature == 0 else 1.0).probs(full.log())


@dataclass(frozen=True, eq=False)
class Distributions:
    """Distributions of the tokens that follow n nodes of B images: p (B, n, V) float32 after all steps of `sampling`.
    The rest is what they were computed from; `guided` (B, n, V) float32 is None if a kernel computed p."""

    p: Tensor
    raw: Tensor
    session: Any
    positions: Tensor
    sampling: Sampling
    guided: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Logits (B, n, V) float32 after guidance and image grammar."""
        if self.guided is not None:
            return self.guided
        return self.session.constrain(self.sampling.apply_guidance(self.raw), self.positions)

    def unfiltered(self) -> Tensor:
        """The distributions (B, n, V) before top-k and top-p, at temperature 1 where decoding is greedy."""
        plain = self.sampling.unfiltered
        if self.sampling == plain:
            return self.p
        if self.guided is not None:
            return plain.probs(self.guided)
        return plain.distributions(self.raw, self.session, self.positions).p

    def log_prob(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Natural-log probabilities (B, k) float32, at least log 1e-38, of tokens (B, k) after nodes (B, k), under the
        distributions of `unfiltered`."""
        if self.sampling == self.sampling.unfiltered:
            probs = self.p.flatten(1).gather(1, nodes * self.p.shape[-1] + tokens)
        else:
            row = torch.arange(len(nodes), device=nodes.device)[:, None]
            if self.guided is not None:
                rows = self.sampling.unfiltered.probs(self.guided[row, nodes])
            else:
                raw = self.raw.unflatten(0, (-1, len(nodes)))[:, row, nodes].flatten(0, 1)
                rows = self.sampling.unfiltered.distributions(raw, self.session, self.positions.gather(1, nodes)).p
            probs = rows.gather(2, tokens.unsqueeze(-1)).squeeze(-1)
        return probs.clamp_min(1e-38).log()
