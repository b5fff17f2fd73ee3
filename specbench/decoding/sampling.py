"""Random streams and distributions: everything a decoding step samples, and the distribution of each sample."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specbench.engine.ops import kernels as fused_kernels

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
#: How many purposes a step's random numbers can have; a drafter uses one or two per depth.
TAGS = 4096


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 tensors (arithmetic modulo 2**64)."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


class RandomStreams:
    """One counter-based random stream per row, keyed by (seed, prompt index).

    A number is a pure function of (seed, index, step, purpose, place), `place` being an index within the purpose. It
    depends neither on the batch, nor on the order of the prompts, nor on the device. It needs no state and no host.
    """

    def __init__(self, keys: list[tuple[int, int]], device: torch.device | str = "cpu") -> None:
        """keys: (seed, prompt index) per row."""
        self.keys = keys
        pairs = torch.tensor(keys, dtype=torch.int64).reshape(-1, 2)
        self.key = _mix(_mix(pairs[:, 0] * _GOLDEN + 1) + pairs[:, 1] * _GOLDEN + 2).to(device)

    def __len__(self) -> int:
        return len(self.key)

    def rows(self, index: Tensor) -> RandomStreams:
        """The streams of rows `index` (n,) int64, in that order and as often. (`keys` stays that of all.)"""
        some = copy(self)
        some.key = self.key[index]
        return some

    def uniform(self, step: Tensor, tag: int, *shape: int) -> Tensor:
        """Float32 numbers in [0, 1) of shape (rows, *shape). `step` (rows,) int64; `purpose` keeps uses of a step
        apart.

        Multiples of 2**-23, so that `u * total < total` holds in float32 and no index exceeds a distribution's last
        token.
        """
        count = 1
        for n in shape:
            count *= n
        return self.uniform_at(step, tag, torch.arange(count, device=self.key.device)).view(-1, *shape)

    def uniforms(self, step: Tensor, tag: int, tags: int, count: int) -> Tensor:
        """The first `count` numbers of several consecutive purposes at once, (rows, purposes, count)."""
        device = self.key.device
        which = step[:, None] * TAGS + (tag + 1) + torch.arange(tags, device=device)
        return self._numbers(self.key[:, None] + _GOLDEN * which, torch.arange(count, device=device))

    def uniform_at(self, step: Tensor, tag: int, place: Tensor) -> Tensor:
        """The numbers (rows, n) at indices `place` (n,) or (rows, n) int64 >= 0 within a purpose."""
        return self._numbers(self.key + _GOLDEN * (step * TAGS + tag + 1), place)

    @staticmethod
    def _numbers(tag: Tensor, place: Tensor) -> Tensor:
        """The numbers (*, n) at indices `place` (n,) or (*, n) of purposes (*), as they are keyed before mixing."""
        bits = _shift(_mix(_mix(tag).unsqueeze(-1) + _GOLDEN * (place + 1)), 41)
        return bits.to(torch.float32) * 2.0**-23


def exponential(u: Tensor) -> Tensor:
    """Positive exponential noise by inversion of uniforms u, of which 1 - u is exact; the logarithm, unlike log1p, has
    the same bits at any index of a tensor."""
    return 2.0**-30 - torch.log(1 - u)


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
    verifier must treat them as absent (`law.gather(...) > 0`).
    """
    clock = exponential(u.clamp(max=1 - 2.0**-23))
    return (probs / clock).topk(count, dim=-1).indices


@dataclass(frozen=True)
class Sampling:
    """From logits to probabilities, in LlamaGen's order: guidance, temperature, top-k (ties kept), top-p, softmax.

    temperature 0 is greedy: a point mass on the largest logit. top_k None and top_p 1 are off.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    cfg_scale: float = 1.0

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
        if self.top_p == 1 and (kernels := fused_kernels()) is not None and logits.shape[-1] <= kernels.MOST_TOKENS:
            return kernels.probs(logits, self.temperature, self.top_k)
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
        """The probabilities (..., V) that `law` returns, from those of `full_law`."""
        if self.temperature > 0 and self.top_k is None and self.top_p == 1:
            return full
        return replace(self, temperature=0.0 if self.temperature == 0 else 1.0).probs(full.log())

    def unfiltered_probs(self, mixed: Tensor, probs: Tensor) -> Tensor:
        """The probabilities (..., V) before top-k and top-p, at temperature 1 where decoding is greedy; `law` is the
        result of `law(mixed)`, returned where it is the same."""
        if self.temperature > 0 and self.top_k is None and self.top_p == 1:
            return probs
        return (mixed.float() / (self.temperature or 1.0)).softmax(-1)
