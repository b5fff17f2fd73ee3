"""Rows of one configuration and several seeds as one: means, and the standard deviation between seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbench.config import parameters
from specbench.errors import decimal
from specbench.rows.columns import _NUMBERS, COLUMNS, METRICS
from specbench.rows.seconds import MACHINE

Row = Mapping[str, Any]

#: Columns in which rows that are pooled agree: every parameter but the seed, what was measured by what, and where.
_SAME = (
    *(name for name in parameters.table() if name in COLUMNS and name not in ("seed", "protocol", "variant")),
    *(f"{name}_backend" for name in METRICS),
    *MACHINE,
    "commit",
    "specbench",
    "timing",
)
#: Columns of one row alone, which a pooled one names all.
_OWN = ("run_id", "time", "config_hash", "seed", "prompts_hash", "note")


def spread_of(column: str) -> str:
    """The column with the standard deviation between seeds."""
    return f"{column.removesuffix('_mean')}_std"


def key(row: Row) -> tuple[str, ...]:
    """What rows have in common that differ in their seed alone."""
    return tuple(_plain(row.get(name)) for name in _SAME)


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that are of one configuration but for the seed, on one machine, by one commit; in the order of the first of
    each. Of several rows of one seed the newest counts."""
    found: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for row in rows:
        seeds = found.setdefault(key(row), {})
        seed = _plain(row.get("seed"))
        if seed not in seeds or str(row.get("time") or "") >= str(seeds[seed].get("time") or ""):
            seeds[seed] = row
    return [list(seeds.values()) for seeds in found.values()]


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def pooled(rows: Sequence[Row]) -> dict[str, Any]:
    """One row for several: of a number the mean over the rows, next to the standard deviation between them in the
    column `spread_of`; of a text all that there are, of notes the remarks that all have. A number that some rows lack
    is missing.

    Standard errors of single rows are left out: they are within a seed, the spread is between seeds.
    """
    if len(rows) == 1:
        return dict(rows[0])
    found: dict[str, Any] = {}
    spreads: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name) for row in rows]
        if name == "note":
            found[name] = _common_note([_plain(cell) for cell in cells])
        elif len({_plain(cell) for cell in cells}) == 1 and (name in parameters.table() or name in MACHINE):
            found[name] = cells[0]
        elif name not in _NUMBERS or name in (*_OWN, *MACHINE) or name in parameters.table():
            texts = dict.fromkeys(_plain(cell) for cell in cells if cell not in (None, ""))
            found[name] = " / ".join(texts) or None
        elif name.endswith(("_stderr", "_std")):
            found[name] = None
        else:
            numbers = [_number(cell) for cell in cells]
            known = [number for number in numbers if number is not None]
            complete = len(known) == len(rows)
            found[name] = statistics.fmean(known) if complete else None
            if complete:
                spreads[spread_of(name)] = statistics.stdev(known)
    if len({_plain(row.get("timing_valid")) for row in rows}) > 1:
        found["timing_valid"] = "false"
    return found | spreads


def _common_note(notes: Sequence[str]) -> str | None:
    """The remarks that all rows have."""
    pieces = [note.split("; ") for note in notes]
    return "; ".join(piece for piece in pieces[0] if all(piece in other for other in pieces)) or None


def _number(cell: Any) -> float | None:
    try:
        return None if cell in (None, "") else decimal(str(cell))
    except ValueError:
        return None
