"""Trajectories of a diffusion head: their noise, their states and their densities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specbench.decoding.continuous.rule import ContinuousRule
from specbench.decoding.continuous.sessions import ContinuousSession
from specbench.decoding.rng import RandomStreams
from specbench.engine.graph import Eager, Graphs

#: Rows of a head that are computed at once; it is small.
HEAD_ROWS = 8192


def normal(rng: RandomStreams, number: Tensor, tag: int, *shape: int) -> Tensor:
    """Standard normal numbers (rows, *shape) float32, by inversion of uniforms; `number` (rows,): the step of `rng`."""
    return normal_quantile(rng.uniform(number, tag, *shape))


def normal_quantile(u: Tensor) -> Tensor:
    """Standard normal numbers from uniforms, multiples of 2**-23 in [0, 1)."""
    return torch.special.ndtri(u + 2.0**-24)


def log_normal(x: Tensor, mean: Tensor, log_variance: Tensor, temperature: float, inner: float = 1.0) -> Tensor:
    """Log density (...) float64 of x (..., D) under independent normals whose standard deviations are multiplied by
    `temperature`; `inner` divides the distance from the mean."""
    log_spread = 0.5 * log_variance.double() + math.log(temperature)
    distance = (x.double() - mean.double()) * torch.exp(-log_spread) / inner
    return (-0.5 * distance**2 - log_spread - 0.5 * math.log(2 * math.pi)).sum(-1)


@dataclass
class Trajectory:
    """Trajectories of n tokens. states (n, T + 1, D): x_0 first; mean, log_variance (n, T, D): of every step, the last
    step first, so that index t gives the distribution of states[:, t]."""

    states: Tensor
    mean: Tensor
    log_variance: Tensor

    @property
    def token(self) -> Tensor:
        return self.states[:, 0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a token's noise, (T + 1, D)."""
        after, dim = self.states.shape[1:]
        return after, dim

    def rows(self, index: Tensor) -> Trajectory:
        return Trajectory(self.states[index], self.mean[index], self.log_variance[index])

    @classmethod
    def stacked(cls, drafts: Sequence[Trajectory]) -> Trajectory:
        """The trajectories of gamma drafted tokens of A images; an image's trajectories are next to each other."""
        columns = zip(*((d.states, d.mean, d.log_variance) for d in drafts), strict=True)
        return cls(*(torch.stack(column, 1).flatten(0, 1) for column in columns))


def draw_trajectory(
    session: ContinuousSession, z: Tensor, noise: Tensor, rule: ContinuousRule, engine: Eager | Graphs
) -> Trajectory:
    """Draw tokens under z (n, E). noise (n, T + 1, D): of the last step first, of x_T last."""
    draw = partial(_draw, session, rule.temperature, rule.final_noise)
    key = (session.head, rule.temperature, rule.final_noise)
    parts = [engine.call(key, draw, *part) for part in zip(z.split(HEAD_ROWS), noise.split(HEAD_ROWS), strict=True)]
    return Trajectory(*(chunks[0] if len(chunks) == 1 else torch.cat(chunks) for chunks in zip(*parts, strict=True)))


def _draw(session: ContinuousSession, temperature: float, final_noise: bool, z: Tensor, noise: Tensor) -> list[Tensor]:
    """The fields of a `Trajectory`."""
    steps, moments = noise.shape[1] - 1, session.sampler(z)
    x = noise[:, steps]
    states, means, variances = [x], [], []
    for t in range(steps - 1, -1, -1):
        mean, log_variance = moments(x, t)
        x = mean
        if t > 0 or final_noise:
            x = mean + noise[:, t] * torch.exp(0.5 * log_variance) * temperature
        states.append(x)
        means.append(mean)
        variances.append(log_variance)
    return [torch.stack(values[::-1], 1) for values in (states, means, variances)]


def log_density(session: ContinuousSession, path: Trajectory, z: Tensor, rule: ContinuousRule) -> Tensor:
    """Log density (n,) of trajectories under a model's z (n, E), given x_T."""
    n, after, dim = path.states.shape
    index = torch.arange(after - 1, device=z.device).expand(n, -1).flatten()
    repeated = z.unsqueeze(1).expand(-1, after - 1, -1).flatten(0, 1)
    states = path.states[:, 1:].flatten(0, 1)
    parts = zip(*(x.split(HEAD_ROWS) for x in (states, index, repeated)), strict=True)
    mean, log_variance = map(torch.cat, zip(*(session.moments(*part) for part in parts), strict=True))
    shape = (n, after - 1, dim)
    return log_normal(path.states[:, :-1], mean.view(shape), log_variance.view(shape), rule.temperature).sum(-1)


def own_log_density(path: Trajectory, rule: ContinuousRule) -> Tensor:
    """Log density (n,) of trajectories under the model that drew them, given x_T."""
    return log_normal(path.states[:, :-1], path.mean, path.log_variance, rule.temperature).sum(-1)
