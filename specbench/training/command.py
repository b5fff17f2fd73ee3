"""`specbench train drafter=...`: trains a drafter for a target, and writes its weights and their card."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specbench.config import missing_weights, parameters, registry
from specbench.errors import UsageError, install
from specbench.harness.pipeline import Pipeline
from specbench.models.loading import checkpoints
from specbench.storage import home, origin
from specbench.storage.files import sha256_file, write_atomically
from specbench.storage.reading import read_json
from specbench.training.drafter import TrainingTask
from specbench.training.recipes import WHERE, TrainingPlan, plan
from specbench.training.trainer import Alone, Checkpoints, Processes, Recipe, Validation, fit, processes

SAMPLING = (
    "cfg_scale",
    "cfg_schedule",
    "temperature",
    "top_k",
    "top_p",
    "entropy_temperature",
    "top_n_sigma",
)
NOTE = Path(registry.TRAINING_STATE, "plan.json")


@dataclass
class TrainingResult:
    """The result of a training: the file of the weights, their statistics, the number of training examples, and
    checkpoint file -> its statistics."""

    file: Path
    statistics: dict[str, float]
    examples: int
    checkpoints: dict[Path, dict[str, float]] = field(default_factory=dict)


def main(arguments: Sequence[str]) -> int:
    """`specbench train drafter=...`. Returns the exit status. Raises UsageError for bad arguments, and for missing
    weights or data."""
    training_plan = plan(arguments)
    process_group, device = processes()
    cfg = training_plan.cfg.changed(device=str(device)) if device else training_plan.cfg
    missing_weights.check(cfg)
    pipeline = Pipeline.load(cfg)
    assert isinstance(pipeline, Pipeline)  # the plan refuses other models
    try:
        result = train(training_plan, pipeline, process_group)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; run the same command to resume") from None
    if process_group.is_main_process:
        _card(training_plan, pipeline, result, arguments)
        print("  ".join(f"{name} {value:.4g}" for name, value in result.statistics.items()))
        print(f"weights and card in {training_plan.out}")
        print(f"use them: specbench run {_use(training_plan)}")
    process_group.end_training()  # otherwise gloo's thread can abort the process at its end
    return 0


def train(plan: TrainingPlan, pipeline: Pipeline, process_group: Processes | None = None) -> TrainingResult:
    """Train as planned. Resumes where an earlier call with the same plan stopped."""
    process_group = process_group or Alone()
    kind, out = plan["drafter"], plan.out
    note = _note(plan, pipeline.weights)
    _check_note(out, note)
    torch.manual_seed(plan.cfg.seed)
    task = TrainingTask(plan, pipeline, _start(plan), process_group)
    if plan["batch"] > len(task.rows):
        raise UsageError(
            f"batch={plan['batch']} is more than the {len(task.rows)} examples to train on; give a smaller one"
        )
    if process_group.is_main_process:
        write_atomically(out / NOTE, json.dumps(note, indent=1).encode())

    in_file = registry.network(kind).kind

    def write(file: Path) -> None:
        half = torch.bfloat16 if pipeline.model.dtype == torch.bfloat16 else torch.float16
        checkpoints.save(task.network, file, in_file, half)

    def final_statistics(file: Path, last: bool) -> dict[str, float]:
        checkpoints.fill(task.network, checkpoints.read(file, in_file)[1], file.name)
        return task.final_statistics(last)

    checkpoint_files = {step: out / f"step-{step}" / registry.DRAFTER_FILE for step in plan["checkpoints"] or ()}
    recipe = recipe_of(plan, len(task.rows))
    spent = fit(
        kind,
        task.network,
        task.loss(recipe.batch),
        recipe,
        out / registry.TRAINING_STATE,
        validation=Validation(task.validate, plan["validate_every"], task.best),
        checkpoints=Checkpoints(checkpoint_files, lambda step: write(checkpoint_files[step])),
        process_group=process_group,
        board=_board(out) if plan["tensorboard"] and process_group.is_main_process else None,
    )
    file = out / registry.DRAFTER_FILE
    if not process_group.is_main_process:
        return TrainingResult(file, {}, len(task.rows))
    write(file)
    by_checkpoint = {path: final_statistics(path, last=False) for path in checkpoint_files.values()}
    spent = {name: spent[name] for name in ("seconds", "images")}
    return TrainingResult(file, final_statistics(file, last=True) | spent, len(task.rows), by_checkpoint)


def recipe_of(plan: TrainingPlan, rows: int) -> Recipe:
    """The trainer's recipe of a plan. rows: number of training examples."""
    steps = plan["steps"] or max(1, round(plan["epochs"] * rows / plan["batch"]))
    names = "batch lr warmup schedule weight_decay clip ema save_every muon accumulate precision".split()
    settings: dict[str, Any] = {name: plan[name] for name in names}
    parts = plan["accumulate"]
    if plan["batch"] < parts:
        raise UsageError(f"accumulate={parts} passes cannot share batch={plan['batch']} examples; give a smaller one")
    return Recipe(steps=steps, betas=(plan["beta1"], plan["beta2"]), seed=plan.cfg.seed, **settings)


