"""Counter-based random streams: every random number of a decoding is a pure function of its keys."""

from __future__ import annotations

import math
from copy import copy

import torch
from torch import Tensor

from specbench.engine.ops import Kernels
from specbench.engine.state import Buffer, Buffers

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
#: Uniform numbers are multiples of 2**-BITS. Exponential noise has `_FURTHER` bits more.
BITS = 23
_FURTHER = 24
#: The number of tags of a step's random numbers. A drafter uses one or two per depth.
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

    A number is a pure function of (seed, prompt index, step, tag, index), where `index` counts the numbers of one tag.
    It does not depend on the batch, the order of the prompts or the device. It needs no state and no host.
    """

    kernels: Kernels | None = None  #: compute the numbers if given

    def __init__(self, keys: list[tuple[int, int]], device: torch.device | str = "cpu") -> None:
        """keys: (seed, prompt index) per row."""
        self.keys = keys
        pairs = torch.tensor(keys, dtype=torch.int64).reshape(-1, 2)
        self.key = _mix(_mix(pairs[:, 0] * _GOLDEN + 1) + pairs[:, 1] * _GOLDEN + 2).to(device)

    def __len__(self) -> int:
        return len(self.key)

    def buffers(self) -> Buffers:
        """The tensors that steps read (see `engine.state`)."""
        return {"key": Buffer(self.key)}

    def copied(self) -> RandomStreams:
        """The same streams, in buffers of their own, which another batch's can overwrite."""
        streams = copy(self)
        streams.key = self.key.clone()
        return streams

    def rows(self, index: Tensor) -> RandomStreams:
        """The streams of the rows `index` (n,) int64; a row may occur several times. (`keys` still has all rows.)"""
        streams = copy(self)
        streams.key = self.key[index]
        return streams

    def uniform(self, step: Tensor, tag: int, *shape: int) -> Tensor:
        """Float32 numbers in [0, 1) of shape (rows, *shape). `step` (rows,) int64; `tag` separates the uses within a
        step.

        They are multiples of 2**-BITS. So `u * total < total` holds in float32, and no index exceeds a distribution's
        last token.
        """
        return self.uniforms(step, tag, 1, math.prod(shape)).view(-1, *shape)

    def uniforms(self, step: Tensor, tag: int, tags: int, count: int) -> Tensor:
        """The first `count` numbers of `tags` consecutive tags, (rows, tags, count)."""
        if self.kernels is not None:
            return self.kernels.uniforms(self.key, step, TAGS, tag, tags, count)
        device = self.key.device
        counter = step[:, None] * TAGS + (tag + 1) + torch.arange(tags, device=device)
        return _uniform(_hashes(self.key[:, None] + _GOLDEN * counter, torch.arange(count, device=device)))

    def uniform_at(self, step: Tensor, tag: int, index: Tensor) -> Tensor:
        """The numbers (rows, n) at `index` (n,) or (rows, n) int64 >= 0 of a tag."""
        if self.kernels is not None:
            return self.kernels.uniforms(self.key, step, TAGS, tag, 1, index.shape[-1], index).squeeze(1)
        return _uniform(_hashes(self.key + _GOLDEN * (step * TAGS + tag + 1), index))

    def exponential(self, step: Tensor, tag: int, *shape: int) -> Tensor:
        """Positive exponential noise of shape (rows, *shape), float32 with mean 1; see `uniform`."""
        return self.exponential_at(step, tag, torch.arange(math.prod(shape), device=step.device)).view(-1, *shape)

    def exponential_at(self, step: Tensor, tag: int, index: Tensor) -> Tensor:
        """The noise (rows, n) at `index`; see `uniform_at`."""
        return exponential(_hashes(self.key + _GOLDEN * (step * TAGS + tag + 1), index))


def _hashes(key: Tensor, index: Tensor) -> Tensor:
    """64 random bits (*, n) int64 at `index` (n,) or (*, n) of streams with unmixed keys (*)."""
    return _mix(_mix(key).unsqueeze(-1) + _GOLDEN * (index + 1))


def _uniform(hashes: Tensor) -> Tensor:
    return _shift(hashes, 64 - BITS).to(torch.float32) * 2.0**-BITS


def exponential(hashes: Tensor) -> Tensor:
    """Positive exponential noise, float32, from random bits int64, by inversion.

    The token with the smallest noise / p is drawn, so a token of probability p is drawn by noise of about p. On the
    grid of the uniforms, each of V improbable tokens would be drawn with probability 2**-BITS, however improbable it
    is: V 2**-BITS together, 0.008 at 65,536 tokens. Further bits divide each interval of the grid, where the noise
    grows as the uniform does if both are small. The logarithm, unlike log1p, has the same bits at any index.
    """
    further = _shift(hashes, 64 - BITS - _FURTHER) & ((1 << _FURTHER) - 1)
    return (further.to(torch.float32) + 0.5) * 2.0 ** -(BITS + _FURTHER) - torch.log(1 - _uniform(hashes))
