"""The parameters of a run: which parameters it has, and the check of their values.

A run has the values in config.yaml and in the chosen files of `PARAMETER_GROUPS`, and nothing else. Each of these files
declares its own parameters (see `plugins`). Imports neither torch nor Hydra.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from specbench.config import plugins, yaml_files
from specbench.config.parameter import METADATA, PROMPTS, Parameter, Parameters
from specbench.config.plugins import INCLUDED
from specbench.config.plugins import PARAMETER_GROUPS as PARAMETER_GROUPS
from specbench.config.yaml_files import cached
from specbench.errors import UsageError, meant, unknown
from specbench.storage.files import write_atomically

#: The groups that make up a method.
PARTS = ("drafter", "rule", "verification")


@cache
def conf_dir() -> Path:
    """The folder of configurations: inside the package if installed, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise UsageError(f"the configurations are missing: no conf/config.yaml in or next to {package}; install again")


@cached
def groups() -> tuple[str, ...]:
    """The groups of conf/ from which a run chooses. (A suite contains many runs.)"""
    return tuple(sorted(found_choices().choices.keys() - {"suite"}))


@cached
def choices(group: str) -> dict[str, str]:
    """Name -> one-line description of every choice of a group: the file's first comment line, a full sentence."""
    lines = {}
    for name, item in found_choices().choices.get(group, {}).items():
        comments = (line[1:].strip() for line in item.path.read_text("utf-8").splitlines() if line.startswith("#"))
        lines[name] = next((c for c in comments if not c.startswith("@")), "")
    return lines


def found_choices() -> plugins.FoundChoices:
    """The choices of specbench and of the installed and included plug-ins."""
    return plugins.load(conf_dir())


def choice(group: str, name: str) -> plugins.Choice:
    """A choice. UsageError for a name that does not exist."""
    known = found_choices().choices.get(group, {})
    if name not in known:
        raise unknown("metric" if group == "metrics" else group, name, known)
    return known[name]


def plugin_of(group: str, name: str) -> plugins.Plugin | None:
    """The plug-in of a choice; None for a choice of specbench itself, and for a name that does not exist."""
    item = found_choices().choices.get(group, {}).get(name)
    return item.plugin if item and not item.plugin.is_shipped else None


def file_of(group: str, name: str) -> Path:
    """The file of a choice, or of a file that choices build on. It exists if the choice exists."""
    return plugins.file_of(found_choices().folders, group, name)


def plugins_of(cfg: Parameters) -> list[str]:
    """The labels of the plug-ins whose choices a configuration names, as in a row."""
    names = [(group, name) for group, value in cfg.items() for name in (value if group == "metrics" else [value])]
    plugin_list = (plugin_of(group, str(name).partition("@")[0]) for group, name in names)
    return sorted({plugin.label for plugin in plugin_list if plugin})


def missing_plugins(labels: Iterable[str]) -> str:
    """The end of a sentence about content that plug-ins with these labels made: it names the plug-ins that are missing.
    "" if all are available."""
    available = {str(plugin).removeprefix("plug-in ") for plugin in found_choices().plugins}
    names = sorted({label.rpartition(":")[0] for label in labels if label} - available)
    action = "which is not here: install it, or name its folder with --include"
    return f"; it is from plug-in {_and(names)}, {action}" if names else ""


@contextmanager
def including(folders: Sequence[Path]) -> Iterator[None]:
    """Within the block, these folders are plug-ins, too, in this process and in child processes."""
    before = os.environ.get(plugins.INCLUDE)
    texts = [*([before] if before else []), *(str(folder.expanduser().absolute()) for folder in folders)]
    os.environ[plugins.INCLUDE] = os.pathsep.join(texts)
    yaml_files.clear()
    try:
        yield
    finally:
        del os.environ[plugins.INCLUDE]
        if before is not None:
            os.environ[plugins.INCLUDE] = before
        yaml_files.clear()


def included() -> list[str]:
    """The folders that are plug-ins in this process, as full paths."""
    return [text for text in dict.fromkeys(os.environ.get(plugins.INCLUDE, "").split(os.pathsep)) if text]


