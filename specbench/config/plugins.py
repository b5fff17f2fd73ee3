"""The choices of a run: specbench's own, in conf/, and the plug-ins'. Both are searched, checked and declared here.

A choice is a file GROUP/NAME.yaml. It may build on other files of its group, which it names in its list `defaults`. A
parameter is declared in the file of the choice that has it, or in a file that it builds on, under `parameters`, with
the fields of `Parameter`; its value in the file is the default. config.yaml declares the parameters of every run.

A plug-in is an installed distribution with entry points, or a folder that the user includes. A distribution has its
files in the folder conf/ of its package, or in the package that its entry point `specbench.conf` names. The
implementation of a choice is the object of an entry point of the same name, in one of the groups `ENTRY_POINTS`, or the
object that the file names with `implementation`, or the one in NAME.py next to NAME.yaml (for specbench's own choices:
in the group's package). Nothing of a plug-in is imported before it is used. A faulty choice is skipped, and a sentence
in `FoundChoices.faults` reports it. A choice never replaces one of specbench's own.
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
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

from specbench.config import yaml_files
from specbench.config.parameter import METADATA, Parameter, Parameters, ShownColumn, declared
from specbench.config.yaml_files import cached
from specbench.errors import UsageError, one_line
from specbench.storage.files import sha256, sha256_file
from specbench.storage.reading import made

#: Group of conf/ -> its group of entry points, and the package of the modules of specbench's own choices.
IMPLEMENTED = {
    "rule": ("specbench.rules", "specbench.decoding.rules"),
    "drafter": ("specbench.drafters", "specbench.decoding.drafters"),
    "verification": ("specbench.verifications", "specbench.decoding.verify"),
    "model": ("specbench.models", "specbench.models"),
    "data": ("specbench.data", "specbench.data"),
    "metrics": ("specbench.metrics", "specbench.metrics"),
}
#: Group of entry points -> group of conf/.
ENTRY_POINTS = {points: group for group, (points, _) in IMPLEMENTED.items()}
#: The groups of entry points that name the package of files. Choices that consist of files alone need no module.
CONF = ("specbench.conf", "specbench.suites", "specbench.methods")
#: The environment variable with the folders that the user includes, separated as in PATH.
INCLUDE = "SPECBENCH_INCLUDE"
#: The file in the folder of a run, a grid or a suite with the folders that it was started with.
INCLUDED = "included.json"
#: The meaning of the rows' column with the plug-ins.
MEANING = "plug-ins whose choices were used: name, version and a hash of their files; empty: none"
#: The groups whose chosen file declares parameters, in the order of a row's columns.
PARAMETER_GROUPS = ("verification", "drafter", "rule", "model", "data", "engine", "log")


@dataclass(frozen=True)
class Plugin:
    """name, version: of the distribution; for a folder, its name and "". conf: the folder of GROUP/NAME.yaml; code: the
    folder of its package; targets: (group, name) -> "module:object" of its entry points; is_shipped: whether it is
    specbench itself, which is handled as a plug-in that always exists."""

    name: str
    version: str
    conf: Path
    code: Path | None = None
    targets: Mapping[tuple[str, str], str] = field(default_factory=dict, hash=False)
    is_shipped: bool = False

    def __str__(self) -> str:
        return "specbench" if self.is_shipped else f"plug-in {self.name} {self.version}".rstrip()

    @property
    def label(self) -> str:
        """Name, version and a hash of its files, as in a row: "specbench-example 0.1.0:1a2b3c4d"."""
        return f"{self.name} {self.version}".rstrip() + f":{_digest(self)}"


@dataclass(frozen=True)
class Choice:
    """A choice and its file; target: the object of its entry point, "" without one."""

    plugin: Plugin
    group: str
    name: str
    path: Path
    target: str = ""

    def load(self, implementation: str) -> Any:
        """The object that implements the choice. implementation: "module:object", or only the object, in the module of
        the choice's name; an entry point has priority. The module is the file next to the choice's own, if it exists;
        for specbench's own choices, it is in the group's package. UsageError if it cannot be imported."""
        module, _, attribute = (self.target or implementation).rpartition(":")
        file = self.path.with_name(f"{module or self.name}.py")
        if self.plugin.is_shipped:
            package = "" if "." in module else f"{IMPLEMENTED[self.group][1]}."
            return pkgutil.resolve_name(f"{package}{module or self.name}:{attribute}")
        try:
            if self.target or (module and not file.is_file()):
                return pkgutil.resolve_name(f"{module}:{attribute}")
            if not file.is_file():
                points = IMPLEMENTED[self.group][0]
                raise FileNotFoundError(f"there is neither {file} nor an entry point {self.name!r} in {points}")
            return getattr(_module(file, self.plugin.conf), attribute)
        except (Exception, SystemExit) as e:
            text = " ".join(str(e).split())[:300]
            raise UsageError(
                f"{self.group} {self.name} of {self.plugin} cannot be loaded ({type(e).__name__}: {text})"
            ) from e


@dataclass(frozen=True)
class FoundChoices:
    """The choices of specbench and of plug-ins by group and name, the parameters that they declare, each with its first
    declaration, and the columns of metrics; the plug-ins, and one sentence for each of their faults. Faults of included
    folders are separate."""

    plugins: tuple[Plugin, ...]
    choices: Mapping[str, Mapping[str, Choice]]
    parameters: Mapping[str, Parameter]
    columns: Mapping[str, ShownColumn]  # of metrics
    faults: tuple[str, ...]
    faults_included: tuple[str, ...]
    folders: tuple[Path, ...]  # of GROUP/NAME.yaml, specbench's own first


@cached
def load(conf: Path) -> FoundChoices:
    """The choices in `conf`, which are specbench's own, and the choices of installed and included plug-ins.

    Raises UsageError for a fault in specbench's own.
    """
    search = _Search(conf)
    for plugin in _installed(search.faults):
        search.add(plugin)
    search.faults, faults = [], search.faults
    for plugin in _included(search.faults):
        search.add(plugin)
    parameters = {name: parameter for name, (parameter, _) in search.parameters.items()}
    installed, included = tuple(faults), tuple(search.faults)
    return FoundChoices(
        tuple(search.plugins[1:]), search.choices, parameters, search.columns, installed, included, search.folders
    )


@cached
def file_of(folders: tuple[Path, ...], group: str, name: str) -> Path:
    """The file of a choice, or of a file that choices build on: the first in these folders."""
    files = [folder / group / f"{name}.yaml" for folder in folders]
    return next((file for file in files[:-1] if file.is_file()), files[-1])


@cached
def content(folders: tuple[Path, ...], group: str, name: str) -> Parameters:
    """The content of a choice's file and of the files of its group that it builds on, without the list of these files
    (`defaults`). {} if the file does not exist. Callers must not change it."""
    values = yaml_files.read(file_of(folders, group, name))
    result: dict[str, Any] = {}
    for entry in built_on(values):
        if entry == "_self_":
            result = yaml_files.merged(result, {key: value for key, value in values.items() if key != "defaults"})
        else:
            path = PurePosixPath(group, name).parent / entry
            result = yaml_files.merged(result, content(folders, group, str(path.relative_to(group))))
    return result


def built_on(values: Parameters) -> list[str]:
    """The files of its group that a file builds on, and the file itself as _self_; later values override earlier
    ones."""
    entries = [entry for entry in values.get("defaults") or [] if isinstance(entry, str)]
    return entries if "_self_" in entries else [*entries, "_self_"]


@cached
def declarations(folders: tuple[Path, ...], group: str, name: str) -> Mapping[str, Parameter]:
    """The parameters that a choice declares, or a file that it builds on. UsageError for a wrong declaration."""
    fields_by_name = content(folders, group, name).get("parameters") or {}
    return {str(name): declared(name, fields) for name, fields in fields_by_name.items()}


class _Search:
    """The search for choices and its results so far, with specbench's own first."""

    def __init__(self, conf: Path) -> None:
        self.groups = _groups(conf)
        self.plugins: list[Plugin] = []
        self.choices: dict[str, dict[str, Choice]] = {group: {} for group in self.groups}
        self.parameters: dict[str, tuple[Parameter, Path]] = {}  # and the file that declares it first
        self.columns: dict[str, ShownColumn] = {}  # of metrics
        self.faults: list[str] = []
        self._common = declarations((conf,), "", "config")
        chosen = self._common.keys() - yaml_files.read(conf / "config.yaml").keys()
        self._declare(conf / "config.yaml", {name: p for name, p in self._common.items() if name in chosen})
        self.add(Plugin("specbench", "", conf, is_shipped=True))
        self._declare(conf / "config.yaml", self._common)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders with files, specbench's own first."""
        return tuple(plugin.conf for plugin in self.plugins)

    def add(self, plugin: Plugin) -> None:
        """Adds a plug-in with all its choices, except faulty ones."""
        added: dict[tuple[str, str], Choice] = {}
        for group in self.groups:
            for path in sorted((plugin.conf / group).glob("*.yaml")):
                key = group, path.stem
                added[key] = Choice(plugin, group, path.stem, path, plugin.targets.get(key, ""))
        for group, name in plugin.targets.keys() - added:
            self.faults.append(f"{plugin} has an entry point for {group} {name}, but no {group}/{name}.yaml")
        if not added and not plugin.targets:
            groups = ", ".join(sorted(self.groups))
            self.faults.append(f"{plugin} has no choice: {plugin.conf} holds no GROUP/NAME.yaml (groups: {groups})")
        self.plugins.append(plugin)
        for check in (self._check, self._check_columns):  # a metric may name a column that a later file declares
            for (group, name), item in list(added.items()):
                try:
                    check(item)
                except (Exception, SystemExit) as e:  # a plug-in's file may contain anything
                    text = one_line(e)
                    if plugin.is_shipped:
                        raise UsageError(f"conf/{group}/{name}.yaml: {text}") from e
                    self.faults.append(f"{group} {name} of {plugin} is left out: {text}")
                    del added[group, name]
        for (group, name), item in added.items():
            self.choices[group][name] = item

    def _check(self, item: Choice) -> None:
        """UsageError if a choice conflicts with the others. Otherwise adds its parameters and columns."""
        if other := self.choices[item.group].get(item.name):
            if other.plugin.is_shipped:
                raise UsageError("specbench has a choice of this name; rename it")
            raise UsageError(f"{other.plugin} has a choice of this name, too")
        if item.plugin.is_shipped and item.group not in (*PARAMETER_GROUPS, "metrics"):
            return  # read when it is chosen
        values = content(self.folders, item.group, item.name)
        if item.group == "metrics":
            self._check_metric(item, values)
        if item.group not in PARAMETER_GROUPS:
            return
        parameters = declarations(self.folders, item.group, item.name)
        known = {*parameters, *self._common, *METADATA, *(() if item.plugin.is_shipped else self.parameters)}
        if foreign := sorted(values.keys() - known):
            what = "not declared" if item.plugin.is_shipped else "no parameter of specbench"
            raise UsageError(f"{foreign[0]} is {what}; declare it under parameters:")
        if missing := sorted(parameters.keys() - values.keys()):
            raise UsageError(f"parameter {missing[0]} has no value; write {missing[0]}: VALUE, its default")
        self._declare(item.path, parameters)

    def _declare(self, path: Path, declared: Mapping[str, Parameter]) -> None:
        """Adds parameters. UsageError if another file declares one of them with another kind."""
        for name, parameter in declared.items():
            first, file = self.parameters.setdefault(name, (parameter, path))
            if first.kind != parameter.kind:
                raise UsageError(
                    f"parameter {name} has kind {parameter.kind} in {path} and kind {first.kind} in {file}; rename one"
                )

    def _check_metric(self, item: Choice, values: Parameters) -> None:
        entry = values.get(item.name)
        if entry is None:
            return  # a set of metrics
        columns = entry.get("columns") if isinstance(entry, Mapping) else None
        if not columns or not (item.target or isinstance(entry.get("metric"), str)):
            raise UsageError(f"{item.name}: needs metric: MODULE:CLASS (or an entry point) and columns:")
        declares = columns if isinstance(columns, Mapping) else {}
        for name in declares:
            if name in self.columns:
                raise UsageError(f"another metric declares the column {name}, too")
            if name in self.parameters or not str(name).isidentifier():
                raise UsageError(f"the column {name} exists already, or is not an identifier; choose another name")
        self.columns |= {str(name): made(ShownColumn, fields, f"column {name}") for name, fields in declares.items()}

    def _check_columns(self, item: Choice) -> None:
        """UsageError unless a metric declares each column that this metric fills."""
        entry = content(self.folders, item.group, item.name).get(item.name) if item.group == "metrics" else None
        if absent := sorted(set(entry["columns"]) - self.columns.keys() if entry else ()):
            raise UsageError(f"no metric declares the column {absent[0]}; give its title:, better: and decimals:")


