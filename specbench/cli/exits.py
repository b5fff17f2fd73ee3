"""Exit codes (docs/long_runs.md describes them), and how a failure is reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.errors import plain

if TYPE_CHECKING:
    from specbench.harness.planned import PlannedRun

USAGE, FAILED, UNMEASURED, STOPPED = 2, 1, 3, 130


def unmeasured(runs: Sequence[PlannedRun]) -> int:
    """Prints a line for every metric that has no value in some of the runs that have a row, here or in their folders,
    and returns the exit code. Of a single run only what was asked for: its own report has the others."""
    from specbench.rows.csv_files import read_rows
    from specbench.rows.remarks import unmeasured

    def row(run: PlannedRun) -> Mapping[str, Any] | None:
        path = run.folder / "row.csv"
        return run.row or (next(iter(read_rows(path)), None) if path.is_file() else None)

    absent = [(run, unmeasured(run.config.metrics, held)) for run in runs if (held := row(run))]
    asked = any(run.asked and reasons for run, reasons in absent)
    names: dict[tuple[str, str], list[str]] = {}
    for run, reasons in absent if asked or len(runs) > 1 else ():
        for item in reasons.items():
            names.setdefault(item, []).append(run.name)
    lines = []
    for (metric, reason), some in names.items():
        shown = ", ".join(some[:3]) + (", ..." if some[3:] else "")
        where = f" in {len(some)} of {len(runs)} runs ({shown})" if len(runs) > 1 else ""
        lines.append(f"{metric} has no value{where}: {reason}")
    return missing(lines, asked)


def missing(lines: Sequence[str], asked: bool = True) -> int:
    """Prints what has no value, and returns the exit code; asked: whether some of it was asked for by name."""
    for text in lines:
        print(f"specbench: {plain(text)}", file=sys.stderr)
    return UNMEASURED if asked and lines else 0


def fail(what: object, code: int) -> int:
    if debug() and isinstance(what, BaseException):
        raise what
    print(f"specbench: {plain(what)}", file=sys.stderr)  # names and cells of untrusted files
    return code


def debug() -> bool:
    return os.environ.get("SPECBENCH_DEBUG", "") not in ("", "0")
