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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from specbench.config import configuration, parameters, registry
from specbench.config.run_config import RunConfig as RunConfig
from specbench.errors import RunError, UsageError
from specbench.harness.planned import EMITTED, SECONDS, Plan, PlannedRun, Row, digest, execute
from specbench.harness.planned import R as R  # of a field, for the documentation
from specbench.rows.columns import TIMED_COLUMNS
from specbench.rows.csv_files import as_cells, csv_text, has_runs, read_rows, to_csv
from specbench.storage.files import write_atomically
from specbench.tables import reading, suite_files
from specbench.tables.collect import Bench
from specbench.tables.definitions import STANDARD, Column, Line, Table, of_world, row_column
from specbench.tables.suite_files import Source

FILE, ROWS, COMPARED = "suite.yaml", "suite.csv", "compared.csv"  # in a suite's folder; the first is its definition
BATCH, TIMED = 16, 24  # by default: images decoded together, prompts of a timed run
#: Of timed runs: nothing is scored, and no statistic of what is emitted is computed.
_SECONDS = ("batch=1", "baseline=true", "timing=true", "metrics=none", "emitted_draws=0")
_PARTS_OF_METHODS = ("method", "variant", "drafter_weights", *parameters.PARTS)


@dataclass(frozen=True)
class Cell:
    """A model, a set of prompts and a seed; the former two by their labels."""

    model: str
    prompts: str
    seed: int | None  # None: each line's own

    @property
    def group(self) -> tuple[str, str]:
        """What stays when seeds are pooled."""
        return self.model, self.prompts

    def __str__(self) -> str:
        return ", ".join(filter(None, [*self.group, "" if self.seed is None else f"seed {self.seed}"]))

    @property
    def path(self) -> Path:
        parts = [self.model, self.prompts, "" if self.seed is None else f"seed{self.seed}"]
        return Path(*(_file_name(part) for part in parts if part))


@dataclass(frozen=True)
class Suite:
    """models, prompts: label -> overrides; timed: prompts of a run of seconds, 0: there are none."""

    table: Table
    models: Mapping[str, tuple[str, ...]]
    prompts: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    shared: tuple[str, ...]  # overrides of all runs
    baseline: tuple[str, ...]
    timed: int
    held: Mapping[str, Any] = field(repr=False)  # the definition, complete

    def cells(self) -> Iterator[Cell]:
        for model, prompts, seed in itertools.product(self.models, self.prompts, self.seeds or (None,)):
            yield Cell(model, prompts, seed)


@dataclass(frozen=True, kw_only=True)
class SuiteRun(PlannedRun):
    """A run of a suite. decodes: identifies what it decodes, whatever n, metrics and baseline are; reference: the
    folder of the vanilla AR with which it is compared, None for vanilla itself."""

    cell: Cell
    decodes: str
    reference: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.label} on {self.cell}" + (", timed" if self.timed else "")


@dataclass(frozen=True, kw_only=True)
class SuitePlan(Plan[SuiteRun]):
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
    held = {**source.held}
    table = reading.table(name, source)
    if table.rows_of != "run":
        raise source.fault(f"it shows rows of specbench {table.rows_of}: draw it with specbench tables {name}")
    shared = _values(table.protocol)
    models = source.entries("models", ("model",)) or {table.model: {"model": table.model}}
    prompts = source.entries("prompts", ("data",)) or {"": {}}
    seeds = [source.integer("seeds", seed, 0) for seed in source.sequence("seeds", held.get("seeds"))]
    if len(set(seeds)) < len(seeds):
        raise source.fault("seeds names one twice")
    if not seeds and "seed" in shared:
        seeds = [int(shared["seed"])]
    batch = source.integer("batch", held.get("batch", max(int(shared.get("batch", BATCH)), 1)))
    batch = BATCH if batch == 1 and "batch" not in held else batch
    own = {name: value for name, value in shared.items() if name not in ("seed", "batch", "timing", "baseline", "n")}
    if "metrics" in held:
        own["metrics"] = reading.overrides(source, "metrics", {"metrics": held["metrics"]})[0].partition("=")[2]
    if not table.columns:
        table = replace(
            table, columns=_default_columns(held, own, table.model, [*models.values()], [*prompts.values()])
        )
    seconds = any(column.key in TIMED_COLUMNS for column in table.columns)
    timed = source.integer("timed", held.get("timed", min(table.n, TIMED) if seconds else 0), 0)
    baseline = source.mapping("baseline", held.get("baseline", {"method": "vanilla"}))
    return Suite(
        table,
        {label: reading.overrides(source, f"models: {label}", one) for label, one in models.items()},
        {label: reading.overrides(source, f"prompts: {label}", one) for label, one in prompts.items()},
        tuple(seeds),
        (*(f"{name}={value}" for name, value in own.items()), f"batch={batch}", "baseline=false", "timing=false"),
        reading.overrides(source, "baseline", baseline),
        timed,
        held,
    )


