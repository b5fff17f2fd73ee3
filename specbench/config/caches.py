"""Caches of what the configurations hold. They are emptied where a folder of plug-ins joins."""

from __future__ import annotations

from collections.abc import Callable
from functools import _lru_cache_wrapper, cache
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_CACHES: list[_lru_cache_wrapper[Any]] = []


def cached(function: Callable[_P, _R]) -> _lru_cache_wrapper[_R]:
    """`functools.cache`, which `clear` empties."""
    found = cache(function)
    _CACHES.append(found)
    return found


def clear() -> None:
    """Empties every cache of `cached`."""
    for one in _CACHES:
        one.cache_clear()
