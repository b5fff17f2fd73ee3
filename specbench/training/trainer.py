"""A small training loop that can be resumed. A stage is a module, a loss and a recipe.

Every step draws from a generator seeded by (recipe seed, step), so a killed run resumes with the same batches. Several
processes, started by `accelerate launch`, share the batch of a step.
"""

from __future__ import annotations

import csv
import io
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from specbench.engine.half import bfloat16_products, units
from specbench.errors import UsageError, install
from specbench.storage.files import atomic_path, write_atomically


@dataclass(frozen=True)
class Recipe:
    """How a stage is trained. steps: optimiser steps of `batch` examples, in `accumulate` passes; lr: the peak learning
    rate, reached after `warmup` steps and followed by a cosine to 5 % or a line to 0."""

    steps: int
    batch: int
    lr: float
    warmup: int = 200
    schedule: str = "cosine"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    ema: float = 0.0  # decay of the moving average that replaces the weights at the end; 0: no average
    seed: int = 0
    save_every: int = 250
    muon: bool = False  # Muon for the blocks' matrices, AdamW for the rest: fewer images for the same loss
    accumulate: int = 1
    precision: str = "bfloat16"

    def lr_at(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        t = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        if self.schedule == "linear":
            return self.lr * (1 - t)
        return self.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * t)))


#: Name prefixes of the parameters of a Transformer's blocks.
BLOCKS = ("layers.", "query_layers.", "encoder_blocks.", "decoder_blocks.")


@dataclass(frozen=True)
class MicroStep:
    """One pass of a training step: pass `part` of `parts` passes, over all processes, that share the step's batch."""

    step: int
    seed: int
    part: int = 0
    parts: int = 1

    @property
    def rng(self) -> np.random.Generator:
        """A generator with the same draws in all parts."""
        return np.random.Generator(np.random.Philox(key=[self.seed, self.step]))

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator with draws for this part only."""
        key = np.random.SeedSequence([self.seed, self.step, self.part]).generate_state(1, np.uint64)[0]
        return torch.Generator(device).manual_seed(int(key >> 1))


#: loss(micro_step) -> (scalar loss, a mean over the examples of this part; statistics to log)
Loss = Callable[[MicroStep], tuple[Tensor, dict[str, float]]]


@dataclass(frozen=True)
class Validation:
    """Calls statistics() every `every` steps. The final weights are those with the highest value of the statistic
    `best` or, if `best` is empty, the last weights."""

    statistics: Callable[[], dict[str, float]]
    every: int
    best: str = ""


@dataclass(frozen=True)
class Checkpoints:
    """Calls write(step) after each of `steps`. The module then has the weights as if training ended at this step."""

    steps: Collection[int]
    write: Callable[[int], None]


class Processes(Protocol):
    """The processes of a training. Hugging Face accelerate's Accelerator has this interface."""

    num_processes: int
    process_index: int

    @property
    def is_main_process(self) -> bool: ...
    def reduce(self, tensor: Any, reduction: str) -> Any: ...
    def wait_for_everyone(self) -> None: ...
    def end_training(self) -> None: ...


class Alone:
    """One process."""

    num_processes, process_index, is_main_process = 1, 0, True

    def reduce(self, tensor: Any, reduction: str) -> Any:
        return tensor

    def wait_for_everyone(self) -> None: ...

    def end_training(self) -> None: ...


