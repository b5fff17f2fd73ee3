"""From a definition to its planned runs, with the rows that exist.

A suite's lines run on its models, prompts and seeds; a paper's table is a suite of one model, with published lines.
They differ in where rows and folders lie:

    `specbench tables`: rows in results/<table>.csv for all models, folders in runs/tables. A row belongs to a run if
        its configuration hash is the run's and, as far as it is known without loading a model, its weights are the ones
        that a run would load now. Other rows stay there as history. A line that two tables share is measured once: its
        row is searched first in the table's own file, then in all other files in `results/`. Of several rows with
        seconds, one of the machine that timed most of the lines is taken.
    `specbench suite`: each run in MODEL/PROMPTS/seedN/LINE-HASH of the suite's folder, with its row. Runs of quality
        are decoded in batches, with one vanilla AR for each (model, prompts, seed), with which all are compared. Runs
        of seconds, in `seconds/`, decode one image at a time, alternating with vanilla AR, and are not scored.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path

import yaml

from specbench.bench.benchmark_rows import PROBES, ROWS
from specbench.config import configuration, parameters, registry
from specbench.config.parameter import Parameters
from specbench.config.run_config import RunConfig as RunConfig  # of a field, for the documentation
from specbench.errors import RunError, UsageError
from specbench.harness.planned import EMITTED, SECONDS, Plan, PlannedRun, digest
from specbench.harness.planned import R as R  # of a field, for the documentation
from specbench.rows import provenance
from specbench.rows.columns import TIMED_COLUMNS, Cells, Row
from specbench.rows.csv_files import append_row, as_cells, has_runs, read_rows
from specbench.rows.remark import as_json, remark, remarks_of
from specbench.rows.selection import pooled, spread_of
from specbench.rows.shown import machine
from specbench.storage.files import bounded_name, sha256, state, write_atomically
from specbench.tables import catalog, literature
from specbench.tables.definitions import (
    Cell,
    Curve,
    Line,
    Panel,
    Suite,
    Table,
    TableTest,
    Values,
    as_overrides,
    named,
    of_world,
)

#: The command that makes the rows, unless it is `specbench run` -> their files.
ROW_FILES = {"bench": ROWS, "probe": PROBES}
FILE, SUITE_ROWS, COMPARED = "suite.yaml", "suite.csv", "compared.csv"  # in a suite's folder; the first defines it
_OF_SECONDS = "seconds: "  # in a printed row, the prefix of the columns of its further runs that measure seconds
_PARTS_OF_METHODS = ("method", "variant", "drafter_weights", *parameters.PARTS)


@dataclass(frozen=True)
class TableRun(PlannedRun):
    """The run of a line. reference: the folder of the suite's vanilla AR with which it is compared, None for vanilla
    itself and for a run with its own baseline. seconds: whether it belongs to the further runs that measure seconds.
    scored: the configuration hash of such a run if it is also scored, which does not change its seconds."""

    cell: Cell = field(default_factory=Cell)
    reference: Path | None = None
    seconds: bool = False
    scored: str = ""

    @property
    def hashes(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.config_hash, self.scored)))

    @property
    def name(self) -> str:
        where = f" on {self.cell}" if self.cell.model else ""
        return f"{self.label}{where}" + (", timed" if self.seconds else "")


Pair = tuple[TableRun, TableRun]  # A and B of a comparison
Group = tuple[Pair, ...]  # pairs that are compared together: one, or those that differ only in their seed


@dataclass(frozen=True, kw_only=True)
class TablePlan(Plan[TableRun]):
    """The runs of a suite, or of one table for one model.

    results: the folder of the rows of tables; None: each row is in its run's folder. left_out: of a suite, why lines
    have no run on some models. compared: the rows of `specbench compare` for its tests; pairs: the rows of
    `compare.equal` for pairs of its curves. After `collect`, uncompared: why comparisons are missing; failed: the error
    if runs failed.
    """

    suite: Suite
    results: Path | None = None
    left_out: tuple[str, ...] = ()
    compared: tuple[Cells, ...] = ()
    pairs: tuple[Cells, ...] = ()
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

    @cached_property
    def suffixes(self) -> dict[tuple[str, str], str]:
        """Model and set of prompts -> the end of the keys of its printed lines, if there are several."""
        groups = dict.fromkeys(run.cell.group for run in self.runs)
        return {group: f"@{i}" if len(groups) > 1 else "" for i, group in enumerate(groups)}

    @cached_property
    def lines(self) -> dict[str, list[TableRun]]:
        """The runs of each printed line: those of a line on one model and set of prompts, with all seeds."""
        lines: dict[str, list[TableRun]] = {}
        for group, suffix in self.suffixes.items():
            for run in self.runs:
                if run.cell.group == group:
                    lines.setdefault(f"{run.key}{suffix}", []).append(run)
        return lines

    @cached_property
    def rows(self) -> dict[str, Cells | None]:
        """Printed line -> its row; for several seeds, a row that pools the existing ones."""
        in_batches = bool(self.suite.baseline or self.suite.timed)
        return {key: pooled_row(runs, in_batches) for key, runs in self.lines.items()}

    # --- files --------------------------------------------------------------------------------------------------------

    def file(self, kind: str) -> Path:
        """The file with the rows of `specbench compare` ("_test") or of `compare.equal` ("_pairs")."""
        return self.home / COMPARED if self.results is None else store(self.table, self.results, kind)

    def keep(self, run: PlannedRun, row: Row) -> None:
        """Stores the row of a finished run; a suite has it in the run's folder."""
        if self.results is not None:
            append = append_row if run.rows_of == "run" else ROW_FILES[run.rows_of].append
            append(store(self.table, self.results), row)

    def with_images(self, run: TableRun) -> Path | None:
        """The folder with the images of a run's row: its own, or that of the same run in another table; None if both
        are missing."""
        folders = [run.folder]
        if self.results is not None and not run.folder.exists():
            folders = sorted(self.home.parents[1].glob(f"*/{self.home.name}/*-{run.folder.name.rpartition('-')[2]}"))
        return next((folder for folder in folders if run.row is not None and _is_of(folder, run.row)), None)

    # --- tests between lines ------------------------------------------------------------------------------------------

    def with_tests(self) -> TablePlan:
        """The plan of a table with the existing tests."""
        compared: Sequence[Cells] = ()
        pairs: Sequence[Cells] = ()
        if self.table.tests:
            from specbench.compare import wording

            compared = self.adjusted(wording.ROWS.read(self.file("_test")))
        if self.table.matched is not None:
            from specbench.compare import equal

            pairs = equal.ROWS.read(self.file("_pairs"))
        return replace(self, compared=tuple(compared), pairs=tuple(pairs))

    def adjusted(self, compared: Sequence[Cells]) -> Sequence[Cells]:
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

    def compared_rows(self, group: Group) -> list[Cells]:
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
        hours = " (takes hours: only if named)" if self.table.on_request else ""
        return f"{self.table.id:20} {state:14} {f'{have}/{need}':>5} rows  {self.table.title}{hours}"


