"""The Python interface: `import specbench` provides these names.

    result = specbench.run("cool_sd", model="llamagen_scenes", delta=1.1, n=16)
    result.row["step_compression"], result.records, result.images[0]

The parameters are the same as on the command line. A mistake raises `specbench.UsageError` with the message that the
command line would print. Work that cannot be done raises `specbench.RunError`.
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

#: Parameters of the loaded networks. All other parameters can change between two calls of `decode`.
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
    """Decodes prompts, scores the images, measures the speed-up over vanilla decoding: `specbench run`.

    Args:
        method: the preset. None: the model's default.
        out: the folder of the run. None: a new folder below runs/. If the folder already has a run, it is continued: a
            second call with the same arguments only reads the result.
        quiet: no messages and no progress bars; the log in the folder has them.
        parameters: the parameters of the command line, such as model="llamagen_scenes", delta=1.1, n=16,
            metrics=["scenes_reward"]. A list is one value; for a grid, call `run` in a loop.

    Raises UsageError for bad parameters and for missing weights or prompts, RunError if disk space or memory runs out,
    and KeyboardInterrupt if the user stops it; finished images are kept.
    """
    from specbench.harness.run import run

    _check_plugins()
    arguments = _overrides(method, {**parameters, "out": out})
    cfg = configuration.compose(arguments)
    with _silence(quiet):
        outcome = run(cfg, asked=configuration.names_metrics(arguments))
    return RunResult(outcome.folder.path, outcome.row, outcome.config)


def result(folder: str | Path | RunResult) -> RunResult:
    """The result of an existing run. Raises UsageError if the folder has no run with a row."""
    from specbench.harness.run import stored_outcome

    _check_plugins()
    outcome = stored_outcome(_folder_of(folder))
    return RunResult(outcome.folder.path, outcome.row, outcome.config)


def compare(a: RunResult | str | Path, b: RunResult | str | Path) -> ComparisonResult:
    """Compares two runs image by image, over the prompts that both decoded: `specbench compare`.

    Args:
        a, b: results, or folders of runs. `result.baseline` and DIR/baseline are the vanilla images of a run.

    Raises UsageError for folders that are not runs, for damaged records, and for too few pairs.
    """
    from specbench.compare import comparison, passes

    _check_plugins()
    return ComparisonResult(comparison.compare(*(passes.read(str(_folder_of(side))) for side in (a, b))))


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
            audit.seed and audit.workers on the command line; its help explains them. Without model and tables, all
            built-in models that the method supports are audited.
        every: audit all presets, like --all.
        quiet: no progress bar.
        parameters: parameters of the method, its drafter, its rule and the sampling.

    Raises UsageError for bad parameters and for a bad file of tables.
    """
    from specbench.audit import plan

    _check_plugins()
    options = {"model": model, "tables": tables, "samples": samples, "margin": margin, "seed": seed, "workers": workers}
    audit_arguments = [f"audit.{name}={_text_of(name, value)}" for name, value in options.items() if value is not None]
    with _silence(quiet):
        rows = list(plan.measured(plan.planned([*_overrides(method, parameters), *audit_arguments], every)))
    return AuditResult(rows)


def load(model: str | None = None, method: str | None = None, **parameters: Any) -> LoadedModel:
    """Loads a model once, to decode your own prompts with it.

        model = specbench.load("llamagen_scenes")
        for delta in (1.0, 1.1, 2.0):
            print(model.decode(["a red circle"], "cool_sd", delta=delta).accepted_length)

    Args:
        model: its name. None: the embedded model.
        method: the default preset of `LoadedModel.decode`.
        parameters: parameters of the model and of the method.

    Raises UsageError for bad parameters and for missing weights.
    """
    _check_plugins()
    return LoadedModel(method, parameters if model is None else {"model": model, **parameters})


def include(*folders: str | Path) -> None:
    """Adds folders of plug-ins, as `--include` does, for this process and the processes that it starts.

    Raises UsageError for a fault in a folder, and if the columns of rows were already read in this process and the
    folders add new ones.
    """
    before = {name: {*names} for name, names in _columns().items()}
    previous = os.environ.get(plugins.INCLUDE, "")
    paths = [str(Path(folder).expanduser().absolute()) for folder in folders]
    os.environ[plugins.INCLUDE] = os.pathsep.join(filter(None, [previous, *paths]))
    yaml_files.clear()
    faults = list(parameters.found_choices().faults_included)
    if "specbench.rows.columns" in sys.modules and before != {name: {*names} for name, names in _columns().items()}:
        faults.append("these folders add columns to rows, so include them before anything else: restart Python")
    if faults:
        os.environ[plugins.INCLUDE] = previous
        yaml_files.clear()
        raise UsageError(faults[0])


