"""From a definition to its planned runs, with the rows that exist.

A suite's lines run on its models, prompts and seeds; a paper's table is a suite of one model, with published lines.
They differ in where their rows and folders lie: in the `Results` of `specbench tables`, or in the `SuiteFolder` of
`specbench suite`.

    runs of quality: of a suite in batches, with one vanilla AR for each (model, prompts, seed), against which all are
                     compared; of a table as its file says, each with its own baseline
    runs of seconds: of a suite that shows seconds, one image at a time, alternating with vanilla AR, not scored
"""

from __future__ import annotations

import itertools
import shlex
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from specbench.bench.rows import PROBES, ROWS
from specbench.config import configuration, parameters, registry
from specbench.config.run_config import RunConfig as RunConfig  # of a field, for the documentation
from specbench.errors import RunError, UsageError
from specbench.harness.planned import EMITTED, SECONDS, Plan, PlannedRun, Row, digest
from specbench.harness.planned import R as R  # of a field, for the documentation
from specbench.rows.columns import TIMED_COLUMNS
from specbench.rows.csv_files import append_row, as_cells, has_runs, read_rows
from specbench.rows.selection import pooled, spread_of
from specbench.storage.files import sha256, state, write_atomically
from specbench.tables import catalog, literature, suite_files
from specbench.tables.definitions import Cell, Curve, Line, Panel, Suite, Table, TableTest, as_overrides, of_world

#: The command that makes the rows, unless it is `specbench run` -> their files.
ROW_FILES = {"bench": ROWS, "probe": PROBES}
_PARTS_OF_METHODS = ("method", "variant", "drafter_weights", *parameters.PARTS)


@dataclass(frozen=True)
class TableRun(PlannedRun):
    """The run of a line. reference: the folder of the suite's vanilla AR with which it is compared, None for vanilla
    itself and for a run with its own baseline. seconds: whether it belongs to the further runs that measure seconds."""

    cell: Cell = field(default_factory=Cell)
    reference: Path | None = None
    seconds: bool = False

    @property
    def name(self) -> str:
        if not self.cell.model:
            return self.label
        return f"{self.label} on {self.cell}" + (", timed" if self.seconds else "")


Pair = tuple[TableRun, TableRun]  # A and B of a comparison
Group = tuple[Pair, ...]  # pairs that are compared together: one, or those that differ only in their seed


class Store(ABC):
    """Where the rows and the folders of a table's runs lie."""

    home: Path  # of all folders
    free: Mapping[str, Any] = {}  # the name of a folder does not depend on these parameters; values: placeholders

    def folder(self, cell: Cell, seconds: bool) -> Path:
        """The folder that contains the folders of a cell's runs."""
        return self.home

    @abstractmethod
    def rows(self, run: TableRun) -> Sequence[Row]:
        """Candidates for the row of a run, the newest last."""

    @abstractmethod
    def places(self, run: TableRun) -> Sequence[Path]:
        """The folders that may have the images of a run's row."""

    @abstractmethod
    def comparisons(self, kind: str = "_test") -> Path:
        """The file with the rows of `specbench compare` or, with "_pairs", of `compare.equal`."""

    @abstractmethod
    def keep(self, run: PlannedRun, row: Mapping[str, Any]) -> None:
        """Stores the row of a finished run."""


