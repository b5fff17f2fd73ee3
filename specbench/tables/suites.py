"""Suites: the methods of a table on several models, sets of prompts and seeds, each against one shared vanilla AR.

    runs of quality: in batches, scored, no baseline; vanilla AR is one of them, decoded once per (model, prompts, seed)
    runs of seconds: one image at a time, alternating with vanilla AR prompt by prompt, not scored

Every run has its own folder inside the suite's, and what is finished is read from there: whatever stops a suite, the
same command goes on.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from specbench.config import configuration, parameters
from specbench.errors import RunError, UsageError
from specbench.harness.planned import EMITTED, SECONDS, Plan, Row
from specbench.harness.planned import R as R  # of a field, for the documentation
from specbench.rows.columns import TIMED_COLUMNS
from specbench.rows.csv_files import as_cells, has_runs, read_rows, to_csv
from specbench.storage.csv_text import csv_text
from specbench.storage.files import write_atomically
from specbench.tables import catalog, suite_files
from specbench.tables.collect import Bench, PlanRunner
from specbench.tables.definitions import STANDARD, Column, Line, Table, as_overrides, named, of_world, row_column
from specbench.tables.measure import Cell, TableRun
from specbench.tables.suite_files import Definition, Source

FILE, ROWS, COMPARED = "suite.yaml", "suite.csv", "compared.csv"  # in a suite's folder; the first is its definition
BATCH, TIMED = 16, 24  # by default: images decoded together, prompts of a timed run
#: Of timed runs: nothing is scored, and no statistic of what is emitted is computed.
_SECONDS = {"batch": "1", "baseline": "true", "timing": "true", "metrics": "none", "emitted_draws": "0"}
#: Of runs of quality. One image at a time is for seconds alone.
_QUALITY = {"baseline": "false", "timing": "false"}
_PARTS_OF_METHODS = ("method", "variant", "drafter_weights", *parameters.PARTS)
Values = Mapping[str, str]  # parameter -> its value as text


@dataclass(frozen=True)
class Suite:
    """models, prompts: label -> parameters; shared: parameters of all runs; timed: prompts of a run of seconds, 0:
    there are none."""

    table: Table
    models: Mapping[str, Values]
    prompts: Mapping[str, Values]
    seeds: tuple[int, ...]
    shared: Values
    baseline: Values
    timed: int
    source: Source

    def cells(self) -> Iterator[Cell]:
        for model, prompts, seed in itertools.product(self.models, self.prompts, self.seeds or (None,)):
            yield Cell(model, prompts, seed)

    def model(self, cell: Cell) -> str:
        """The name of a cell's model."""
        return self.models[cell.model].get("model", self.table.model)


@dataclass(frozen=True, kw_only=True)
class SuitePlan(Plan[TableRun]):
    """The runs of a suite. left_out: why lines have none on some models; compared: the rows of `specbench compare` of
    runs with their vanilla AR, after `gather`; uncompared: why some are missing."""

    suite: Suite
    left_out: tuple[str, ...]
    compared: tuple[Row, ...] = ()
    uncompared: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return f"specbench resume {shlex.quote(str(self.home))}"


def read(source: Source, name: str) -> Suite:
    """A suite from a file. UsageError for what it cannot hold."""
    keys, table = source.definition, catalog.table(name, source)
    if keys.rows_of != "run":
        raise source.fault(f"it shows rows of specbench {keys.rows_of}: draw it with specbench tables {name}")
    if len(set(keys.seeds)) < len(keys.seeds):
        raise source.fault("seeds names one twice")

    def entries(key: str, parameter: str) -> dict[str, Values]:
        some = source.entries(key, parameter).items()
        return {label: named(catalog.overrides(source, f"{key}: {label}", one)) for label, one in some}

    given = named(table.protocol)
    models = entries("models", "model") or {table.model: {"model": table.model}}
    prompts = entries("prompts", "data") or {"": {}}
    own = parameters.table()
    seeds = keys.seeds or ((own["seed"].from_text("seed", given["seed"]),) if "seed" in given else ())
    batch = own["batch"].from_text("batch", given.get("batch", "1"))
    shared = {name: one for name, one in given.items() if name not in ("seed", "batch", "timing", "baseline", "n")}
    if keys.metrics is not None:
        shared |= named(catalog.overrides(source, "metrics", {"metrics": keys.metrics}))
    if not table.columns:
        table = replace(table, columns=_default_columns(keys, shared, models, prompts))
    shared |= {"batch": str(keys.batch or (batch if batch > 1 else BATCH)), **_QUALITY}
    seconds = any(column.key in TIMED_COLUMNS for column in table.columns)
    timed = keys.timed if keys.timed is not None else min(table.n, TIMED) if seconds else 0
    baseline = named(catalog.overrides(source, "baseline", keys.baseline))
    return Suite(table, models, prompts, seeds, shared, baseline, timed, source)


