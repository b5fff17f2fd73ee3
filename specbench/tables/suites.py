"""Suites: the methods of a table on several models, sets of prompts and seeds, each against one shared vanilla AR.

    runs of quality: in batches, scored, no baseline; vanilla AR is one of them, decoded once per (model, prompts, seed)
    runs of seconds: one image at a time, alternating with vanilla AR prompt by prompt, not scored

Every run has its own folder inside the suite's folder, and finished runs are read from there. After any interruption,
the same command continues.
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
BATCH, TIMED = 16, 24  # defaults: images decoded together, prompts of a timed run
#: Parameters of timed runs: no scores, and no statistics of the emitted distribution.
_SECONDS = {"batch": "1", "baseline": "true", "timing": "true", "metrics": "none", "emitted_draws": "0"}
#: Parameters of runs of quality. Only timed runs decode one image at a time.
_QUALITY = {"baseline": "false", "timing": "false"}
_PARTS_OF_METHODS = ("method", "variant", "drafter_weights", *parameters.PARTS)
Values = Mapping[str, str]  # parameter -> its value as text


@dataclass(frozen=True)
class Suite:
    """models, prompts: label -> parameters; shared: parameters of all runs; timed: prompts of a timed run; 0: no timed
    runs."""

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
    """The runs of a suite. left_out: why lines have no run on some models; compared: the rows of `specbench compare`
    for runs and their vanilla AR, after `gather`; uncompared: why some are missing."""

    suite: Suite
    left_out: tuple[str, ...]
    compared: tuple[Row, ...] = ()
    uncompared: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return f"specbench resume {shlex.quote(str(self.home))}"


def read(source: Source, name: str) -> Suite:
    """The suite in a file. UsageError for invalid content."""
    keys, table = source.definition, catalog.table(name, source)
    if keys.rows_of != "run":
        raise source.fault(f"it shows rows of specbench {keys.rows_of}: draw it with specbench tables {name}")
    if len(set(keys.seeds)) < len(keys.seeds):
        raise source.fault("seeds contains one seed twice")

    def entries(key: str, parameter: str) -> dict[str, Values]:
        labelled = source.entries(key, parameter).items()
        return {label: named(catalog.overrides(source, f"{key}: {label}", values)) for label, values in labelled}

    protocol = named(table.protocol)
    models = entries("models", "model") or {table.model: {"model": table.model}}
    prompts = entries("prompts", "data") or {"": {}}
    declared = parameters.table()
    seeds = keys.seeds or ((declared["seed"].from_text("seed", protocol["seed"]),) if "seed" in protocol else ())
    batch = declared["batch"].from_text("batch", protocol.get("batch", "1"))
    separate = ("seed", "batch", "timing", "baseline", "n")
    shared = {name: value for name, value in protocol.items() if name not in separate}
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
    """Steps, seconds if they are measured, and the columns of the metrics; default: the metrics that its runs have."""
    columns = ["speedup_step", "accepted_length_mean"]
    columns += ["latency_s_mean", "speedup_latency"] if keys.timed else []
    default = {"metrics": parameters.default_choice("metrics")}
    for model, data in itertools.product(models.values(), prompts.values()):
        chosen = {"model": keys.model, **model, **data, **shared}
        run = of_world(chosen["model"], chosen)
        metrics = (default | run | named(configuration.implied(as_overrides(run))))["metrics"]
        for name in metrics.strip("[]").split(","):
            names = (
                parameters.declared("metrics", name.strip()) if name.strip() in parameters.choices("metrics") else ()
            )
            for metric in (m for m in parameters.single_metrics() if m in names):
                columns += parameters.metric_columns(metric)
    return tuple(STANDARD.get(key) or row_column(key) for key in dict.fromkeys(columns))


# --- which runs -------------------------------------------------------------------------------------------------------


def plan(suite: Suite, out: Path) -> SuitePlan:
    """The runs of a suite, and the rows of the finished ones in the folder `out`. Loads no model, writes nothing.

    UsageError, with its name, for a line that has no run.
    """
    runs: list[TableRun] = []
    left_out: list[str] = []
    with configuration.session():  # one for all runs
        for cell in suite.cells():
            lines = []
            for line in suite.table.lines:
                arguments = _parameters(suite, line, cell)
                if isinstance(arguments, str):
                    left_out.append(arguments)
                else:
                    lines.append((line, arguments))
            fitting = of_world(suite.model(cell), suite.shared)
            if foreign := as_overrides({name: v for name, v in suite.shared.items() if name not in fitting}):
                left_out.append(f"{cell.model} is a real model: its runs leave {' and '.join(sorted(foreign))} out")
            for timed in (False, True) if suite.timed else (False,):
                runs += _of_cell(suite, cell, lines, out, timed)
    return SuitePlan(
        title=suite.table.id, home=out, runs=tuple(runs), suite=suite, left_out=tuple(dict.fromkeys(left_out))
    )


def _parameters(suite: Suite, line: Line, cell: Cell) -> Values | str:
    """A line's parameters on a model, or the reason why it has no run there."""
    model = suite.model(cell)
    values = line.on(model, suite.table.model)
    if values is None:
        return f"{line.label}: {line.without}"
    if suite.source.definition.seeds and "seed" in values:
        raise UsageError(f"line {line.key} has its own seed: leave seeds out")
    if foreign := [name for name in values if name in parameters.table() and name not in parameters.possible(model)]:
        return f"{line.label} has no run on {cell.model}, which has no {foreign[0]}"
    method = values.get("method", "")
    if method in parameters.choices("method") and model in parameters.choices("model"):
        fits, kind = parameters.kind("method", method), parameters.kind("model", model)
        if fits not in ("any", kind):
            return f"{line.label} has no run on {cell.model}, whose tokens are {kind}"
    return values


