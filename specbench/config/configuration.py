"""The checked configurations of a command line.

Hydra parses the arguments and composes, except for plain choices of files, which `composition` composes faster. Bad
arguments are reported in one sentence. A grid (`-m`) is expanded and checked in full before its first job starts.
Imports Hydra, but no torch.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench.config import command_line, composition, parameters, protocols, registry, variants
from specbench.config.parameter import METADATA, Parameters
from specbench.config.run_config import RunConfig
from specbench.config.yaml_files import cached
from specbench.errors import UsageError, install, one_line, unknown

VERSION_BASE = "1.3"  # of Hydra's behaviour
CONFIG = "config"


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of one run: `compose(["method=cool_sd", "delta=1.1", "n=16"])`.

    Raises UsageError for a name that does not exist, a value that does not fit, and text that cannot be parsed.
    """
    with session():
        return _compose(command_line.normalized(overrides))


@dataclass(frozen=True)
class Job:
    """A run of a command line. name: the arguments that distinguish it from the other jobs of a grid, joined."""

    name: str
    cfg: RunConfig
    asked: bool = False  # whether its metrics were requested by name


def grid(overrides: Sequence[str], multirun: bool) -> list[Job]:
    """The jobs of a command line, in their order; without `multirun` one job. Arguments of Hydra itself are checked,
    but are not part of a job.

    Raises UsageError, naming the job if there are several.
    """
    with session():
        jobs = _expand(command_line.normalized(overrides), multirun)
        checked = []
        for name, arguments in jobs:
            try:
                checked.append(Job(name, _compose(arguments), names_metrics(arguments)))
            except UsageError as e:
                raise UsageError(f"job {' '.join(arguments)}: {e}" if len(jobs) > 1 else str(e)) from None
        return checked


