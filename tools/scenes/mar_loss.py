"""MAR's training: its masks, and the loss of its diffusion head, which is the squared error of the noise plus a term of
the variational bound for the variance (Li et al. 2024, arXiv 2406.11838; Nichol and Dhariwal 2021)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.models import diffusion
from specbench.models.diffusion import Schedule
from specbench.models.mar import MAR

#: How often each token of a batch is noised. (The head costs less than the layers before it.)
REPEATS = 4


def head_loss(model: MAR, x0: Tensor, z: Tensor, generator: torch.Generator) -> Tensor:
    """The mean of the loss over sampled tokens x0 (n, D) under z (n, E). A token is noised `REPEATS` times, to
    different steps."""
    x0, z = x0.repeat(REPEATS, 1), z.repeat(REPEATS, 1)
    schedule = diffusion.schedule(diffusion.TRAINED_STEPS, x0.device)
    drawn = torch.rand(len(x0), generator=generator, device=generator.device).to(x0.device)
    index = (drawn * len(schedule)).long()
    noise = torch.randn(x0.shape, generator=generator, device=generator.device).to(x0.device)
    x = schedule.noised(x0, noise, index)
    eps, v = model.predict(x, index, z)
    return (F.mse_loss(eps, noise, reduction="none").mean(-1) + bound(schedule, x0, x, eps, v, index)).mean()


def bound(schedule: Schedule, x0: Tensor, x: Tensor, eps: Tensor, v: Tensor, index: Tensor) -> Tensor:
    """The term of the variational bound (n,), in bits per number, that trains the variance. The mean gets no gradient.
    x0, x, eps and v are (n, D); index (n,) int64 has a step per row.

    At index 0 it is the probability of a bin of width 2/255 around x0, as for 8-bit pixels. No bin is open-ended,
    because latents are unbounded.
    """
    mean = schedule.mean(x, schedule.x0(x, eps.detach(), index), index)
    log_variance = schedule.log_variance(v, index)
    true_mean, true = schedule.mean(x, x0, index), schedule.posterior_log_variance_clipped[index, None]
    divergence = 0.5 * (
        log_variance - true - 1 + (true - log_variance).exp() + (true_mean - mean) ** 2 * (-log_variance).exp()
    )
    narrow = (-0.5 * log_variance).exp()
    upper, lower = ((x0 - mean + edge) * narrow for edge in (1 / 255, -1 / 255))
    inside = (torch.special.ndtr(upper) - torch.special.ndtr(lower)).clamp_min(1e-12)
    return torch.where(index[:, None] == 0, -inside.log(), divergence).mean(-1) / math.log(2)


def masks(count: int, length: int, generator: torch.Generator, least: float = 0.7, spread: float = 0.25) -> Tensor:
    """Masks (count, length) bool for training, on the generator's device. All rows have the same share of masked
    tokens, drawn from a normal distribution with mean 1 and this spread, between `least` and 1. Positions are
    random."""
    device = generator.device
    low, high = (torch.special.ndtr(torch.tensor(x, device=device)) for x in ((least - 1) / spread, 0.0))
    share = 1 + spread * torch.special.ndtri(low + (high - low) * torch.rand((), generator=generator, device=device))
    order = torch.rand(count, length, generator=generator, device=device).argsort(1)
    return order < torch.ceil(length * share).clamp(1, length)