class Results(Store):
    """The store of `specbench tables`: rows are in results/<table>.csv for all models, folders in runs/tables.

    A row belongs to a run if its configuration hash is the run's and, as far as it is known without loading a model,
    its weights are the ones that a run would load now. A row that no longer fits stays there as history and is not
    shown. A line that two tables share is measured once: its row is searched first in the table's own file, then in all
    other files in `results/`.
    """

    def __init__(self, table: Table, model: str, results: Path, runs: Path) -> None:
        self.table, self.results = table, results
        self.home = runs / "tables" / ((table.matched and table.matched.lines_of) or table.id) / model

    def rows(self, run: TableRun) -> Sequence[Row]:
        return self._by_hash.get(run.config_hash, ())

    @cached_property
    def _by_hash(self) -> Mapping[str, list[Row]]:
        own_file = store(self.table, self.results)
        if self.table.rows_of != "run":
            files: list[Sequence[Row]] = [ROW_FILES[self.table.rows_of].read(own_file)]
        else:
            others = [path for path in sorted(self.results.glob("*.csv")) if path != own_file]
            files = [_read(path, state(path), path == own_file) for path in (*others, own_file) if path.exists()]
        by_hash: dict[str, list[Row]] = defaultdict(list)
        for row in (row for rows in files for row in rows):
            by_hash[row["config_hash"]].append(row)
        return by_hash

    def places(self, run: TableRun) -> Sequence[Path]:
        """Its own folder, or those of the same run in other tables."""
        shared = self.home.parents[1].glob(f"*/{self.home.name}/*-{run.folder.name.rpartition('-')[2]}")
        return [run.folder] if run.folder.exists() else sorted(shared)

    def comparisons(self, kind: str = "_test") -> Path:
        return store(self.table, self.results, kind)

    def keep(self, run: PlannedRun, row: Mapping[str, Any]) -> None:
        append = append_row if run.rows_of == "run" else ROW_FILES[run.rows_of].append
        append(store(self.table, self.results), row)


class SuiteFolder(Store):
    """The folder of a suite: each run is in MODEL/PROMPTS/seedN/LINE-HASH, timed ones in `seconds/` there, and its row
    with it. More prompts, other metrics and another baseline reuse its images."""

    FILE, ROWS, COMPARED = "suite.yaml", "suite.csv", "compared.csv"  # the first is its definition
    free: Mapping[str, Any] = {"n": 1, "metrics": [], "reference": None, "baseline": False}

    def __init__(self, home: Path) -> None:
        self.home = home

    def folder(self, cell: Cell, seconds: bool) -> Path:
        seed = "" if cell.seed is None else f"seed{cell.seed}"
        return self.home.joinpath(*map(_file_name, filter(None, [*cell.group, seed, "seconds" if seconds else ""])))

    def rows(self, run: TableRun) -> Sequence[Row]:
        path = run.folder / "row.csv"
        with suppress(UsageError):  # the run itself reports the mistake
            return [as_cells(row) for row in read_rows(path)] if path.is_file() and has_runs(path) else []
        return []

    def places(self, run: TableRun) -> Sequence[Path]:
        return [run.folder]

    def comparisons(self, kind: str = "_test") -> Path:
        return self.home / self.COMPARED

    def keep(self, run: PlannedRun, row: Mapping[str, Any]) -> None:
        pass  # it is in the run's folder

    def check(self) -> None:
        """UsageError for a folder that has content but no suite, such as a run."""
        if not (self.home / self.FILE).is_file() and any(path.name != ".lock" for path in self.home.iterdir()):
            raise UsageError(f"{self.home} is not empty and holds no suite; choose another out=")

    def write(self, suite: Suite) -> None:
        """Stores the definition, from which `status` and `resume` read it. UsageError if the folder contains a suite of
        another name, which `resume` could not continue after this one."""
        try:
            name = self.suite().table.id
        except UsageError:  # a new folder, or a definition that no command can continue
            name = suite.table.id
        if name != suite.table.id:
            raise UsageError(f"{self.home} holds the suite {name}; choose another out=")
        path, text = (
            self.home / self.FILE,
            yaml.safe_dump(suite.content, sort_keys=False, allow_unicode=True, width=120),
        )
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text.encode())

    def suite(self) -> Suite:
        """The suite in the folder. UsageError if it contains none."""
        source = suite_files.of_file(self.home / self.FILE)
        return catalog.suite(source.definition.name or self.home.name, source)


