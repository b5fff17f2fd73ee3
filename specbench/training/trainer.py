"""A small, resumable training loop. It knows nothing of images: a stage is a module, a loss and a recipe.

Every step draws its batch from a generator seeded by (recipe seed, step), so a run that was killed continues with the
batches it would have seen.
"""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm


@dataclass(frozen=True)
class Recipe:
    """How one stage is trained. `steps` counts optimiser steps; `lr` is the peak after `warmup` steps, then a cosine to
    5 %."""

    steps: int
    batch: int
    lr: float
    warmup: int = 200
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    ema: float = 0.0  # decay of a shadow copy that replaces the weights at the end; 0 = none
    seed: int = 0
    save_every: int = 250
    muon: bool = False  # Muon for the blocks' matrices, AdamW for the rest: fewer images for the same loss

    def lr_at(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        t = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, t))))


#: Where parameters of the blocks of a Transformer stand.
BLOCKS = ("layers.", "encoder_blocks.", "decoder_blocks.")

#: loss(step) -> (scalar loss, figures to log)
Loss = Callable[[np.random.Generator], tuple[Tensor, dict[str, float]]]


def batch_rng(recipe: Recipe, step: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[recipe.seed, step]))


def _optimisers(module: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW, decaying matrices only; with `recipe.muon` the blocks' matrices go to Muon, at AdamW's scale."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    blocks = [p for name, p in named if recipe.muon and p.dim() == 2 and name.startswith(BLOCKS)]
    others = [p for _, p in named if not any(p is b for b in blocks)]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)]
    if blocks:
        found.append(
            torch.optim.Muon(blocks, lr=recipe.lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return found


def _save(path: Path, state: dict) -> None:
    tmp = path.with_suffix(".tmp")
    torch.save(state, tmp)
    os.replace(tmp, path)


def fit(
    name: str,
    module: nn.Module,
    loss: Loss,
    recipe: Recipe,
    work: Path,
    after_step: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Train `module` in place; resume from `work/<name>.pt` where it exists. Returns the last logged figures.

    `after_step(step)` runs without gradients after each optimiser step (codebook upkeep and the like). The loss curve
    is appended to `work/<name>.csv`.
    """
    work.mkdir(parents=True, exist_ok=True)
    path = work / f"{name}.pt"
    device = next(module.parameters()).device
    params = [p for p in module.parameters() if p.requires_grad]
    optimisers = _optimisers(module, recipe)
    shadow = [p.detach().clone() for p in params] if recipe.ema else []
    start, figures, seconds = 0, {}, 0.0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        module.load_state_dict(state["module"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        shadow, start, figures, seconds = state["shadow"], state["step"], state["figures"], state["seconds"]
    began = time.perf_counter()
    module.train()
    progress = tqdm(
        range(start, recipe.steps),
        initial=start,
        total=recipe.steps,
        desc=name,
        mininterval=5,
        disable=start >= recipe.steps,
    )
    for step in progress:
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = recipe.lr_at(step)
        # bf16 on both kinds of device: CPUs with matrix units gain as much from it as GPUs
        with torch.autocast(device.type, torch.bfloat16):
            value, logged = loss(batch_rng(recipe, step))
        value.backward()
        norm = nn.utils.clip_grad_norm_(params, recipe.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"{name}: gradient is not finite at step {step}; lower the learning rate")
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            if recipe.ema:
                d = min(recipe.ema, (1 + step) / (10 + step))
                torch._foreach_lerp_(shadow, [p.data for p in params], 1 - d)
            if after_step is not None:
                after_step(step)
        done = step + 1
        if done % 50 == 0 or done == recipe.steps:
            figures = {k: float(v) for k, v in logged.items()}
            progress.set_postfix({k: f"{v:.3f}" for k, v in figures.items()}, refresh=False)
            _log(work / f"{name}.csv", {"step": done, "lr": recipe.lr_at(step), **figures})
        if done % recipe.save_every == 0 or done == recipe.steps:
            spent = seconds + time.perf_counter() - began
            state = {
                "module": module.state_dict(),
                "optimisers": [o.state_dict() for o in optimisers],
                "shadow": shadow,
            }
            _save(path, {**state, "step": done, "figures": figures, "seconds": spent})
    if recipe.ema and shadow:
        with torch.no_grad():
            for p, s in zip(params, shadow, strict=True):
                p.copy_(s)
    module.eval()
    return {**figures, "seconds": seconds + time.perf_counter() - began, "images": recipe.steps * recipe.batch}


def _log(path: Path, row: dict[str, float]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)
