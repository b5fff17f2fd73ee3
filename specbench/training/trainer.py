"""A small, resumable training loop, independent of images: a stage is a module, a loss and a recipe.

Every step draws from a generator seeded by (recipe seed, step), so a killed run resumes with the same batches.
Several processes, started by `accelerate launch`, share a step's batch.
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

from specbench.errors import UsageError, install
from specbench.storage.files import atomic_path, write_atomically


@dataclass(frozen=True)
class Recipe:
    """How one stage is trained. `steps` counts optimiser steps of `batch` examples, which `accumulate` passes share;
    `lr` is the peak after `warmup` steps, then a cosine to 5 % or a line to 0."""

    steps: int
    batch: int
    lr: float
    warmup: int = 200
    schedule: str = "cosine"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    ema: float = 0.0  # decay of a shadow copy that replaces the weights at the end; 0 = none
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
    """One pass of a training step: index `part` of `parts` over all processes, which share the step's batch."""

    step: int
    seed: int
    part: int = 0
    parts: int = 1

    @property
    def rng(self) -> np.random.Generator:
        """The generator of draws that all parts share."""
        return np.random.Generator(np.random.Philox(key=[self.seed, self.step]))

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator of this part's own."""
        key = np.random.SeedSequence([self.seed, self.step, self.part]).generate_state(1, np.uint64)[0]
        return torch.Generator(device).manual_seed(int(key >> 1))


#: loss(micro_step) -> (scalar loss, a mean over the examples of this part; statistics to log)
Loss = Callable[[MicroStep], tuple[Tensor, dict[str, float]]]


@dataclass(frozen=True)
class Validation:
    """statistics() every `every` steps; with `best`, the result has the weights with the highest statistic of that
    name, else the last ones."""

    statistics: Callable[[], dict[str, float]]
    every: int
    best: str = ""


@dataclass(frozen=True)
class Checkpoints:
    """write(step) after each of `steps`, while the module has the weights it would have if training ended there."""

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


class Alone:
    """One process."""

    num_processes, process_index, is_main_process = 1, 0, True

    def reduce(self, tensor: Any, reduction: str) -> Any:
        return tensor

    def wait_for_everyone(self) -> None: ...


