"""Plug-ins: choices from outside the package.

A plug-in is an installed distribution with entry points, or a folder that the user includes. Both hold files
GROUP/NAME.yaml as conf/ does: a distribution in the folder conf/ of its package, or in the package that its entry point
`specbench.conf` names. The implementation of a choice is the object of an entry point of the same name, in one of the
groups `ENTRY_POINTS`, or that of NAME.py next to NAME.yaml.

A new parameter is declared in the file of the choice that has it, under `parameters`, with the fields of `Parameter`
and its unit. Nothing of a plug-in is imported before it is used. What is wrong with one is a sentence in
`FoundPlugins.faults`, and the choice is left out; a choice never replaces one of specbench's own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf

from specbench.config.caches import cached
from specbench.config.parameter import KINDS, METADATA, Parameter
from specbench.config.shown_column import shown
from specbench.config.table import BUILT_IN
from specbench.errors import UsageError
from specbench.storage.files import sha256, sha256_file

#: Group of entry points -> group of conf/.
ENTRY_POINTS = {
    "specbench.rules": "rule",
    "specbench.drafters": "drafter",
    "specbench.verifications": "verification",
    "specbench.models": "model",
    "specbench.data": "data",
    "specbench.metrics": "metrics",
}
#: The groups of entry points that name the package of files; what they have needs no module.
CONF = ("specbench.conf", "specbench.suites", "specbench.methods")
#: The environment variable with the folders that the user includes, separated as in PATH.
INCLUDE = "SPECBENCH_INCLUDE"
#: The column of rows that names them.
MEANING = "plug-ins whose choices were used: name, version and a hash of their files; empty: none"
#: The groups whose files declare parameters.
_OF_PARAMETERS = ("model", "data", "engine", "drafter", "rule", "verification")


@dataclass(frozen=True)
class Plugin:
    """name, version: of the distribution, or the folder's name and nothing; conf: the folder of GROUP/NAME.yaml; code:
    the folder of its package; targets: (group, name) -> "module:object" of its entry points."""

    name: str
    version: str
    conf: Path
    code: Path | None = None
    targets: Mapping[tuple[str, str], str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"plug-in {self.name} {self.version}".rstrip()

    @property
    def is_included(self) -> bool:
        """Whether it is a folder that the user named."""
        return self.code is None

    @property
    def label(self) -> str:
        """Name, version and a hash of its files, as a row names it: "specbench-example 0.1.0:1a2b3c4d"."""
        return f"{self.name} {self.version}".rstrip() + f":{_digest(self)}"


@dataclass(frozen=True)
class Provided:
    """A choice of a plug-in and its file; target: the object of its entry point, empty without one."""

    plugin: Plugin
    group: str
    name: str
    path: Path
    target: str

    def load(self, default: str) -> Any:
        """The object behind the choice. default: "object" of NAME.py or "module:object", without an entry point; the
        module is a file next to the choice's own, if there is one. UsageError where it cannot be imported."""
        module, _, attribute = (self.target or default).rpartition(":")
        file = self.path.with_name(f"{module or self.name}.py")
        try:
            if self.target or (module and not file.is_file()):
                return pkgutil.resolve_name(f"{module}:{attribute}")
            if not file.is_file():
                wanted = next(key for key, group in ENTRY_POINTS.items() if group == self.group)
                raise FileNotFoundError(f"there is neither {file} nor an entry point {self.name!r} in {wanted}")
            return getattr(_module(file, self.plugin.conf), attribute)
        except (Exception, SystemExit) as e:
            text = " ".join(str(e).split())[:300]
            raise UsageError(
                f"{self.group} {self.name} of {self.plugin} cannot be loaded ({type(e).__name__}: {text})"
            ) from e


@dataclass(frozen=True)
class FoundPlugins:
    """Plug-ins, their choices by group and name, the parameters that they declare with their units, and one sentence
    for each fault, of included folders apart."""

    plugins: tuple[Plugin, ...] = ()
    choices: Mapping[str, Mapping[str, Provided]] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    faults_included: tuple[str, ...] = ()


