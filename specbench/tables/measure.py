"""From a table's definition to its planned runs, with the rows that exist.

A row belongs to a line when its configuration hash is that of the line's overrides and, where that is known without
loading a model, its weights are the ones that a run would load now. Rows are in `results/<table>.csv`, whatever the
model; a row that no longer fits stays there as history and is not shown. A line that another table has, too, is
measured once: a row is looked for among the table's own first, then among all others in `results/`.
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
from specbench.tables.definitions import Line, Panel, Table, TableTest

#: The command that rows are of, where it is not `specbench run` -> their files.
ROW_FILES = {"bench": ROWS, "probe": PROBES}


@dataclass(frozen=True)
class Cell:
    """A model, a set of prompts and a seed of a suite; the former two by their labels. A table names none."""

    model: str = ""
    prompts: str = ""
    seed: int | None = None  # None: each line's own

    @property
    def group(self) -> tuple[str, str]:
        """What stays when seeds are pooled."""
        return self.model, self.prompts

    def __str__(self) -> str:
        return ", ".join(filter(None, [*self.group, "" if self.seed is None else f"seed {self.seed}"]))


@dataclass(frozen=True)
class TableRun(PlannedRun):
    """The run of a line. decodes: identifies what it decodes; reference: the folder of the vanilla AR of a suite with
    which it is compared, None for vanilla itself."""

    cell: Cell = Cell()
    decodes: str = ""
    reference: Path | None = None

    @property
    def name(self) -> str:
        if not self.cell.model:
            return self.label
        return f"{self.label} on {self.cell}" + (", timed" if self.timed else "")

    @classmethod
    def of(cls, home: Path, line: Line, overrides: Sequence[str], free: Mapping[str, Any], **more: Any) -> Self:
        """Of a line in its folder in `home`, whose name does not depend on the parameters `free`: these have values
        that stand for all others. Loads no model."""
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
    """The runs of one table for one model, of each line one, or one for each of several seeds. compared: the rows of
    `specbench compare` for its tests; pairs: the rows of `compare.equal` for pairs of its curves."""

    table: Table
    model: str
    compared: tuple[Row, ...] = ()
    pairs: tuple[Row, ...] = ()

    @property
    def rows(self) -> dict[str, Row | None]:
        """Line key -> row; of several seeds one that pools those that exist."""
        found: dict[str, list[Row]] = {run.key: [] for run in self.runs}
        for run in self.runs:
            found[run.key] += [] if run.row is None else [run.row]
        return {key: as_cells(pooled(rows)) if rows else None for key, rows in found.items()}

    @property
    def untested(self) -> list[TableTest]:
        """The tests of which both lines have a run, and these two runs are not compared."""
        rows = self.rows
        runs = [test for test in self.table.tests if {test.line, test.other} <= rows.keys()]
        return [test for test in runs if compared_row(test, rows, self.compared) is None]

    @property
    def equal(self) -> dict[str, Panel]:
        """The panels whose curves can be compared, by what identifies their runs: those that have all their rows."""
        rows, found = self.rows, {}
        for panel in self.table.compared_panels:
            runs = [(rows.get(key) or {}).get("run_id") for key in panel.keys]
            if all(runs):
                found[sha256(" ".join(map(str, runs)), 12)] = panel
        return found

    @property
    def unequalled(self) -> dict[str, Panel]:
        """The panels of `equal` whose very runs are not compared."""
        known = {row["runs"] for row in self.pairs}
        return {runs: panel for runs, panel in self.equal.items() if runs not in known}

    def state(self, asked: bool) -> str:
        """A line about what exists; asked: whether the model was asked for."""
        need, have = len(self.runs), len(self.runs) - len(self.missing)
        whole = have == need and not self.untested and not self.unequalled
        state = "complete" if whole else "partial" if have else "no rows"
        if not need:  # no line has a run on this model
            others = "other models" if asked else "needs --model"
            state = "published only" if self.table.id in literature.available() else others
        return f"{self.table.id:20} {state:14} {f'{have}/{need}':>5} rows  {self.table.title}"

    def with_tests(self, results: Path) -> Self:
        """With the tests that exist."""
        compared: Sequence[Row] = ()
        pairs: Sequence[Row] = ()
        if self.table.tests:
            from specbench.compare import wording

            held = wording.ROWS.read(store(self.table, results, "_test"))
            shown = [compared_row(test, self.rows, held) for test in self.table.tests]
            compared = wording.readjusted(held, [i for i, row in enumerate(held) if any(row is one for one in shown)])
        if self.table.matched is not None:
            from specbench.compare import equal

            pairs = equal.ROWS.read(store(self.table, results, "_pairs"))
        return replace(self, compared=tuple(compared), pairs=tuple(pairs))


def compared_row(test: TableTest, rows: Mapping[str, Row | None], comparisons: Sequence[Row]) -> Row | None:
    """The comparison of the very runs of which a test's two lines have the rows; None where it is missing."""
    runs = [(rows.get(key) or {}).get("run_id") for key in (test.other, test.line)]
    same = (r for r in reversed(comparisons) if (r["statistic"], r["run_a"], r["run_b"]) == (test.statistic, *runs))
    return next(same, None)


