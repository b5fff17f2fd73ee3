"""From a table's definition to its measured rows: which there are.

A row belongs to a line when its configuration hash is that of the line's overrides and, where that is known without
loading a model, its weights are the ones that a run would load now. Rows lie in `results/<table>.csv`, whatever the
model; a row that no longer fits stays there as history and is not shown. A line that another table has, too, is
measured once: a row is looked for among the table's own first, then among all others in `results/`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from specbench.bench import rows as benchmarks
from specbench.config import configuration, registry
from specbench.probe import rows as probes
from specbench.rows import provenance
from specbench.rows.csv_files import has_runs, read_rows
from specbench.rows.seconds import is_timed
from specbench.storage.files import sha256, state
from specbench.tables.definitions import Line, Matched, Panel, Table, TableFigure, TableTest

Row = Mapping[str, str]

#: The command that rows are of, where it is not `specbench run` -> their files.
ROW_FILES = {"bench": benchmarks.ROWS, "probe": probes.ROWS}


@dataclass(frozen=True)
class Identity:
    """What a run would be: the hash of its configuration, and its weights (None = not known before loading them)."""

    config_hash: str
    weights: str | None
    timed: bool = False  # whether its seconds are needed
    emits: bool = False  # whether what it emits is measured, and needed
    needs: tuple[str, ...] = ()  # columns that it fills, which rows of older versions may lack

    def fits(self, row: Row) -> bool:
        """Whether `row` came from such a run."""
        same = row.get("config_hash") == self.config_hash and self.weights in (None, row.get("weights"))
        untimed = self.timed and row.get("timing") == "false"
        unmeasured = self.emits and not row.get("emitted_kl") and "emitted_kl" not in (row.get("note") or "")
        return same and not untimed and not unmeasured and all(row.get(name) for name in self.needs)


class Bench(Protocol):
    """What the tables ask of the harness."""

    def identify(self, overrides: Sequence[str]) -> Identity:
        """The identity of the run with these overrides, without loading a model. UsageError for bad overrides."""

    def run(self, overrides: Sequence[str], out: Path) -> Mapping[str, Any]:
        """Run, or go on with, that run in the folder `out`; returns its row."""

    def row_of(self, command: str, overrides: Sequence[str]) -> Mapping[str, Any]:
        """The row of `specbench bench` or `specbench probe`."""

    def compare(self, a: Path, b: Path) -> Sequence[Mapping[str, Any]]:
        """The rows of `specbench compare` for two folders of runs."""

    def equal(self, curves: Mapping[str, Sequence[Path]], x: str, value: float, y: str) -> Sequence[Mapping[str, Any]]:
        """The rows of every pair of curves of folders of runs where x has this value: `compare.equal`."""


class SuiteBench(Bench, Protocol):
    """What suites ask of it besides."""

    def key(self, overrides: Sequence[str]) -> str:
        """Identifies what the run with these overrides decodes, whatever n, metrics and baseline are."""

    def versus(self, run: Path, vanilla: Path, n: int) -> Mapping[str, Any]:
        """The columns of a run's row against the run of vanilla AR on the same n prompts."""

    def keep(self, rows: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
        """Adds the completed rows of folders to the store of results."""


class LocalBench:
    """The harness in this process."""

    def identify(self, overrides: Sequence[str]) -> Identity:
        from specbench.rows import timing

        cfg = configuration.compose(overrides)
        emits = bool(cfg.get("emitted_draws"))
        return Identity(provenance.config_hash(cfg), _weights(cfg), timing.is_timed(cfg), emits)

    def run(self, overrides: Sequence[str], out: Path) -> Mapping[str, Any]:
        from specbench.harness.run import run

        return run(configuration.compose(overrides), out).row

    def row_of(self, command: str, overrides: Sequence[str]) -> Mapping[str, Any]:
        cfg = configuration.compose(overrides)
        if command == "probe":
            return probes.row(cfg)
        from specbench.bench import measure

        return benchmarks.row(cfg, measure.measure(cfg, measure.BenchPlan(images=0)))

    def compare(self, a: Path, b: Path) -> Sequence[Mapping[str, Any]]:
        from specbench.compare import comparison, passes, wording

        return wording.rows(comparison.compare(passes.read(str(a)), passes.read(str(b))))

    def equal(self, curves: Mapping[str, Sequence[Path]], x: str, value: float, y: str) -> Sequence[Mapping[str, Any]]:
        from specbench.compare import equal, passes

        some = {label: [passes.read(str(path)) for path in paths] for label, paths in curves.items()}
        return list(equal.rows(some, x, value, y))

    def key(self, overrides: Sequence[str]) -> str:
        cfg = configuration.compose(overrides)
        images = cfg.changed(n=1, metrics=[], reference=None, baseline=False)
        return sha256(f"{provenance.config_hash(images)} {_weights(cfg)}", 8)

    def versus(self, run: Path, vanilla: Path, n: int) -> Mapping[str, Any]:
        from specbench.harness.row import against

        return against(run, vanilla, n)

    def keep(self, rows: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
        from specbench.harness.run import keep

        keep(rows)


def _weights(cfg: Mapping[str, Any]) -> str | None:
    """The label that a row of this configuration would carry; None where the files are not there."""
    try:
        return registry.weights_label(cfg)
    except OSError:
        return None


@dataclass(frozen=True)
class Need:
    """One measured line: its run, and its row where there is one; alone: whether its seconds are measured."""

    line: Line
    overrides: tuple[str, ...]
    identity: Identity
    row: Row | None
    rows_of: str = "run"
    alone: bool = False

    @property
    def command(self) -> str:
        """The command line of the run."""
        more = ["bench.images=0"] if self.rows_of == "bench" else []
        return f"specbench {self.rows_of} {shlex.join([*self.overrides, *more])}"

    @property
    def key(self) -> str:
        """Identifies its configuration and weights: two lines of one key are one run."""
        return sha256(f"{self.identity.config_hash} {self.identity.weights}", 8)

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return f"{self.line.key}-{self.key}"


@dataclass(frozen=True)
class EqualPanel:
    """A panel whose curves are tested at equal values; runs: identifies all its runs."""

    panel: Panel
    matched: Matched
    runs: str


@dataclass(frozen=True)
class RunPlan:
    """The measured lines of one table for one model; compared: the rows of `specbench compare` for its tests."""

    table: Table
    model: str
    needs: tuple[Need, ...]
    compared: tuple[Row, ...] = ()
    pairs: tuple[Row, ...] = ()  # of curves, as of `compare.equal`

    @property
    def missing(self) -> list[Need]:
        """The lines without a row."""
        return [need for need in self.needs if need.row is None]

    @property
    def rows(self) -> dict[str, Row | None]:
        """Line key -> row."""
        return {need.line.key: need.row for need in self.needs}

    @property
    def untested(self) -> list[TableTest]:
        """The tests of which both lines have a run, and the comparison of these two runs is not there."""
        rows = self.rows
        runs = [test for test in self.table.tests if {test.line, test.other} <= rows.keys()]
        return [test for test in runs if compared(test, rows, self.compared) is None]

    @property
    def tested_panels(self) -> list[Panel]:
        """The panels whose curves are tested at equal values."""
        table = self.table
        if table.matched is None or not table.matched.tested or not isinstance(table.figure, TableFigure):
            return []
        return [panel for panel in table.figure.panels if panel.label in table.matched.at]

    @property
    def equal(self) -> list[EqualPanel]:
        """What is to be tested at equal values: the panels whose runs are all there."""
        rows, found = self.rows, []
        for panel in self.tested_panels:
            assert self.table.matched is not None
            runs = [(rows.get(key) or {}).get("run_id") for curve in panel.curves for key in curve.lines]
            if all(runs):
                found.append(EqualPanel(panel, self.table.matched, sha256(" ".join(map(str, runs)), 12)))
        return found

    @property
    def unequalled(self) -> list[EqualPanel]:
        """Those of `equal` whose very runs no row has compared."""
        known = {row["runs"] for row in self.pairs}
        return [panel for panel in self.equal if panel.runs not in known]

    @property
    def commands(self) -> dict[str, str]:
        """Line key -> the command of its run."""
        return {need.line.key: need.command for need in self.needs}


def compared(test: TableTest, rows: Mapping[str, Row | None], comparisons: Sequence[Row]) -> Row | None:
    """The comparison of the very runs behind the rows of a test's two lines; None where there is none."""
    runs = [(rows.get(key) or {}).get("run_id") for key in (test.other, test.line)]
    same = (r for r in reversed(comparisons) if (r["statistic"], r["run_a"], r["run_b"]) == (test.statistic, *runs))
    return next(same, None)


def comparisons(table: Table, results: Path) -> Path:
    """The file with the rows of `specbench compare` for the tests of a table."""
    return results / f"{table.id}_test.csv"


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
    shown = [column.key for column in table.columns] if table.rows_of == "run" else []
    shows_seconds, shows_emitted = any(map(is_timed, shown)), any(key.startswith("emitted_") for key in shown)
    needs = []
    with configuration.session():  # one for all lines
        for line in table.lines:
            overrides = table.overrides(line, model, n)
            if overrides is None:
                continue
            found = bench.identify(overrides)
            timed, emits = found.timed and shows_seconds, found.emits and shows_emitted
            identity = replace(found, timed=timed, emits=emits, needs=table.needs)
            row = next((r for r in reversed(rows) if identity.fits(r)), None)
            alone = table.rows_of == "bench" or (table.rows_of == "run" and found.timed)
            needs.append(Need(line, tuple(overrides), identity, row, table.rows_of, alone))
    return RunPlan(table, model, tuple(needs), compared_rows(table, results), equal_rows(table, results))


def compared_rows(table: Table, results: Path) -> tuple[Row, ...]:
    """The rows of `specbench compare` that there are for the tests of a table."""
    if not table.tests:
        return ()
    from specbench.compare import wording

    return tuple(wording.ROWS.read(comparisons(table, results)))


def equal_file(table: Table, results: Path) -> Path:
    """The file with the tests of a table's curves at equal values."""
    return results / f"{table.id}_pairs.csv"


def equal_rows(table: Table, results: Path) -> tuple[Row, ...]:
    """The tests of a table's curves at equal values that there are."""
    if table.matched is None or not table.matched.tested:
        return ()
    from specbench.compare import equal

    return tuple(equal.ROWS.read(equal_file(table, results)))


def _read(path: Path) -> Sequence[Row]:
    if not path.exists():
        return ()
    return _rows(path, state(path))


@cache
def _rows(path: Path, state: tuple[int, ...]) -> tuple[Row, ...]:
    """The rows of a file in this state, as text: every table looks through all files."""
    rows = read_rows(path) if path.stat().st_size else []
    return tuple({k: "" if v is None else str(v) for k, v in row.items()} for row in rows)