def processes() -> tuple[Processes, torch.device | None]:
    """The processes that `accelerate launch` or torchrun started, and this one's device; otherwise `Alone` and None."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Alone(), None
    try:
        from accelerate import Accelerator
    except ImportError:
        raise UsageError(f"several processes need accelerate: {install('train')}") from None
    found = Accelerator()
    return found, found.device


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


class _Fit:
    """A training in progress, whose state is saved to a file and loaded from it."""

    def __init__(self, name: str, module: nn.Module, recipe: Recipe, work: Path) -> None:
        self.name, self.module, self.recipe = name, module, recipe
        self.path, self.curve, self.held = (work / f"{name}{end}" for end in (".pt", ".csv", "-validation.csv"))
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
        for file in (self.curve, self.held):  # rows logged after the saved state are logged again
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
        """Within, the module has the weights it would have if training ended now."""
        own = [p.detach().clone() for p in self.params] if self.shadow else []
        self.put(self.shadow)
        self.module.eval()
        try:
            yield
        finally:
            self.put(own)
            self.module.train()

    @torch.no_grad()
    def put(self, values: list[Tensor]) -> None:
        for p, value in zip(self.params, values, strict=False):
            p.copy_(value)

    def validate(self, validation: Validation) -> dict[str, float]:
        with self.averaged():
            found = validation.statistics()
            if validation.best and found[validation.best] > self.best:
                self.best, self.best_weights = found[validation.best], [p.detach().clone() for p in self.params]
        return found


def fit(
    name: str,
    module: nn.Module,
    loss: Loss,
    recipe: Recipe,
    work: Path,
    after_step: Callable[[int], None] | None = None,
    validation: Validation | None = None,
    checkpoints: Checkpoints | None = None,
    together: Processes | None = None,
    board: Any = None,
) -> dict[str, float]:
    """Train `module` itself; resume from `work/<name>.pt` where it exists. Returns the last logged statistics.

    `after_step(step)` runs without gradients after each optimiser step (codebook upkeep and the like). The loss curve
    goes to `work/<name>.csv`, the validation's statistics to `work/<name>-validation.csv`; both to `board`, a
    TensorBoard writer, where there is one. Raises FloatingPointError for a gradient that is not finite.
    """
    work.mkdir(parents=True, exist_ok=True)
    together = together or Alone()
    device = next(module.parameters()).device
    run = _Fit(name, module, recipe, work)
    run.load(device)
    start, began = run.step, time.perf_counter()
    parts = recipe.accumulate * together.num_processes
    own = range(together.process_index * recipe.accumulate, (together.process_index + 1) * recipe.accumulate)
    module.train()
    progress = tqdm(
        range(start, recipe.steps),
        initial=start,
        total=recipe.steps,
        desc=name,
        mininterval=5,
        disable=start >= recipe.steps or not together.is_main_process,
    )
    for step in progress:
        for optimiser in run.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = recipe.lr_at(step)
        seen = []
        for part in own:
            # bf16 on both kinds of device: CPUs with matrix units gain as much from it as GPUs
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                value, logged = loss(MicroStep(step, recipe.seed, part, parts))
            (value / parts).backward()
            seen.append(logged)
        _add_up(run.params, together)
        norm = nn.utils.clip_grad_norm_(run.params, recipe.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"{name}: gradient is not finite at step {step}; lower the learning rate")
        for optimiser in run.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            if recipe.ema:
                d = min(recipe.ema, (1 + step) / (10 + step))
                torch._foreach_lerp_(run.shadow, [p.data for p in run.params], 1 - d)
            if after_step is not None:
                after_step(step)
        run.step = done = step + 1
        last = done == recipe.steps
        if done % 50 == 0 or last:
            run.statistics = _mean(seen, device, together)
            progress.set_postfix({k: f"{v:.3f}" for k, v in run.statistics.items()}, refresh=False)
            if together.is_main_process:
                _log(run.curve, {"step": done, "lr": recipe.lr_at(step), **run.statistics}, board, name)
        if validation and together.is_main_process and (done % validation.every == 0 or last):
            _log(run.held, {"step": done, **run.validate(validation)}, board, f"{name}-validation")
        if checkpoints and together.is_main_process and done in checkpoints.steps:
            with run.averaged():
                checkpoints.write(done)
        if together.is_main_process and (done % recipe.save_every == 0 or last):
            run.save(run.seconds + time.perf_counter() - began)
    together.wait_for_everyone()
    run.put(run.best_weights or run.shadow)
    module.eval()
    return {
        **run.statistics,
        "seconds": run.seconds + time.perf_counter() - began,
        "images": recipe.steps * recipe.batch,
    }


def _add_up(params: list[nn.Parameter], together: Processes) -> None:
    """Sum the gradients of all processes, in one message."""
    if together.num_processes == 1:
        return
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
    total = together.reduce(torch.cat([g.flatten() for g in grads]), "sum")
    for p, g in zip(params, total.split([g.numel() for g in grads]), strict=True):
        p.grad = g.view_as(p)


def _mean(statistics: list[dict[str, float]], device: torch.device, together: Processes) -> dict[str, float]:
    """The mean over the parts of a step, on all processes."""
    own = torch.tensor([[float(v) for v in part.values()] for part in statistics], dtype=torch.float64).mean(0)
    shared = together.reduce(own.to(device, torch.float32), "mean")
    return dict(zip(statistics[0], shared.tolist(), strict=True))


def _log(path: Path, row: Mapping[str, float], board: Any = None, name: str = "") -> None:
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
    """Keep the rows of a curve up to training step `step`; drop a truncated line, too."""
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