def values(arguments: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """The checked values of some parameters, without the rest of a configuration: `metrics=coco` gives the names. A
    list of names needs no brackets: `metrics=a,b`.

    Raises UsageError for a bad value, and for a parameter that is not in `known`.
    """
    with session():
        result: dict[str, Any] = {}
        for o in _parse(command_line.read([*map(_in_brackets, arguments)])):
            key = o.key_or_group
            if key not in known:
                raise unknown("parameter", key, known)
            if key in result:
                raise UsageError(f"'{key}' is given twice; give it only once")
            _check_form(o)
            if o.is_sweep_override():
                raise UsageError(f"'{o.input_line}' names several values; give only one")
            result[key] = parameters.settle(_chosen([o]))[key] if _is_choice(o) else o.value()
        declared = parameters.in_run(result)
        result = {key: declared[key].checked(key, value) for key, value in result.items()}
        parameters.check_metrics(result.get("metrics", ()))
        return result


def _in_brackets(argument: str) -> str:
    """A list of names as Hydra writes it: metrics=a,b -> metrics=[a,b]."""
    key, _, value = argument.partition("=")
    parameter = parameters.table().get(key)
    names = parameter is not None and parameter.kind == "names" and re.fullmatch(r"\s*\w+(\s*,\s*\w+)+\s*", value)
    return f"{key}=[{value}]" if names else argument


def swept(overrides: Sequence[str]) -> set[str]:
    """The keys of normalized arguments that take several values."""
    with session():
        return {o.key_or_group for o in _parse(overrides) if o.is_sweep_override()}


class PluginFolders(SearchPathPlugin):
    """Appends the folders of plug-ins to Hydra's search path, after conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for plugin in parameters.found_choices().plugins:
            search_path.append("specbench-plugin", f"file://{plugin.conf}")


@contextmanager
def session() -> Iterator[None]:
    """Hydra's compose API on conf/, from any working directory; its errors become UsageErrors of one line. Within
    another session, it reuses that one."""
    try:
        if GlobalHydra.instance().is_initialized():
            yield
            return
        Plugins.instance().register(PluginFolders)  # again: a launcher in this process may have made new Plugins
        with hydra.initialize_config_dir(str(parameters.conf_dir()), job_name="specbench", version_base=VERSION_BASE):
            yield
    except (HydraException, OmegaConfBaseException, ValueError) as e:
        raise UsageError(one_line(e)) from e


def implied(arguments: Sequence[str]) -> list[str]:
    """The arguments that the normalized arguments of one run imply: `prompts=FILE` implies `data=prompts` and n=all, a
    protocol implies its values, a model and a data set imply the preferences in their files."""
    chosen, certain, of_protocol = _named(arguments)
    model = _model(chosen)
    preferred = parameters.preferred("model", model) | of_protocol
    data = str((preferred | chosen | certain).get("data", parameters.default_choice("data")))
    fits = parameters.world("data", data) in (None, parameters.world("model", model))
    added = (parameters.preferred("data", data) if fits else {}) | preferred | certain
    if certain:
        added.setdefault("n", "all")
    return [f"{key}={_value_text(value)}" for key, value in added.items() if key not in chosen]


def names_metrics(arguments: Sequence[str]) -> bool:
    """Whether the arguments of one run, or their experiment or protocol, name the metrics."""
    return any("metrics" in values for values in _named(command_line.normalized(arguments)))


def _named(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The values of normalized arguments and their experiment, the values that prompts=FILE implies, and the values of
    the protocol."""
    pairs = (argument.split("=", 1) for argument in arguments if "=" in argument)
    given: dict[str, Any] = {key: value.strip(" '\"") for key, value in pairs}
    chosen = parameters.of_experiment(given.get("experiment", "")) | given
    certain = {"data": "prompts"} if "prompts" in given else {}
    name = str(chosen.get("protocol", ""))
    return chosen, certain, protocols.values(name, _model(chosen), chosen | certain)


def _model(chosen: Parameters) -> str:
    return str(chosen.get("model", parameters.default_choice("model")))


def _value_text(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{','.join(value)}]" if value else "none"  # a list of metrics
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _parse(overrides: Sequence[str]) -> list[Override]:
    return [_parsed(text) for text in overrides]


@cache
def _parsed(text: str) -> Override:
    """One parsed argument. Cached: tables and grids repeat arguments, and Hydra's parser takes a millisecond for
    each."""
    try:
        [parsed] = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides([text])
        return parsed
    except HydraException:
        raise UsageError(
            f"cannot read '{text}': write name=value, and quote a value with commas or brackets: 'out=\"a, b\"'"
        ) from None
    except Exception:
        if not sys.flags.optimize:
            raise
        raise UsageError(
            f"Hydra cannot read '{text}' in a Python without assertions: unset PYTHONOPTIMIZE, and leave -O out"
        ) from None


def _expand(overrides: Sequence[str], multirun: bool) -> list[tuple[str, list[str]]]:
    """The name and the arguments of each job, without the arguments of Hydra itself."""
    arguments = _parse(overrides)
    keys = [o.key_or_group for o in arguments]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"'{key}' is given {keys.count(key)} times; give it only once")
    first = [o for o in arguments if o.key_or_group == "experiment" or command_line.is_hydras(o.key_or_group)]
    for o in arguments:
        _check_form(o)
        if o in first and o.is_sweep_override():
            raise UsageError(f"'{o.key_or_group}' takes one value at a time: run {o.input_line} one by one")
    for o in arguments:
        _check_plugin(o)
    chosen = tuple(o.input_line or "" for o in first)
    sweeps = {key: f"{key}={v}" for key, v in (_sweeper(parameters.conf_dir(), chosen) if chosen else {}).items()}
    of_runs = [o for o in arguments if not command_line.is_hydras(o.key_or_group)]
    if multirun and _runs_side_by_side(arguments):
        timed = next((o for o in of_runs if o.key_or_group == "timing"), None)
        if timed is None:
            of_runs += _parse(["timing=false"])
        elif timed.value() is True:
            raise UsageError("timing=true: parallel jobs would disturb each other's seconds; leave the launcher out")
    if not multirun:
        if sweeps:
            raise UsageError(f"this experiment is a grid over {', '.join(sweeps)}: add -m")
        return [("", [o.input_line or "" for o in of_runs])]
    # The command line overrides the experiment, as in Hydra's own sweeper.
    swept_keys = {k for k in sweeps if k not in keys} | {o.key_or_group for o in of_runs if o.is_sweep_override()}
    lists = {o.key_or_group: _values(o) for o in [*_parse(list(sweeps.values())), *of_runs]}
    jobs = [list(job) for job in itertools.product(*lists.values())]
    return [
        (",".join(sorted(a for a in job if a.split("=", 1)[0] in swept_keys - {"out"})) or str(i), job)
        for i, job in enumerate(jobs)
    ]


