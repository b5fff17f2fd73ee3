"""The one function with which this package starts fused kernels."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton.language as tl
from triton.language.extra import cuda

#: Programmatic dependent launch; None in a Triton without it.
gdc_launch_dependents: Any = getattr(cuda, "gdc_launch_dependents", None)
gdc_wait: Any = getattr(cuda, "gdc_wait", None)

#: Whether Triton interprets the kernels, for a machine without a GPU.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

#: Options of the compiler for a program that reads distributions. With fewer registers it would spill.
DISTRIBUTIONS = {"num_warps": 16, "maxnreg": 128}


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, dependent: Any = None, **options: Any) -> None:
    """Start `kernel` in as many programs as `grid` says. options: constants, and options of the compiler (num_warps,
    num_stages). Tests count and inspect the starts here.

    dependent: whether the kernel may begin before the previous one has ended (programmatic dependent launch). Such a
    kernel has a constant PDL, and calls `gdc_wait` before it reads anything except weights. None: the kernel has no
    such constant.
    """
    if dependent is not None:
        options["PDL"] = dependent
        if dependent:
            options["launch_pdl"] = True
    kernel[grid](*arguments, **options)


def can_depend(device: torch.device) -> bool:
    """Whether kernels on `device` may begin before the previous one has ended."""
    if gdc_wait is None or device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