@dataclass(frozen=True, kw_only=True)
class TablePlan(Plan[TableRun]):
    """The runs of a suite, or of one table for one model.

    left_out: of a suite, why lines have no run on some models. compared: the rows of `specbench compare` for its tests;
    pairs: the rows of `compare.equal` for pairs of its curves. After `collect`, uncompared: why comparisons are
    missing; failed: the error if runs failed.
    """

    suite: Suite
    store: Store
    left_out: tuple[str, ...] = ()
    compared: tuple[Row, ...] = ()
    pairs: tuple[Row, ...] = ()
    uncompared: tuple[str, ...] = ()
    failed: UsageError | RunError | None = None

    @property
    def table(self) -> Table:
        return self.suite.table

    @property
    def model(self) -> str:
        """The model of a table."""
        return self.suite.model(next(self.suite.cells()))

    @property
    def command(self) -> str:
        """The command that continues a suite."""
        return f"specbench resume {shlex.quote(str(self.home))}"

    @property
    def suffixes(self) -> dict[tuple[str, str], str]:
        """Model and set of prompts -> the end of the keys of its printed lines, if there are several."""
        groups = dict.fromkeys(run.cell.group for run in self.runs)
        return {group: f"@{i}" if len(groups) > 1 else "" for i, group in enumerate(groups)}

    @property
    def lines(self) -> dict[str, list[TableRun]]:
        """The runs of each printed line: those of a line on one model and set of prompts, with all seeds."""
        lines: dict[str, list[TableRun]] = {}
        for group, suffix in self.suffixes.items():
            for run in self.runs:
                if run.cell.group == group:
                    lines.setdefault(f"{run.key}{suffix}", []).append(run)
        return lines

    @property
    def rows(self) -> dict[str, Row | None]:
        """Printed line -> its row; for several seeds, a row that pools the existing ones."""
        return {key: pooled_row(runs, bool(self.suite.baseline)) for key, runs in self.lines.items()}

    # --- tests between lines ------------------------------------------------------------------------------------------

    def with_tests(self) -> TablePlan:
        """The plan of a table with the existing tests."""
        compared: Sequence[Row] = ()
        pairs: Sequence[Row] = ()
        if self.table.tests:
            from specbench.compare import wording

            compared = self.adjusted(wording.ROWS.read(self.store.comparisons()))
        if self.table.matched is not None:
            from specbench.compare import equal

            pairs = equal.ROWS.read(self.store.comparisons("_pairs"))
        return replace(self, compared=tuple(compared), pairs=tuple(pairs))

    def adjusted(self, compared: Sequence[Row]) -> Sequence[Row]:
        """Rows of comparisons with Holm's adjustment. A table adjusts the tests that it shows. In a suite, the rows of
        one seed of several are adjusted together, and all others, which give the stars."""
        from specbench.compare import wording

        if not self.suite.baseline:
            rows = self.rows
            shown = [compared_row(test, rows, compared) for test in self.table.tests]
            return wording.readjusted(compared, [i for i, r in enumerate(compared) if any(r is row for row in shown)])
        several = {run_id for row in compared if " / " in row["run_b"] for run_id in row["run_b"].split(" / ")}
        for of_seed in (True, False):
            family = [i for i, row in enumerate(compared) if (row["run_b"] in several) == of_seed]
            compared = wording.readjusted(compared, family)
        return compared

    @property
    def untested(self) -> list[TableTest]:
        """The tests of a table whose two lines have a run, but whose runs are not compared yet."""
        rows = self.rows
        runs = [test for test in self.table.tests if {test.line, test.other} <= rows.keys()]
        return [test for test in runs if compared_row(test, rows, self.compared) is None]

    def comparisons(self) -> list[Group]:
        """What `specbench compare` compares: the runs of the tests and, in a suite, every run with its vanilla AR, also
        for the means over seeds. Only finished runs."""
        quality = {run.folder: run for run in self.runs if run.row is not None and not run.seconds}
        pairs = [(quality[run.reference], run) for run in quality.values() if run.reference in quality]
        lines = {(run.cell, run.key): run for run in quality.values()}
        for cell, test in itertools.product(self.suite.cells(), self.table.tests):
            other, run = lines.get((cell, test.other)), lines.get((cell, test.line))
            if other is not None and run is not None and (other, run) not in pairs:
                pairs.append((other, run))
        several: dict[tuple[object, ...], list[Pair]] = {}
        for other, run in pairs:
            key = run.cell.group, run.key, None if run.reference == other.folder else other.key
            several.setdefault(key, []).append((other, run))
        return [*((pair,) for pair in pairs), *(tuple(group) for group in several.values() if len(group) > 1)]

    def compared_rows(self, group: Group) -> list[Row]:
        """The existing rows of a comparison."""
        ids = [" / ".join((run.row or {}).get("run_id", "") for run in side) for side in zip(*group, strict=True)]
        return [row for row in self.compared if [row["run_a"], row["run_b"]] == ids]

    # --- pairs of curves ----------------------------------------------------------------------------------------------

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
        return {runs: panel for runs, panel in self.equal.items() if any(self.unpaired(panel, runs).values())}

    def unpaired(self, panel: Panel, runs: str) -> dict[tuple[str, str], list[tuple[str, str]]]:
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


