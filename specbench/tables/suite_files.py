"""The files that tables and suites are written in: conf/suite/NAME.yaml, a plug-in's, or a user's; and typed values
from their YAML. What they mean: `reading`, and docs/suites.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from specbench.config import parameters
from specbench.errors import UsageError, plain, unknown
from specbench.tables.definitions import DEFAULT_MODEL, Maps, Matched, Series, Stack

GROUP = "suite"
T = TypeVar("T")
Positive = Annotated[int, 1]
Natural = Annotated[int, 0]
#: Types of plain values: their name in messages, and the types of YAML that they may have.
_PLAIN: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("an integer", (int,)),
    float: ("a number", (float, int)),
    bool: ("true or false", (bool,)),
}


@dataclass(frozen=True)
class PanelKeys:
    """A group of lines with parameters of its own. first: where its curves begin, except those of without_first."""

    lines: dict[str, Any]
    with_: dict[str, Any] = field(default_factory=dict)
    suffix: str | None = None
    first: dict[str, Any] = field(default_factory=dict)
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
    series: Series | None = None
    maps: Maps | None = None
    stack: Stack | None = None


@dataclass(frozen=True)
class PairKeys:
    """Every statistic `of` (with its label) is tested in each of the pairs of lines."""

    of: dict[str, str]
    pairs: tuple[Any, ...]


@dataclass(frozen=True)
class Definition:
    """The keys of a file; a field `with_` is the key `with`. The last seven are of `specbench suite` alone."""

    name: str = ""
    title: str = ""
    paper: str = "own comparison"
    model: str = DEFAULT_MODEL
    n: Positive | None = None
    with_: dict[str, Any] = field(default_factory=dict)
    columns: tuple[Any, ...] = ()
    lines: dict[str, Any] = field(default_factory=dict)
    panels: dict[str, PanelKeys] = field(default_factory=dict)
    figure: FigureKeys | None = None
    matched: Matched | None = None
    tests: tuple[PairKeys, ...] = ()
    remarks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    rows_of: Literal["run", "bench", "probe"] = "run"
    on_request: bool = False
    models: Any = None
    prompts: Any = None
    seeds: tuple[Natural, ...] = ()
    metrics: Any = None
    batch: Positive | None = None
    timed: Natural | None = None
    baseline: dict[str, Any] = field(default_factory=lambda: {"method": "vanilla"})


@dataclass(frozen=True)
class Source:
    """A file as text for messages, and its content."""

    name: str
    held: Mapping[str, Any]

    @cached_property
    def definition(self) -> Definition:
        return self.build("", Definition, self.held)

    def fault(self, text: str) -> UsageError:
        return UsageError(f"{self.name}: {text}")

    def mapping(self, where: str, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fault(f"{where} must be a mapping of names to values (got {short(value)})")
        return {str(name): one for name, one in value.items()}

    def sequence(self, where: str, value: Any) -> list[Any]:
        if value is None:
            return []
        if isinstance(value, dict):
            raise self.fault(f"{where} must be a list (got {short(value)})")
        return value if isinstance(value, list) else [value]

    def text(self, where: str, value: Any) -> str:
        """In one line, without what a terminal would obey."""
        if isinstance(value, dict | list) or value is None:
            raise self.fault(f"{where} must be a text (got {short(value)})")
        return plain(" ".join(str(value).splitlines()))

    def build(self, where: str, kind: type[T], held: Any) -> T:
        """An object of a dataclass from a mapping. UsageError for what the dataclass cannot hold."""
        values = self.values(where, kind, held)
        for one in fields(kind):  # type: ignore[arg-type]
            needed = one.default is MISSING and one.default_factory is MISSING
            if needed and not values.get(one.name):
                raise self.fault(f"{where} needs {one.name}")
        return kind(**values)

    def values(self, where: str, kind: type, held: Any) -> dict[str, Any]:
        """Those fields of a dataclass that a mapping has, in their types."""
        hints = {name.rstrip("_"): (name, hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
        found = {}
        for key, value in self.mapping(where, held).items():
            if key not in hints:
                raise self.fault(f"{where or 'a suite'} has no '{plain(key)}' (choose from: {', '.join(hints)})")
            name, hint = hints[key]
            found[name] = self.value(f"{where}: {key}" if where else key, hint, value)
        return found

    def value(self, where: str, hint: Any, value: Any) -> Any:
        """A value in the type of an annotation. A tuple may be given by its only entry."""
        origin, of = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            return None if value is None else self.value(where, of[0], value)
        if origin is tuple:
            return tuple(self.value(where, of[0], one) for one in self.sequence(where, value))
        if origin is dict:
            entries = self.mapping(where, value).items()
            return {name: self.value(f"{where}: {name}", of[1], one) for name, one in entries}
        if hasattr(hint, "__dataclass_fields__"):
            return self.build(where, hint, value)
        if hint is str:
            return self.text(where, value)
        expected = ""
        if origin is Literal and value not in of:
            expected = " or ".join(of)
        elif origin is Annotated and (type(value) is not int or value < of[1]):
            expected = f"an integer of at least {of[1]}"
        elif hint in _PLAIN and type(value) not in _PLAIN[hint][1]:
            expected = _PLAIN[hint][0]
        if expected:
            raise self.fault(f"{where} must be {expected} (got {short(value)})")
        return value

    def entries(self, key: str, parameter: str) -> dict[str, dict[str, Any]]:
        """Label -> parameters: of a mapping of such, a list of names, or one name; a name is a value of `parameter`."""
        value = self.held.get(key)
        if not isinstance(value, dict):
            return {self.text(key, one): {parameter: one} for one in self.sequence(key, value)}
        found = {}
        for label, one in self.mapping(key, value).items():
            given = one if isinstance(one, dict) else {parameter: label if one is None else one}
            found[label] = self.mapping(f"{key}: {label}", given)
        return found


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return plain(text if len(text) <= 60 else f"{text[:60]}...")


def names() -> list[str]:
    """The suites that are shipped, or that a plug-in brings."""
    return list(parameters.choices(GROUP))


def named(name: str) -> Source:
    """A shipped suite. UsageError for an unknown name."""
    return _complete(_shipped(name))


def _shipped(name: str) -> Source:
    if name not in parameters.choices(GROUP):
        raise unknown("suite", plain(name), parameters.choices(GROUP))
    return Source(f"suite {name}", _read(parameters.file_of(GROUP, name)))


def of_file(path: Path) -> Source:
    """A user's file. UsageError where it cannot be read."""
    return _complete(Source(str(path), _read(path)))