@cached
def load(conf: Path) -> FoundPlugins:
    """The plug-ins that are installed and included, next to the choices in `conf`, specbench's own."""
    search = _Search(conf)
    for plugin in _installed(search.faults):
        search.add(plugin)
    search.faults, faults = [], search.faults
    for plugin in _included(search.faults):
        search.add(plugin)
    return FoundPlugins(
        tuple(search.plugins),
        {group: dict(sorted(names.items())) for group, names in search.choices.items()},
        search.parameters,
        search.units,
        tuple(faults),
        tuple(search.faults),
    )


class _Search:
    """What was found so far."""

    def __init__(self, conf: Path) -> None:
        self.groups = {p.name for p in conf.iterdir() if p.is_dir() and p.name != "hydra"}
        self.plugins: list[Plugin] = []
        self.choices: dict[str, dict[str, Provided]] = defaultdict(dict)
        self.parameters: dict[str, Parameter] = {}
        self.units: dict[str, str] = {}
        self.columns: set[str] | None = None  # of metrics, read on demand
        self.faults: list[str] = []
        self._conf = conf

    def add(self, plugin: Plugin) -> None:
        """A plug-in with all its choices but those that have a fault."""
        found: dict[tuple[str, str], Provided] = {}
        for group in sorted(self.groups):
            for path in sorted((plugin.conf / group).glob("*.yaml")):
                key = group, path.stem
                found[key] = Provided(plugin, group, path.stem, path, plugin.targets.get(key, ""))
        for group, name in plugin.targets.keys() - found:
            self.faults.append(f"{plugin} has an entry point for {group} {name}, but no {group}/{name}.yaml")
        if not found and not plugin.targets:
            groups = ", ".join(sorted(self.groups))
            self.faults.append(f"{plugin} has no choice: {plugin.conf} holds no GROUP/NAME.yaml (groups: {groups})")
        self.plugins.append(plugin)
        for (group, name), one in found.items():
            try:
                self._check(one)
            except (Exception, SystemExit) as e:  # whatever a file of others holds
                text = str(e).strip() or type(e).__name__
                self.faults.append(f"{group} {name} of {plugin} is left out: {text.splitlines()[0]}")
            else:
                self.choices[group][name] = one

    def _check(self, one: Provided) -> None:
        """UsageError unless a choice can stand next to the others. Adds its parameters and columns."""
        if (self._conf / one.group / one.path.name).is_file():
            raise UsageError("specbench has a choice of this name; rename it")
        if other := self.choices[one.group].get(one.name):
            raise UsageError(f"{other.plugin} has a choice of this name, too")
        held = _content(one.path)
        if one.group == "metrics":
            self._check_metric(one, held)
        if one.group not in _OF_PARAMETERS:
            return
        declared = {name: _parameter(name, given) for name, given in (held.get("parameters") or {}).items()}
        for name, (parameter, _) in declared.items():
            if name in BUILT_IN or self.parameters.get(name, parameter) != parameter:
                raise UsageError(f"parameter {name} is declared already; leave it out of parameters:, or rename it")
        known = {*BUILT_IN, *self.parameters, *declared, *METADATA, "defaults", "hydra"}
        if foreign := sorted(held.keys() - known):
            raise UsageError(f"{foreign[0]} is no parameter of specbench; declare it under parameters:")
        self.parameters |= {name: parameter for name, (parameter, _) in declared.items()}
        self.units |= {name: unit for name, (_, unit) in declared.items() if unit}

    def _check_metric(self, one: Provided, held: Mapping[str, Any]) -> None:
        own = held.get(one.name)
        if own is None:
            return  # a set of metrics
        columns = own.get("columns") if isinstance(own, Mapping) else None
        if not columns or not (one.target or isinstance(own.get("metric"), str)):
            raise UsageError(f"{one.name}: needs metric: MODULE:CLASS (or an entry point) and columns:")
        if self.columns is None:
            files = sorted((self._conf / "metrics").glob("*.yaml"))
            self.columns = {name for file in files for name in _columns(_content(file).get(file.stem))}
        for name in columns if isinstance(columns, Mapping) else ():
            if name in self.columns or name in BUILT_IN or not str(name).isidentifier():
                raise UsageError(f"the column {name} exists, or is no name; choose another")
            shown(one.path.name, name, columns[name])
        if absent := sorted(set(columns) - self.columns - set(_columns(own))):
            raise UsageError(f"no metric declares the column {absent[0]}; give its title:, better: and decimals:")
        self.columns |= set(_columns(own))


