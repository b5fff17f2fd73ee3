"""`specbench train drafter=...`: a drafter for a target, from examples to weights with their card."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from specbench.config import missing_weights, parameters, registry
from specbench.errors import UsageError, install
from specbench.harness.pipeline import ContinuousPipeline, Pipeline
from specbench.models.loading import checkpoints
from specbench.storage import home, origin
from specbench.storage.files import sha256_file, write_atomically
from specbench.storage.reading import read_json
from specbench.training.continuous import ContinuousTask
from specbench.training.drafter import DiscreteTask
from specbench.training.recipes import WHERE, TrainingPlan, is_continuous, plan
from specbench.training.trainer import Alone, Checkpoints, Loss, Processes, Recipe, Validation, fit, processes

SAMPLING = (
    "cfg_scale",
    "cfg_schedule",
    "temperature",
    "top_k",
    "top_p",
    "entropy_temperature",
    "top_n_sigma",
    "diffusion_steps",
)
NOTE = Path("state", "plan.json")


@dataclass
class Trained:
    """The result of a training: the weights' file, their statistics, the number of training examples, the statistics of
    each checkpoint's file, and the meaning of the statistics."""

    file: Path
    statistics: dict[str, float]
    examples: int
    checkpoints: dict[Path, dict[str, float]] = field(default_factory=dict)
    about: str = ""


def main(arguments: Sequence[str]) -> int:
    """`specbench train drafter=...`. Returns the exit status. Raises UsageError for bad arguments, absent weights or
    data."""
    chosen = plan(arguments)
    together, device = processes()
    cfg = {**chosen.cfg, "device": str(device)} if device else chosen.cfg
    missing_weights.check(cfg)
    pipeline = Pipeline.load(cfg)
    try:
        done = train(chosen, pipeline, together)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; run the same command to resume") from None
    if together.is_main_process:
        _card(chosen, pipeline, done, arguments)
        print("  ".join(f"{name} {value:.4g}" for name, value in done.statistics.items()))
        print(f"weights and card in {chosen.out}")
        print(f"use them: specbench run {_use(chosen)}")
    return 0


class TrainingTask(Protocol):
    """What a network learns, and how it is measured; the constructor makes the examples. rows, held: the indices of the
    examples to train on, and of those held out; best: the statistic of the weights to keep, the last ones if empty;
    before: statistics of the weights at the start; about: the meaning of the statistics."""

    network: nn.Module
    rows: np.ndarray
    held: np.ndarray
    best: str
    before: dict[str, float]
    about: str

    def loss(self, batch: int) -> Loss:
        """The loss over the examples `rows`, `batch` of them per step."""
        ...

    def validated(self) -> dict[str, float]:
        """Statistics during the training."""
        ...

    def reached(self, last: bool) -> dict[str, float]:
        """Statistics of the network as a file holds it: with the last weights, or with those of a checkpoint."""
        ...


def _task(chosen: TrainingPlan, pipeline: Any, together: Processes) -> TrainingTask:
    make = ContinuousTask if is_continuous(chosen["drafter"]) else DiscreteTask
    task: TrainingTask = make(chosen, pipeline, _start(chosen), together)
    return task


def train(chosen: TrainingPlan, pipeline: Pipeline | ContinuousPipeline, together: Processes | None = None) -> Trained:
    """Train as planned; resume where an earlier call with the same plan stopped."""
    together = together or Alone()
    kind, out = chosen["drafter"], chosen.out
    note = _note(chosen, pipeline.weights)
    _check_note(out, note)
    torch.manual_seed(chosen.cfg["seed"])
    task = _task(chosen, pipeline, together)
    if chosen["batch"] > len(task.rows):
        raise UsageError(
            f"batch={chosen['batch']} is more than the {len(task.rows)} examples to train on; give a smaller one"
        )
    if together.is_main_process:
        write_atomically(out / NOTE, json.dumps(note, indent=1).encode())

    in_file = registry.network(kind).kind

    def write(file: Path) -> None:
        half = torch.bfloat16 if pipeline.model.dtype == torch.bfloat16 else torch.float16
        checkpoints.save(task.network, file, in_file, half)

    def reached(file: Path, last: bool) -> dict[str, float]:
        checkpoints.fill(task.network, checkpoints.read(file, in_file)[1], file.name)
        return task.reached(last)

    kept = {step: out / f"step-{step}" / registry.DRAFTER_FILE for step in chosen["checkpoints"] or ()}
    recipe = recipe_of(chosen, len(task.rows))
    spent = fit(
        kind,
        task.network,
        task.loss(recipe.batch),
        recipe,
        out / "state",
        validation=Validation(task.validated, chosen["validate_every"], task.best),
        checkpoints=Checkpoints(kept, lambda step: write(kept[step])),
        together=together,
        board=_board(out) if chosen["tensorboard"] and together.is_main_process else None,
    )
    file = out / registry.DRAFTER_FILE
    if not together.is_main_process:
        return Trained(file, {}, len(task.rows))
    write(file)
    before = {path: reached(path, last=False) for path in kept.values()}
    spent = {name: spent[name] for name in ("seconds", "images")}
    return Trained(file, reached(file, last=True) | task.before | spent, len(task.rows), before, task.about)


