"""Triton's interpreter in less time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any


def _remember_types() -> None:
    """The interpreter makes a type and a tensor for every operation, and computes their names, sizes and formats anew:
    here once for each shape."""
    import triton.language as tl
    from triton.runtime import interpreter

    block, tensor, formats = tl.core.block_type, tl.core.tensor, {}
    made: dict[Any, dict[str, Any]] = {}
    make_block, make_tensor, format_of = block.__init__, tensor.__init__, interpreter._get_np_dtype

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        if key not in made:
            make_block(self, element_ty, shape)
            made[key] = vars(self).copy()
        vars(self).update(made[key], element_ty=element_ty)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        if type.name not in made:
            make_tensor(self, handle, type)
            made[type.name] = vars(self) | {"handle": None}
        vars(self).update(made[type.name], handle=handle, type=type, dtype=type.scalar)

    def format_once(type_: Any) -> Any:
        name = type_.scalar.name
        if name not in formats:
            formats[name] = format_of(type_)
        return formats[name]

    block.__init__, tensor.__init__, interpreter._get_np_dtype = block_init, tensor_init, format_once


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
    _remember_types()
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
