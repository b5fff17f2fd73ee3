"""How a fused kernel is started: the one way in which this package starts any."""

from __future__ import annotations

from typing import Any


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start `kernel` in as many programs as `grid` names; options: of the compiler (num_warps, num_stages). Tests count
    and inspect the starts here."""
    kernel[grid](*arguments, **options)
