"""The files that tables and suites are written in: conf/suite/NAME.yaml, a plug-in's, or a user's. What their keys
mean: `catalog`, and docs/suites.md."""

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
    """A group of lines with parameters of its own, its `with`. first: where its curves begin, except those of
    without_first."""

    lines: Parameters
    with_: Parameters = field(default_factory=dict)
    suffix: str | None = None
    first: Parameters = field(default_factory=dict)
    without_first: tuple[str, ...] = ()
    baseline: str = ""


@dataclass(frozen=True)
class FigureKeys:
    """A figure of curves, of which `curves` names other lines than those of the table, or one of the last three."""

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
    """Every statistic `of` (with its label) is tested in each of the pairs of lines."""

    of: dict[str, str]
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Definition:
    """The keys of a file; `with_` is its `with`. The last seven are of `specbench suite` alone."""

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
    needs: tuple[str, ...] = ()
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
    """A file as text for messages, and its content."""

    name: str
    held: Mapping[str, Any]

    @cached_property
    def definition(self) -> Definition:
        return self.made("", Definition, self.held)

    def fault(self, text: str) -> UsageError:
        return UsageError(f"{self.name}: {text}")

    def made(self, where: str, kind: type[T], held: Mapping[str, Any]) -> T:
        """A dataclass from a mapping. A list of one entry may be given as the entry."""
        hints = {name.rstrip("_"): (name, hint) for name, hint in get_type_hints(kind).items()}
        values = {}
        for key, value in held.items():
            if key not in hints:
                raise self.fault(f"{where or 'a suite'} has no '{key}' (choose from: {', '.join(hints)})")
            name, hint = hints[key]
            alone = get_origin(hint) is tuple and not isinstance(value, list | dict)
            values[name] = [value] if alone else value
        return made(kind, values, f"{self.name}: {where}" if where else self.name)

    def mapping(self, where: str, value: Any) -> Parameters:
        """A mapping, an empty one for null."""
        if not isinstance(value, dict | None):
            raise self.fault(f"{where} must be a mapping of names to values (got {short(value)})")
        return value or {}

    def entries(self, key: str, parameter: str) -> dict[str, Parameters]:
        """Label -> parameters: of a mapping of such, a list of names, or one name; a name is a value of `parameter`."""
        value = self.held.get(key)
        if not isinstance(value, dict):
            names = value if isinstance(value, list) else [] if value is None else [value]
            return {str(one): {parameter: one} for one in names}
        found = {}
        for label, one in value.items():
            given = one if isinstance(one, dict) else {parameter: label if one is None else one}
            found[label] = given
        return found


def names() -> list[str]:
    """The suites that are shipped, or that a plug-in brings."""
    return list(parameters.choices(GROUP))


def named(name: str) -> Source:
    """A shipped suite. UsageError for an unknown name."""
    return _complete(_shipped(name))


def _shipped(name: str) -> Source:
    if name not in parameters.choices(GROUP):
        raise unknown("suite", plain(name), parameters.choices(GROUP))
    return _read(f"suite {name}", parameters.file_of(GROUP, name))


def of_file(path: Path) -> Source:
    """A user's file. UsageError where it cannot be read."""
    return _complete(_read(str(path), path))


def _read(name: str, path: Path) -> Source:
    held = read_yaml(path)
    if not held:
        raise UsageError(f"{path} is not a suite: it needs lines; docs/suites.md has all of its keys")
    return Source(name, _one_line(held))


def _one_line(value: Any) -> Any:
    """A value of YAML with every text in one line, without what a terminal would obey."""
    if isinstance(value, dict):
        return {_one_line(str(key)): _one_line(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_one_line(one) for one in value]
    return plain(" ".join(value.splitlines())) if isinstance(value, str) else value


def _complete(source: Source, seen: tuple[str, ...] = ()) -> Source:
    """With the keys of the suites that it names under `defaults`, where it has none of its own."""
    held: dict[str, Any] = {}
    others = source.held.get("defaults", [])
    for name in others if isinstance(others, list) else [others]:
        if name in seen:
            raise source.fault(f"defaults name {name} in a circle")
        held |= _complete(_shipped(str(name)), (*seen, name)).held
    return replace(source, held=held | {key: value for key, value in source.held.items() if key != "defaults"})