def pooled_row(runs: Sequence[TableRun], in_batches: bool = False) -> Row | None:
    """The row of a printed line. Seconds come from the further runs that measure them, if there are any. in_batches:
    leaves out the remark of every run of a suite that it decoded in batches, which does not apply to these."""
    quality = [run.row for run in runs if run.row is not None and not run.seconds]
    seconds = [run.row for run in runs if run.row is not None and run.seconds]
    if not quality:
        return None
    row = pooled(quality)
    if seconds:
        timed = pooled(seconds)
        # A spread of fewer seeds than `seeds` would be misread.
        spreads = map(spread_of, TIMED_COLUMNS if len(seconds) == len(quality) else ())
        row |= {name: timed.get(name) for name in (*TIMED_COLUMNS, *spreads)}
    if in_batches:
        remarks = [text for text in str(row.get("note") or "").split("; ") if not text.startswith("decoded in batches")]
        if seconds and len(seconds) != len(quality):
            remarks.append(f"runs in seconds: {len(seconds)}")
        row["note"] = "; ".join(filter(None, remarks))
    return as_cells(row)


def compared_row(test: TableTest, rows: Mapping[str, Row | None], comparisons: Sequence[Row]) -> Row | None:
    """The comparison of exactly the runs whose rows a test's two lines show; None if it does not exist."""
    runs = [(rows.get(key) or {}).get("run_id") for key in (test.other, test.line)]
    same = (r for r in reversed(comparisons) if (r["statistic"], r["run_a"], r["run_b"]) == (test.statistic, *runs))
    return next(same, None)


def store(table: Table, results: Path, kind: str = "") -> Path:
    """The file with the rows of a table; kind: "_test" for the rows of `specbench compare` for its tests, "_pairs" for
    the pairs of its curves at equal values."""
    return (results if table.rows_of == "run" else results / table.rows_of) / f"{table.id}{kind}.csv"


