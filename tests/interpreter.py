"""Triton's interpreter in less time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


def _skip_checks_without_effect() -> None:
    """Every sum and product of integers also checks for an overflow, in a dozen operations, and only a debug build
    asserts the result. Whether operands need a conversion, and the shape of the result, follows from the names of their
    types, which name the shapes, too: here once for each pair."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    check, tensor = semantic.binary_op_type_checking_impl, tl.core.tensor
    kept: dict[Any, bool] = {}

    def check_once(lhs: Any, rhs: Any, *arguments: Any, **options: Any) -> Any:
        if not (isinstance(lhs, tensor) and isinstance(rhs, tensor)):
            return check(lhs, rhs, *arguments, **options)
        key = lhs.type.name, rhs.type.name, *arguments, *options.items()
        if kept.get(key):
            return broadcast_once(lhs, rhs)
        both = check(lhs, rhs, *arguments, **options)
        kept[key] = all(new.dtype == old.dtype for new, old in zip(both, (lhs, rhs), strict=True))
        return both

    broadcast = semantic.broadcast_impl_value
    known: dict[tuple[str, str], list[Any]] = {}

    def broadcast_once(lhs: Any, rhs: Any) -> Any:
        key = lhs.type.name, rhs.type.name
        if key not in known:
            both = broadcast(lhs, rhs)
            known[key] = [None if new is old else new.type for new, old in zip(both, (lhs, rhs), strict=True)]
            return both
        return tuple(x if kind is None else as_type(x, kind) for x, kind in zip((lhs, rhs), known[key], strict=True))

    def as_type(x: Any, kind: Any) -> Any:
        data = np.broadcast_to(x.handle.data, [getattr(size, "value", size) for size in kind.shape])
        return tensor(interpreter.TensorHandle(data, x.handle.dtype.scalar), kind)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check_once, broadcast_once


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
    _skip_checks_without_effect()
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