def _groups(conf: Path) -> list[str]:
    """The folders of choices, first in the order of config.yaml, then the others."""
    named = [next(iter(item)) for item in yaml_files.read(conf / "config.yaml")["defaults"] if isinstance(item, dict)]
    others = sorted(p.name for p in conf.iterdir() if p.is_dir() and p.name != "hydra" and any(p.glob("*.yaml")))
    return list(dict.fromkeys([*(name for name in named if name in others), *others]))


def _installed(faults: list[str]) -> Iterator[Plugin]:
    """The distributions with entry points of specbench. Distributions that cannot be used become faults."""
    by_distribution, every, known = defaultdict(list), entry_points(), (*ENTRY_POINTS, *CONF)
    for group in sorted(name for name in every.groups if name.startswith("specbench.")):
        for point in every.select(group=group):
            if point.dist is not None:
                by_distribution[point.dist.name, point.dist.version].append(point)
    for (name, version), points in sorted(by_distribution.items()):
        title = f"plug-in {name} {version}"
        if foreign := [point.group for point in points if point.group not in known]:
            names = ", ".join(known)
            faults.append(f"{title} has entry points of an unknown group {foreign[0]} (choose from: {names})")
        points = [point for point in points if point.group in known]
        if not points:
            continue
        package = next(
            (point.module for point in points if point.group in CONF), f"{points[0].module.split('.')[0]}.conf"
        )
        if (conf := folder_of(package)) is None:
            faults.append(f"{title} is left out: there is no folder for {package}; install it again")
            continue
        targets = {(ENTRY_POINTS[p.group], p.name): f"{p.module}:{p.attr}" for p in points if p.group not in CONF}
        yield Plugin(name, version, conf, folder_of(package.split(".")[0]) or conf, targets)