def _default_columns(
    keys: Definition, shared: Values, models: Mapping[str, Values], prompts: Mapping[str, Values]
) -> tuple[Column, ...]:
    """Steps, seconds where they are measured, and what the metrics fill: by default those that its runs have."""
    columns = ["speedup_step", "accepted_length_mean"]
    columns += ["latency_s_mean", "speedup_latency"] if keys.timed else []
    default = {"metrics": parameters.default_choice("metrics")}
    for model, data in itertools.product(models.values(), prompts.values()):
        chosen = {"model": keys.model, **model, **data, **shared}
        run = of_world(chosen["model"], chosen)
        metrics = (default | run | named(configuration.implied(as_overrides(run))))["metrics"]
        for name in metrics.strip("[]").split(","):
            some = parameters.declared("metrics", name.strip()) if name.strip() in parameters.choices("metrics") else ()
            for metric in (one for one in parameters.single_metrics() if one in some):
                columns += parameters.metric_columns(metric)
    return tuple(STANDARD.get(key) or row_column(key) for key in dict.fromkeys(columns))


# --- which runs -------------------------------------------------------------------------------------------------------


def plan(suite: Suite, out: Path) -> SuitePlan:
    """The runs of a suite, and the rows of those that are finished in the folder `out`. Loads no model, writes nothing.

    UsageError for a line that has no run, with its name.
    """
    runs: list[TableRun] = []
    left_out: list[str] = []
    with configuration.session():  # one for all runs
        for cell in suite.cells():
            lines = []
            for line in suite.table.lines:
                own = _own(suite, line, cell)
                if isinstance(own, str):
                    left_out.append(own)
                else:
                    lines.append((line, own))
            fitting = of_world(suite.model(cell), suite.shared)
            if foreign := as_overrides({name: one for name, one in suite.shared.items() if name not in fitting}):
                left_out.append(f"{cell.model} is a real model: its runs leave {' and '.join(sorted(foreign))} out")
            for timed in (False, True) if suite.timed else (False,):
                runs += _of_cell(suite, cell, lines, out, timed)
    return SuitePlan(
        title=suite.table.id, home=out, runs=tuple(runs), suite=suite, left_out=tuple(dict.fromkeys(left_out))
    )


def _own(suite: Suite, line: Line, cell: Cell) -> Values | str:
    """A line's parameters on a model, or why it has none."""
    model = suite.model(cell)
    own = line.on(model == suite.table.model)
    if own is None:
        return f"{line.label}: {line.without}"
    if suite.source.definition.seeds and "seed" in own:
        raise UsageError(f"line {line.key} has a seed of its own: leave seeds out")
    if foreign := [name for name in own if name in parameters.table() and name not in parameters.possible(model)]:
        return f"{line.label} has no run on {cell.model}, which has no {foreign[0]}"
    method = own.get("method", "")
    if method in parameters.choices("method") and model in parameters.choices("model"):
        fits, kind = parameters.kind("method", method), parameters.kind("model", model)
        if fits not in ("any", kind):
            return f"{line.label} has no run on {cell.model}, whose tokens are {kind}"
    return own


