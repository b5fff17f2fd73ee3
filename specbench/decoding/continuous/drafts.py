"""Drafts of continuous tokens, and the target's side of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specbench.decoding.continuous.trajectory import Trajectory


@dataclass
class Drafts:
    """A drafts: `row` (A,) of the batch, whose drafts lie next to each other; indices `number` (A, gamma) in the order
    of generation, of which those inside the image are `valid`, `room` (A,) of them; `series` (A,) of their random
    numbers, as of `keyed`; values (A, L + 1, D) at all positions, including the drafts; the drafter's trajectories and
    z, of A * gamma tokens."""

    row: Tensor
    number: Tensor
    valid: Tensor
    room: Tensor
    series: Tensor
    values: Tensor
    paths: Trajectory
    z: Tensor

    def of(self, index: Tensor) -> Drafts:
        """The drafts `index` (n,)."""
        names = ("row", "number", "valid", "room", "series", "values")
        each = {name: getattr(self, name)[index] for name in names}
        tokens = of_tokens(index, self.number.shape[1])
        return replace(self, **each, paths=self.paths.rows(tokens), z=self.z[tokens])


@dataclass
class Compared:
    """Drafts with the target's z (A * gamma, E) of their tokens and, where a token may follow a draft, z_after
    (A, gamma + 1, E) with that of this one; log_ratio (A, gamma) float64, log p / q of each token; `own` trajectories
    of the target where the criterion needs them, and log Sigma, `sigma` (A * gamma,); u (A, gamma): the uniform number
    that decides on each token by itself."""

    drafts: Drafts
    z: Tensor
    z_after: Tensor | None
    log_ratio: Tensor
    own: Trajectory | None
    sigma: Tensor
    u: Tensor

    def of(self, index: Tensor) -> Compared:
        """The drafts `index` (n,)."""
        tokens = of_tokens(index, self.log_ratio.shape[1])
        return Compared(
            self.drafts.of(index),
            self.z[tokens],
            None if self.z_after is None else self.z_after[index],
            self.log_ratio[index],
            None if self.own is None else self.own.rows(tokens),
            self.sigma[tokens],
            self.u[index],
        )


@dataclass
class Replacement:
    """Tokens (n, D) after a rejection, for the drafted tokens `at` (n,); the number of `proposals` (n,) of each; and
    which (n,) are the last proposal because these ran out, `exhausted`."""

    at: Tensor
    token: Tensor
    proposals: Tensor
    exhausted: Tensor


@dataclass
class Decision:
    """Of drafted tokens (A, gamma) bool: which are kept, which were verified, and which are replaced; `advance` (A,):
    how many tokens of a draft count; and `new` tokens, those that replace others among them."""

    kept: Tensor
    verified: Tensor
    replaced: Tensor
    advance: Tensor
    new: Replacement | None = None


def of_tokens(index: Tensor, gamma: int) -> Tensor:
    """The indices (n gamma,) of the tokens of the drafts `index` (n,)."""
    return (index[:, None] * gamma + torch.arange(gamma, device=index.device)).flatten()


def keyed(number: Tensor, series: Tensor | int, length: int) -> Tensor:
    """The step (n,) of `RandomStreams` that keys the random numbers of tokens `number` (n,) in a series, for images of
    `length` tokens. Series 0 is that of vanilla decoding. Under block verification every pass has its own (see
    block.py); else the k-th draft of an image has series k at every pass, since a token behind a rejected one decides
    nothing."""
    return number + (length + 1) * series