# --- which runs -------------------------------------------------------------------------------------------------------


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
    no lines are tested.

    Raises UsageError for an unknown model, and for rows that cannot be read.
    """
    if seeds and table.matched is not None:
        raise UsageError(f"{table.id} compares curves prompt by prompt, with one seed each: leave --seeds out")
    table = replace(table, tests=()) if len(seeds) > 1 else table
    todo = plan_suite(table.on(model, n, tuple(seeds)), Results(table, model, results, runs))
    order = {line.key: i for i, line in enumerate(table.lines)}
    return replace(todo, runs=tuple(sorted(todo.runs, key=lambda run: order[run.key]))).with_tests()


def plan_suite(suite: Suite, store: Store) -> TablePlan:
    """The runs of a suite, and the rows of the finished ones in `store`. Loads no model, writes nothing.

    UsageError, with its name, for a line that has no run.
    """
    runs: list[TableRun] = []
    left_out: list[str] = []
    with configuration.session():  # one for all runs
        for cell in suite.cells():
            model, name, lines = suite.model(cell), cell.model or suite.model(cell), []
            for line in suite.table.lines:
                with _named(line, cell):
                    why = suite.table.no_run(line, model, suite.models[cell.model])
                if why:
                    left_out.append(f"{line.label} has no run on {name}: {why.rstrip('.')}")
                else:
                    lines.append(line)
            fitting = of_world(model, suite.shared)
            if foreign := as_overrides({name: v for name, v in suite.shared.items() if name not in fitting}):
                left_out.append(f"{name} is a real model: its runs leave {' and '.join(sorted(foreign))} out")
            for seconds in (False, True) if suite.timed else (False,):
                runs += _of_cell(suite, store, cell, lines, seconds)
    return TablePlan(
        suite.table.id,
        store.home,
        tuple(run.with_newest(store.rows(run)) for run in runs),
        suite=suite,
        store=store,
        left_out=tuple(dict.fromkeys(left_out)) if suite.baseline else (),
    )


def _of_cell(suite: Suite, store: Store, cell: Cell, lines: Sequence[Line], seconds: bool) -> list[TableRun]:
    """The runs of these lines; in a suite after the vanilla AR runs that they need: one for every sampling of the
    lines, unless a line is vanilla AR itself."""
    if not suite.baseline:
        return [_run(suite, store, cell, line, seconds)[0] for line in lines]
    runs: dict[str, TableRun] = {}  # by the digest of what they decode
    vanillas: dict[str, TableRun] = {}
    needed: dict[str, str] = {}  # digest of a run -> of its vanilla AR
    for line in lines:
        with _named(line, cell):
            run, decodes = _run(suite, store, cell, line, seconds)
            vanilla, needed[decodes] = _run(suite, store, cell, _vanilla(suite, line, cell), seconds)
        if decodes in runs:
            raise UsageError(f"lines {runs[decodes].key} and {line.key} of {suite.table.id} are the same run")
        runs[decodes] = run
        vanillas.setdefault(needed[decodes], vanilla)
    vanillas |= {decodes: runs[decodes] for decodes in vanillas if decodes in runs}
    others = [(vanillas[needed[decodes]], run) for decodes, run in runs.items() if decodes not in vanillas]
    return [*vanillas.values(), *(replace(run, reference=vanilla.folder) for vanilla, run in others)]


@contextmanager
def _named(line: Line, cell: Cell) -> Iterator[None]:
    """Adds the line of a suite to the messages of errors."""
    try:
        yield
    except UsageError as e:
        raise UsageError(f"line {line.key} on {cell.model}: {e}") if cell.model else e from None


def _vanilla(suite: Suite, line: Line, cell: Cell) -> Line:
    """The line of the vanilla AR with which a line is compared. It has the parameters of the line that are not of its
    method: sampling, prompts, sizes."""
    of_methods = {*parameters.method_parameters(), *_PARTS_OF_METHODS, *suite.baseline}
    values = line.on(suite.model(cell), suite.table.model) or {}
    sampling = {name: value for name, value in values.items() if name not in of_methods}
    differs = [f"{name}={value}" for name, value in sampling.items() if suite.shared.get(name) != value]
    key = _file_name("_".join(["vanilla", *differs]))
    key += "_AR" * any(key == other.key for other in suite.table.lines)
    return Line(key, ", ".join(["vanilla", *differs]), tuple(as_overrides({**suite.baseline, **sampling})))


def _run(suite: Suite, store: Store, cell: Cell, line: Line, seconds: bool) -> tuple[TableRun, str]:
    """The run of a line, and the digest of what it decodes. Loads no model."""
    overrides = suite.overrides(line, cell, seconds)
    config = configuration.compose(overrides)
    weights = registry.weights_here(config)
    decodes = digest(config.changed(**store.free), weights)
    run = TableRun(
        store.folder(cell, seconds) / f"{line.key}-{decodes}",
        config,
        line.key,
        line.label,
        tuple(overrides),
        suite.table.rows_of,
        weights,
        _needs(suite.table, seconds),
        asked=configuration.names_metrics(overrides),
        cell=cell,
        seconds=seconds,
    )
    return run, decodes


def _needs(table: Table, seconds: bool) -> tuple[str, ...]:
    """Columns that a row of the table must have."""
    if seconds:
        return (SECONDS,)
    shown = [column.key for column in table.columns] if table.rows_of == "run" else []
    timed = [] if TIMED_COLUMNS.isdisjoint(shown) else [SECONDS]
    return (*timed, *([EMITTED] if any(key.startswith("emitted_") for key in shown) else []))


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._=,+-" else "_" for c in text)


# --- rows -------------------------------------------------------------------------------------------------------------


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
