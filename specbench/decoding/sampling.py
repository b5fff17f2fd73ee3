"""From logits to distributions, and from distributions to tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specbench.decoding.rng import exponential
from specbench.engine.ops import Kernels


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Tokens (...) int64 from distributions (..., V) by inversion with uniforms u (...). Distributions need not be
    normalised; tokens of probability zero are never drawn."""
    cdf = probs.cumsum(-1)
    wanted = u.unsqueeze(-1) * cdf[..., -1:]
    return torch.searchsorted(cdf, wanted, right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)


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

    def apply_guidance(self, logits: Tensor) -> Tensor:
        """Guided logits (B, ...) of rows (2B, ...): conditional first, then unconditional; u + s (c - u)."""
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
        """The probabilities (..., V) that `probs` returns, from those of `unfiltered_probs`."""
        if self._unfiltered:
            return full
        return replace(self, temperature=0.0 if self.temperature == 0 else 1.0).probs(full.log())

    def unfiltered_probs(self, logits: Tensor, probs: Tensor) -> Tensor:
        """The probabilities (..., V) of guided logits before top-k and top-p, at temperature 1 where decoding is
        greedy; `probs` is the result of `probs(logits)`, returned where it is the same."""
        if self._unfiltered:
            return probs
        return (logits.float() / (self.temperature or 1.0)).softmax(-1)

    @property
    def _unfiltered(self) -> bool:
        return self.temperature > 0 and self.top_k is None and self.top_p == 1