def _of_cell(suite: Suite, cell: Cell, lines: Sequence[tuple[Line, Values]], out: Path, timed: bool) -> list[TableRun]:
    """The runs of these lines, after the vanilla AR runs that they need: one for every sampling of the lines, unless a
    line is vanilla AR itself."""
    runs: dict[str, tuple[TableRun, str]] = {}  # by `decodes`: the run, and the `decodes` of its vanilla AR
    vanillas: dict[str, TableRun] = {}  # by `decodes`
    called = {line.key for line in suite.table.lines}
    for line, values in lines:
        sampling = _without_method(values, suite.baseline)
        differs = [f"{name}={value}" for name, value in sampling.items() if suite.shared.get(name) != value]
        reference = Line("vanilla", ", ".join(["vanilla", *differs]), None)
        try:
            run = _planned(suite, cell, line, values, out, timed)
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


def _planned(suite: Suite, cell: Cell, line: Line, values: Values, out: Path, timed: bool) -> TableRun:
    """The run of a line in its folder. More prompts, other metrics and another baseline reuse its images."""
    parts = [cell.model, cell.prompts, "" if cell.seed is None else f"seed{cell.seed}", "seconds" if timed else ""]
    home = out.joinpath(*map(_file_name, filter(None, parts)))
    free = {"n": 1, "metrics": [], "reference": None, "baseline": False}
    return TableRun.for_line(
        home, line, _arguments(suite, cell, values, timed), free, needs=(SECONDS, EMITTED), cell=cell
    )


def _without_method(values: Values, baseline: Values) -> dict[str, str]:
    """The parameters of a line that vanilla AR has, too: sampling, prompts, sizes."""
    of_methods = {*parameters.method_parameters(), *_PARTS_OF_METHODS, *baseline}
    return {name: value for name, value in values.items() if name not in of_methods}


def _arguments(suite: Suite, cell: Cell, values: Values, timed: bool) -> list[str]:
    """The overrides of a run: the model, the line's parameters, and the remaining shared parameters."""
    model = suite.model(cell)
    shared = {**suite.models[cell.model], **of_world(model, suite.shared), **suite.prompts[cell.prompts]}
    shared |= {} if cell.seed is None else {"seed": str(cell.seed)}
    shared["n"] = str(suite.timed if timed else suite.table.n)
    arguments = {name: value for name, value in of_world(model, values).items() if name not in _QUALITY}
    if timed:
        arguments |= _SECONDS | {name: value for name, value in arguments.items() if name == "batch"}
        arguments.pop("n", None)
    first = {name: value for name, value in shared.items() if name == "model"} | arguments
    return as_overrides(first | shared | first)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._=,+-" else "_" for c in text)


def _rows(path: Path) -> list[Row]:
    try:
        return [as_cells(row) for row in read_rows(path)] if path.is_file() and has_runs(path) else []
    except UsageError:
        return []  # the run itself reports the mistake


# --- running and comparing --------------------------------------------------------------------------------------------