def _default_columns(
    held: Mapping[str, Any],
    shared: Mapping[str, str],
    model: str,
    models: Sequence[Mapping[str, Any]],
    prompts: Sequence[Mapping[str, Any]],
) -> tuple[Column, ...]:
    """Steps, seconds where they are measured, and what the metrics fill: by default those that its runs have."""
    names: list[str] = []
    for one, data in itertools.product(models, prompts):
        chosen = {"model": model, **one, **data}
        run = of_world(chosen["model"], [f"{name}={value}" for name, value in (chosen | dict(shared)).items()])
        metrics = _values([f"metrics={parameters.default_choice('metrics')}", *run, *configuration.implied(run)])[
            "metrics"
        ]
        names += [name.strip() for name in metrics.strip("[]").split(",")]
    declared = [parameters.declared("metrics", name) for name in names if name in parameters.choices("metrics")]
    single = [one for some in declared for one in parameters.single_metrics() if one in some]
    keys = ["speedup_step", "accepted_length_mean"]
    keys += ["latency_s_mean", "speedup_latency"] if held.get("timed") else []
    keys += [column for name in single for column in parameters.metric_columns(name)]
    return tuple(STANDARD.get(key) or row_column(key) for key in dict.fromkeys(keys))


# --- which runs -------------------------------------------------------------------------------------------------------


def plan(suite: Suite, out: Path) -> SuitePlan:
    """The runs of a suite, and the rows of those that are finished in the folder `out`. Loads no model, writes nothing.

    UsageError for a line that has no run, with its name.
    """
    runs: list[SuiteRun] = []
    left_out: dict[str, None] = {}
    with configuration.session():  # one for all runs
        for cell in suite.cells():
            lines = {line.key: (line, _own(suite, line, cell)) for line in suite.table.lines}
            left_out |= {why: None for _, why in lines.values() if isinstance(why, str)}
            if foreign := set(suite.shared).difference(of_world(_model(suite, cell), suite.shared)):
                left_out[f"{cell.model} is a real model: its runs leave {' and '.join(sorted(foreign))} out"] = None
            there = [replace(line, overrides=own) for line, own in lines.values() if not isinstance(own, str)]
            for timed in (False, True) if suite.timed else (False,):
                runs += _of_cell(suite, cell, there, out, timed)
    return SuitePlan(title=suite.table.id, home=out, runs=tuple(runs), suite=suite, left_out=tuple(left_out))


def _of_cell(suite: Suite, cell: Cell, lines: Sequence[Line], out: Path, timed: bool) -> list[SuiteRun]:
    """The runs of these lines, after the vanilla AR that they need."""
    runs: list[tuple[SuiteRun, str]] = []  # each with what its vanilla AR decodes
    vanillas: dict[str, SuiteRun] = {}  # by what they decode
    for line in lines:
        sampling = _without_method(line.overrides or (), suite.baseline)
        differs = [override for override in sampling if override not in suite.shared]
        reference = Line("vanilla", ", ".join(["vanilla", *differs]), (*suite.baseline, *sampling))
        try:
            run, vanilla = (_planned(suite, cell, one, out, timed) for one in (line, reference))
        except UsageError as e:
            raise UsageError(f"line {line.key} on {cell.model}: {e}") from None
        if run.decodes == vanilla.decodes:
            vanilla = vanillas[run.decodes] = run  # a line of the suite is vanilla AR itself
        elif differs or any(other.key == "vanilla" for other in suite.table.lines):
            key = f"vanilla_{vanilla.decodes}"
            vanilla = replace(vanilla, key=key, folder=vanilla.folder.with_name(f"{key}-{vanilla.decodes}"))
        vanillas.setdefault(vanilla.decodes, vanilla)
        runs.append((run, vanilla.decodes))
    keys = {line.key for line in lines}
    found: dict[str, SuiteRun] = {}
    for run, needed in (*((one, one.decodes) for one in vanillas.values() if one.key not in keys), *runs):
        if run.decodes in found:
            raise UsageError(f"lines {found[run.decodes].key} and {run.key} of {suite.table.id} are the same run")
        other = None if run.decodes == needed else vanillas[needed].folder
        found[run.decodes] = replace(run, reference=other).with_newest(_rows(run.folder / "row.csv"))
    return sorted(found.values(), key=lambda run: run.reference is not None)


