"""Which timings of a row may be printed next to others, from its cells alone (text or values)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbench.rows.columns import DRIFT_BOUND, SPEEDUPS, TIMED_COLUMNS

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

    A speed-up in seconds is printed if method and vanilla alternated and the machine's drift is small. Vanilla's own
    speed-up is 1 by definition.
    """
    if column not in SPEEDUPS or not row.get(column) or is_vanilla(row):
        return ""
    if not row.get("timed_pairs"):
        return (
            "Not printed: the method and vanilla were timed in separate passes, between which the speed of the machine"
            " changes; the row has the value."
        )
    if str(row.get("timing_valid")).lower() == "true":
        return ""
    if row.get("drift") in (None, "") or abs(float(row["drift"])) <= DRIFT_BOUND:
        return f"Not printed: {row['timed_pairs']} timed pairs are too few for an error and a drift."
    return (
        f"Not printed: vanilla's seconds drifted by {float(row['drift']):+.0%} from the first half to the second,"
        f" beyond {DRIFT_BOUND:.0%}."
    )


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
