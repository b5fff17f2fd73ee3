"""The parameters of a run: which ones it has, and the check of their values.

A run has the values in config.yaml and in the chosen files of `PARAMETER_GROUPS`, and nothing else. Each of these files
declares its own parameters (see `plugins`). Imports neither torch nor Hydra.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from specbench.config import plugins, yaml_files
from specbench.config.parameter import METADATA, PROMPTS, Parameter
from specbench.config.plugins import PARAMETER_GROUPS as PARAMETER_GROUPS
from specbench.config.yaml_files import cached
from specbench.errors import UsageError, nearest, unknown

#: The groups of which a method consists.
PARTS = ("drafter", "rule", "verification")

#: What a run has whose images a server decodes, besides the parameters of its data and its engine: names that stand for
#: the server's own model and method, and the parameters of every run that concern prompts, scoring and the folder.
_GROUPS_OF_SERVED = ("data", "engine", "log")
SERVED = dict.fromkeys(("model", "method", "drafter", "rule"), "served")
_OF_SERVED = ("seed", "n", "images_per_prompt", "device", "warmup", "metrics", "metrics_dir", "reference", "out")


@cache
def conf_dir() -> Path:
    """The folder of configurations: inside the package when installed, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise UsageError(f"the configurations are missing: no conf/config.yaml in or next to {package}; install again")


def groups() -> tuple[str, ...]:
    """The groups of conf/ from which a run chooses. (Suites are of many runs.)"""
    return tuple(sorted(found_choices().choices.keys() - {"suite"}))


@cached
def choices(group: str) -> dict[str, str]:
    """Name -> one-line description of every choice of a group: the file's first comment line, a full sentence."""
    found = {}
    for name, one in found_choices().choices.get(group, {}).items():
        comments = (line[1:].strip() for line in one.path.read_text("utf-8").splitlines() if line.startswith("#"))
        found[name] = next((c for c in comments if not c.startswith("@")), "")
    return found


def found_choices() -> plugins.FoundChoices:
    """The choices of specbench and of the plug-ins that are installed and included."""
    return plugins.load(conf_dir())


def choice(group: str, name: str) -> plugins.Choice:
    """A choice. UsageError for a name that does not exist."""
    known = found_choices().choices.get(group, {})
    if name not in known:
        raise unknown("metric" if group == "metrics" else group, name, known)
    return known[name]


def plugin_of(group: str, name: str) -> plugins.Plugin | None:
    """The plug-in that a choice is from; None for one of specbench's own, and for a name that does not exist."""
    one = found_choices().choices.get(group, {}).get(name)
    return one.plugin if one and not one.plugin.is_shipped else None


def file_of(group: str, name: str) -> Path:
    """The file of a choice, which exists if the choice does, or of one that choices build on."""
    return plugins.file_of(found_choices().folders, group, name)


def plugins_of(cfg: Mapping[str, Any]) -> list[str]:
    """The labels of the plug-ins whose choices a configuration names, as a row gives them."""
    names = [(group, name) for group, value in cfg.items() for name in (value if group == "metrics" else [value])]
    found = (plugin_of(group, str(name).partition("@")[0]) for group, name in names)
    return sorted({plugin.label for plugin in found if plugin})


def plugins_lacking(labels: Iterable[str]) -> str:
    """The end of a sentence about something that plug-ins with these labels made: those that are not here. Empty if
    all are."""
    here = {str(plugin).removeprefix("plug-in ") for plugin in found_choices().plugins}
    names = sorted({label.rpartition(":")[0] for label in labels if label} - here)
    away = "which is not here: install it, or name its folder with --include"
    return f"; it is from plug-in {_and(names)}, {away}" if names else ""


@contextmanager
def including(folders: Sequence[Path]) -> Iterator[None]:
    """Inside, these folders are plug-ins, too, here and in child processes."""
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


def content(group: str, name: str) -> Mapping[str, Any]:
    """The values of a choice's file and of those that it builds on; empty where there is no such file. Callers do not
    change it."""
    return plugins.content(found_choices().folders, group, name)


