"""Triton's interpreter in less time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any


def patch_language_once() -> None:
    """While a kernel runs, the interpreter's functions replace the functions of triton.language. Triton puts them there
    when the kernel starts, and again whenever it calls another function, which changes nothing and takes a third of the
    time. With this, the calls leave the language as it is. A Triton that never takes the functions back, and has no
    scope of them, stays as it is."""
    import triton.language as tl
    from triton.runtime import interpreter

    scope_of: Any = getattr(interpreter, "_LangPatchScope", None)
    if scope_of is None:
        return
    patch: Callable[[Any], Any] = interpreter._patch_lang
    patched: set[str] = set()

    @lru_cache(None)
    def languages(function: Any) -> frozenset[str]:
        """The names of the modules that a patch for this function changes."""
        return frozenset(value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core)

    @wraps(patch)
    def patch_what_is_not_patched(function: Any) -> Any:
        new = languages(function) - patched
        if not new:
            return scope_of()
        scope = patch(function)
        patched.update(new)
        take_back = scope.restore

        def restore() -> None:
            take_back()
            patched.difference_update(new)

        scope.restore = restore
        return scope

    interpreter._patch_lang = patch_what_is_not_patched