def remember_included(folder: Path) -> None:
    """Stores these folders in the folder of a run, a grid or a suite, so that every command finds them there."""
    if folders := included():
        write_atomically(folder / INCLUDED, (json.dumps(folders) + "\n").encode())


def including_flags() -> str:
    """The flags that a printed command needs for the same plug-ins: "" or " --include DIR"."""
    return "".join(f" --include {shlex.quote(folder)}" for folder in included())


def content(group: str, name: str) -> Parameters:
    """The values of a choice's file and of the files that it builds on; {} if the file does not exist. Callers must not
    change it."""
    return plugins.content(found_choices().folders, group, name)


def declarations(group: str, name: str) -> Mapping[str, Parameter]:
    """The parameters of a choice, or of a file that it builds on. Parameters of every run: ("", "config")."""
    return plugins.declarations(found_choices().folders, group, name)


def table() -> Mapping[str, Parameter]:
    """Every parameter with its first declaration, in the order of a row's columns: the names of choices, the parameters
    of these choices in the order of config.yaml's groups, the parameters of every run, and the plug-ins' parameters."""
    return found_choices().parameters


def in_run(cfg: Parameters) -> dict[str, Parameter]:
    """Every parameter as declared for a run with these choices: by the choice that has it, otherwise by its first
    declaration."""
    result = {**table(), **declarations("", "config")}
    for group in PARAMETER_GROUPS:
        result |= declarations(group, str(cfg.get(group)))
    return result


@cached
def declared(group: str, name: str) -> frozenset[str]:
    """The flat parameters of a choice and of the files that it builds on."""
    return frozenset(content(group, name)) - METADATA


def preferred(group: str, name: str) -> dict[str, str]:
    """The default choices of other groups (data, metrics, a method) for a model or a data set, from its file."""
    return dict(content(group, name).get("preferred") or {})


def world(group: str, name: str) -> str | None:
    """The embedded world of a model, a data set or a single metric, such as "scenes"; None for real ones."""
    values = content(group, name)
    return ((values.get(name) or {}) if group == "metrics" else values).get("world")


def check_measurable(model: str, metrics: Iterable[str]) -> None:
    """UsageError for a metric of an embedded world with a model outside it, for which it has no meaning."""
    for name in metrics:
        if (metric_world := world("metrics", name)) not in (None, world("model", model)):
            raise UsageError(
                f"metric {name} scores only the embedded world ({metric_world}), not images of model={model}:"
                " leave metrics= out for real metrics, or choose from `specbench list metrics`"
            )


def default(group: str, name: str, parameter: str) -> Any:
    """The value of a parameter in a choice's file; None if it is not set."""
    return content(group, name).get(parameter)


def default_in(cfg: Parameters, name: str) -> Any:
    """The value of a parameter in the file of the choice that declares it, not in the preset's; for a group, its
    default choice."""
    if name in groups():
        return default_choice(name)
    parts = ((group, str(cfg.get(group))) for group in PARAMETER_GROUPS)
    return next((default(*part, name) for part in parts if name in declared(*part)), None)


@cached
def common() -> frozenset[str]:
    """The parameters that every run has."""
    return declared("", "config") | {"method"}


@cached
def method_parameters() -> frozenset[str]:
    """The parameters that the parts of a method declare, without the model's and the sampling's."""
    parts = (declared(group, name) for group in PARTS for name in choices(group))
    return frozenset().union(*parts)


def in_preset(chosen: Parameters) -> frozenset[str]:
    """The parameters of the parts of a method that a run with these choices has."""
    method = str(chosen.get("method", default_choice("method")))
    if method not in choices("method"):
        return method_parameters()
    parts = {**method_choices(method), **{group: str(chosen[group]) for group in PARTS if group in chosen}}
    known = ((group, name) for group, name in parts.items() if group in PARTS and name in choices(group))
    return declared("method", method).union(*(declared(group, name) for group, name in known))


def possible(model: str) -> frozenset[str]:
    """The parameters that a run of a model can have: all except those that only other models declare."""
    if model not in choices("model"):
        return frozenset(table())
    others = frozenset().union(*(declared("model", name) for name in choices("model")))
    return frozenset(table()) - (others - declared("model", model) - common())


def method_choices(method: str) -> Mapping[str, str]:
    """Group -> choice in a method's preset: {"drafter": "eagle_tree", "rule": "cool"}."""
    return _chosen("method", method)


