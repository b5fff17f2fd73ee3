"""The Python interface: `import specbench` gives these names.

    result = specbench.run("cool_sd", model="llamagen_scenes", delta=1.1, n=16)
    result.row["step_compression"], result.records, result.images[0]

Parameters are those of the command line, by the same names. A mistake raises `specbench.UsageError` with the sentence
that the command line would print; work that could not be done raises `specbench.RunError`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.api.results import AuditResult, ComparisonResult, DecodedPrompts, RunResult
from specbench.config import command_line, configuration, parameters, plugins, yaml_files
from specbench.errors import UsageError, unknown

if TYPE_CHECKING:
    from specbench.harness.pipeline import ContinuousPipeline, Pipeline

__all__ = ["LoadedModel", "audit", "choices", "compare", "include", "load", "result", "run"]

#: Parameters that the loaded networks have; the others can change from one call of `decode` to the next.
_LOADED = (
    "model",
    "weights",
    "reduced",
    "size",
    "prompt_length",
    "instruction",
    "suffix",
    "negative",
    "drafter_weights",
    "device",
    "dtype",
)


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
    arguments = _overrides(method, {**parameters, "out": out})
    cfg = configuration.compose(arguments)
    with _silence(quiet):
        outcome = run(cfg, asked=configuration.names_metrics(arguments))
    return RunResult(outcome.folder.path, outcome.row, outcome.config)


def result(folder: str | Path | RunResult) -> RunResult:
    """The result of a run that exists in a folder. UsageError where there is none with a row."""
    from specbench.harness.run import stored_outcome

    _check_plugins()
    outcome = stored_outcome(_folder_of(folder))
    return RunResult(outcome.folder.path, outcome.row, outcome.config)


def compare(a: RunResult | str | Path, b: RunResult | str | Path) -> ComparisonResult:
    """Compares two runs image by image, over the prompts that both decoded: `specbench compare`.

    Args:
        a, b: results, or folders of runs; `result.baseline` and DIR/baseline are the vanilla images of a run.

    Raises UsageError for folders that are not runs, damaged records and too few pairs.
    """
    from specbench.compare import comparison, passes

    _check_plugins()
    return ComparisonResult(comparison.compare(*(passes.read(str(_folder_of(one))) for one in (a, b))))


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
    given = [f"audit.{name}={_text_of(name, value)}" for name, value in own.items() if value is not None]
    with _silence(quiet):
        rows = list(plan.measured(plan.planned([*_overrides(method, parameters), *given], every)))
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


class LoadedModel:
    """A target model on its device. Drafters and rules are built when `decode` needs them."""

    def __init__(self, method: str | None, given: Mapping[str, Any]) -> None:
        """method, given: of `specbench.load`."""
        from specbench.harness.pipeline import load_model

        self._method, self._given = method, dict(given)
        self.config = self._configuration(None, {})
        self.device, self._model = load_model(self.config)
        self._pipeline: tuple[str, Pipeline | ContinuousPipeline] | None = None  # the last one, by its configuration

    @property
    def name(self) -> str:
        """Of the model."""
        return str(self.config["model"])

    @property
    def resolution(self) -> int:
        """Side of an image in pixels."""
        return int(self._model.resolution)

    @property
    def tokens_per_image(self) -> int:
        return int(self._model.target.length)

    def __repr__(self) -> str:
        return f"<{self.name} on {self.device}, {self.resolution} pixels, {self.tokens_per_image} tokens an image>"

    def decode(
        self, prompts: str | Sequence[str], method: str | None = None, *, seed: int = 0, first: int = 0, **given: Any
    ) -> DecodedPrompts:
        """Decodes prompts together, as one batch.

        Args:
            prompts: B prompts, or one.
            method: the preset; None takes the one of `specbench.load`, with its parameters.
            seed, first: image i has the random stream (seed, first + i). With first=0, the first prompts of a run with
                this seed become the images of that run.
            given: parameters of the method and of the sampling.

        Raises UsageError for bad parameters, those of `specbench.load`, and absent weights of a drafter.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UsageError("decode needs one prompt or a list of prompts, each a text")
        cfg = self._configuration(method, {**given, "seed": seed})
        pipeline = self._built(cfg)
        keys = [(seed, first + i) for i in range(len(texts))]
        decoded = pipeline.decode(pipeline.encode(texts), keys)
        pipeline.synchronize()
        return DecodedPrompts(
            texts,
            cfg,
            decoded.tokens.cpu().numpy(),
            pipeline.pixels(decoded.tokens),
            decoded.steps.cpu().numpy(),
            decoded.drafted.cpu().numpy(),
            decoded.accepted.cpu().numpy(),
            decoded.seconds,
            decoded.trace,
        )

    def _configuration(self, method: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """The checked configuration of `decode`; of a method that replaces that of `load`, only the parameters that
        every method has are taken over."""
        if fixed := [name for name in given if name in _LOADED]:
            raise UsageError(f"{fixed[0]} belongs to the loaded model: give it to specbench.load")
        taken = self._given
        if method is not None:
            model = str(taken.get("model", parameters.default_choice("model")))
            known = {*parameters.common(), *parameters.declared("model", model), "model"} - {"method"}
            taken = {name: value for name, value in taken.items() if name in known}
        cfg = configuration.compose(_overrides(method or self._method, {**taken, **given}))
        return {**cfg, "batch": 1}

    def _built(self, cfg: Mapping[str, Any]) -> Pipeline | ContinuousPipeline:
        from specbench.harness.pipeline import Pipeline
        from specbench.harness.run import check

        key = json.dumps({name: value for name, value in cfg.items() if name != "seed"}, sort_keys=True)
        if self._pipeline is None or self._pipeline[0] != key:
            check(cfg)
            self._pipeline = key, Pipeline.assemble(cfg, self.device, self._model)
        return self._pipeline[1]


def _overrides(method: str | None, parameters: Mapping[str, Any]) -> list[str]:
    """The arguments of a configuration. A parameter that is None is one only where it has that value: `out`, the
    method and the model are left out."""
    if method is not None and "method" in parameters:
        raise UsageError("the method is given twice; give it once")
    given = parameters if method is None else {"method": method, **parameters}
    return [f"{k}={_text_of(k, v)}" for k, v in given.items() if v is not None or k not in ("out", "method", "model")]


def _text_of(name: str, value: Any) -> str:
    """A value in Hydra's grammar. UsageError for an object that no parameter can have."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of NumPy or PyTorch
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | Path):
        text = str(value)
        plain = re.fullmatch(r"[A-Za-z_/][\w/.:@-]*", text, re.ASCII) and text.lower() not in command_line.NO_TEXT
        return text if plain else command_line.quoted(text)
    if isinstance(value, list | tuple):
        if name == "metrics" and not value:
            return "none"
        return f"[{','.join(_text_of(name, one) for one in value)}]"
    declared = parameters.table().get(name)
    if isinstance(value, Mapping) and declared and declared.kind == "fields":
        return command_line.quoted(json.dumps(value))
    raise UsageError(f"{name} cannot be a {type(value).__name__}: give a number, text, True, False, None or a list")


def _folder_of(given: RunResult | str | Path) -> str | Path:
    """The folder of a run."""
    return given.folder if isinstance(given, RunResult) else given


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