def _columns(held: Any) -> Iterator[str]:
    """The columns that a metric's values declare, not only name."""
    columns = held.get("columns") if isinstance(held, Mapping) else None
    yield from columns if isinstance(columns, Mapping) else ()


def _parameter(name: object, given: Any) -> tuple[Parameter, str]:
    """A declared parameter and its unit."""
    if not str(name).isidentifier() or not isinstance(given, Mapping):
        raise UsageError(f"parameters: {name} needs the form NAME: {{kind: number, line: its meaning}}")
    fields: dict[str, Any] = {
        str(key): tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    unit = fields.pop("unit", "")
    try:
        parameter = Parameter(**fields)
        parameter.wanted()
    except (TypeError, ValueError) as e:
        raise UsageError(f"parameters: {name} is not declared well ({e})") from None
    if parameter.kind not in KINDS:
        raise UsageError(f"parameters: {name} has kind {parameter.kind}; choose from: {', '.join(KINDS)}")
    return parameter, str(unit)


def _content(path: Path) -> dict[str, Any]:
    held = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(held, dict):
        raise UsageError(f"{path.name} holds no NAME: VALUE lines")
    return {str(key): value for key, value in held.items()}


def _installed(faults: list[str]) -> Iterator[Plugin]:
    """The distributions with entry points of specbench; those that cannot be used become faults."""
    found = defaultdict(list)
    every = entry_points()
    for group in sorted(name for name in every.groups if name.startswith("specbench.")):
        for point in every.select(group=group):
            if point.dist is not None:
                found[point.dist.name, point.dist.version].append(point)
    for (name, version), points in sorted(found.items()):
        title = f"plug-in {name} {version}"
        if unknown := next((point for point in points if point.group not in (*ENTRY_POINTS, *CONF)), None):
            known = ", ".join((*ENTRY_POINTS, *CONF))
            faults.append(f"{title} has entry points of an unknown group {unknown.group} (choose from: {known})")
        points = [point for point in points if point.group in (*ENTRY_POINTS, *CONF)]
        if not points:
            continue
        named = next((point.module for point in points if point.group in CONF), "")
        own = named or f"{points[0].module.split('.')[0]}.conf"
        conf = folder_of(own)
        if conf is None:
            faults.append(f"{title} is left out: there is no folder for {own}; install it again")
            continue
        targets = {(ENTRY_POINTS[p.group], p.name): f"{p.module}:{p.attr}" for p in points if p.group not in CONF}
        yield Plugin(name, version, conf, folder_of(own.split(".")[0]) or conf, targets)


def folder_of(package: str) -> Path | None:
    """The folder of a package, which is not imported; None where there is none."""
    head, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(head) if head else None
    except (ImportError, ValueError):
        spec = None
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (folder := Path(place, *rest)).is_dir():
            return folder
    return None


def _included(faults: list[str]) -> Iterator[Plugin]:
    """The folders of the environment variable."""
    for text in dict.fromkeys(os.environ.get(INCLUDE, "").split(os.pathsep)):
        folder = Path(text).expanduser().resolve()
        if text and not folder.is_dir():
            faults.append(f"there is no folder {text} to include")
        elif text:
            yield Plugin(folder.name, "", folder)


def _module(file: Path, conf: Path) -> ModuleType:
    """A file of an included folder as a module. The folder is on Python's path, last, so that files share helpers."""
    name = f"specbench_plugin_{sha256(str(file), 8)}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if str(conf) not in sys.path:
        sys.path.append(str(conf))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@cached
def _digest(plugin: Plugin) -> str:
    """Eight digits of a SHA-256 over its files and their names: of a package all, of an included folder those in groups
    and the modules next to them."""
    h = hashlib.sha256()
    for root in dict.fromkeys([plugin.code or plugin.conf, plugin.conf]):
        found = (
            root.rglob("*") if plugin.code else (p for end in ("*.py", "*/*.py", "*/*.yaml") for p in root.glob(end))
        )
        for path in sorted(set(found)):
            name = path.relative_to(root)
            if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in name.parts):
                h.update(f"{name.as_posix()} {sha256_file(path)}\n".encode())
    return h.hexdigest()[:8]