def of_experiment(name: str) -> dict[str, Any]:
    """The choices and values of an experiment's file, by group and parameter; {} if the experiment does not exist."""
    if name not in choices("experiment"):
        return {}
    values = content("experiment", name)
    return {**_chosen("experiment", name), **{key: values[key] for key in values if key not in METADATA}}


def default_choice(group: str) -> str:
    """The default choice of a group."""
    return _chosen("", "config")[group]


@cached
def _chosen(group: str, name: str) -> Mapping[str, str]:
    """Group -> choice of a file's list of defaults."""
    entries = [d for d in yaml_files.read(file_of(group, name)).get("defaults", []) if isinstance(d, dict)]
    return {key.split("/")[-1]: value for entry in entries for key, value in entry.items()}


def parameters_of(cfg: Parameters) -> list[str]:
    """The parameters of a run with these choices: the names of choices, then the parameters of each choice in the order
    of its file, in the order of `PARAMETER_GROUPS`, then the parameters of every run."""
    names = {*common(), *(declared("method", str(cfg.get("method"))) & {"variant"})}
    chosen = [(group, str(cfg.get(group))) for group in PARAMETER_GROUPS]
    declared_here = [
        name for item in chosen for name in (*declarations(*item), *content(*item)) if name not in METADATA
    ]
    every = content("", "config")
    first = [name for name in declarations("", "config") if name not in every]
    ordered = dict.fromkeys([*first, *declared_here, *table()])
    return [name for name in ordered if name in names or name in declared_here]


@cached
def owners(name: str) -> tuple[str, ...]:
    """The choices that have a parameter: "rule cool (method cool_sd)"."""
    result = [f"method {method}" for method in choices("method") if name == "variant" in declared("method", method)]
    for group in PARAMETER_GROUPS:
        for choice in choices(group):
            if name in declared(group, choice):
                presets = [method for method in choices("method") if method_choices(method).get(group) == choice]
                result.append(f"{group} {choice}" + (f" (method {', '.join(presets)})" if presets else ""))
    return tuple(result)


def no_parameter(name: str, cfg: Parameters) -> UsageError:
    """The error for a parameter that a run with these choices does not have."""
    has = [p for p in parameters_of(cfg) if p not in groups()]
    who = f"method '{cfg.get('method')}' (drafter {cfg.get('drafter')}, rule {cfg.get('rule')})"
    if owned := owners(name):
        return UsageError(
            f"{who} has no parameter '{name}' (it belongs to {_and(owned)}); this choice has: {', '.join(has)}"
        )
    hint = meant(name, [*table(), *groups()])
    return UsageError(f"unknown parameter '{name}': {who} has: {', '.join(has)}{hint}")


def validate(cfg: Parameters) -> dict[str, Any]:
    """Checks a composed, flat configuration and returns it in canonical form and order. `registry.completed` checks its
    paths.

    Raises UsageError for an unknown or missing parameter, a wrong type and a value out of range. `delta=2` and
    `delta=2.0` become the same, so that equal runs have equal hashes.
    """
    for group in PARAMETER_GROUPS:
        choice(group, str(cfg.get(group)))
    wanted = parameters_of(cfg)
    for name in cfg:
        if name not in wanted:
            raise no_parameter(str(name), cfg)
    if missing := [name for name in wanted if name not in cfg]:
        raise UsageError(f"the configuration has no {_and(missing)}: give {missing[0]}=...")
    parameters = in_run(cfg)
    checked = {name: parameters[name].checked(name, cfg[name]) for name in wanted}
    check_metrics(checked["metrics"])
    per_prompt = checked["images_per_prompt"]
    if isinstance(checked["n"], int) and checked["n"] * per_prompt > PROMPTS:
        raise UsageError(
            f"n times images_per_prompt must be at most {PROMPTS:,} images (got {checked['n']:,} times {per_prompt:,})"
        )
    part, _, parts = (checked.get("shard") or "1/1").partition("/")
    if int(part) > int(parts):
        raise UsageError(f"shard={part}/{parts} does not exist: the last one is shard={parts}/{parts}")
    _check_kinds(checked)
    if checked["timing"] and (checked["workers"] > 1 or checked["ray_address"]):
        raise UsageError("timing=true measures one process of this machine: leave workers= and ray_address= out")
    return checked