def _of_cell(suite: Suite, cell: Cell, lines: Sequence[tuple[Line, Values]], out: Path, timed: bool) -> list[TableRun]:
    """The runs of these lines, after the vanilla AR that they need: one for every sampling that some line has, unless a
    line is vanilla AR itself."""
    runs: dict[str, tuple[TableRun, str]] = {}  # each with what its vanilla AR decodes, by what it decodes itself
    vanillas: dict[str, TableRun] = {}  # by what they decode
    called = {line.key for line in suite.table.lines}
    for line, own in lines:
        sampling = _without_method(own, suite.baseline)
        differs = [f"{name}={value}" for name, value in sampling.items() if suite.shared.get(name) != value]
        reference = Line("vanilla", ", ".join(["vanilla", *differs]), None)
        try:
            run = _planned(suite, cell, line, own, out, timed)
            vanilla = _planned(suite, cell, reference, {**suite.baseline, **sampling}, out, timed)
        except UsageError as e:
            raise UsageError(f"line {line.key} on {cell.model}: {e}") from None
        if run.decodes in runs:
            raise UsageError(f"lines {runs[run.decodes][0].key} and {line.key} of {suite.table.id} are the same run")
        runs[run.decodes] = run, vanilla.decodes
        if differs or "vanilla" in called:
            key = f"vanilla_{vanilla.decodes}"
            vanilla = replace(vanilla, key=key, folder=vanilla.folder.with_name(f"{key}-{vanilla.decodes}"))
        vanillas.setdefault(vanilla.decodes, vanilla)
    vanillas |= {decodes: run for decodes, (run, needed) in runs.items() if needed == decodes}
    first = [vanilla for decodes, vanilla in vanillas.items() if decodes not in runs]
    first += [run for decodes, (run, needed) in runs.items() if needed == decodes]
    others = [
        replace(run, reference=vanillas[needed].folder) for decodes, (run, needed) in runs.items() if needed != decodes
    ]
    return [run.with_newest(_rows(run.folder / "row.csv")) for run in (*first, *others)]


def _planned(suite: Suite, cell: Cell, line: Line, own: Values, out: Path, timed: bool) -> TableRun:
    """The run of a line in its folder: more prompts, other metrics and another baseline add to what is there."""
    parts = [cell.model, cell.prompts, "" if cell.seed is None else f"seed{cell.seed}", "seconds" if timed else ""]
    home = out.joinpath(*map(_file_name, filter(None, parts)))
    needs = (SECONDS, EMITTED, *(() if timed else suite.table.needs))
    free = {"n": 1, "metrics": [], "reference": None, "baseline": False}
    return TableRun.of(home, line, _arguments(suite, cell, own, timed), free, needs=needs, cell=cell)


def _without_method(own: Values, baseline: Values) -> dict[str, str]:
    """A line's parameters that vanilla AR has, too: sampling, prompts, sizes."""
    of_methods = {*parameters.method_parameters(), *_PARTS_OF_METHODS, *baseline}
    return {name: value for name, value in own.items() if name not in of_methods}


def _arguments(suite: Suite, cell: Cell, own: Values, timed: bool) -> list[str]:
    """The overrides of a run: the model, what the line has, and the rest of what runs share."""
    model = suite.model(cell)
    shared = {**suite.models[cell.model], **of_world(model, suite.shared), **suite.prompts[cell.prompts]}
    shared |= {} if cell.seed is None else {"seed": str(cell.seed)}
    shared["n"] = str(suite.timed if timed else suite.table.n)
    mine = {name: value for name, value in of_world(model, own).items() if name not in _QUALITY}
    if timed:
        mine |= _SECONDS | {name: value for name, value in mine.items() if name == "batch"}
        mine.pop("n", None)
    first = {name: value for name, value in shared.items() if name == "model"} | mine
    return as_overrides(first | shared | first)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._=,+-" else "_" for c in text)


def _rows(path: Path) -> list[Row]:
    try:
        return [as_cells(row) for row in read_rows(path)] if path.is_file() and has_runs(path) else []
    except UsageError:
        return []  # the run itself says what is wrong


# --- running and comparing --------------------------------------------------------------------------------------------