#: Launcher -> the extra that installs its package.
_EXTRAS = {
    **dict.fromkeys(("local", "joblib"), "joblib"),
    **dict.fromkeys(("slurm", "submitit", "submitit_slurm", "submitit_local"), "slurm"),
    "ray": "ray",
}
_PACKAGES = {"joblib": "hydra_joblib_launcher", "slurm": "hydra_submitit_launcher", "ray": "hydra_ray_launcher"}


def _runs_side_by_side(arguments: Iterable[Override]) -> bool:
    """Whether the jobs of a grid run on one machine at the same time. (A Slurm job has its own processors.)"""
    launchers = [o.get_value_element_as_str() for o in arguments if o.key_or_group == "hydra/launcher"]
    return not {"local", "joblib", "submitit_local"}.isdisjoint(launchers)


def _check_plugin(o: Override) -> None:
    """Raises UsageError for a sweeper (a run has no objective), and for a launcher that is not installed."""
    if o.key_or_group not in ("hydra/sweeper", "hydra/launcher"):
        return
    name = o.get_value_element_as_str()
    argument = f"{o.key_or_group}={name}"
    if o.key_or_group == "hydra/sweeper":
        if name != "basic":
            raise UsageError(f"{argument}: a grid decodes every combination of its lists; leave hydra/sweeper out")
    elif (extra := _EXTRAS.get(name)) and not _installed(f"hydra_plugins.{_PACKAGES[extra]}"):
        if extra == "ray":
            raise UsageError(
                f"{argument} is in no extra: to use many GPUs, run one job after another with workers=N, which needs"
                f" Ray: {install(extra)}"
            )
        raise UsageError(f"{argument} needs {_PACKAGES[extra].replace('_', '-')}: {install(extra)}")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing, too
        return False


def _values(o: Override) -> list[str]:
    key = o.get_key_element()
    if not o.is_sweep_override():
        return [o.input_line or f"{key}={o.get_value_element_as_str()}"]
    if not o.is_discrete_sweep():
        raise UsageError(f"'{o.input_line}' has no list of values: write {key}=a,b,c or {key}=range(start,stop,step)")
    return [f"{key}={value}" for value in o.sweep_string_iterator()]


def _check_form(o: Override) -> None:
    """Raises UsageError for overrides that Hydra would silently accept, or would report in a long message."""
    key = o.key_or_group
    if command_line.is_hydras(key):
        return
    if o.is_delete():
        raise UsageError(f"'{o.input_line}': a parameter cannot be removed, only set: {key}=value")
    if o.package is not None:
        raise UsageError(f"'{o.input_line}': parameters are flat, write {key}=value")
    if key not in parameters.groups() or o.is_sweep_override():
        return
    value = o.value()
    for name in value if isinstance(value, list) and key == "metrics" else [value]:
        if name is not None or key != "experiment":
            parameters.choice(key, "null" if name is None else str(name))


def described(overrides: Sequence[str]) -> dict[str, Any]:
    """The flat configuration of normalized arguments for the help text, neither complete nor checked. A parameter with
    several values gets its default."""
    with session():
        several = swept(overrides)
        return _flat([argument for argument in overrides if argument.split("=", 1)[0] not in several])


def _compose(arguments: Sequence[str]) -> RunConfig:
    """The configuration of one job's normalized arguments."""
    values = parameters.validate(_flat(arguments))
    for name, others in _without_effect(arguments, values).items():
        shown = " and ".join(f"{other}={_value_text(values[other])}" for other in others)
        ways = " or ".join(_another(values, other, listed) for other, listed in others.items())
        raise UsageError(
            f"{name}={_value_text(values[name])} has no effect with {shown}: leave {name}= out, or give {ways}"
        )
    parameters.check_measurable(values["model"], values["metrics"])
    return registry.completed(values)


def without_effect(arguments: Sequence[str]) -> set[str]:
    """The keys of one job's normalized arguments whose values cannot change what the job decodes."""
    with session():
        return set(_without_effect(arguments, parameters.validate(_flat(arguments))))