def choices(group: str) -> dict[str, str]:
    """Name -> description of all choices of a group: "model", "method", "drafter", "rule", "data", "metrics", ..."""
    if group not in parameters.groups():
        raise unknown("group", group, parameters.groups())
    return dict(parameters.choices(group))


class LoadedModel:
    """A target model on its device. Drafters and rules are built when `decode` needs them."""

    def __init__(self, method: str | None, arguments: Mapping[str, Any]) -> None:
        """method, arguments: as in `specbench.load`."""
        from specbench.harness.pipeline import load_model

        self._method, self._arguments = method, dict(arguments)
        self.config = self._configuration(None, {})
        self.device, self._model = load_model(self.config)
        self._pipeline: tuple[str, Pipeline | ContinuousPipeline] | None = None  # the last one, with its configuration

    @property
    def name(self) -> str:
        """The name of the model."""
        return str(self.config["model"])

    @property
    def resolution(self) -> int:
        """The side of an image in pixels."""
        return int(self._model.resolution)

    @property
    def tokens_per_image(self) -> int:
        return int(self._model.target.length)

    def __repr__(self) -> str:
        return f"<{self.name} on {self.device}, {self.resolution} pixels, {self.tokens_per_image} tokens per image>"

    def decode(
        self,
        prompts: str | Sequence[str],
        method: str | None = None,
        *,
        seed: int = 0,
        first: int = 0,
        **overrides: Any,
    ) -> DecodedPrompts:
        """Decodes prompts together, as one batch.

        Args:
            prompts: B prompts, or one.
            method: the preset. None: the preset of `specbench.load`, with its parameters.
            seed, first: image i has the random stream (seed, first + i). With first=0, the first prompts of a run with
                this seed give the images of that run.
            overrides: parameters of the method and of the sampling.

        Raises UsageError for bad parameters, for parameters of the loaded model, and for missing drafter weights.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UsageError("decode needs one prompt or a list of prompts; a prompt must be a text")
        cfg = self._configuration(method, {**overrides, "seed": seed})
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

    def _configuration(self, method: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The checked configuration of `decode`. If `method` replaces the method of `load`, only the parameters that
        all methods have are kept."""
        if fixed := [name for name in overrides if name in _LOADED]:
            raise UsageError(f"{fixed[0]} belongs to the loaded model: give it to specbench.load")
        base = self._arguments
        if method is not None:
            model = str(base.get("model", parameters.default_choice("model")))
            available = {*parameters.common(), *parameters.declared("model", model), "model"} - {"method"}
            base = {name: value for name, value in base.items() if name in available}
        cfg = configuration.compose(_overrides(method or self._method, {**base, **overrides}))
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
    """The arguments of a configuration. The value None is also passed, except for `out`, the method and the model,
    which are then omitted."""
    if method is not None and "method" in parameters:
        raise UsageError("the method is given twice; give it once")
    arguments = parameters if method is None else {"method": method, **parameters}
    return [
        f"{k}={_text_of(k, v)}" for k, v in arguments.items() if v is not None or k not in ("out", "method", "model")
    ]


def _text_of(name: str, value: Any) -> str:
    """A value in Hydra's grammar. Raises UsageError for a type that no parameter has."""
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
    raise UsageError(f"{name} cannot be a {type(value).__name__}: give a number, text, True, False, None or a list")


def _folder_of(result: RunResult | str | Path) -> str | Path:
    """The folder of a result, or of a path to one."""
    return result.folder if isinstance(result, RunResult) else result


def _columns() -> dict[str, Any]:
    choices = parameters.found_choices()
    return {"parameters": choices.parameters, "metrics": choices.choices.get("metrics", {})}


def _check_plugins() -> None:
    """Warns of faults in installed plug-ins. Raises UsageError for faults in included folders."""
    choices = parameters.found_choices()
    for text in choices.faults:
        warnings.warn(text, stacklevel=3)
    if choices.faults_included:
        raise UsageError(choices.faults_included[0])


def _silence(quiet: bool) -> redirect_stderr[Any]:
    return redirect_stderr(open(os.devnull, "w") if quiet else sys.stderr)