def declarations(group: str, name: str) -> Mapping[str, Parameter]:
    """The parameters of a choice, or of a file that it builds on; every run's are under ("", "config")."""
    return plugins.declarations(found_choices().folders, group, name)


def table() -> Mapping[str, Parameter]:
    """Every parameter by its first declaration, in the order in which a row lists them: the names of choices, the
    parameters of these in the order of config.yaml's groups, what every run has, then what plug-ins add."""
    return found_choices().parameters


def in_run(cfg: Mapping[str, Any]) -> dict[str, Parameter]:
    """Every parameter as it is declared for a run with these choices: by the choice that has it, else by its first
    declaration."""
    found = {**table(), **declarations("", "config")}
    for group in PARAMETER_GROUPS:
        found |= declarations(group, str(cfg.get(group)))
    return found


@cached
def declared(group: str, name: str) -> frozenset[str]:
    """The flat parameters that a choice of a group has, including what the files have that it builds on."""
    return frozenset(content(group, name)) - METADATA


def preferred(group: str, name: str) -> dict[str, str]:
    """The choices of other groups (data, metrics, a method) that a model or a data set has where none are named, from
    its file."""
    return dict(content(group, name).get("preferred") or {})


def world(group: str, name: str) -> str | None:
    """The embedded world of a model, a data set or a single metric: "scenes"; None for real ones."""
    held = content(group, name)
    found = (held.get(name) or {}) if group == "metrics" else held
    return found.get("world")


def no_pixels(cfg: Mapping[str, Any]) -> str:
    """What a run of a model without a pixel decoder measures, in a sentence; empty for other models."""
    if content("model", str(cfg["model"])).get("pixels", True):
        return ""
    return (
        f"{cfg['model']} ends with tokens, and the stage that draws its images is not part of specbench: a run measures"
        " tokens, steps and time, its image files hold one pixel for a token, and metrics of images need a server that"
        " draws (engine=http) or stored images (specbench evaluate)"
    )


def check_measurable(cfg: Mapping[str, Any]) -> None:
    """UsageError for metrics of a model without pixels, and for a metric of an embedded world and a model of another
    one: no column has such a value for a real model. (Of a served model, the prompts tell the world.)"""
    if cfg["metrics"] and (reason := no_pixels(cfg)):
        raise UsageError(f"{reason}: use metrics=none")
    group = "data" if is_served(cfg) else "model"
    for name in cfg["metrics"]:
        if (theirs := world("metrics", name)) not in (None, world(group, cfg[group])):
            raise UsageError(
                f"metric {name} scores the embedded world ({theirs}) alone, not images of {group}={cfg[group]}: leave"
                " metrics= out for real ones, or take some of `specbench list metrics`"
            )


def default(group: str, name: str, parameter: str) -> Any:
    """The value of a parameter in a choice's file; None where it is not set."""
    return content(group, name).get(parameter)


@cached
def common() -> frozenset[str]:
    """The parameters that every run has."""
    return declared("", "config") | {"method"}


@cached
def method_parameters() -> frozenset[str]:
    """The parameters that a part of a method declares: those of a method, without the model and the sampling."""
    parts = (declared(group, name) for group in PARTS for name in choices(group))
    return frozenset().union(*parts)


def possible(model: str) -> frozenset[str]:
    """The parameters that a run of a model can have: all but those that only other models declare."""
    if model not in choices("model"):
        return frozenset(table())
    others = frozenset().union(*(declared("model", name) for name in choices("model")))
    return frozenset(table()) - (others - declared("model", model) - common())


def method_choices(method: str) -> dict[str, str]:
    """Group -> choice in a method's preset: {"drafter": "eagle_tree", "rule": "cool"}."""
    return _chosen("method", method)


def of_experiment(name: str) -> dict[str, Any]:
    """The choices and values of an experiment's file, by group and parameter; empty for one that does not exist."""
    if name not in choices("experiment"):
        return {}
    held = content("experiment", name)
    return _chosen("experiment", name) | {key: held[key] for key in held if key not in METADATA}


def default_choice(group: str) -> str:
    """The default choice of a group."""
    return _chosen("", "config")[group]


