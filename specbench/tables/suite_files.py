"""The files that define tables and suites: conf/suite/NAME.yaml, a plug-in's, or a user's. `catalog` and docs/suites.md
explain their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from specbench.config import parameters
from specbench.errors import UsageError, plain, unknown
from specbench.storage.reading import made, read_yaml, short
from specbench.tables.definitions import DEFAULT_MODEL

GROUP = "suite"
T = TypeVar("T")
Parameters = dict[str, Any]


@dataclass(frozen=True)
class PanelKeys:
    """A group of lines with its own parameters, `with`. first: the lines at which its curves start, except the curves
    in without_first."""

    lines: Parameters
    with_: Parameters = field(default_factory=dict)
    suffix: str | None = None
    first: Parameters = field(default_factory=dict)
    without_first: tuple[str, ...] = ()
    baseline: str = ""


@dataclass(frozen=True)
class FigureKeys:
    """A figure of curves, or of one of the last three kinds. curves: names other lines than the table's."""

    x: tuple[str, ...] = ()
    y: tuple[str, ...] = ()
    baseline: str = ""
    panel: str | None = None
    curves: dict[str, tuple[str, ...]] = field(default_factory=dict)
    log: bool = False
    series: Parameters = field(default_factory=dict)
    maps: Parameters = field(default_factory=dict)
    stack: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class PairKeys:
    """Tests: every statistic in `of` (with its label) is tested for each of the pairs of lines."""

    of: dict[str, str]
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Definition:
    """The keys of a file; `with_` is its `with`. The last seven are only for `specbench suite`."""

    name: str = ""
    title: str = ""
    paper: str = "own comparison"
    model: str = DEFAULT_MODEL
    n: int | None = None
    with_: Parameters = field(default_factory=dict)
    columns: tuple[str | Parameters, ...] = ()
    lines: Parameters = field(default_factory=dict)
    panels: dict[str, Parameters] = field(default_factory=dict)
    figure: Parameters = field(default_factory=dict)
    matched: Parameters = field(default_factory=dict)
    tests: tuple[PairKeys, ...] = ()
    remarks: tuple[str, ...] = ()
    rows_of: Literal["run", "bench", "probe"] = "run"
    on_request: bool = False
    models: Any = None
    prompts: Any = None
    seeds: tuple[int, ...] = ()
    metrics: Any = None
    batch: int | None = None
    timed: int | None = None
    baseline: Parameters = field(default_factory=lambda: {"method": "vanilla"})

    def __post_init__(self) -> None:
        for name, value, least in (
            ("n", self.n, 1),
            ("batch", self.batch, 1),
            ("timed", self.timed, 0),
            *(("a seed", seed, 0) for seed in self.seeds),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} must be an integer of at least {least} (got {value})")


@dataclass(frozen=True)
class Source:
    """A file: its name for messages, and its content."""

    name: str
    content: Mapping[str, Any]

    @cached_property
    def definition(self) -> Definition:
        return self.made("", Definition, self.content)

    def fault(self, text: str) -> UsageError:
        return UsageError(f"{self.name}: {text}")

    def made(self, where: str, kind: type[T], content: Mapping[str, Any]) -> T:
        """A dataclass from a mapping. A list with a single entry may be given as the entry."""
        hints = {name.rstrip("_"): (name, hint) for name, hint in get_type_hints(kind).items()}
        values = {}
        for key, value in content.items():
            if key not in hints:
                raise self.fault(f"{where or 'a suite'} has no '{key}' (choose from: {', '.join(hints)})")
            name, hint = hints[key]
            is_single = get_origin(hint) is tuple and not isinstance(value, list | dict)
            values[name] = [value] if is_single else value
        return made(kind, values, f"{self.name}: {where}" if where else self.name)

    def mapping(self, where: str, value: Any) -> Parameters:
        """The value as a mapping; {} for null."""
        if not isinstance(value, dict | None):
            raise self.fault(f"{where} must be a mapping of names to values (got {short(value)})")
        return value or {}

    def entries(self, key: str, parameter: str) -> dict[str, Parameters]:
        """Label -> parameters, from a mapping of these, a list of names, or one name. A name is a value of
        `parameter`."""
        value = self.content.get(key)
        if not isinstance(value, dict):
            names = value if isinstance(value, list) else [] if value is None else [value]
            return {str(name): {parameter: name} for name in names}
        entries = {}
        for label, entry in value.items():
            default = {parameter: label if entry is None else entry}
            entries[label] = entry if isinstance(entry, dict) else default
        return entries


def names() -> list[str]:
    """The suites that are part of specbench or of a plug-in."""
    return list(parameters.choices(GROUP))


def named(name: str) -> Source:
    """A suite by its name. UsageError for an unknown name."""
    return _complete(_shipped(name))


def _shipped(name: str) -> Source:
    if name not in parameters.choices(GROUP):
        raise unknown("suite", plain(name), parameters.choices(GROUP))
    return _read(f"suite {name}", parameters.file_of(GROUP, name))


def of_file(path: Path) -> Source:
    """A suite from a user's file. UsageError if it cannot be read."""
    return _complete(_read(str(path), path))


def _read(name: str, path: Path) -> Source:
    content = read_yaml(path)
    if not content:
        raise UsageError(f"{path} is not a suite: it needs lines; docs/suites.md explains all of its keys")
    return Source(name, _one_line(content))


def _one_line(value: Any) -> Any:
    """A value of YAML with every text in one line, without control characters for a terminal."""
    if isinstance(value, dict):
        return {_one_line(str(key)): _one_line(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_one_line(item) for item in value]
    return plain(" ".join(value.splitlines())) if isinstance(value, str) else value


def _complete(source: Source, seen: tuple[str, ...] = ()) -> Source:
    """Adds the keys of the suites that it names under `defaults`; its own keys have priority."""
    content: dict[str, Any] = {}
    others = source.content.get("defaults", [])
    for name in others if isinstance(others, list) else [others]:
        if name in seen:
            raise source.fault(f"defaults contain {name} in a circle")
        content |= _complete(_shipped(str(name)), (*seen, name)).content
    return replace(source, content=content | {key: value for key, value in source.content.items() if key != "defaults"})