def recipe_of(chosen: TrainingPlan, rows: int) -> Recipe:
    """The trainer's part of a plan, for so many examples to train on."""
    steps = chosen["steps"] or max(1, round(chosen["epochs"] * rows / chosen["batch"]))
    names = "batch lr warmup schedule weight_decay clip ema save_every muon accumulate precision".split()
    given: dict[str, Any] = {name: chosen[name] for name in names}
    parts = chosen["accumulate"]
    if chosen["batch"] < parts:
        raise UsageError(f"accumulate={parts} passes cannot share batch={chosen['batch']} examples; give a smaller one")
    return Recipe(steps=steps, betas=(chosen["beta1"], chosen["beta2"]), seed=chosen.cfg["seed"], **given)


def _start(chosen: TrainingPlan) -> Path | None:
    """The weights that a training starts from."""
    if not (given := chosen["start"]):
        return None
    if registry.is_embedded(given):
        return registry.network(chosen["drafter"]).path(given)
    path = home.expanded(given)
    if not path.exists():
        raise UsageError(f"start: there is no folder '{path}' of a drafter's weights")
    return path


def _note(chosen: TrainingPlan, weights: str) -> dict[str, Any]:
    """The identity of a training, so that a later command cannot resume another training's state."""
    names = ("model", "seed", "dtype", "data", "split", *SAMPLING)
    own = {name: value for name, value in chosen.arguments.items() if name not in WHERE}
    if start := _start(chosen):
        own["start"] = registry.digest(*registry.drafter_files(start))
    return own | {name: chosen.cfg[name] for name in names if name in chosen.cfg} | {"weights": weights}


def _check_note(out: Path, note: dict[str, Any]) -> None:
    if not (out / NOTE).exists():
        return
    begin = f"give another out=, or remove {out / 'state'} to start again"
    before = read_json(out / NOTE, dict, begin)
    changed = [k for k in sorted({*note, *before}) if note.get(k) != before.get(k)]
    if changed:
        differing = ", ".join(f"{k}={before.get(k)}" for k in changed)
        raise UsageError(f"{out} has a training with {differing}: resume it with the same arguments, {begin}")


def _board(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(f"tensorboard=true needs TensorBoard: {install('train')}") from None
    return SummaryWriter(str(out / "tensorboard"))


def _use(chosen: TrainingPlan) -> str:
    """The arguments of a run with the trained drafter."""
    model = chosen.cfg["model"]
    arguments = [f"model={model}"] if model != parameters.default_choice("model") else []
    return shlex.join(
        [*arguments, f"method={registry.network(chosen['drafter']).method}", f"drafter_weights={chosen.out}"]
    )


def _card(chosen: TrainingPlan, pipeline: Any, done: Trained, arguments: Sequence[str]) -> None:
    """card.md next to the weights: their identity, training data, recipe and results."""
    where = origin.environment(pipeline.device)
    source = {"self": "drawn by the target", "pairs": "images with captions, by the model's tokenizer"}[
        chosen["source"]
    ]
    before = done.checkpoints
    sampling = ", ".join(f"{name}={chosen.cfg[name]}" for name in SAMPLING if name in chosen.cfg)
    terms = [
        f"# {chosen['drafter']} for {chosen.cfg['model']}",
        "",
        f"`specbench train {shlex.join(arguments)}`",
        "",
        f"- Made {time.strftime('%Y-%m-%d', time.gmtime())} by specbench {where['specbench']}, commit"
        f" {where['commit']}, on {where['device_name']} (torch {where['torch']}).",
        f"- Target: {chosen.cfg['model']}, weights {pipeline.weights}.",
        f"- Examples: {done.examples} for training, {source} (data={chosen.cfg['data']}"
        + (f", images={Path(chosen['images']).name}" if chosen["images"] else "")
        + f", seed={chosen.cfg['seed']}).",
        f"- Weights: `{done.file.name}`, SHA-256 {sha256_file(done.file)}.",
        f"- Use: `specbench run {_use(chosen)}`",
        "",
        "| statistic | value |",
        "|---|---|",
        *(f"| {name} | {value:.4g} |" for name, value in done.statistics.items()),
        *(f"| {f.parent.name} | " + ", ".join(f"{k} {v:.4g}" for k, v in s.items()) + " |" for f, s in before.items()),
        "",
        done.about.format(sampling=sampling),
        "",
        "| recipe | value |",
        "|---|---|",
        *(
            f"| {name} | {value} |"
            for name, value in chosen.arguments.items()
            if name not in WHERE and value is not None
        ),
    ]
    write_atomically(chosen.out / "card.md", ("\n".join(terms) + "\n").encode())
