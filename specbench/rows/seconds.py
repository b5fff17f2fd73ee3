"""Which timings of a row may be printed next to others, from its cells alone (text or values)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbench.rows.columns import OF_TIMING, OLDER_DRIFT_BOUND, SHIFT_BOUND, SPEEDUPS, TIMED_COLUMNS, stderr_of

Row = Mapping[str, Any]

#: Columns that identify what was timed on, and their names in print.
MACHINE = {
    "device_name": "device",
    "device": "device",
    "threads": "threads",
    "dtype": "dtype",
    "engine": "engine",
    "torch": "PyTorch",
    "driver": "driver",
}


def withheld(row: Row, column: str) -> str:
    """Why a row's value of a column is not printed; empty where it is.

    Of a row whose timing does not hold, no seconds are printed. A speed-up in seconds also needs that method and
    vanilla alternated, often enough for an error. Vanilla's own speed-up is 1 by definition.
    """
    if column not in TIMED_COLUMNS or column in OF_TIMING or row.get(column) in (None, ""):
        return ""
    is_speedup = column in SPEEDUPS or column in map(stderr_of, SPEEDUPS)
    if is_speedup and is_vanilla(row):
        return ""
    if why := unsteady(row):
        return f"Not printed: {why}."
    if not is_speedup:
        return ""
    if not row.get("timed_pairs"):
        return (
            "Not printed: the method and vanilla were timed in separate passes, between which the speed of the machine"
            " changes; the row has the value."
        )
    if str(row.get("timing_valid")).lower() == "true":
        return ""
    return f"Not printed: {row['timed_pairs']} timed pairs are too few for an error."


def unsteady(row: Row) -> str:
    """Why the timing of a row does not hold, although its pairs suffice; empty where it does."""
    if not row.get("timed_pairs") or str(row.get("timing_valid")).lower() == "true":
        return ""
    if is_older(row):
        if row.get("drift") in (None, "") or abs(float(row["drift"])) <= OLDER_DRIFT_BOUND:
            return ""
        return (
            f"vanilla's seconds drifted by {float(row['drift']):+.0%} from the first half to the second, beyond the"
            f" {OLDER_DRIFT_BOUND:.0%} with which a timing held when the row was measured"
        )
    if row.get("speedup_shift") in (None, "") or float(row["speedup_shift"]) <= SHIFT_BOUND:
        return ""
    return (
        f"over {row['timed_pairs']} pairs with vanilla, {row.get('further_pairs') or 0} of them measured again, the"
        f" speed-up was not steady (a change of one side moved it by up to {float(row['speedup_shift']):.0%})"
    )


def is_older(row: Row) -> bool:
    """Whether a row is from before the steadiness of the speed-up was measured."""
    return bool(row.get("timed_pairs")) and row.get("further_pairs") in (None, "")


OLDER = (
    f"decided by the drift of vanilla alone, so that the error has {SHIFT_BOUND:.0%} of the speed-up, by which a load"
    " on one side may have moved it"
)


def with_bias(row: Row) -> Row:
    """The row; of an older one, the standard errors of speed-ups with the bias that its criterion left, B = 5 %.

    Both are added in squares. An interval of 1.96 such errors then has the truth with at least 95 % for every bias up
    to B and every noise s: it reaches as far as B + 1.645 s, since 1.96^2 (B^2 + s^2) >= (B + 1.645 s)^2 for all s.
    """
    if not is_older(row) or is_vanilla(row):
        return row
    changed = {}
    for column in SPEEDUPS:
        if row.get(column) and row.get(error := stderr_of(column)):
            both = math.hypot(float(row[error]), SHIFT_BOUND * float(row[column]))
            changed[error] = str(both) if isinstance(row[error], str) else both
    return {**row, **changed}


def common_machine(rows: Iterable[Row], columns: Sequence[str]) -> tuple[str, ...] | None:
    """The machine of most of the rows that have a value in one of these columns; of equally many, that of the first.
    Rows of timed pairs decide where there are any. None where no row has a value."""
    timed = [row for row in rows if any(row.get(column) for column in columns)]
    found = Counter(machine(row) for row in [row for row in timed if row.get("timed_pairs")] or timed)
    return found.most_common(1)[0][0] if found else None


def machine(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(name) or "") for name in MACHINE)


def is_vanilla(row: Row) -> bool:
    return bool(row.get("run_id")) and row.get("baseline_run_id") == row.get("run_id")


def elsewhere(row: Row, column: str, common: tuple[str, ...]) -> str:
    """Why a row's value is not printed in a column with the seconds of another machine; empty where it is."""
    if column in SPEEDUPS and is_vanilla(row):
        return ""
    differing = {MACHINE[n]: (a, b) for n, a, b in zip(MACHINE, machine(row), common) if a != b}
    if not differing:
        return ""
    parts = [
        f"{name} {mine or 'unknown'} instead of {theirs or 'unknown'}" for name, (mine, theirs) in differing.items()
    ]
    return f"Not printed: timed otherwise than the rest of the column ({', '.join(parts)}); the row has the value."


def is_timed(column: str, of_benchmark: bool = False) -> bool:
    """Whether a column is in seconds; of a benchmark's rows, all are."""
    return of_benchmark or column in TIMED_COLUMNS
