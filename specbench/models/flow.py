"""Sampling with a flow-matching head: a stochastic differential equation whose steps are Gaussian.

At time t from 0 (noise) to 1 (data), the state of a token is x = t data + (1 - t) noise, and the head predicts its
velocity v = data - noise. The score is s = (t v - x) / (1 - t). A step of length d adds (v + g s / 2) d and normal
noise of variance g d, for any diffusion g(t) >= 0, with the same distribution of states in the limit of small steps
(NextStep-1, arXiv 2508.10711, repository stepfun-ai/NextStep-1; Flow-GRPO, arXiv 2505.05470).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specbench.errors import UsageError
from specbench.models.denoiser import waves


@dataclass(frozen=True)
class FlowSampler:
    """Steps of a token from time 0 to 1.

    steps: K evaluations of the head, with equally long steps. last_step: if above 0, the length of the last step; the
    first K - 1 steps lead to time 1 - last_step. shift: s replaces the start t of each step by t / (s - (s - 1) t).
    level: of the noise. None: g = 2 (1 - t), as published for NextStep-1 and 1.1; a number: g = level^2 (1 - t) / t, as
    in Flow-GRPO; at t = 0 the divisor is the length of the last step. noisy: whether the last step adds noise; without
    noise it is x + v d.
    """

    steps: int
    shift: float = 1.0
    last_step: float = 0.0
    level: float | None = None
    noisy: bool = True

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise UsageError(f"a flow head samples in 2 steps or more (got {self.steps}); 28 is NextStep-1.1's default")

    def times(self) -> Tensor:
        """The start of each step, and the end: (K + 1,) float64 on the CPU, increasing."""
        end = 1 - self.last_step if self.last_step else 1 - 1 / self.steps
        t = torch.linspace(0, end, self.steps, dtype=torch.float64, device="cpu")
        t = t / (self.shift - (self.shift - 1) * t)
        return torch.cat([t, t[-1:] + self.last_step if self.last_step else torch.ones_like(t[:1])])


@dataclass(frozen=True)
class FlowSteps:
    """Constants (K, 1) of the steps; index 0 is the last step. The next state has the mean keep x + pull v and this log
    variance. sinusoids (K, 256): of the times."""

    keep: Tensor
    pull: Tensor
    log_variance: Tensor
    sinusoids: Tensor

    def __len__(self) -> int:
        return len(self.keep)


@lru_cache(maxsize=64)
def flow_steps(sampler: FlowSampler, device: torch.device, dtype: torch.dtype) -> FlowSteps:
    """The constants on a device, in float32. dtype: of the head; the official code rounds its times to it."""
    with torch.inference_mode(False):
        times = sampler.times()
        t, d = times[:-1], times.diff()
        if sampler.level is None:
            g = 2 * (1 - t)
        else:
            divisor = torch.where(t == 0, 1 - t[-1], t)  # avoids a division by zero like the official code
            g = sampler.level**2 * (1 - t) / divisor
        drifting = g.clone()
        if not sampler.noisy:
            drifting[-1] = 0
        half = drifting * d / (2 * (1 - t))  # factor of (t v - x), the contribution of the score
        columns = (1 - half, d + half * t, (g * d).log())
        keep, pull, log_variance = (x.flip(0)[:, None].to(device, torch.float32) for x in columns)
        sinusoids = waves(t.flip(0).to(dtype)).to(device)
        return FlowSteps(keep, pull, log_variance, sinusoids)


def forget_tables() -> None:
    """Drop the cached tables, because tables made with fake tensors have no numbers."""
    flow_steps.cache_clear()