def _another(values: Parameters, name: str, listed: Collection[Any]) -> str:
    """The values of a parameter that are not listed, as text."""
    others = [str(value) for value in parameters.in_run(values)[name].choices if value not in listed]
    return f"{name}={' or '.join(others)}" if others else f"another value of {name}"


def _without_effect(arguments: Sequence[str], values: Parameters) -> dict[str, Mapping[str, tuple[Any, ...]]]:
    """Argument -> the other parameters, with listed values, with which its value has no effect. Not included are a
    default value, which asks for nothing, and the value that the run has without the argument, which the printed
    command of a row may repeat."""
    declared, result = parameters.in_run(values), {}
    for name in (argument.split("=", 1)[0] for argument in arguments):
        others = declared[name].unused_in(name, values) if name in declared else {}
        if others and values[name] != parameters.default_in(values, name):
            try:
                repeated = _flat([a for a in arguments if a.split("=", 1)[0] != name])[name] == values[name]
            except UsageError:  # other arguments need this one: rule=cool delta=2
                repeated = False
            if not repeated:
                result[name] = others
    return result


def _flat(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of one job's normalized arguments, by parameter. Raises UsageError for a parameter that the job does
    not have."""
    arguments = _parse([*overrides, *implied(overrides)])
    for o in arguments:
        _check_form(o)
        if o.is_sweep_override():
            parameter = parameters.table().get(o.key_or_group)
            listed = parameter is not None and parameter.kind == "names"
            raise UsageError(
                f"'{o.input_line}' names several values: add -m to run one job for each"
                + (f", or write {o.key_or_group}=[A,B] for all in one" if listed else "")
            )
    chosen = [o for o in arguments if _is_choice(o)]
    cfg = _chosen(chosen)
    for o in arguments:
        if o in chosen:
            continue
        if o.key_or_group not in cfg:
            raise parameters.no_parameter(o.key_or_group, cfg)
        cfg[o.key_or_group] = deepcopy(o.value())
    given = {o.key_or_group for o in arguments}
    experiment = next((o.value() for o in chosen if o.key_or_group == "experiment"), None)
    cfg = variants.resolved(cfg, given.union(parameters.of_experiment(str(experiment))))
    return parameters.settle(cfg, given)


def _is_choice(o: Override) -> bool:
    """Whether an argument chooses a file, configures Hydra itself, or refers to other values."""
    key = o.key_or_group
    if command_line.is_path(key):
        return False  # a path may contain ${
    return key in parameters.groups() or command_line.is_hydras(key) or "${" in (o.input_line or "")


def _chosen(arguments: Sequence[Override]) -> dict[str, Any]:
    """The values in the files that these arguments choose. Uses Hydra only where needed."""
    if all(o.key_or_group in parameters.groups() and not o.is_sweep_override() for o in arguments):
        choices = {o.key_or_group: o.value() for o in arguments}
        if (cfg := composition.compose(choices)) is not None:
            return cfg
    return deepcopy(_by_hydra(parameters.conf_dir(), tuple(o.input_line or "" for o in arguments)))


@cached
def _by_hydra(_conf: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    composed: Any = OmegaConf.to_container(hydra.compose(CONFIG, list(arguments)), resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in composed.items() if key not in METADATA}


@cached
def _hydras(_conf: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Hydra's own configuration for these arguments, of which some values are not known before a job."""
    composed = hydra.compose(CONFIG, list(arguments), return_hydra_config=True).hydra
    return {name: OmegaConf.to_container(composed[name]) for name in ("sweeper", "launcher")}


def _sweeper(conf: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """The parameters over which an experiment or Hydra's own arguments sweep, with their lists of values."""
    return {str(key): value for key, value in (_hydras(conf, arguments)["sweeper"].get("params") or {}).items()}


def check_launcher(hydras: Sequence[str]) -> None:
    """Raises UsageError if Hydra's own arguments name a launcher that this machine does not have."""
    with session():
        launcher = str(_hydras(parameters.conf_dir(), tuple(hydras))["launcher"]["_target_"]) if hydras else ""
    if launcher.endswith("SlurmLauncher") and (absent := [n for n in ("sbatch", "srun") if shutil.which(n) is None]):
        raise UsageError(
            f"Slurm's command {absent[0]} is not on this machine: start the grid on a login node of the cluster, or"
            " without hydra/launcher="
        )
