"""Metrics of a run that have no value in its row, and why.

A run whose metric could not be computed is complete: its images and its row exist. It ends with exit code 3 if the
metric was asked for, on the command line or by an experiment, a protocol, a suite or a table, and with 0 if it is a
default of the model or the data set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.rows.csv_files import read_rows


class Run(Protocol):
    """A run, as `harness.planned.PlannedRun` describes it."""

    @property
    def folder(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def config(self) -> RunConfig: ...
    @property
    def asked(self) -> bool: ...
    @property
    def row(self) -> Mapping[str, Any] | None: ...


def pieces(note: str) -> list[tuple[str, str]]:
    """The remarks of a row's note, each with the column that it is about, or with its own first words."""
    return [(piece, piece.partition(": ")[0]) for piece in re.split(r"; (?=[a-z_]+: )", note)]


def unmeasured(metrics: Iterable[str], row: Mapping[str, Any]) -> dict[str, str]:
    """Metric -> why the row has no value in its first column, in the words of the note."""
    reasons = {column: piece.partition(": ")[2] for piece, column in pieces(row.get("note") or "")}
    columns = {name: parameters.metric_columns(name)[0] for name in metrics}
    return {
        name: reasons.get(column) or "the row does not say why"
        for name, column in columns.items()
        if row.get(column) in (None, "")
    }


def report(runs: Sequence[Run]) -> tuple[list[str], bool]:
    """A line for every metric that has no value in some of the runs that have a row, here or in their folders, and
    whether one of these was asked for. Of a single run only such lines: its own report has the others."""
    rows = [(run, run.row or _row(run.folder / "row.csv")) for run in runs]
    missing = [(run, unmeasured(run.config.metrics, row)) for run, row in rows if row]
    asked = any(run.asked and found for run, found in missing)
    names: dict[tuple[str, str], list[str]] = {}
    for run, found in missing if asked or len(runs) > 1 else ():
        for item in found.items():
            names.setdefault(item, []).append(run.name)
    lines = []
    for (metric, reason), some in names.items():
        shown = ", ".join(some[:3]) + (", ..." if some[3:] else "")
        where = f" in {len(some)} of {len(runs)} runs ({shown})" if len(runs) > 1 else ""
        lines.append(f"{metric} has no value{where}: {reason}")
    return lines, asked


def _row(path: Path) -> Mapping[str, Any] | None:
    return next(iter(read_rows(path)), None) if path.is_file() else None