def processes() -> tuple[Processes, torch.device | None]:
    """The processes that `accelerate launch` or torchrun started, and the device of this process; otherwise `Alone` and
    None."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Alone(), None
    try:
        from accelerate import Accelerator
    except ImportError:
        raise UsageError(f"several processes need accelerate: {install('train')}") from None
    accelerator = Accelerator()
    return accelerator, accelerator.device


def _optimisers(module: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW with weight decay on matrices only. With `recipe.muon`, Muon trains the blocks' matrices, at AdamW's
    scale."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    blocks = [p for name, p in named if recipe.muon and p.dim() == 2 and name.startswith(BLOCKS)]
    others = [p for _, p in named if not any(p is b for b in blocks)]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)]
    if blocks:
        optimisers.append(
            torch.optim.Muon(blocks, lr=recipe.lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimisers


class _Fit:
    """A training in progress, whose state is saved to a file and loaded from it."""

    def __init__(self, name: str, module: nn.Module, recipe: Recipe, work: Path) -> None:
        self.name, self.module, self.recipe = name, module, recipe
        self.path, self.curve, self.validation_curve = (
            work / f"{name}{end}" for end in (".pt", ".csv", "-validation.csv")
        )
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.optimisers = _optimisers(module, recipe)
        self.shadow = [p.detach().clone() for p in self.params] if recipe.ema else []
        self.step, self.statistics, self.seconds = 0, dict[str, float](), 0.0
        self.best, self.best_weights = -math.inf, list[Tensor]()

    def load(self, device: torch.device) -> None:
        if not self.path.exists():
            return
        state = torch.load(self.path, map_location=device, weights_only=True)
        self.module.load_state_dict(state["module"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.shadow, self.step, self.statistics = state["shadow"], state["step"], state["statistics"]
        self.seconds, self.best, self.best_weights = (
            state["seconds"],
            state.get("best", -math.inf),
            state.get("best_weights", []),
        )
        for file in (self.curve, self.validation_curve):  # rows logged after the saved state are logged again
            _forget_after(file, self.step)

    def save(self, seconds: float) -> None:
        state = {
            "module": self.module.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "shadow": self.shadow,
            "best": self.best,
            "best_weights": self.best_weights,
        }
        with atomic_path(self.path) as temporary:
            torch.save({**state, "step": self.step, "statistics": self.statistics, "seconds": seconds}, temporary)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """In this context, the module has the weights as if training ended now."""
        weights = [p.detach().clone() for p in self.params] if self.shadow else []
        self.put(self.shadow)
        self.module.eval()
        try:
            yield
        finally:
            self.put(weights)
            self.module.train()

    @torch.no_grad()
    def put(self, values: list[Tensor]) -> None:
        for p, value in zip(self.params, values, strict=False):
            p.copy_(value)

    def validate(self, validation: Validation) -> dict[str, float]:
        with self.averaged():
            statistics = validation.statistics()
            if validation.best and statistics[validation.best] > self.best:
                self.best, self.best_weights = statistics[validation.best], [p.detach().clone() for p in self.params]
        return statistics


def fit(
    name: str,
    module: nn.Module,
    loss: Loss,
    recipe: Recipe,
    work: Path,
    after_step: Callable[[int], None] | None = None,
    validation: Validation | None = None,
    checkpoints: Checkpoints | None = None,
    process_group: Processes | None = None,
    board: Any = None,
) -> dict[str, float]:
    """Train `module` in place. Resumes from `work/<name>.pt` if it exists. Returns the last logged statistics.

    `after_step(step)` runs without gradients after each optimiser step, for example to update a codebook. The loss
    curve is written to `work/<name>.csv`, the validation's statistics to `work/<name>-validation.csv`, and both to
    `board`, if a TensorBoard writer is given. Raises FloatingPointError for a gradient that is not finite.
    """
    work.mkdir(parents=True, exist_ok=True)
    process_group = process_group or Alone()
    device = next(module.parameters()).device
    run = _Fit(name, module, recipe, work)
    run.load(device)
    start, began = run.step, time.perf_counter()
    parts = recipe.accumulate * process_group.num_processes
    parts_here = range(
        process_group.process_index * recipe.accumulate, (process_group.process_index + 1) * recipe.accumulate
    )
    module.train()
    progress = tqdm(
        range(start, recipe.steps),
        initial=start,
        total=recipe.steps,
        desc=name,
        mininterval=5,
        disable=start >= recipe.steps or not process_group.is_main_process,
    )
    for step in progress:
        for optimiser in run.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = recipe.lr_at(step)
        statistics = []
        for part in parts_here:
            # on CPUs, too: with matrix units, they gain as much from it as GPUs
            with bfloat16_products(device, recipe.precision == "bfloat16"):
                value, logged = loss(MicroStep(step, recipe.seed, part, parts))
            (value / parts).backward()
            statistics.append(logged)
        _add_up(run.params, process_group)
        norm = nn.utils.clip_grad_norm_(run.params, recipe.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"{name}: gradient is not finite at step {step}; lower the learning rate")
        for optimiser in run.optimisers:
            with units(device):  # Muon multiplies in bfloat16
                optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            if recipe.ema:
                d = min(recipe.ema, (1 + step) / (10 + step))
                torch._foreach_lerp_(run.shadow, [p.data for p in run.params], 1 - d)
            if after_step is not None:
                after_step(step)
        run.step = completed = step + 1
        last = completed == recipe.steps
        if completed % 50 == 0 or last:
            run.statistics = _mean(statistics, device, process_group)
            progress.set_postfix({k: f"{v:.3f}" for k, v in run.statistics.items()}, refresh=False)
            if process_group.is_main_process:
                _log(run.curve, {"step": completed, "lr": recipe.lr_at(step), **run.statistics}, board, name)
        if validation and process_group.is_main_process and (completed % validation.every == 0 or last):
            _log(run.validation_curve, {"step": completed, **run.validate(validation)}, board, f"{name}-validation")
        if checkpoints and process_group.is_main_process and completed in checkpoints.steps:
            with run.averaged():
                checkpoints.write(completed)
        if process_group.is_main_process and (completed % recipe.save_every == 0 or last):
            run.save(run.seconds + time.perf_counter() - began)
    process_group.wait_for_everyone()
    run.put(run.best_weights or run.shadow)
    module.eval()
    return {
        **run.statistics,
        "seconds": run.seconds + time.perf_counter() - began,
        "images": recipe.steps * recipe.batch,
    }


def _add_up(params: list[nn.Parameter], process_group: Processes) -> None:
    """Sum the gradients over all processes, in one message."""
    if process_group.num_processes == 1:
        return
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
    total = process_group.reduce(torch.cat([g.flatten() for g in grads]), "sum")
    for p, g in zip(params, total.split([g.numel() for g in grads]), strict=True):
        p.grad = g.view_as(p)


def _mean(statistics: list[dict[str, float]], device: torch.device, process_group: Processes) -> dict[str, float]:
    """The mean over the parts of a step, in all processes."""
    mean = torch.tensor([[float(v) for v in part.values()] for part in statistics], dtype=torch.float64).mean(0)
    shared = process_group.reduce(mean.to(device, torch.float32), "mean")
    return dict(zip(statistics[0], shared.tolist(), strict=True))


def _log(path: Path, row: Mapping[str, float], board: Any, name: str) -> None:
    new = not path.exists()
    with path.open("a", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)
    if board is not None:
        for key, value in row.items():
            board.add_scalar(f"{name}/{key}", value, row["step"])


def _forget_after(path: Path, step: int) -> None:
    """Keep the rows of a curve up to training step `step`, and drop a truncated line."""
    if not path.exists():
        return
    with path.open(newline="") as f:
        rows = list(csv.DictReader(f))
    complete = [row for row in rows if None not in row and None not in row.values() and float(row["step"]) <= step]
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, fieldnames=[k for k in rows[0] if k is not None])
        writer.writeheader()
        writer.writerows(complete)
    write_atomically(path, text.getvalue().encode())
