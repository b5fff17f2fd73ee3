"""Reads the files in conf/. The contents are cached; the caches are cleared when a folder of plug-ins is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from specbench.storage.reading import read_yaml

_F = TypeVar("_F", bound=Callable[..., Any])
_CACHES: list[Any] = []


def cached(function: _F) -> _F:
    """`functools.cache` that `clear` can empty."""
    _CACHES.append(wrapped := cache(function))
    return wrapped  # type: ignore[return-value]


def clear() -> None:
    """Empties every cache of `cached`."""
    for function in _CACHES:
        function.cache_clear()


@cached
def read(path: Path) -> Mapping[str, Any]:
    """The content of a file, which callers must not change; {} if the file does not exist. UsageError if it is bad."""
    return read_yaml(path) if path.is_file() else {}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The values of both mappings. The second one has priority, except that nested mappings are merged."""
    result = dict(first)
    for key, value in second.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