def store(table: Table, results: Path, of: str = "") -> Path:
    """The file with the rows of a table; of: "_test": with those of `specbench compare` for its tests, "_pairs": with
    the pairs of its curves at equal values."""
    return (results if table.rows_of == "run" else results / table.rows_of) / f"{table.id}{of}.csv"


def plan(
    table: Table,
    model: str,
    n: int | None,
    results: Path,
    runs: Path = Path("runs"),
    seeds: Sequence[int] = (),
) -> TablePlan:
    """The runs that `table` needs for `model` with `n` prompts and the seed of each (None, none: its own), and those of
    their rows that exist in `results`. Their folders are under `runs`. Of several seeds, values are means over them,
    and no lines are tested. Loads no model, writes nothing.

    Raises UsageError for an unknown model, and for rows that cannot be read.
    """
    if seeds and table.matched is not None:
        raise UsageError(f"{table.id} compares curves prompt by prompt, of one seed each: leave --seeds out")
    table = over_seeds(table, len(seeds))
    rows = _rows(table, results)
    shown = [column.key for column in table.columns] if table.rows_of == "run" else []
    needs = [*table.needs, *([SECONDS] if not TIMED_COLUMNS.isdisjoint(shown) else [])]
    needs += [EMITTED] if any(key.startswith("emitted_") for key in shown) else []
    home = runs / "tables" / ((table.matched and table.matched.lines_of) or table.id) / model
    planned = []
    with configuration.session():  # one for all lines
        for line, seed in itertools.product(table.lines, seeds or (None,)):
            overrides = table.overrides(line, model, n, seed)
            if overrides is not None:
                run = TableRun.of(home, line, overrides, {}, rows_of=table.rows_of, needs=tuple(needs))
                planned.append(run.with_newest(rows.get(run.config_hash, ())))
    return TablePlan(table.id, home, tuple(planned), table, model).with_tests(results)


def over_seeds(table: Table, seeds: int) -> Table:
    """The table of means over so many seeds, which says so."""
    if seeds < 2:
        return table
    spread = [one if one.std_over is None else replace(one, std_over=f"{seeds} seeds") for one in table.columns]
    remark = f"Each value is the mean over {seeds} seeds, ± the standard deviation between them."
    return replace(table, columns=tuple(spread), tests=(), remarks=(remark, *table.remarks))


def _rows(table: Table, results: Path) -> Mapping[str, list[Row]]:
    """The rows that may be those of its lines, by the hash of their configurations; its own are the last."""
    own = store(table, results)
    if table.rows_of != "run":
        files: list[Sequence[Row]] = [ROW_FILES[table.rows_of].read(own)]
    else:
        others = [path for path in sorted(results.glob("*.csv")) if path != own]
        files = [_read(path, state(path), path == own) for path in (*others, own) if path.exists()]
    found: dict[str, list[Row]] = defaultdict(list)
    for row in (row for rows in files for row in rows):
        found[row["config_hash"]].append(row)
    return found


def rows_in(results: Path) -> list[Row]:
    """The rows of runs in all files of a folder, as text."""
    return [row for path in sorted(results.glob("*.csv")) for row in _read(path, state(path), False)]


@cache
def _read(path: Path, state: tuple[int, ...], must: bool) -> tuple[Row, ...]:
    """The rows of a file in this state, as text, because every table looks through all files; none in a file that holds
    something else, except where it `must` hold rows of runs."""
    if not path.stat().st_size or not (must or has_runs(path)):
        return ()
    return tuple(map(as_cells, read_rows(path)))
