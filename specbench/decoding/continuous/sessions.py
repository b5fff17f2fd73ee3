"""The interface of continuous-token models for the decode loop, and the order in which tokens are generated.

A model gives the conditions of its head, and the head gives each step's mean and variance. It is a masked model such
as MAR: it conditions any position on any known positions, and draws in a random order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.rng import RandomStreams
from specbench.engine.state import Buffers

#: Rows of a masked network that are computed at once.
CHUNK = 512


class ContinuousSession(Protocol):
    """A model, opened for B images."""

    def condition(
        self, tokens: Tensor, known: Tensor, row: Tensor, positions: Tensor, done: Tensor, most: int
    ) -> Tensor:
        """The conditions of the head, z (R, n, E), for `positions` (R, n) of R copies of images `row` (R,). Their
        tokens (R, L, D) are known where `known` (R, L) bool is true, at most `most` per copy. done (R, n): how many
        tokens come before."""
        ...

    def moments(self, x: Tensor, index: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, D) and log variance (n, D) of the next state, from states x (n, D) at step `index` (n,) int64 (the
        last step is 0), under z (n, E)."""
        ...

    def sampler(self, z: Tensor) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
        """`moments` for states that are all at one step, called from the first step down to 0, under constant z. A
        model that can compute something once for all steps overrides it."""
        return lambda x, t: self.moments(x, torch.full((len(x),), t, device=x.device), z)

    def buffers(self) -> Buffers:
        """The tensors that passes read and that depend on the batch (see `engine.state`)."""
        return {}

    @property
    def head(self) -> Any:
        """The object that `sampler` computes with, apart from z. Sessions with the same head share recorded
        trajectories."""
        return self


class ContinuousModel(Protocol):
    """length: tokens L of an image; dim: numbers D of a token; steps: T of the diffusion head."""

    length: int
    dim: int
    steps: int

    def open(self, conditioning: Any, rows: int) -> Any:
        """A `ContinuousSession`."""
        ...


@dataclass(frozen=True)
class GenerationOrder:
    """The order of generation of B images. position (B, L + 1) int64: the position of a token by its number, which is
    its index in this order; the last entry, L, is a position that is never read. rank (B, L) int64: the number of the
    token at a position."""

    position: Tensor
    rank: Tensor

    @classmethod
    def random(cls, rng: RandomStreams, tag: int, length: int) -> GenerationOrder:
        step = torch.zeros(len(rng), dtype=torch.int64, device=rng.key.device)
        return cls._from_order(rng.uniform(step, tag, length).argsort(dim=-1, stable=True))

    @classmethod
    def raster(cls, rows: int, length: int, device: torch.device) -> GenerationOrder:
        return cls._from_order(torch.arange(length, device=device).repeat(rows, 1))

    @classmethod
    def _from_order(cls, order: Tensor) -> GenerationOrder:
        return cls(F.pad(order, (0, 1), value=order.shape[1]), order.argsort(-1))

    def at(self, row: Tensor, number: Tensor) -> Tensor:
        """Positions of the tokens `number` (n, k) of images `row` (n,); L after the end."""
        return self.position[row].gather(1, number.clamp_max(self.rank.shape[1]))


@dataclass(frozen=True)
class Conditions:
    """Conditions of the head, z. They are computed for tokens (R, L + 1, D) by position, whose last entry is never
    read, of R copies of images `row` (R,)."""

    session: ContinuousSession
    order: GenerationOrder

    def following(self, tokens: Tensor, row: Tensor, first: Tensor, count: int, most: int) -> Tensor:
        """z (R, count, E) of the tokens `first` (R,), at most `most`, to first + count - 1, each given all tokens
        before it, by a copy of the image per token. After an image's end the values do not matter."""
        known = first[:, None] + torch.arange(count, device=first.device)
        values, copies = (x.repeat_interleave(count, 0) if count > 1 else x for x in (tokens, row))
        number = known.flatten()[:, None]
        z = self.from_prefix(values, copies, known.flatten(), number, number, most + count - 1)
        return z.view(*known.shape, -1)

    def from_prefix(
        self, tokens: Tensor, row: Tensor, known: Tensor, number: Tensor, done: Tensor, most: int
    ) -> Tensor:
        """z (R, k, E) of the tokens `number` (R, k), given the first `known` (R,) tokens, at most `most`. After the end
        of an image it is the z of the last token. done (R, k): how far the image is, for guidance."""
        parts, length = [], self.order.rank.shape[1]
        for start in range(0, len(row), CHUNK):
            part = slice(start, start + CHUNK)
            is_known = self.order.rank[row[part]] < known[part, None]
            at = self.order.at(row[part], number[part].clamp_max(length - 1))
            values = tokens[part, :length]
            parts.append(self.session.condition(values, is_known, row[part], at, done[part], min(most, length)))
        return torch.cat(parts)