def run(
    todo: SuitePlan, bench: Bench, say: Callable[[str], None], jobs: int = 1
) -> tuple[SuitePlan, UsageError | RunError | None]:
    """Executes the runs without a row; a failed run does not stop the others. Then calls `gather`. Returns the plan,
    and the error if runs failed."""
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
    """Adds the comparison of each finished run with vanilla AR, and of the means over seeds. Writes `ROWS` and
    `COMPARED`. ran: the folders of runs whose stored comparisons are outdated."""
    from specbench.compare import comparison, passes, wording
    from specbench.harness.row import against

    rows = {run.folder: run.row for run in plan.runs if run.row is not None}
    for run in plan.runs:
        if run.row is not None and not run.timed and run.reference in rows:
            versus = against(run.folder, run.reference, int(float(run.row["n"])))
            rows[run.folder] = {**run.row, **as_cells(versus)}
    plan = plan.with_rows(rows)
    finished = {run.folder: run for run in plan.runs if run.row is not None}
    try:
        kept = wording.ROWS.read(plan.home / COMPARED)
    except UsageError:
        kept = []  # computed again
    runner, compared, uncompared = PlanRunner(plan, bench, say), list[Row](), dict[str, None]()
    pairs = _pairs(plan, finished)
    groups: dict[tuple[object, ...], list[tuple[TableRun, TableRun]]] = {}  # pairs that differ only in their seed
    for other, run in pairs:
        key = run.cell.group, run.key, None if run.reference == other.folder else other.key
        groups.setdefault(key, []).append((other, run))
    for group in (*([pair] for pair in pairs), *(group for group in groups.values() if len(group) > 1)):
        ids = [" / ".join(rows[run.folder].get("run_id", "") for run in side) for side in zip(*group, strict=True)]
        same: list[Row] = [row for row in kept if [row["run_a"], row["run_b"]] == ids]
        if not same or any(run.folder in ran for pair in group for run in pair):
            try:
                if len(group) == 1:
                    same = runner.compare(*((run.label, run.folder) for run in group[0]))
                else:
                    seeds = [(passes.read(str(a.folder)), passes.read(str(b.folder))) for a, b in group]
                    lines = wording.rows(comparison.over_seeds(seeds))
                    same = [as_cells({name: line.get(name) for name in wording.ROWS.columns}) for line in lines]
            except UsageError as e:
                uncompared[str(e)] = None
        compared += same
    if finished:
        write_atomically(plan.home / ROWS, to_csv([run.row or {} for run in finished.values()]).encode())
    adjusted: Sequence[Row] = compared
    for family in _families(compared):
        adjusted = wording.readjusted(adjusted, family)
    if adjusted:
        write_atomically(plan.home / COMPARED, csv_text(wording.ROWS.columns, adjusted).encode())
    return replace(plan, compared=tuple(adjusted), uncompared=tuple(uncompared))


def _families(compared: Sequence[Row]) -> list[list[int]]:
    """The rows that Holm's adjustment covers together: first the rows of one seed of several, then all others, which
    give the stars."""
    several = {run_id for row in compared if " / " in row["run_b"] for run_id in row["run_b"].split(" / ")}
    return [[i for i, row in enumerate(compared) if (row["run_b"] in several) == one] for one in (True, False)]


def _pairs(plan: SuitePlan, finished: Mapping[Path, TableRun]) -> list[tuple[TableRun, TableRun]]:
    """Every run after its vanilla AR, and the runs of the suite's own tests, as arguments of `specbench compare`."""
    quality = [run for run in finished.values() if not run.timed]
    pairs = [(finished[run.reference], run) for run in quality if run.reference and run.reference in finished]
    lines = {(run.cell, run.key): run for run in quality}
    for cell, test in itertools.product(plan.suite.cells(), plan.suite.table.tests):
        other, run = lines.get((cell, test.other)), lines.get((cell, test.line))
        if other is not None and run is not None and (other, run) not in pairs:
            pairs.append((other, run))
    return pairs


# --- the definition in the folder -------------------------------------------------------------------------------------


def check_folder(out: Path) -> None:
    """UsageError for a folder that has content but no suite, such as a run."""
    if not (out / FILE).is_file() and any(path.name != ".lock" for path in out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no suite; choose another out=")


def write_definition(suite: Suite, out: Path) -> None:
    """Stores the definition in the suite's folder, from which `status` and `resume` read it."""
    content = {"name": suite.table.id, **suite.source.content}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    path = out / FILE
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text.encode())


def in_folder(out: Path) -> Suite:
    """The suite in a folder. UsageError if it contains no suite."""
    source = suite_files.of_file(out / FILE)
    return read(source, source.definition.name or out.name)
