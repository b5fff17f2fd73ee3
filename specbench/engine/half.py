"""Products in bfloat16 on processors that have no units for them.

There torch computes such a product at least ten times as slowly as one in float32 (the embedded tokenizer on an AMD
EPYC with AVX2). A product in bfloat16 has rounded factors, is added up in float32, and is rounded. So the same product
is computed in float32 on rounded factors: it differs by the order of its sums alone. Attention, whose weights stay in
float32 here, differs by their rounding, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

#: What autocast computes in bfloat16, of what the networks here use.
_PRODUCTS = {
    torch.conv2d,
    torch.conv_transpose2d,
    F.linear,
    F.scaled_dot_product_attention,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.mm,
    Tensor.bmm,
}


@contextmanager
def bfloat16_products(device: torch.device, enabled: bool = True) -> Iterator[None]:
    """Matrix products and convolutions in bfloat16, as torch.autocast has them, with their gradients."""
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled), units(device) if enabled else nullcontext():
        yield


def units(device: torch.device) -> AbstractContextManager[Any]:
    """Products of bfloat16 tensors are computed as above where the device has no units for them."""
    return _Rounded() if device.type == "cpu" and not has_units() else nullcontext()


@cache
def has_units() -> bool:
    """Whether this processor multiplies bfloat16 itself, as far as torch knows."""
    capabilities: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    known = capabilities()
    return any(known.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))


class _Rounded(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or not (torch.is_autocast_enabled("cpu") or _has_bfloat16(args, kwargs)):
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(_rounded, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs).bfloat16()


def _has_bfloat16(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in (*args, *kwargs.values()))


def _rounded(x: Any) -> Any:
    return x.bfloat16().float() if isinstance(x, Tensor) and x.is_floating_point() else x
