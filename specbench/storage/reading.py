"""Reads text, JSON and YAML files that a user wrote, and makes dataclasses of their content.

Every mistake in a file is a UsageError of one sentence, which names the file and the place in it.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from specbench.errors import UsageError, plain
from specbench.storage.files import content

T = TypeVar("T")

#: Maximum bytes of a text file (COCO's captions have 92 million) and of a YAML file.
LARGEST, _LARGEST_YAML = 2**27, 1_000_000
#: Maximum values in a YAML file: with aliases, even a short one can expand to any size.
_VALUES = 100_000


def read_text(path: Path, way_out: str = "name another file", largest: int = LARGEST) -> str:
    """The text of a file, without a byte order mark. UsageError, which ends with the way out, if the file is missing,
    cannot be read, is larger than `largest` bytes, is not UTF-8 or contains a NUL."""
    try:
        if path.stat().st_size > largest:
            raise UsageError(f"{path} is larger than {largest / 2**20:.3g} MiB; use a smaller file")
        raw = content(path)
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}; check its name, or {way_out}") from None
    except OSError as e:
        raise UsageError(f"cannot read {path} ({e.strerror}); {way_out}") from None
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise UsageError(f"{path}, line {line}: this is not UTF-8 text; save the file as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"{path}, line {line}: there is a NUL character; save the file as UTF-8 text")
    return text


def read_json(path: Path, wanted: Any = Any, way_out: str = "name another file") -> Any:
    """The value in a JSON file, of the type `wanted` (see `typed`). UsageError, which ends with the way out."""
    value = parse_json(read_text(path, way_out), str(path), way_out)
    try:
        return typed(wanted, value, str(path))
    except UsageError as e:
        raise UsageError(f"{e}; {way_out}") from None


def parse_json(text: str, where: str, way_out: str = "fix the file") -> Any:
    """A JSON value. UsageError for invalid JSON, and for an object with a key that occurs twice; where: for
    messages."""
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise UsageError(f"{where}: the JSON is nested too deeply; {way_out}") from None
    except ValueError as e:
        raise UsageError(f"{where}: cannot read it as JSON ({e}); {way_out}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:100]!r} occurs twice in one object")
    return values


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast
_FLOAT = (
    r"[-+]?\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+|\.[\d_]+(?:[eE][-+]\d+)?"
    r"|[-+]?\d[\d_]*(?::[0-5]?\d)+\.[\d_]*|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class _Loader(_Base):
    """Resolves scalars as OmegaConf does: 1e-3 is a number, a date is text, and a key that occurs twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Checks the keys before `<<` is merged."""
        keys = [key.value for key, _ in node.value if key.tag == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {twice}", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "float")]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT})$"), list("-+0123456789."))


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes the texts that `_Loader` would read as numbers."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def yaml_text(values: dict[str, Any]) -> str:
    """NAME: VALUE lines, from which `from_yaml` and Hydra read the same values."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def from_yaml(text: str) -> Any:
    """The value of YAML text. Raises what yaml raises."""
    return yaml.load(text, _Loader)  # noqa: S506 (a safe loader)


def read_yaml(path: Path, way_out: str = "fix the file") -> dict[str, Any]:
    """The NAME: VALUE lines of a YAML file, with the same values as Hydra reads; {} for an empty file. UsageError for
    any mistake."""
    text = read_text(path, way_out, _LARGEST_YAML)
    try:
        values = from_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UsageError(f"cannot read {path} ({' '.join(str(e).split())}); {way_out}") from None
    if not isinstance(values, dict | types.NoneType):
        raise UsageError(f"{path} contains no NAME: VALUE lines; {way_out}")
    _check_size(values, path)
    return {str(key): value for key, value in (values or {}).items()}


def _check_size(values: Any, path: Path) -> None:
    waiting, count = [values], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count + len(waiting) > _VALUES:
            raise UsageError(f"{path} is too large; use a smaller file")
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value


def made(kind: Callable[..., T], fields: Any, where: str) -> T:
    """A dataclass, or the result of another callable, from the fields in a file, each of the type in its annotation
    (see `typed`). UsageError, which names `where`, for a field that is missing, unknown or of another type."""
    if not isinstance(fields, Mapping):
        raise UsageError(f"{where} must be fields and values (got {short(fields)})")
    signature, wanted = _fields_of(kind)
    try:
        signature.bind(**fields)
        return kind(**{name: typed(wanted.get(name, Any), v, f"{where}: {name}") for name, v in fields.items()})
    except (TypeError, ValueError) as e:
        raise UsageError(f"{where} is declared wrongly ({e})") from None


@cache
def _fields_of(kind: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """The signature and the resolved annotations, which take a hundred times as long as a read of one value."""
    return inspect.signature(kind), typing.get_type_hints(kind)


_PLAIN = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}


def typed(wanted: Any, value: Any, where: str) -> Any:
    """Converts a value of a file to the type of an annotation: a list becomes a tuple, fields become a dataclass.
    UsageError, which names `where`, for any other value."""
    kind, parts = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
    if is_dataclass(kind):
        return value if isinstance(value, kind) else made(kind, value, where)  # type: ignore[arg-type]
    if kind in (typing.Union, types.UnionType):
        for part in parts:
            with suppress(UsageError):
                return typed(part, value, where)
    elif kind in (tuple, list, Sequence):
        if isinstance(value, list | tuple) and (len(parts) == len(value) or kind is not tuple or ... in parts):
            inner = parts if kind is tuple and ... not in parts else [*parts[:1], Any][:1] * len(value)
            return tuple(typed(part, item, f"{where}, {i}") for i, (part, item) in enumerate(zip(inner, value), 1))
    elif kind in (dict, Mapping):
        if isinstance(value, Mapping):
            return {key: typed(parts[1] if parts else Any, item, f"{where}: {key}") for key, item in value.items()}
    elif kind is Literal:
        if value in parts:
            return value
    elif kind not in _PLAIN or type(value) is kind or (kind is float and type(value) is int):
        return value
    raise UsageError(f"{where} must be {_meaning(wanted)} (got {short(value)})")


def _meaning(wanted: Any) -> str:
    kind, parts = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(map(_meaning, parts))
    if kind is Literal:
        return f"one of {', '.join(map(str, parts))}"
    return _PLAIN.get(kind) or ("a list" if kind in (tuple, list, Sequence) else "a mapping of names to values")


def short(value: object, limit: int = 60) -> str:
    """A value as text for a message, cut to `limit` characters."""
    try:
        text = plain(repr(value))
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= limit else f"{text[:limit]}..."