def _chosen(group: str, name: str) -> dict[str, str]:
    """Group -> choice of a file's list of defaults."""
    entries = [d for d in yaml_files.read(file_of(group, name)).get("defaults", []) if isinstance(d, dict)]
    return {key.split("/")[-1]: value for entry in entries for key, value in entry.items()}


def is_served(cfg: Mapping[str, Any]) -> bool:
    """Whether a server decodes the images of a run (engine=http)."""
    return default("engine", str(cfg.get("engine")), "served") is True


def parameters_of(cfg: Mapping[str, Any]) -> list[str]:
    """The parameters of a run with these choices: the names of choices, then the parameters of each in the order of its
    file, in the order of `PARAMETER_GROUPS`, then what every run has."""
    groups: tuple[str, ...]
    if is_served(cfg):
        groups, names = _GROUPS_OF_SERVED, {*SERVED, *_OF_SERVED}
    else:
        groups, names = PARAMETER_GROUPS, {*common(), *(declared("method", str(cfg.get("method"))) & {"variant"})}
    chosen = [(group, str(cfg.get(group))) for group in groups]
    own = [name for one in chosen for name in (*declarations(*one), *content(*one)) if name not in METADATA]
    every = content("", "config")
    first = [name for name in declarations("", "config") if name not in every]
    return [name for name in dict.fromkeys([*first, *own, *table()]) if name in names or name in own]


def owners(name: str) -> list[str]:
    """The choices that have a parameter: "rule cool (method cool_sd)"."""
    found = [f"method {method}" for method in choices("method") if name == "variant" in declared("method", method)]
    for group in PARAMETER_GROUPS:
        for choice in choices(group):
            if name in declared(group, choice):
                presets = [method for method in choices("method") if method_choices(method).get(group) == choice]
                found.append(f"{group} {choice}" + (f" (method {', '.join(presets)})" if presets else ""))
    return found


def no_parameter(name: str, cfg: Mapping[str, Any]) -> UsageError:
    """The error for a parameter that a run with these choices does not have."""
    has = [p for p in parameters_of(cfg) if p not in groups()]
    if is_served(cfg):
        engine = cfg["engine"]
        return UsageError(f"engine={engine} has no parameter '{name}': a server decodes; it has: {', '.join(has)}")
    who = f"method '{cfg.get('method')}' (drafter {cfg.get('drafter')}, rule {cfg.get('rule')})"
    if owned := owners(name):
        return UsageError(
            f"{who} has no parameter '{name}' (it belongs to {_and(owned)}); this choice has: {', '.join(has)}"
        )
    near = nearest(name, [*table(), *groups()])
    hint = f" (did you mean '{near}'?)" if near else ""
    return UsageError(f"unknown parameter '{name}'{hint}; {who} has: {', '.join(has)}")