def pooled_row(runs: Sequence[TableRun], in_batches: bool) -> Cells | None:
    """The row of a printed line. Seconds come from the further runs that measure them, if there are any; `timed_row`
    has the machine of these. in_batches: leaves out the remark of every run of a suite that it decoded in batches,
    which does not apply to these."""
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
        row |= {f"{_OF_SECONDS}{name}": value for name, value in timed.items() if name not in TIMED_COLUMNS}
    if in_batches:
        remarks = [r for r in remarks_of(row) if r.code != "batches"]
        if seconds and len(seconds) != len(quality):
            remarks.append(remark("timed_runs", runs=len(seconds)))
        row["remarks"] = as_json(remarks)
    return as_cells(row)


def timed_row(row: Cells) -> Cells:
    """A printed row with the machine, commit, time, prompts and remarks of the runs that measured its seconds."""
    own = {name.removeprefix(_OF_SECONDS): text for name, text in row.items() if name.startswith(_OF_SECONDS)}
    return {**row, **own} if own else row


def compared_row(test: TableTest, rows: Mapping[str, Cells | None], comparisons: Sequence[Cells]) -> Cells | None:
    """The comparison of exactly the runs whose rows a test's two lines show; None if it does not exist."""
    runs = [(rows.get(key) or {}).get("run_id") for key in (test.other, test.line)]
    same = (r for r in reversed(comparisons) if (r["statistic"], r["run_a"], r["run_b"]) == (test.statistic, *runs))
    return next(same, None)