def _planned(suite: Suite, cell: Cell, line: Line, out: Path, timed: bool) -> SuiteRun:
    arguments = _arguments(suite, cell, line.overrides or (), timed)
    config = configuration.compose(arguments)
    weights = registry.weights_here(config)
    decodes = digest(config.changed(n=1, metrics=[], reference=None, baseline=False), weights)
    return SuiteRun(
        out / cell.path / ("seconds" if timed else "") / f"{_file_name(line.key)}-{decodes}",
        config,
        line.key,
        line.label,
        arguments,
        weights=weights,
        asked=configuration.names_metrics(arguments),
        needs=(SECONDS, EMITTED, *(() if timed else suite.table.needs)),
        cell=cell,
        decodes=decodes,
    )


def _own(suite: Suite, line: Line, cell: Cell) -> tuple[str, ...] | str:
    """A line's overrides on a model, or why it has none."""
    model = _model(suite, cell)
    own = line.overrides if model == suite.table.model or line.elsewhere is None else line.elsewhere
    if own is None:
        return f"{line.label}: {line.without}"
    given = _values(own)
    if suite.held.get("seeds") and "seed" in given:
        raise UsageError(f"line {line.key} has a seed of its own: leave seeds out")
    if foreign := [name for name in given if name in parameters.table() and name not in parameters.possible(model)]:
        return f"{line.label} has no run on {cell.model}, which has no {foreign[0]}"
    method = given.get("method", "")
    if method in parameters.choices("method") and model in parameters.choices("model"):
        kinds = parameters.kind("method", method), parameters.kind("model", model)
        if kinds[0] not in ("any", kinds[1]):
            return f"{line.label} has no run on {cell.model}, whose tokens are {kinds[1]}"
    return own


def _model(suite: Suite, cell: Cell) -> str:
    return _values(suite.models[cell.model]).get("model", suite.table.model)


def _without_method(own: Sequence[str], baseline: Sequence[str]) -> list[str]:
    """A line's parameters that vanilla AR has, too: sampling, prompts, sizes."""
    of_methods = {*parameters.method_parameters(), *_PARTS_OF_METHODS, *_values(baseline)}
    return [override for override in own if override.partition("=")[0] not in of_methods]


def _arguments(suite: Suite, cell: Cell, own: Sequence[str], timed: bool) -> tuple[str, ...]:
    """The overrides of a run: the model, what the line has, and the rest of what runs share."""
    seed = [] if cell.seed is None else [f"seed={cell.seed}"]
    n = f"n={suite.timed if timed else suite.table.n}"
    fitting, own = (of_world(_model(suite, cell), overrides) for overrides in (suite.shared, own))
    shared = _values([*suite.models[cell.model], *fitting, *suite.prompts[cell.prompts], *seed, n])
    method = {name: text for name, text in _values(own).items() if name not in ("baseline", "timing")}
    if timed:
        method = {**method, **_values(_SECONDS), **({"batch": method["batch"]} if "batch" in method else {})}
        method.pop("n", None)
    first = {name: text for name, text in shared.items() if name == "model"} | method
    return tuple(f"{name}={text}" for name, text in (first | shared | first).items())


