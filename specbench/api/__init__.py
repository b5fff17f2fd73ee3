"""The Python interface: `import specbench` gives these names.

    result = specbench.run("cool_sd", model="llamagen_scenes", delta=1.1, n=16)
    result.row["step_compression"], result.records, result.images[0]

Parameters are those of the command line, by the same names. A mistake raises `specbench.UsageError` with the sentence
that the command line would print; work that could not be done raises `specbench.RunError`.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from specbench.api.arguments import folder_of, overrides, text_of
from specbench.api.model import LoadedModel
from specbench.api.results import AuditResult, ComparisonResult, RunResult
from specbench.config import configuration, parameters, plugins, yaml_files
from specbench.errors import UsageError, unknown

__all__ = ["audit", "choices", "compare", "include", "load", "result", "run"]


def run(
    method: str | None = None, *, out: str | Path | None = None, quiet: bool = False, **parameters: Any
) -> RunResult:
    """Decodes prompts, scores the images, times them against vanilla decoding, and gives the row: `specbench run`.

    Args:
        method: the preset; None takes the model's default.
        out: the folder of the run; None makes a new one below runs/. A run that exists there is continued, so that the
            same call again only reads.
        quiet: no messages and progress bars; the log in the folder has them.
        parameters: the parameters of the command line, such as model="llamagen_scenes", delta=1.1, n=16,
            metrics=["scenes_reward"]. A list is one value; for a grid, call `run` in a loop.

    Raises UsageError for bad parameters, and absent weights or prompts; RunError if disk or memory did not suffice; and
    KeyboardInterrupt where the user stopped it: finished images are kept.
    """
    from specbench.harness.run import run

    _check_plugins()
    arguments = overrides(method, {**parameters, "out": out})
    cfg = configuration.compose(arguments)
    with _silence(quiet):
        outcome = run(cfg, asked=configuration.names_metrics(arguments))
    return RunResult(outcome.folder.path, outcome.row, outcome.config)


def result(folder: str | Path | RunResult) -> RunResult:
    """The result of a run that exists in a folder. UsageError where there is none with a row."""
    from specbench.harness.run import stored_row

    path = folder_of(folder)
    _check_plugins()
    config, row = stored_row(path)
    return RunResult(path, row, config)


def compare(a: RunResult | str | Path, b: RunResult | str | Path) -> ComparisonResult:
    """Compares two runs image by image, over the prompts that both decoded: `specbench compare`.

    Args:
        a, b: results, or folders of runs; `result.baseline` and DIR/baseline are the vanilla images of a run.

    Raises UsageError for folders that are not runs, damaged records and too few pairs.
    """
    from specbench.compare import comparison, passes

    _check_plugins()
    return ComparisonResult(comparison.compare(*(passes.read(str(folder_of(one))) for one in (a, b))))


def audit(
    method: str | None = None,
    *,
    model: str | None = None,
    tables: str | Path | None = None,
    samples: int | None = None,
    margin: float | None = None,
    seed: int | None = None,
    workers: int | None = None,
    every: bool = False,
    quiet: bool = False,
    **parameters: Any,
) -> AuditResult:
    """Measures whether a method is lossless, on models whose distribution is known: `specbench audit`.

    Args:
        method: the preset.
        model, tables, samples, margin, seed, workers: as audit.model, audit.tables, audit.samples, audit.margin,
            audit.seed and audit.workers of the command line, which its help explains. Without model and tables, all
            built-in models that the method suits are audited.
        every: every preset, as --all.
        quiet: no progress bar.
        parameters: those of the method, its drafter, its rule and the sampling.

    Raises UsageError for bad parameters and a bad file of tables.
    """
    from specbench.audit import plan

    _check_plugins()
    own = {"model": model, "tables": tables, "samples": samples, "margin": margin, "seed": seed, "workers": workers}
    given = [f"audit.{name}={text_of(name, value)}" for name, value in own.items() if value is not None]
    with _silence(quiet):
        rows = list(plan.measured(plan.planned([*overrides(method, parameters), *given], every)))
    return AuditResult(rows)


def load(model: str | None = None, method: str | None = None, **parameters: Any) -> LoadedModel:
    """Loads a model once, to decode with it: one's own prompts, loops and methods.

        model = specbench.load("llamagen_scenes")
        for delta in (1.0, 1.1, 2.0):
            print(model.decode(["a red circle"], "cool_sd", delta=delta).accepted_length)

    Args:
        model: its name; None is the embedded one.
        method: the preset that `LoadedModel.decode` uses unless it is given another one.
        parameters: those of the model and of the method.

    Raises UsageError for bad parameters and absent weights.
    """
    _check_plugins()
    return LoadedModel(method, parameters if model is None else {"model": model, **parameters})


def include(*folders: str | Path) -> None:
    """Adds folders of plug-ins, as `--include` does, for this process and those that it starts.

    Raises UsageError for a fault in one, and where rows exist in this process already, which lack the new columns.
    """
    before = {name: {*found} for name, found in _columns().items()}
    own = os.environ.get(plugins.INCLUDE, "")
    paths = [str(Path(folder).expanduser().absolute()) for folder in folders]
    os.environ[plugins.INCLUDE] = os.pathsep.join(filter(None, [own, *paths]))
    yaml_files.clear()
    faults = list(parameters.found_choices().faults_included)
    if "specbench.rows.columns" in sys.modules and before != {name: {*found} for name, found in _columns().items()}:
        faults.append("these folders add columns to rows, so include them before anything else: restart Python")
    if faults:
        os.environ[plugins.INCLUDE] = own
        yaml_files.clear()
        raise UsageError(faults[0])


def choices(group: str) -> dict[str, str]:
    """Name -> description of every choice of a group: "model", "method", "drafter", "rule", "data", "metrics", ..."""
    if group not in parameters.groups():
        raise unknown("group", group, parameters.groups())
    return dict(parameters.choices(group))


def _columns() -> dict[str, Any]:
    found = parameters.found_choices()
    return {"parameters": found.parameters, "metrics": found.choices.get("metrics", {})}


def _check_plugins() -> None:
    """Warns of faults in installed plug-ins; UsageError for those in included folders."""
    found = parameters.found_choices()
    for text in found.faults:
        warnings.warn(text, stacklevel=3)
    if found.faults_included:
        raise UsageError(found.faults_included[0])


def _silence(quiet: bool) -> redirect_stderr[Any]:
    return redirect_stderr(open(os.devnull, "w") if quiet else sys.stderr)