def _start(plan: TrainingPlan) -> Path | None:
    """The weights that the training starts from."""
    if not (start := plan["start"]):
        return None
    if registry.is_embedded(start):
        return registry.network(plan["drafter"]).path(start)
    path = home.expanded(start)
    if not path.exists():
        raise UsageError(f"start: the folder '{path}' of a drafter's weights does not exist")
    return path


def _note(plan: TrainingPlan, weights: str) -> dict[str, Any]:
    """The identity of a training: a command with another identity cannot resume its state."""
    names = ("model", "seed", "dtype", "data", "split", *SAMPLING)
    arguments = {name: value for name, value in plan.arguments.items() if name not in WHERE}
    if start := _start(plan):
        arguments["start"] = registry.digest(*registry.drafter_files(start))
    return arguments | {name: plan.cfg.get(name) for name in names if name in plan.cfg} | {"weights": weights}


def _check_note(out: Path, note: dict[str, Any]) -> None:
    if not (out / NOTE).exists():
        if out.is_dir() and any(path.is_file() for path in out.iterdir()):
            raise UsageError(f"{out} has other files, such as a published drafter: give out=DIR")
        return
    begin = f"give another out=, or remove {out / 'state'} to start again"
    stored = read_json(out / NOTE, dict, begin)
    changed = [k for k in sorted({*note, *stored}) if note.get(k) != stored.get(k)]
    if changed:
        differing = ", ".join(f"{k}={stored.get(k)}" for k in changed)
        raise UsageError(f"{out} has a training with {differing}: resume it with the same arguments, {begin}")


def _board(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(f"tensorboard=true needs TensorBoard: {install('train')}") from None
    return SummaryWriter(str(out / "tensorboard"))


def _use(plan: TrainingPlan) -> str:
    """The arguments of a run with the trained drafter. It needs not be named where every run looks for it."""
    model, folder = plan.cfg.model, registry.weights_folder(plan.cfg)
    arguments = [f"model={model}"] if model != parameters.default_choice("model") else []
    arguments += [f"weights={folder}"] if plan.cfg.weights not in ("official", "embedded", "random") else []
    arguments.append(f"method={registry.network(plan['drafter']).method}")
    found = folder is not None and plan.out == folder / registry.network(plan["drafter"]).folder
    return shlex.join([*arguments, *([] if found else [f"drafter_weights={plan.out}"])])


def _card(plan: TrainingPlan, pipeline: Any, result: TrainingResult, arguments: Sequence[str]) -> None:
    """card.md next to the weights: their identity, training data, recipe and results."""
    where = origin.environment(pipeline.device)
    source = {"self": "drawn by the target", "pairs": "images with captions, by the model's tokenizer"}[plan["source"]]
    checkpoints = result.checkpoints
    sampling = ", ".join(f"{name}={plan.cfg.get(name)}" for name in SAMPLING if name in plan.cfg)
    terms = [
        f"# {plan['drafter']} for {plan.cfg.model}",
        "",
        f"`specbench train {shlex.join(arguments)}`",
        "",
        f"- Trained on {time.strftime('%Y-%m-%d', time.gmtime())} by specbench {where['specbench']}, commit"
        f" {where['commit']}, on {where['device_name']} (torch {where['torch']}).",
        f"- Target: {plan.cfg.model}, weights {pipeline.weights}.",
        f"- Examples: {result.examples} for training, {source} (data={plan.cfg.data}"
        + (f", images={Path(plan['images']).name}" if plan["images"] else "")
        + f", seed={plan.cfg.seed}).",
        f"- Weights: `{result.file.name}`, SHA-256 {sha256_file(result.file)}.",
        f"- Use: `specbench run {_use(plan)}`",
        "",
        "| statistic | value |",
        "|---|---|",
        *(f"| {name} | {value:.4g} |" for name, value in result.statistics.items()),
        *(
            f"| {f.parent.name} | " + ", ".join(f"{k} {v:.4g}" for k, v in s.items()) + " |"
            for f, s in checkpoints.items()
        ),
        "",
        TrainingTask.about.format(sampling=sampling),
        "",
        "| recipe | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in plan.arguments.items() if name not in WHERE and value is not None),
    ]
    write_atomically(plan.out / "card.md", ("\n".join(terms) + "\n").encode())
