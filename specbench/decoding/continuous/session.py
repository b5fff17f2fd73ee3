"""The protocols of models with continuous tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from specbench.engine.state import Buffers


class ContinuousSession(Protocol):
    """A masked autoregressive model, opened for B images."""

    def condition(
        self, tokens: Tensor, known: Tensor, row: Tensor, positions: Tensor, done: Tensor, most: int
    ) -> Tensor:
        """The conditioning of the head, z (R, n, E), for `positions` (R, n) of R copies of images `row` (R,), whose
        tokens (R, L, D) are known where `known` (R, L) bool is true, `most` of a copy or fewer; done (R, n): how many
        tokens come before."""
        ...

    def moments(self, x: Tensor, index: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, D) and log variance (n, D) of the next state, from states x (n, D) at step index (n,) int64, the
        last one 0, under z (n, E)."""
        ...

    def sampler(self, z: Tensor) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
        """`moments` of states that are all at one step, called from the first step down to 0, under constant z; a
        model that can compute something once for all steps overrides it."""
        return lambda x, t: self.moments(x, torch.full((len(x),), t, device=x.device), z)

    def buffers(self) -> Buffers:
        """What passes read and what depends on the batch (see `engine.state`)."""
        return {}

    @property
    def head(self) -> Any:
        """What `sampler` computes with, apart from z: sessions with the same head share recorded trajectories."""
        return self


class ContinuousModel(Protocol):
    """length: tokens L of an image; dim: numbers D of a token; steps: T of the diffusion head."""

    length: int
    dim: int
    steps: int

    def open(self, conditioning: Any, rows: int) -> ContinuousSession: ...
