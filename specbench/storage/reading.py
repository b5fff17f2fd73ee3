"""The one way to read a text, JSON or YAML file that somebody wrote, and to make dataclasses of what it holds.

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
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from specbench.errors import UsageError, plain
from specbench.storage.files import content

T = TypeVar("T")

#: Bytes of a text file (COCO's captions have 92 million), and values in a YAML file: with aliases even a short one can
#: expand to any size.
LARGEST, _VALUES = 2**27, 100_000


def read_text(path: Path, way_out: str = "name another file", largest: int = LARGEST) -> str:
    """The text of a file, without a byte order mark. UsageError, which ends with the way out, where the file is absent,
    cannot be read or is larger than so many bytes, is not UTF-8 or contains a NUL."""
    try:
        if path.stat().st_size > largest:
            raise UsageError(f"{path} is larger than {largest / 2**20:.3g} MiB; give a smaller file")
        held = content(path)
        text = held.decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}; check its name, or {way_out}") from None
    except OSError as e:
        raise UsageError(f"cannot read {path} ({e.strerror}); {way_out}") from None
    except UnicodeDecodeError as e:
        line = held.count(b"\n", 0, e.start) + 1
        raise UsageError(f"{path}, line {line}: this is not UTF-8 text; save the file as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"{path}, line {line}: there is a NUL character; save the file as UTF-8 text")
    return text


def read_json(path: Path, wanted: Any = Any, way_out: str = "name another file") -> Any:
    """The value in a JSON file, such as `wanted` says (see `typed`). UsageError, which ends with the way out."""
    held = parse_json(read_text(path, way_out), str(path), way_out)
    try:
        return typed(wanted, held, str(path))
    except UsageError as e:
        raise UsageError(f"{e}; {way_out}") from None


def parse_json(text: str, where: str, way_out: str = "fix the file") -> Any:
    """A JSON value. UsageError for invalid JSON, and for an object that has a key twice; `where` is its location."""
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise UsageError(f"{where}: the JSON is nested too deeply; {way_out}") from None
    except ValueError as e:
        raise UsageError(f"{where}: cannot read it as JSON ({e}); {way_out}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:100]!r} occurs twice in one object")
    return found


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is ten times as fast
_FLOAT = (
    r"[-+]?\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+|\.[\d_]+(?:[eE][-+]\d+)?"
    r"|[-+]?\d[\d_]*(?::[0-5]?\d)+\.[\d_]*|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class _Loader(_Base):
    """Resolves scalars as OmegaConf does: 1e-3 is a number, a date is text, and a key that occurs twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Checks the keys before those of `<<` are among them."""
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


def read_yaml(path: Path, way_out: str = "fix the file", largest: int = 1_000_000) -> dict[str, Any]:
    """The NAME: VALUE lines of a YAML file, with the values that Hydra reads in them; an empty file has none.
    UsageError."""
    text = read_text(path, way_out, largest)
    try:
        held = yaml.load(text, _Loader)  # noqa: S506 (a safe loader)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UsageError(f"cannot read {path} ({' '.join(str(e).split())}); {way_out}") from None
    if not isinstance(held, dict | types.NoneType):
        raise UsageError(f"{path} holds no NAME: VALUE lines; {way_out}")
    _check_size(held, path)
    return {str(key): value for key, value in (held or {}).items()}


def _check_size(held: Any, path: Path) -> None:
    waiting, count = [held], 0
    while waiting:
        one = waiting.pop()
        count += 1
        if count + len(waiting) > _VALUES:
            raise UsageError(f"{path} is too large; give a smaller file")
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one


def made(kind: Callable[..., T], fields: Any, where: str) -> T:
    """A dataclass, or what another callable gives, from the fields in a file, each as its annotation says: see `typed`.
    UsageError, naming `where`, for a field that is missing, unknown or of another type."""
    if not isinstance(fields, Mapping):
        raise UsageError(f"{where} must be fields and values (got {short(fields)})")
    wanted = typing.get_type_hints(kind)
    try:
        inspect.signature(kind).bind(**fields)
        return kind(**{name: typed(wanted.get(name, Any), one, f"{where}: {name}") for name, one in fields.items()})
    except (TypeError, ValueError) as e:
        raise UsageError(f"{where} is not declared well ({e})") from None


_PLAIN = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}


def typed(wanted: Any, value: Any, where: str) -> Any:
    """A value of a file, such as an annotation wants it: a list becomes a tuple, fields a dataclass. UsageError, naming
    `where`, for any other value."""
    kind, parts = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
    if is_dataclass(kind):
        return made(kind, value, where)  # type: ignore[arg-type]
    if kind in (typing.Union, types.UnionType):
        for one in parts:
            with suppress(UsageError):
                return typed(one, value, where)
    elif kind in (tuple, list, Sequence):
        if isinstance(value, list | tuple) and (len(parts) == len(value) or kind is not tuple or ... in parts):
            inner = parts if kind is tuple and ... not in parts else [*parts[:1], Any][:1] * len(value)
            return tuple(typed(part, one, f"{where}, {i}") for i, (part, one) in enumerate(zip(inner, value), 1))
    elif kind in (dict, Mapping):
        if isinstance(value, Mapping):
            return {key: typed(parts[1] if parts else Any, one, f"{where}: {key}") for key, one in value.items()}
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
    """A value for a message."""
    try:
        text = plain(repr(value))
    except ValueError:  # Python refuses to write integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= limit else f"{text[:limit]}..."
