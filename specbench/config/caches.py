"""Caches of what the configurations hold. They are emptied where a folder of plug-ins joins."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)


class CachedFunction(Protocol[_P, _R]):
    """A function that remembers its results."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...

    def cache_clear(self) -> None: ...


_CACHES: list[CachedFunction[..., Any]] = []


def cached(function: Callable[_P, _R]) -> CachedFunction[_P, _R]:
    """`functools.cache`, which `clear` empties."""
    found: Any = cache(function)
    _CACHES.append(found)
    return found


def clear() -> None:
    """Empties every cache of `cached`."""
    for one in _CACHES:
        one.cache_clear()