def run(
    todo: SuitePlan, bench: Bench, say: Callable[[str], None], jobs: int = 1
) -> tuple[SuitePlan, UsageError | RunError | None]:
    """Executes the runs without a row; one that fails stops no other. Then as `gather`; and the error where some
    failed."""
    runner = PlanRunner(todo, bench, say, jobs, patient=True)
    failed: UsageError | RunError | None = None
    try:
        runner.execute(todo.missing)
    except (UsageError, RunError) as e:
        failed = e
    return gather(runner.plan, bench, runner.made, say), failed


def gather(
    plan: SuitePlan, bench: Bench, ran: Collection[Path] = (), say: Callable[[str], None] = lambda text: None
) -> SuitePlan:
    """With what each finished run is next to vanilla AR, kept in `ROWS` and `COMPARED`; ran: the folders of runs whose
    comparisons are older than their rows."""
    from specbench.compare import wording
    from specbench.harness.row import against
    from specbench.harness.run import keep

    there = {one.folder: one.row for one in plan.runs if one.row is not None}
    for one in plan.runs:
        if one.row is not None and not one.timed and one.reference in there:
            versus = against(one.folder, one.reference, int(float(one.row["n"])))
            there[one.folder] = {**one.row, **as_cells(versus)}
    plan = plan.with_rows(there)
    finished = {one.folder: one for one in plan.runs if one.row is not None}
    try:
        kept = wording.ROWS.read(plan.home / COMPARED)
    except UsageError:
        kept = []  # computed again
    runner, compared, uncompared = PlanRunner(plan, bench, say), list[Row](), dict[str, None]()
    for other, one in _pairs(plan, finished):
        ids = [there[run.folder].get("run_id", "") for run in (other, one)]
        same: list[Row] = [row for row in kept if [row["run_a"], row["run_b"]] == ids]
        if not same or one.folder in ran or other.folder in ran:
            try:
                same = runner.compare((other.label, other.folder), (one.label, one.folder))
            except UsageError as e:
                uncompared[str(e)] = None
        compared += same
    if finished:
        keep([(one.folder, one.row or {}) for one in finished.values() if not one.timed])
        write_atomically(plan.home / ROWS, to_csv([one.row or {} for one in finished.values()]).encode())
    adjusted = wording.readjusted(compared)
    if adjusted:
        write_atomically(plan.home / COMPARED, csv_text(wording.ROWS.columns, adjusted).encode())
    return replace(plan, compared=tuple(adjusted), uncompared=tuple(uncompared))


def _pairs(plan: SuitePlan, finished: Mapping[Path, TableRun]) -> list[tuple[TableRun, TableRun]]:
    """Every run after its vanilla AR, and the runs of the suite's own tests, in the order of `specbench compare`."""
    quality = [one for one in finished.values() if not one.timed]
    pairs = [(finished[one.reference], one) for one in quality if one.reference and one.reference in finished]
    lines = {(one.cell, one.key): one for one in quality}
    for cell, test in itertools.product(plan.suite.cells(), plan.suite.table.tests):
        other, one = lines.get((cell, test.other)), lines.get((cell, test.line))
        if other is not None and one is not None and (other, one) not in pairs:
            pairs.append((other, one))
    return pairs


# --- the definition in the folder -------------------------------------------------------------------------------------


def check_folder(out: Path) -> None:
    """UsageError for a folder that holds a run, or other things, and no suite."""
    if not (out / FILE).is_file() and any(path.name != ".lock" for path in out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no suite; choose another out=")


def write_definition(suite: Suite, out: Path) -> None:
    """Keeps the definition in the suite's folder, from which `status` and `resume` read it."""
    held = {"name": suite.table.id, **suite.source.held}
    text = yaml.safe_dump(held, sort_keys=False, allow_unicode=True, width=120)
    path = out / FILE
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text.encode())


def in_folder(out: Path) -> Suite:
    """The suite of a folder. UsageError where there is none."""
    source = suite_files.of_file(out / FILE)
    return read(source, source.definition.name or out.name)
