"""Caches of what the configurations hold. They are emptied where a folder of plug-ins joins."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

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
