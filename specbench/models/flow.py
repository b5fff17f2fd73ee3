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
    """steps K: evaluations of the head for a token. From time 0 to 1 they are equally long; with `last_step` above 0,
    K - 1 lead to 1 - last_step, and one of that length follows. `shift` s makes t / (s - (s - 1) t) of the time t at
    which each step starts. level: of the noise. None: g = 2 (1 - t), as NextStep-1 and 1.1 are published; a number:
    g = level^2 (1 - t) / t, as of Flow-GRPO, where the divisor is the length of the last step instead of t = 0. noisy:
    the last step adds noise, too; without, it is the deterministic x + v d."""

    steps: int
    shift: float = 1.0
    last_step: float = 0.0
    level: float | None = None
    noisy: bool = True

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise UsageError(f"a flow head samples in 2 steps or more (got {self.steps}); 28 is NextStep-1.1's default")

    def times(self) -> Tensor:
        """(K + 1,) float64 on the CPU, rising: where each step starts, and the end."""
        end = 1 - self.last_step if self.last_step else 1 - 1 / self.steps
        t = torch.linspace(0, end, self.steps, dtype=torch.float64, device="cpu")
        t = t / (self.shift - (self.shift - 1) * t)
        return torch.cat([t, t[-1:] + self.last_step if self.last_step else torch.ones_like(t[:1])])


@dataclass(frozen=True)
class FlowSteps:
    """Constants (K, 1) of each step, index 0 the last one: the next state's mean is keep x + pull v, and its log
    variance. sinusoids (K, 256): of the times."""

    keep: Tensor
    pull: Tensor
    log_variance: Tensor
    sinusoids: Tensor

    def __len__(self) -> int:
        return len(self.keep)


@lru_cache(maxsize=64)
def flow_steps(sampler: FlowSampler, device: torch.device, dtype: torch.dtype) -> FlowSteps:
    """On a device, in float32; dtype: of the head, to which the official code rounds its times."""
    with torch.inference_mode(False):
        times = sampler.times()
        t, d = times[:-1], times.diff()
        if sampler.level is None:
            g = 2 * (1 - t)
        else:
            apart = torch.where(t == 0, 1 - t[-1], t)  # as the official code avoids a division by zero
            g = sampler.level**2 * (1 - t) / apart
        drifting = g.clone()
        if not sampler.noisy:
            drifting[-1] = 0
        half = drifting * d / (2 * (1 - t))  # the score's share: (t v - x) times this
        columns = (1 - half, d + half * t, (g * d).log())
        keep, pull, log_variance = (x.flip(0)[:, None].to(device, torch.float32) for x in columns)
        sinusoids = waves(t.flip(0).to(dtype)).to(device)
        return FlowSteps(keep, pull, log_variance, sinusoids)


def forget_tables() -> None:
    """Drop the tables that are computed once: those made on fake tensors hold no numbers."""
    flow_steps.cache_clear()
