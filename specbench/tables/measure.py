"""From a table's definition to its measured rows: which are there, and running those that are not.

A row belongs to a line when its configuration hash is that of the line's overrides and, where that is known without
loading a model, its weights are the ones that a run would load now. Rows lie in `results/<table>.csv`, whatever the
model; a row that no longer fits stays there as history and is not shown. A line that another table has, too, is
measured once: a row is looked for among the table's own first, then among all others in `results/`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from specbench.bench import rows as benchmarks
from specbench.config import configuration, registry
from specbench.errors import UsageError
from specbench.probe import rows as probes
from specbench.rows import provenance
from specbench.rows.csv_files import append_row, has_runs, read_rows
from specbench.rows.seconds import is_timed
from specbench.storage.files import sha256, state
from specbench.tables.definitions import Line, Table

Row = Mapping[str, str]

#: The command that rows are of, where it is not `specbench run` -> their files.
ROW_FILES = {"bench": benchmarks.ROWS, "probe": probes.ROWS}


@dataclass(frozen=True)
class Identity:
    """What a run would be: the hash of its configuration, and its weights (None = not known before loading them)."""

    config_hash: str
    weights: str | None
    timed: bool = False  # whether its seconds are needed

    def fits(self, row: Row) -> bool:
        """Whether `row` came from such a run."""
        same = row.get("config_hash") == self.config_hash and self.weights in (None, row.get("weights"))
        return same and not (self.timed and row.get("timing") == "false")


class Bench(Protocol):
    """What the tables ask of the harness."""

    def identify(self, overrides: Sequence[str]) -> Identity:
        """The identity of the run with these overrides, without loading a model. UsageError for bad overrides."""

    def run(self, overrides: Sequence[str], out: Path) -> Mapping[str, Any]:
        """Run, or go on with, that run in the folder `out`; returns its row."""

    def row_of(self, command: str, overrides: Sequence[str]) -> Mapping[str, Any]:
        """The row of `specbench bench` or `specbench probe`."""


class LocalBench:
    """The harness in this process."""

    def identify(self, overrides: Sequence[str]) -> Identity:
        from specbench.rows import timing

        cfg = configuration.compose(overrides)
        return Identity(provenance.config_hash(cfg), _weights(cfg), timing.is_timed(cfg))

    def run(self, overrides: Sequence[str], out: Path) -> Mapping[str, Any]:
        from specbench.harness.run import Run

        one = Run(configuration.compose(overrides), out)
        return one.requested_row(one.execute())

    def row_of(self, command: str, overrides: Sequence[str]) -> Mapping[str, Any]:
        cfg = configuration.compose(overrides)
        if command == "probe":
            return probes.row(cfg)
        from specbench.bench import measure

        return benchmarks.row(cfg, measure.measure(cfg, measure.BenchPlan(images=0)))


def _weights(cfg: Mapping[str, Any]) -> str | None:
    """The label that a row of this configuration would carry; None where the files are not there."""
    try:
        return registry.weights_label(cfg)
    except OSError:
        return None


@dataclass(frozen=True)
class Need:
    """One measured line: its run, and its row where there is one."""

    line: Line
    overrides: tuple[str, ...]
    identity: Identity
    row: Row | None
    rows_of: str = "run"

    @property
    def command(self) -> str:
        """The command line of the run."""
        more = ["bench.images=0"] if self.rows_of == "bench" else []
        return f"specbench {self.rows_of} {shlex.join([*self.overrides, *more])}"

    @property
    def folder(self) -> str:
        """The name of the run's folder; another configuration or other weights have another one."""
        key = f"{self.identity.config_hash} {self.identity.weights}"
        return f"{self.line.key}-{sha256(key, 8)}"


@dataclass(frozen=True)
class RunPlan:
    """The measured lines of one table for one model."""

    table: Table
    model: str
    needs: tuple[Need, ...]

    @property
    def missing(self) -> list[Need]:
        """The lines without a row."""
        return [need for need in self.needs if need.row is None]

    @property
    def rows(self) -> dict[str, Row | None]:
        """Line key -> row."""
        return {need.line.key: need.row for need in self.needs}

    @property
    def commands(self) -> dict[str, str]:
        """Line key -> the command of its run."""
        return {need.line.key: need.command for need in self.needs}


def store(table: Table, results: Path) -> Path:
    """The file with the rows of a table."""
    return (results if table.rows_of == "run" else results / table.rows_of) / f"{table.id}.csv"


def plan(table: Table, model: str, n: int | None, results: Path, bench: Bench) -> RunPlan:
    """What `table` needs for `model` with `n` prompts a run (None: its own number), and what of it is there. Loads no
    model, writes nothing.

    Raises:
        UsageError: there is no such model, or the rows cannot be read.
    """
    own = store(table, results)
    if table.rows_of != "run":
        rows: list[Row] = list(ROW_FILES[table.rows_of].read(own))
    else:
        others = [path for path in sorted(results.glob("*.csv")) if path != own and has_runs(path)]
        rows = [row for path in (*others, own) for row in _read(path)]
    shows_seconds = table.rows_of == "run" and any(is_timed(column.key) for column in table.columns)
    needs = []
    for line in table.lines:
        overrides = table.overrides(line, model, n)
        if overrides is None:
            continue
        identity = bench.identify(overrides)
        identity = replace(identity, timed=identity.timed and shows_seconds)
        row = next((r for r in reversed(rows) if identity.fits(r)), None)
        needs.append(Need(line, tuple(overrides), identity, row, table.rows_of))
    return RunPlan(table, model, tuple(needs))


def _read(path: Path) -> Sequence[Row]:
    if not path.exists():
        return ()
    return _rows(path, state(path))


@cache
def _rows(path: Path, state: tuple[int, ...]) -> tuple[Row, ...]:
    """The rows of a file in this state, as text: every table looks through all files."""
    rows = read_rows(path) if path.stat().st_size else []
    return tuple({k: "" if v is None else str(v) for k, v in row.items()} for row in rows)


def collect(todo: RunPlan, results: Path, runs: Path, bench: Bench, say: Callable[[str], None]) -> RunPlan:
    """Run what is missing, one run after the other, so that no run spoils another's latency; returns the filled plan.

    Each row is appended as soon as it is there, and each run goes on in its own folder under `runs`/tables: whatever
    stops this function, calling it again loses and repeats nothing.
    """
    needs = []
    for i, need in enumerate(todo.needs, 1):
        if need.row is None:
            say(f"{todo.table.id}: line {i} of {len(todo.needs)}, {need.line.label}: {need.command}")
            folder = runs / "tables" / todo.table.id / todo.model / need.folder
            of_run = need.rows_of == "run"
            row = bench.run(need.overrides, folder) if of_run else bench.row_of(need.rows_of, need.overrides)
            text = {k: "" if v is None else str(v) for k, v in row.items()}
            if not need.identity.fits(text):  # it would be run again by every later call
                raise UsageError(f"the row in {folder} is not that of {need.command}: remove the folder and try again")
            append = append_row if of_run else ROW_FILES[need.rows_of].append
            append(store(todo.table, results), row)
            need = replace(need, row=text)
        needs.append(need)
    return RunPlan(todo.table, todo.model, tuple(needs))