def store(table: Table, results: Path, kind: str = "") -> Path:
    """The file with the rows of a table, which may be those of another one; kind: "_test" for the rows of `specbench
    compare` for its tests, "_pairs" for the pairs of its curves at equal values."""
    name = f"{table.id}{kind}" if kind else _with_lines(table)
    return (results if table.rows_of == "run" else results / table.rows_of) / f"{name}.csv"


def _with_lines(table: Table) -> str:
    """The table that has the lines and runs of a table: itself, or the one that it compares."""
    return (table.matched and table.matched.lines_of) or table.id


# --- which runs -------------------------------------------------------------------------------------------------------


def plan(
    table: Table,
    model: str,
    n: int | None,
    results: Path,
    runs: Path = Path("runs"),
    seeds: Sequence[int] = (),
    changes: Values | None = None,
) -> TablePlan:
    """The runs that `table` needs for `model` with `n` prompts and each of the seeds (None, none: the defaults), and
    their rows that exist in `results`. changes: see `Table.on`. Their folders are in `runs`. With several seeds, values
    are means over them, and no lines are tested.

    Raises UsageError for an unknown model, and for rows that cannot be read.
    """
    if seeds and table.matched is not None:
        raise UsageError(f"{table.id} compares curves prompt by prompt, with one seed each: leave --seeds out")
    table = replace(table, tests=()) if len(seeds) > 1 else table
    home = runs / "tables" / _with_lines(table) / model
    rows = _rows(table, results)
    todo = _plan(table.on(model, n, tuple(seeds), changes), home, {}, lambda run: rows(run.hashes))
    given = {name: value for name, value in of_world(model, changes or {}).items() if name != "timed"}
    for name, value in given.items():
        if todo.runs and all(named(run.overrides).get(name) != value for run in todo.runs):
            raise UsageError(f"every line of {table.id} has its own {name}: leave it out")
    order = {line.key: i for i, line in enumerate(table.lines)}
    ordered = sorted(todo.runs, key=lambda run: order[run.key])
    return replace(todo, runs=tuple(ordered), left_out=(), results=results).with_tests()


def plan_suite(suite: Suite, out: Path) -> TablePlan:
    """The runs of a suite, and the rows of the finished ones in the folder `out`. Loads no model, writes nothing.

    UsageError, with its name, for a line that cannot be composed, and if no line has a run.
    """
    # More prompts, other metrics and another baseline reuse the images of a folder.
    free = {"n": 1, "metrics": [], "reference": None, "baseline": False}
    todo = _plan(suite, out, free, lambda run: _own_rows(run.folder / "row.csv"))
    if not todo.runs:
        raise UsageError(f"no line of {suite.table.id} has a run ({'; '.join(todo.left_out[:3])})")
    return todo


def _plan(suite: Suite, home: Path, free: Parameters, rows: Callable[[TableRun], Sequence[Cells]]) -> TablePlan:
    """free: the names of folders do not depend on these parameters, whose values are placeholders; rows: candidates for
    the row of a run, the newest last."""
    runs: list[TableRun] = []
    left_out: list[str] = []
    with configuration.session():  # one for all runs
        for cell in suite.cells():
            for seconds in (False, True) if suite.timed else (False,):
                runs += _of_cell(suite, cell, home, free, seconds, left_out)
            fitting = of_world(suite.model(cell), suite.shared)
            if foreign := as_overrides({name: v for name, v in suite.shared.items() if name not in fitting}):
                left_out.append(f"{cell.model} is a real model: its runs leave {' and '.join(sorted(foreign))} out")
    taken = {name for run in runs for name in named(run.overrides)}
    if runs and (unknown := sorted(suite.shared.keys() & parameters.method_parameters() - taken)):
        raise UsageError(f"no line of {suite.table.id} has the parameter {unknown[0]}: leave it out")
    candidates = {run.folder: rows(run) for run in runs}
    found = _of_one_machine([run.with_newest(candidates[run.folder]) for run in runs], candidates)
    return TablePlan(suite.table.id, home, found, suite=suite, left_out=tuple(dict.fromkeys(left_out)))


