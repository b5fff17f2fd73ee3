"""The diffusion process of MAR's head: cosine schedule, respacing, and the arithmetic of one step.

The network predicts the noise (eps), and the variance as a position between two bounds. Facts: reference README (34) to
(36), notes of the golden mar_diffusion_schedule; formulas of DDPM (Ho et al. 2020) and improved DDPM (Nichol and
Dhariwal 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from specbench.errors import UsageError

#: Number of steps in training; sampling uses a subset.
TRAINED_STEPS = 1000
#: A step: (n,) int64, one per row, or a slice for all rows.
Index = Tensor | slice
MAX_BETA = 0.999
_OFFSET = 0.008


@dataclass(frozen=True)
class Schedule:
    """Constants of n steps. Index 0 is the last step of sampling. All tensors are (n,): `timestep` int64 is the number
    of the trained step, which is the network's input; the others are floating-point.

    A golden of the official code has every field, and is compared by the fields' names (scripts/goldens/mar.py)."""

    timestep: Tensor
    betas: Tensor
    alphas_cumprod: Tensor
    alphas_cumprod_prev: Tensor
    sqrt_alphas_cumprod: Tensor
    sqrt_one_minus_alphas_cumprod: Tensor
    sqrt_recip_alphas_cumprod: Tensor
    sqrt_recipm1_alphas_cumprod: Tensor
    posterior_mean_coef1: Tensor
    posterior_mean_coef2: Tensor
    posterior_variance: Tensor
    posterior_log_variance_clipped: Tensor
    log_betas: Tensor

    def __len__(self) -> int:
        return len(self.timestep)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Schedule:
        """The same on a device, as `dtype`. Official sampling uses float32."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Schedule(**{n: t.to(device, dtype if t.is_floating_point() else t.dtype) for n, t in moved.items()})

    # x, x0, eps, noise and v are (n, D); index (n,) int64 has a step per row, or is a slice with one step for all rows.

    def noised(self, x0: Tensor, noise: Tensor, index: Tensor) -> Tensor:
        """The state x at a step, for data x0."""
        return self.sqrt_alphas_cumprod[index, None] * x0 + self.sqrt_one_minus_alphas_cumprod[index, None] * noise

    def x0(self, x: Tensor, eps: Tensor, index: Index) -> Tensor:
        """The data x0 of a state and its noise; not clipped."""
        return self.sqrt_recip_alphas_cumprod[index, None] * x - self.sqrt_recipm1_alphas_cumprod[index, None] * eps

    def mean(self, x: Tensor, x0: Tensor, index: Index) -> Tensor:
        """Mean of the next state, given this state and the data."""
        return self.posterior_mean_coef1[index, None] * x0 + self.posterior_mean_coef2[index, None] * x

    def log_variance(self, v: Tensor, index: Index) -> Tensor:
        """Log variance of the next state. v, the second half of the network's output, is its position between the
        bounds: -1 is the true posterior, 1 the forward process."""
        share = (v + 1) / 2
        return share * self.log_betas[index, None] + (1 - share) * self.posterior_log_variance_clipped[index, None]


@lru_cache(maxsize=64)
def schedule(steps: int, device: torch.device | str | None = None) -> Schedule:
    """The cosine schedule of 1000 steps, respaced to `steps` steps: float64 on the CPU, or float32 on `device`.

    Step i is the trained step round(i * 999 / (steps - 1)), with halves rounded to even. Raises UsageError.
    """
    if not 2 <= steps <= TRAINED_STEPS:
        raise UsageError(
            f"a diffusion head samples in 2 to {TRAINED_STEPS} steps (got {steps}); 100 is the default of MAR"
        )
    with torch.inference_mode(False):  # the cached tensors are used in training, too
        return _cosine(steps) if device is None else schedule(steps).to(device)


def _cosine(steps: int) -> Schedule:
    def left(t: float) -> float:  # the signal's share of the variance
        return math.cos((t + _OFFSET) / (1 + _OFFSET) * math.pi / 2) ** 2

    n = TRAINED_STEPS
    trained = np.cumprod([1 - min(1 - left((i + 1) / n) / left(i / n), MAX_BETA) for i in range(n)])
    timestep = np.array([round(i * (n - 1) / (steps - 1)) for i in range(steps)])
    before = np.append(1.0, trained[timestep[:-1]])
    betas = 1 - trained[timestep] / before
    cumprod = np.cumprod(1 - betas)
    prev = np.append(1.0, cumprod[:-1])
    variance = betas * (1 - prev) / (1 - cumprod)
    floating = (
        betas,
        cumprod,
        prev,
        np.sqrt(cumprod),
        np.sqrt(1 - cumprod),
        np.sqrt(1 / cumprod),
        np.sqrt(1 / cumprod - 1),
        betas * np.sqrt(prev) / (1 - cumprod),
        (1 - prev) * np.sqrt(1 - betas) / (1 - cumprod),
        variance,
        np.log(np.append(variance[1], variance[1:])),  # the last step's variance is zero
        np.log(betas),
    )
    return Schedule(torch.from_numpy(timestep), *map(torch.from_numpy, floating))