#: Characters of a file, and values in it: with aliases even a short one can expand to any size.
_LARGEST, _VALUES = 1_000_000, 100_000


@cache
def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is ten times as fast


def _check_size(held: Any, path: Path) -> None:
    waiting, count = [held], 0
    while waiting:
        one = waiting.pop()
        count += 1
        if count + len(waiting) > _VALUES:
            raise UsageError(f"{path} is too large for a suite")
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > _LARGEST:
            raise UsageError(f"{path} is too large for a suite")
        held = yaml.load(text, Loader=_loader())  # noqa: S506 - a safe loader
        _check_size(held, path)
    except OSError as e:
        raise UsageError(f"cannot read {path} ({e.strerror})") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UsageError(f"cannot read {path}: {' '.join(str(e).split())}") from None
    if not isinstance(held, dict) or not held:
        raise UsageError(f"{path} is not a suite: it needs lines; docs/suites.md has all of its keys")
    return {str(key): value for key, value in held.items()}


def _complete(source: Source, seen: tuple[str, ...] = ()) -> Source:
    """With the keys of the suites that it names under `defaults`, where it has none of its own."""
    held: dict[str, Any] = {}
    for other in source.sequence("defaults", source.held.get("defaults")):
        name = source.text("defaults", other)
        if name in seen:
            raise source.fault(f"defaults name {name} in a circle")
        held |= _complete(_shipped(name), (*seen, name)).held
    return Source(source.name, held | {key: value for key, value in source.held.items() if key != "defaults"})
