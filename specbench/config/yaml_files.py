"""What the files under conf/ hold, and the caches of it, which are emptied where a folder of plug-ins joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from specbench.storage.reading import read_yaml

_F = TypeVar("_F", bound=Callable[..., Any])
_CACHES: list[Any] = []


def cached(function: _F) -> _F:
    """`functools.cache`, which `clear` empties."""
    _CACHES.append(found := cache(function))
    return found  # type: ignore[return-value]


def clear() -> None:
    """Empties every cache of `cached`."""
    for one in _CACHES:
        one.cache_clear()


@cached
def read(path: Path) -> Mapping[str, Any]:
    """The content of a file, which callers do not change; empty where there is no such file. UsageError."""
    return read_yaml(path) if path.is_file() else {}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The values of both; of a key that both have, that of the second, but mappings are merged."""
    found = dict(first)
    for key, value in second.items():
        mine = found.get(key)
        found[key] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return found
