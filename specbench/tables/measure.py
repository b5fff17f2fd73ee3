"""From a table's definition to its planned runs, with the rows that exist.

A row belongs to a line if its configuration hash is the hash of the line's overrides and, as far as it is known without
loading a model, its weights are the ones that a run would load now. Rows are in `results/<table>.csv` for all models; a
row that no longer fits stays there as history and is not shown. A line that two tables share is measured once: its row
is searched first in the table's own file, then in all other files in `results/`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from specbench.bench.rows import PROBES, ROWS
from specbench.config import configuration, registry
from specbench.config.run_config import RunConfig as RunConfig  # of a field, for the documentation
from specbench.errors import UsageError
from specbench.harness.planned import EMITTED, SECONDS, Plan, PlannedRun, Row, digest
from specbench.harness.planned import R as R  # of a field, for the documentation
from specbench.rows.columns import TIMED_COLUMNS
from specbench.rows.csv_files import as_cells, has_runs, read_rows
from specbench.rows.selection import pooled
from specbench.storage.files import sha256, state
from specbench.tables import literature
from specbench.tables.definitions import Curve, Line, Panel, Table, TableTest

#: The command that makes the rows, unless it is `specbench run` -> their files.
ROW_FILES = {"bench": ROWS, "probe": PROBES}


@dataclass(frozen=True)
class Cell:
    """A model, a set of prompts (both by their labels) and a seed of a suite. A table names none of them."""

    model: str = ""
    prompts: str = ""
    seed: int | None = None  # None: the line's own

    @property
    def group(self) -> tuple[str, str]:
        """The part that stays when seeds are pooled."""
        return self.model, self.prompts

    def __str__(self) -> str:
        return ", ".join(filter(None, [*self.group, "" if self.seed is None else f"seed {self.seed}"]))


@dataclass(frozen=True)
class TableRun(PlannedRun):
    """The run of a line. decodes: identifies its images; reference: the folder of the suite's vanilla AR with which it
    is compared, None for vanilla itself."""

    cell: Cell = Cell()
    decodes: str = ""
    reference: Path | None = None

    @property
    def name(self) -> str:
        if not self.cell.model:
            return self.label
        return f"{self.label} on {self.cell}" + (", timed" if self.timed else "")

    @classmethod
    def for_line(cls, home: Path, line: Line, overrides: Sequence[str], free: Mapping[str, Any], **more: Any) -> Self:
        """The run of a line in its folder in `home`. The folder's name does not depend on the parameters in `free`;
        their values here are placeholders. Loads no model."""
        config = configuration.compose(overrides)
        weights = registry.weights_here(config)
        decodes = digest(config.changed(**free), weights)
        return cls(
            home / f"{line.key}-{decodes}",
            config,
            line.key,
            line.label,
            tuple(overrides),
            weights=weights,
            asked=configuration.names_metrics(overrides),
            decodes=decodes,
            **more,
        )


@dataclass(frozen=True)
class TablePlan(Plan[TableRun]):
    """The runs of one table for one model: one per line, or one per line and seed. compared: the rows of `specbench
    compare` for its tests; pairs: the rows of `compare.equal` for pairs of its curves."""

    table: Table
    model: str
    compared: tuple[Row, ...] = ()
    pairs: tuple[Row, ...] = ()

    @property
    def rows(self) -> dict[str, Row | None]:
        """Line key -> row; for several seeds, a row that pools the existing ones."""
        rows: dict[str, list[Row]] = {run.key: [] for run in self.runs}
        for run in self.runs:
            rows[run.key] += [] if run.row is None else [run.row]
        return {key: as_cells(pooled(group)) if group else None for key, group in rows.items()}

    @property
    def untested(self) -> list[TableTest]:
        """The tests whose two lines have a run, but whose runs are not compared yet."""
        rows = self.rows
        runs = [test for test in self.table.tests if {test.line, test.other} <= rows.keys()]
        return [test for test in runs if compared_row(test, rows, self.compared) is None]

    @property
    def equal(self) -> dict[str, Panel]:
        """The panels whose curves can be compared, because all their rows exist, by an identifier of their runs."""
        rows, panels = self.rows, {}
        for panel in self.table.compared_panels:
            runs = [(rows.get(key) or {}).get("run_id") for key in panel.keys]
            if all(runs):
                panels[sha256(" ".join(map(str, runs)), 12)] = panel
        return panels

    @property
    def unequalled(self) -> dict[str, Panel]:
        """The panels of `equal` with pairs of curves that are not compared yet."""
        return {runs: panel for runs, panel in self.equal.items() if any(self.uncompared(panel, runs).values())}

    def uncompared(self, panel: Panel, runs: str) -> dict[tuple[str, str], list[tuple[str, str]]]:
        """(x, y) -> the pairs of a panel's curves that are not compared yet. Curves without the column have none."""
        known = {(row["x"], row["y"], row["a"], row["b"]) for row in self.pairs if row["runs"] == runs}
        return {
            (x, y): [
                pair
                for pair in itertools.combinations([curve.label for curve in self.with_column(panel, y)], 2)
                if (x, y, *pair) not in known
            ]
            for other, x, y in self.table.comparisons
            if other == panel
        }

    def with_column(self, panel: Panel, y: str) -> list[Curve]:
        """The curves of a panel whose rows all have a column."""
        rows = self.rows
        return [curve for curve in panel.curves if all((rows[key] or {}).get(y) for key in curve.lines)]

    def state(self, asked: bool) -> str:
        """One line on the rows that exist; asked: whether the user named the model."""
        need, have = len(self.runs), len(self.runs) - len(self.missing)
        whole = have == need and not self.untested and not self.unequalled
        state = "complete" if whole else "partial" if have else "no rows"
        if not need:  # no line has a run on this model
            others = "other models" if asked else "needs --model"
            state = "published only" if self.table.id in literature.available() else others
        return f"{self.table.id:20} {state:14} {f'{have}/{need}':>5} rows  {self.table.title}"

    def with_tests(self, results: Path) -> Self:
        """This plan with the existing tests."""
        compared: Sequence[Row] = ()
        pairs: Sequence[Row] = ()
        if self.table.tests:
            from specbench.compare import wording

            stored = wording.ROWS.read(store(self.table, results, "_test"))
            shown = [compared_row(test, self.rows, stored) for test in self.table.tests]
            family = [i for i, row in enumerate(stored) if any(row is other for other in shown)]
            compared = wording.readjusted(stored, family)
        if self.table.matched is not None:
            from specbench.compare import equal

            pairs = equal.ROWS.read(store(self.table, results, "_pairs"))
        return replace(self, compared=tuple(compared), pairs=tuple(pairs))