def _of_one_machine(runs: Sequence[TableRun], candidates: Mapping[Path, Sequence[Cells]]) -> tuple[TableRun, ...]:
    """The runs. Timed ones have their newest row of the machine that timed most of them, if they have one of it; in a
    tie, the machine of most of the newest rows counts."""
    timed = [run for run in runs if run.row is not None and run.timed and SECONDS in run.needs]
    newest = Counter(machine(run.row or {}) for run in timed)
    fitting = [dict.fromkeys(machine(row) for row in candidates[run.folder] if run.fits(row)) for run in timed]
    known = Counter(itertools.chain.from_iterable(fitting))
    common = max(known, key=lambda m: (known[m], newest[m]), default=None)
    there = {r.folder: r.with_newest([c for c in candidates[r.folder] if machine(c) == common]) for r in timed}
    return tuple(chosen if (chosen := there.get(run.folder, run)).row is not None else run for run in runs)


def _of_cell(
    suite: Suite, cell: Cell, home: Path, free: Parameters, seconds: bool, left_out: list[str]
) -> list[TableRun]:
    """The runs of the lines. In a suite after the vanilla AR runs that they need: one for every sampling of the lines,
    unless a line is vanilla AR itself. Adds to `left_out` why lines have no run."""
    plan = partial(_of_line, suite=suite, cell=cell, home=home, free=free, seconds=seconds)
    without_baseline: list[TableRun] = []
    runs: dict[str, TableRun] = {}  # of a suite, by the digest of what they decode
    vanillas: dict[str, TableRun] = {}  # that these are compared with, in the same way
    vanilla_of: dict[str, str] = {}  # digest of a run -> of its vanilla AR
    for line in suite.table.lines:
        try:
            if why := suite.table.no_run(line, suite.model(cell), suite.models[cell.model]):
                left_out.append(f"{line.label} has no run on {cell.model}: {why.rstrip('.')}")
                continue
            decodes, run = plan(line)
            if not suite.baseline:
                without_baseline.append(run)
                continue
            vanilla_decodes, vanilla = plan(_vanilla(suite, line, cell))
        except UsageError as e:
            raise UsageError(f"line {line.key} on {cell.model}: {e}") if cell.model else e from None
        if decodes in runs:
            raise UsageError(f"lines {runs[decodes].key} and {line.key} of {suite.table.id} are the same run")
        runs[decodes] = run
        vanillas.setdefault(vanilla_decodes, vanilla)
        vanilla_of[decodes] = vanilla_decodes

    # A line that is vanilla AR itself is the run that the others are compared with.
    references = {decodes: runs.get(decodes, vanilla) for decodes, vanilla in vanillas.items()}
    compared = [
        replace(run, reference=references[vanilla_of[decodes]].folder)
        for decodes, run in runs.items()
        if decodes not in references
    ]
    return [*without_baseline, *references.values(), *compared]


