"""The columns of rows that metrics fill, as conf/metrics declares them: title, better side and decimals.

One metric declares a column, `columns: {fid: {title: Fréchet distance, better: lower, decimals: 2}}`; the other metrics
that fill it only name it, `columns: [fid]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.errors import UsageError


@dataclass(frozen=True)
class ShownColumn:
    """How tables and reports show a column: its title, its better side ("higher" or "lower"), its decimals, and up to
    which size a value is rounding: it is printed as 0, and such a difference is none in every test."""

    title: str
    better: str
    decimals: int
    resolution: float = 0.0


def shown(name: str, keys: Mapping[str, Any]) -> ShownColumn:
    """The column `name` that a metric's file declares. UsageError for a wrong declaration."""
    wanted = {"title": str, "better": str, "decimals": int}
    for key in {**wanted, **keys}:
        if key not in wanted or type(keys.get(key)) is not wanted[key]:
            raise UsageError(
                f"column {name} needs title: TEXT, better: higher or lower, and decimals: INTEGER (got {key}:"
                f" {keys.get(key)!r})"
            )
    found = ShownColumn(**keys)
    if found.better not in ("higher", "lower"):
        raise UsageError(f"better of {name} must be higher or lower (got {found.better!r})")
    return found