def compared_row(test: TableTest, rows: Mapping[str, Row | None], comparisons: Sequence[Row]) -> Row | None:
    """The comparison of exactly the runs whose rows a test's two lines show; None if it does not exist."""
    runs = [(rows.get(key) or {}).get("run_id") for key in (test.other, test.line)]
    same = (r for r in reversed(comparisons) if (r["statistic"], r["run_a"], r["run_b"]) == (test.statistic, *runs))
    return next(same, None)


def store(table: Table, results: Path, kind: str = "") -> Path:
    """The file with the rows of a table; kind: "_test" for the rows of `specbench compare` for its tests, "_pairs" for
    the pairs of its curves at equal values."""
    return (results if table.rows_of == "run" else results / table.rows_of) / f"{table.id}{kind}.csv"


def plan(
    table: Table,
    model: str,
    n: int | None,
    results: Path,
    runs: Path = Path("runs"),
    seeds: Sequence[int] = (),
) -> TablePlan:
    """The runs that `table` needs for `model` with `n` prompts and each of the seeds (None, none: the defaults), and
    their rows that exist in `results`. Their folders are in `runs`. With several seeds, values are means over them, and
    no lines are tested. Loads no model, writes nothing.

    Raises UsageError for an unknown model, and for rows that cannot be read.
    """
    if seeds and table.matched is not None:
        raise UsageError(f"{table.id} compares curves prompt by prompt, with one seed each: leave --seeds out")
    table = over_seeds(table, len(seeds))
    rows = _rows(table, results)
    shown = [column.key for column in table.columns] if table.rows_of == "run" else []
    needs = [SECONDS] if not TIMED_COLUMNS.isdisjoint(shown) else []
    needs += [EMITTED] if any(key.startswith("emitted_") for key in shown) else []
    home = runs / "tables" / ((table.matched and table.matched.lines_of) or table.id) / model
    planned = []
    with configuration.session():  # one for all lines
        for line, seed in itertools.product(table.lines, seeds or (None,)):
            overrides = table.overrides(line, model, n, seed)
            if overrides is not None:
                run = TableRun.for_line(home, line, overrides, {}, rows_of=table.rows_of, needs=tuple(needs))
                planned.append(run.with_newest(rows.get(run.config_hash, ())))
    return TablePlan(table.id, home, tuple(planned), table, model).with_tests(results)


def over_seeds(table: Table, seeds: int) -> Table:
    """The table of means over this number of seeds; its columns and a remark say so. Each line's note has the number of
    its finished runs."""
    if seeds < 2:
        return table
    columns = (
        c if c.std_over is None else replace(c, std_over="seeds", published_spread=c.printed_spread)
        for c in table.columns
    )
    remark = (
        f"Each value is the mean over {seeds} seeds, ± the standard deviation between them. A line that is not complete"
        " has fewer: its note gives their number, and one seed has no ±."
    )
    return replace(table, columns=tuple(columns), tests=(), remarks=(remark, *table.remarks))


def _rows(table: Table, results: Path) -> Mapping[str, list[Row]]:
    """Candidates for the rows of its lines, by the hash of their configurations; the table's own rows are the last."""
    own_file = store(table, results)
    if table.rows_of != "run":
        files: list[Sequence[Row]] = [ROW_FILES[table.rows_of].read(own_file)]
    else:
        others = [path for path in sorted(results.glob("*.csv")) if path != own_file]
        files = [_read(path, state(path), path == own_file) for path in (*others, own_file) if path.exists()]
    by_hash: dict[str, list[Row]] = defaultdict(list)
    for row in (row for rows in files for row in rows):
        by_hash[row["config_hash"]].append(row)
    return by_hash


def rows_in(results: Path) -> list[Row]:
    """The rows of runs in all files of a folder, as text."""
    return [row for path in sorted(results.glob("*.csv")) for row in _read(path, state(path), False)]


@cache
def _read(path: Path, state: tuple[int, ...], must: bool) -> tuple[Row, ...]:
    """The rows of a file in this state, as text. Cached, because every table reads all files. () for a file with other
    content, unless it `must` contain rows of runs."""
    if not path.stat().st_size or not (must or has_runs(path)):
        return ()
    return tuple(map(as_cells, read_rows(path)))