def _values(overrides: Sequence[str]) -> dict[str, str]:
    """Name -> value as text; the last one counts."""
    return dict(override.split("=", 1) for override in overrides)


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
    made: dict[Path, Row] = {}
    failed: UsageError | RunError | None = None

    def keep(one: SuiteRun, row: Mapping[str, Any]) -> None:
        made[one.folder] = as_cells(row)

    try:
        execute(todo, todo.missing, bench.row, keep, say, jobs, patient=True)
    except (UsageError, RunError) as e:
        failed = e
    return gather(todo.with_rows(made), bench, made, say), failed


def gather(
    plan: SuitePlan, bench: Bench, ran: Collection[Path] = (), say: Callable[[str], None] = lambda text: None
) -> SuitePlan:
    """With what each finished run is next to vanilla AR, kept in `ROWS` and `COMPARED`; ran: the folders of runs whose
    comparisons are older than their rows."""
    from specbench.compare import wording
    from specbench.harness.row import against

    there = {one.folder: one.row for one in plan.runs if one.row is not None}
    pairs = {
        one.folder: (one.reference, int(float(one.row["n"])))
        for one in plan.runs
        if one.row is not None and not one.timed and one.reference in there
    }
    plan = plan.with_rows({run: {**there[run], **as_cells(against(run, *other))} for run, other in pairs.items()})
    finished = {one.folder: one for one in plan.runs if one.row is not None}
    try:
        kept = wording.ROWS.read(plan.home / COMPARED)
    except UsageError:
        kept = []  # computed again
    compared: list[dict[str, str]] = []
    uncompared: dict[str, None] = {}
    for other, one in _pairs(plan, finished):
        ids = [(run.row or {}).get("run_id", "") for run in (other, one)]
        same: list[dict[str, str]] = [row for row in kept if [row["run_a"], row["run_b"]] == ids]
        if not same or one.folder in ran or other.folder in ran:
            say(f"{plan.title}: {one.label} and {other.label}, image by image")
            try:
                found = bench.compare(other.folder, one.folder)
                same = [as_cells({name: row.get(name) for name in wording.ROWS.columns}) for row in found]
            except UsageError as e:
                uncompared[str(e)] = None
        compared += same
    if finished:
        from specbench.harness.run import keep

        keep([(one.folder, one.row or {}) for one in finished.values() if not one.timed])
        write_atomically(plan.home / ROWS, to_csv([one.row or {} for one in finished.values()]).encode())
    compared = wording.readjusted(compared)
    if compared:
        write_atomically(plan.home / COMPARED, csv_text(wording.ROWS.columns, compared).encode())
    return replace(plan, compared=tuple(compared), uncompared=tuple(uncompared))


def _pairs(plan: SuitePlan, finished: Mapping[Path, SuiteRun]) -> list[tuple[SuiteRun, SuiteRun]]:
    """Every run after its vanilla AR, and the runs of the suite's own tests, in the order of `specbench compare`."""
    quality = [one for one in finished.values() if not one.timed]
    found = [(finished[one.reference], one) for one in quality if one.reference and one.reference in finished]
    lines = {(one.cell, one.key): one for one in quality}
    for cell in plan.suite.cells():
        for test in plan.suite.table.tests:
            pair = lines.get((cell, test.other)), lines.get((cell, test.line))
            if pair[0] is not None and pair[1] is not None and pair not in found:
                found.append((pair[0], pair[1]))
    return found


# --- the definition in the folder -------------------------------------------------------------------------------------


def check_folder(out: Path) -> None:
    """UsageError for a folder that holds a run, or other things, and no suite."""
    if not (out / FILE).is_file() and any(path.name != ".lock" for path in out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no suite; choose another out=")


def write_definition(suite: Suite, out: Path) -> None:
    """Keeps the definition in the suite's folder, from which `status` and `resume` read it."""
    text = yaml.safe_dump({"name": suite.table.id, **suite.held}, sort_keys=False, allow_unicode=True, width=120)
    path = out / FILE
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text.encode())


def in_folder(out: Path) -> Suite:
    """The suite of a folder. UsageError where there is none."""
    source = suite_files.of_file(out / FILE)
    return read(source, source.text("name", source.held.get("name", out.name)))