def folder_of(package: str) -> Path | None:
    """The folder of a package; None if it does not exist. Does not import the package."""
    head, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(head) if head else None
    except (ImportError, ValueError):
        spec = None
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (folder := Path(location, *rest)).is_dir():
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
    """Imports a file of an included folder. The folder is last on Python's path, so that files can share helpers."""
    name = f"specbench_plugin_{sha256(str(file), 8)}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if str(conf) not in sys.path:
        sys.path.append(str(conf))
    return import_file(name, file)


class _FromSource(SourceFileLoader):
    """Does not use bytecode, which counts as valid after a change of the file within the same second."""

    def get_code(self, fullname: str) -> CodeType | None:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(name: str, file: Path) -> ModuleType:
    """Imports a user's file, as it is now, as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, file, loader=_FromSource(name, str(file)))
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
    """Eight digits of a SHA-256 over its files and their names: for a package all files, for an included folder those
    in groups and the modules next to them."""
    h = hashlib.sha256()
    for root in dict.fromkeys([plugin.code or plugin.conf, plugin.conf]):
        paths = (
            root.rglob("*") if plugin.code else (p for end in ("*.py", "*/*.py", "*/*.yaml") for p in root.glob(end))
        )
        for path in sorted(set(paths)):
            name = path.relative_to(root)
            if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in name.parts):
                h.update(f"{name.as_posix()} {sha256_file(path)}\n".encode())
    return h.hexdigest()[:8]