def _of_line(line: Line, suite: Suite, cell: Cell, home: Path, free: Parameters, seconds: bool) -> tuple[str, TableRun]:
    """The digest of what the run of a line decodes, and the run."""
    overrides = _overrides(line, suite, cell, seconds)
    config = configuration.compose(overrides)
    weights = registry.weights_here(config)
    decodes = digest(config.changed(**free), weights)
    folders = [*cell.group, f"seed{cell.seed}" if cell.model and cell.seed is not None else "", "seconds" * seconds]
    run = TableRun(
        home.joinpath(*map(_file_name, filter(None, folders)), f"{bounded_name(line.key)}-{decodes}"),
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
    if seconds and not suite.baseline:  # a suite has only its own rows
        metrics = configuration.compose(_overrides(line, suite, cell, seconds=False)).get("metrics")
        run = replace(run, scored=provenance.config_hash(config.changed(metrics=metrics)))
    return decodes, run


def _overrides(line: Line, suite: Suite, cell: Cell, seconds: bool) -> list[str]:
    """The arguments of the run of a line, without shared ones that have no effect in it."""
    overrides = suite.overrides(line, cell, seconds)
    of_methods = suite.shared.keys() & {*parameters.method_parameters(), *parameters.PARTS}
    shared = of_methods - (line.on(suite.model(cell), suite.table.model) or {}).keys()
    useless = shared & configuration.without_effect(overrides) if shared else set()
    return (
        as_overrides({name: v for name, v in named(overrides).items() if name not in useless}) if useless else overrides
    )


def _vanilla(suite: Suite, line: Line, cell: Cell) -> Line:
    """The line of the vanilla AR with which a line is compared. It has the parameters of the line that are not of its
    method: sampling, prompts, sizes."""
    of_methods = {*parameters.method_parameters(), *_PARTS_OF_METHODS, *suite.baseline}
    values = line.on(suite.model(cell), suite.table.model) or {}
    sampling = {name: value for name, value in values.items() if name not in of_methods}
    same = {**suite.shared, **{name: value for name, value in sampling.items() if name in ("n", "metrics")}}
    differs = [f"{name}={value}" for name, value in sampling.items() if same.get(name) != value]
    key = _file_name("_".join(["vanilla", *differs]))
    key += "_AR" * any(key == other.key for other in suite.table.lines)
    return Line(key, ", ".join(["vanilla", *differs]), tuple(as_overrides({**suite.baseline, **sampling})))


def _needs(table: Table, seconds: bool) -> tuple[str, ...]:
    """Columns that a row of the table must have."""
    if seconds:
        return (SECONDS,)
    shown = [column.key for column in table.columns] if table.rows_of == "run" else []
    timed = [] if TIMED_COLUMNS.isdisjoint(shown) else [SECONDS]
    return (*timed, *([EMITTED] if any(key.startswith("emitted_") for key in shown) else []))


def _file_name(text: str) -> str:
    return bounded_name("".join(c if c.isalnum() or c in "._=,+-" else "_" for c in text))


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(table: Table, results: Path) -> Callable[[Sequence[str]], list[Cells]]:
    """Hashes of the configuration of a run -> candidates for its row; the table's own rows are the last."""
    own_file = store(table, results)
    if table.rows_of != "run":
        own: Sequence[Cells] = ROW_FILES[table.rows_of].read(own_file)
        others: list[tuple[Path, tuple[int, ...]]] = []
    else:
        own = _read(own_file, state(own_file), True) if own_file.exists() else ()
        others = [(path, state(path)) for path in sorted(results.glob("*.csv")) if path != own_file]

    def candidates(hashes: Sequence[str]) -> list[Cells]:
        rows: list[Cells] = []
        for path, its_state in others:
            if not _words(path, its_state).isdisjoint(hashes):  # to parse every file takes a second
                rows += _read(path, its_state, False)
        return [row for row in (*rows, *own) if row["config_hash"] in hashes]

    return candidates


@cache
def _words(path: Path, state: tuple[int, ...]) -> frozenset[str]:
    """The words and hashes in a file in this state."""
    return frozenset(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace")))


def _own_rows(path: Path) -> list[Cells]:
    try:
        return [as_cells(row) for row in read_rows(path)] if path.is_file() and has_runs(path) else []
    except UsageError:
        return []  # the run itself reports the mistake


def _is_of(folder: Path, row: Cells) -> bool:
    """Whether a row belongs to the finished run in a folder."""
    file = folder / "row.csv"
    return file.exists() and any(r["run_id"] == row.get("run_id") for r in read_rows(file))


@cache
def _read(path: Path, state: tuple[int, ...], must: bool) -> tuple[Cells, ...]:
    """The rows of a file in this state, as text. Cached, because every table reads all files. () for a file with other
    content, unless it `must` contain rows of runs."""
    if not path.stat().st_size or not (must or has_runs(path)):
        return ()
    return tuple(map(as_cells, read_rows(path)))


# --- the definition in the folder of a suite --------------------------------------------------------------------------


def check_folder(suite: Suite, out: Path) -> None:
    """UsageError for a folder that has content but no suite, such as a run, or a suite of another name, which `resume`
    could not continue after this one. The folder need not exist."""
    if not (out / FILE).is_file() and out.exists() and any(path.name != ".lock" for path in out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no suite; choose another out=")
    try:
        name = in_folder(out).table.id
    except UsageError:  # a new folder, or a definition that no command can continue
        return
    if name != suite.table.id:
        raise UsageError(f"{out} holds the suite {name}; choose another out=")


def write_definition(suite: Suite, out: Path) -> None:
    """Stores the definition, from which `status` and `resume` read it."""
    text = yaml.safe_dump(dict(suite.table.content), sort_keys=False, allow_unicode=True, width=120)
    if not (out / FILE).is_file() or (out / FILE).read_text(encoding="utf-8") != text:
        write_atomically(out / FILE, text.encode())
    parameters.remember_included(out)


def in_folder(out: Path) -> Suite:
    """The suite in a folder. UsageError if it contains no suite."""
    source = catalog.of_file(out / FILE)
    return catalog.suite(str(source.content.get("name") or out.name), source)