def kind(group: str, name: str) -> str:
    """The tokens that a model, drafter, rule or method supports, from `kind:` in its file: discrete (default),
    continuous, or any."""
    value, kinds = content(group, name).get("kind", "discrete"), ("discrete", "continuous", "any")
    if value not in kinds:
        raise UsageError(f"{file_of(group, name)}: kind must be one of {', '.join(kinds)} (got {value})")
    return str(value)


def is_continuous(group: str, name: str) -> bool:
    """Whether a choice is only for models with continuous tokens."""
    return kind(group, name) == "continuous"


def in_raster_order(drafter: str) -> bool:
    """Whether a run samples its tokens row by row: its drafter has no other order."""
    return default("drafter", drafter, "raster") is not False


def _check_kinds(cfg: Parameters) -> None:
    """UsageError unless drafter, rule and verification support the model's tokens: discrete or continuous."""
    model_kind = kind("model", cfg["model"])
    if kind("verification", cfg["verification"]) not in (model_kind, "any"):
        raise UsageError(
            f"{cfg['model']} has {model_kind} tokens, which verification={cfg['verification']} does not support: use"
            " verification=token"
        )
    parts = {group: cfg[group] for group in ("drafter", "rule") if kind(group, cfg[group]) != "any"}
    kinds = {kind(group, name) for group, name in parts.items()}
    if kinds <= {model_kind} and (model_kind != "continuous" or len(parts) != 1):
        return
    suited = [method for method in choices("method") if kind("method", method) in (model_kind, "any")]
    shown = " and ".join(f"{group} {name}" for group, name in parts.items())
    does = "do" if len(parts) > 1 else "does"
    text = f"{cfg['model']} has {model_kind} tokens, which {shown} {does} not support"
    raise UsageError(f"{text}; use method={', '.join(suited)}")


def single_metrics() -> dict[str, str]:
    """Name -> one-line description of every metric that is not a set of others."""
    return {name: line for name, line in choices("metrics").items() if name in declared("metrics", name)}


def metric_columns(name: str) -> tuple[str, ...]:
    """The columns of a row that a metric fills. UsageError for an unknown name."""
    if name not in single_metrics():
        raise unknown("metric", name, single_metrics())
    return tuple(default("metrics", name, name)["columns"])


def check_metrics(names: Iterable[str]) -> None:
    """UsageError for an unknown name, and for two metrics that fill the same column."""
    filled: dict[str, str] = {}
    for name in names:
        for column in metric_columns(name):
            if filled.setdefault(column, name) != name:
                raise UsageError(
                    f"metrics {filled[column]} and {name} both fill the column {column}; measure them in two runs"
                )


def _and(names: Iterable[str]) -> str:
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last


def settle(cfg: Parameters, given: Iterable[str] = ()) -> dict[str, Any]:
    """Converts a configuration that Hydra composed to the flat one that `validate` checks: the metrics, one switch per
    file in conf/metrics, become a list of names, and a protocol its name and version. given: the names that the user
    gave."""
    flat = dict(cfg)
    if isinstance(flat.get("protocol"), Mapping):
        flat["protocol"] = f"{flat['protocol']['name']}@{flat['protocol']['version']}"
    if isinstance(flat.get("metrics"), Mapping):
        flat["metrics"] = [name for name, on in flat["metrics"].items() if on]
    return _without_lost_values(flat, frozenset(given))


def _without_lost_values(flat: Parameters, given: frozenset[str]) -> dict[str, Any]:
    """The configuration without a preset's values for a part that the user replaced (`method=cool_sd rule=exact`)."""
    result, has, parameters = dict(flat), set(parameters_of(flat)), in_run(flat)
    for name, value in content("method", str(flat.get("method"))).items():
        if name not in result or name in given:
            continue  # `validate` refuses what the user gave and the new part does not have
        if name not in has:
            del result[name]
        elif name in parameters and result[name] == value and not parameters[name].allows(value):
            result[name] = next(
                values[name]
                for values in (content(group, flat[group]) for group in reversed(PARAMETER_GROUPS))
                if name in values
            )
    return result