def validate(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """A composed, flat configuration, checked and in canonical form and order; `registry.completed` checks its paths.

    Raises UsageError for an unknown or missing parameter, a wrong type and a value out of range. `delta=2` and
    `delta=2.0` become the same, so that equal runs have equal hashes.
    """
    served = is_served(cfg)
    for group in _GROUPS_OF_SERVED if served else PARAMETER_GROUPS:
        choice(group, str(cfg.get(group)))
    wanted = parameters_of(cfg)
    for name in cfg:
        if name not in wanted:
            raise no_parameter(str(name), cfg)
    if missing := [name for name in wanted if name not in cfg]:
        raise UsageError(f"the configuration lacks {_and(missing)}: give {missing[0]}=...")
    own = in_run(cfg)
    checked = {name: own[name].checked(name, cfg[name]) for name in wanted}
    check_metrics(checked["metrics"])
    each = checked["images_per_prompt"]
    if isinstance(checked["n"], int) and checked["n"] * each > PROMPTS:
        raise UsageError(
            f"n times images_per_prompt must be at most {PROMPTS:,} images (got {checked['n']:,} times {each:,})"
        )
    part, _, parts = (checked.get("shard") or "1/1").partition("/")
    if int(part) > int(parts):
        raise UsageError(f"shard={part}/{parts} is beyond the last one, shard={parts}/{parts}")
    if served:
        return checked
    _check_kinds(checked)
    if checked["timing"] and (checked["workers"] > 1 or checked["ray_address"]):
        raise UsageError("timing=true measures one process of this machine: leave workers= and ray_address= out")
    return checked


def kind(group: str, name: str) -> str:
    """The tokens for which a model, drafter, rule or method is, from `kind:` in its file: discrete, which is the
    default, continuous, or any; ordered: discrete tokens of a model that leaves raster order."""
    found, kinds = content(group, name).get("kind", "discrete"), ("discrete", "continuous", "ordered", "any")
    if found not in kinds:
        raise UsageError(f"{file_of(group, name)}: kind must be one of {', '.join(kinds)} (got {found})")
    return str(found)


def is_continuous(group: str, name: str) -> bool:
    """Whether a choice is only for models with continuous tokens."""
    return kind(group, name) == "continuous"


def in_raster_order(cfg: Mapping[str, Any]) -> bool:
    """Whether a run samples its tokens row by row: neither its model nor its drafter has an order of its own."""
    drafter_leaves = default("drafter", str(cfg["drafter"]), "raster") is False
    return not drafter_leaves and kind("model", str(cfg.get("model"))) != "ordered"


#: What the tokens of a model are, by its kind, in messages.
_TOKENS = {"ordered": "discrete tokens in an order of its own"}


def _check_kinds(cfg: Mapping[str, Any]) -> None:
    """UsageError unless drafter, rule and verification fit the model: discrete ones need discrete tokens, continuous
    ones continuous tokens."""
    mine = kind("model", cfg["model"])
    tokens = _TOKENS.get(mine, f"{mine} tokens")
    if kind("verification", cfg["verification"]) not in (mine, "any"):
        raise UsageError(
            f"{cfg['model']} has {tokens}, which verification={cfg['verification']} does not support: use"
            " verification=token"
        )
    parts = {group: cfg[group] for group in ("drafter", "rule") if kind(group, cfg[group]) != "any"}
    kinds = {kind(group, name) for group, name in parts.items()}
    if kinds <= {mine} and (mine != "continuous" or len(parts) != 1):
        return
    suited = [method for method in choices("method") if kind("method", method) in (mine, "any")]
    shown = " and ".join(f"{group} {name}" for group, name in parts.items())
    does = "do" if len(parts) > 1 else "does"
    text = f"{cfg['model']} has {tokens}, which {shown} {does} not support"
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


def settle(cfg: Mapping[str, Any], given: Iterable[str] = ()) -> dict[str, Any]:
    """A configuration as Hydra composed it -> the flat one that `validate` checks.

    The metrics, one switch per file in conf/metrics, become a list of names, and a protocol its name and version. The
    values that a method's preset sets for a replaced part (`method=cool_sd rule=exact`) are dropped where the new part
    does not have or allow them, except the names `given` by the user: those stay for `validate` to refuse.
    """
    flat = dict(cfg)
    if isinstance(flat.get("protocol"), Mapping):
        flat["protocol"] = f"{flat['protocol']['name']}@{flat['protocol']['version']}"
    if isinstance(flat.get("metrics"), Mapping):
        flat["metrics"] = [name for name, on in flat["metrics"].items() if on]
    if is_served(flat):
        if foreign := [name for name in ("model", "method", "protocol", *PARTS) if name in given]:
            raise UsageError(
                f"engine={flat['engine']}: the server has its own model and method: leave {foreign[0]}= out;"
                " model_name= names its model"
            )
        wanted = {*parameters_of(flat), *given}
        return {name: value for name, value in flat.items() if name in wanted} | SERVED
    run_names = set(parameters_of(flat)) | set(given)
    preset, own = content("method", str(flat.get("method"))), in_run(flat)
    found = {name: value for name, value in flat.items() if name in run_names or name not in preset}
    for name in declared("method", str(flat.get("method"))) & found.keys() - set(given):
        if found[name] == preset[name] and name in own and not own[name].allows(found[name]):
            parts = (content(group, flat[group]) for group in reversed(PARAMETER_GROUPS))
            found[name] = next(held[name] for held in parts if name in held)
    return found
