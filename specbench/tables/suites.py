"""Suites: the methods of a table on several models, sets of prompts and seeds, each against one shared vanilla AR.

    runs of quality: in batches, scored, no baseline; vanilla AR is one of them, decoded once per (model, prompts, seed)
    runs of seconds: one image at a time, alternating with vanilla AR prompt by prompt, not scored

Every run has its own folder inside the suite's, and what is finished is read from there: whatever stops a suite, the
same command goes on.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from specbench.config import parameters
from specbench.errors import UsageError
from specbench.rows.csv_files import has_runs, read_rows
from specbench.rows.seconds import is_timed
from specbench.storage.files import write_atomically
from specbench.tables import reading, suite_files
from specbench.tables.collect import as_text
from specbench.tables.definitions import STANDARD, Line, Table, row_column
from specbench.tables.measure import Need, Row, SuiteBench
from specbench.tables.suite_files import Source

FILE = "suite.yaml"  # in a suite's folder: its definition
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

    @property
    def path(self) -> Path:
        parts = [self.model, self.prompts, "" if self.seed is None else f"seed{self.seed}"]
        return Path(*(_file_name(part) for part in parts if part))


@dataclass(frozen=True)
class SuiteRun:
    """A run of a suite. folder: inside the suite's; reference: the folder of the vanilla AR that it is compared with,
    empty for vanilla itself; timed: one that measures seconds."""

    need: Need
    cell: Cell
    folder: Path
    reference: Path | None
    timed: bool

    @property
    def line(self) -> Line:
        return self.need.line


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


@dataclass(frozen=True)
class SuitePlan:
    """The runs of a suite in the folder `out`; left_out: why lines have none on some models."""

    suite: Suite
    out: Path
    runs: tuple[SuiteRun, ...]
    left_out: tuple[str, ...]

    @property
    def missing(self) -> list[SuiteRun]:
        return [run for run in self.runs if run.need.row is None]

    @property
    def command(self) -> str:
        return f"specbench resume {shlex.quote(str(self.out))}"


def read(source: Source, name: str) -> Suite:
    """A suite from a file. UsageError for what it cannot hold."""
    held = {**source.held}
    table = reading.table(name, source)
    if table.rows_of != "run":
        raise source.fault(f"it shows rows of specbench {table.rows_of}: draw it with specbench tables {name}")
    shared = dict(override.split("=", 1) for override in table.protocol)
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
        table = replace(table, columns=_default_columns(source, held, own))
    seconds = any(is_timed(column.key) for column in table.columns)
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


def _default_columns(source: Source, held: Mapping[str, Any], shared: Mapping[str, str]) -> tuple[Any, ...]:
    """Steps, seconds where they are measured, and what the metrics fill."""
    names = [name.strip() for name in shared.get("metrics", "scenes").strip("[]").split(",")]
    single = [one for name in names if name in parameters.choices("metrics") for one in _single(name)]
    keys = ["speedup_step", "accepted_length_mean"]
    keys += ["latency_s_mean", "speedup_latency"] if held.get("timed") else []
    keys += [column for name in single for column in parameters.metric_columns(name)]
    return tuple(STANDARD.get(key) or row_column(key) for key in dict.fromkeys(keys))


def _single(metrics: str) -> list[str]:
    return [name for name in parameters.single_metrics() if name in parameters.declared("metrics", metrics)]


# --- which runs -------------------------------------------------------------------------------------------------------


def plan(suite: Suite, out: Path, bench: SuiteBench) -> SuitePlan:
    """The runs of a suite, and which of them are finished in the folder `out`. Loads no model, writes nothing.

    UsageError for a line that has no run, with its name.
    """
    runs: list[SuiteRun] = []
    left_out: list[str] = []
    for cell in suite.cells():
        for timed in (False, True) if suite.timed else (False,):
            runs += _of_cell(suite, cell, timed, out, bench, left_out)
    return SuitePlan(suite, out, tuple(runs), tuple(dict.fromkeys(left_out)))


def _of_cell(
    suite: Suite, cell: Cell, timed: bool, out: Path, bench: SuiteBench, left_out: list[str]
) -> list[SuiteRun]:
    found: dict[str, SuiteRun] = {}  # by key of what is decoded
    references: dict[str, Line] = {}  # key of vanilla AR -> its line
    waiting: list[tuple[Line, tuple[str, ...], str, str]] = []
    for line in suite.table.lines:
        own = _own(suite, line, cell)
        if isinstance(own, str):
            left_out.append(own)
            continue
        arguments = _arguments(suite, cell, own, timed)
        vanilla = _arguments(suite, cell, [*suite.baseline, *_without_method(own, suite.baseline)], timed)
        try:
            keys = bench.key(arguments), bench.key(vanilla)
        except UsageError as e:
            raise UsageError(f"line {line.key} on {cell.model}: {e}") from None
        if keys[0] == keys[1]:
            references[keys[1]] = line
        waiting.append((line, arguments, *keys))
        if keys[1] not in references:
            differs = [one for one in _without_method(own, suite.baseline) if one not in suite.shared]
            label = ", ".join(["vanilla", *differs])
            taken = differs or any(other.key == "vanilla" for other in suite.table.lines)
            references[keys[1]] = Line(f"vanilla_{keys[1]}" if taken else "vanilla", label, vanilla)
    lines = {line.key for line, *_ in waiting}
    extra = [(line, line.overrides or (), key, key) for key, line in references.items() if line.key not in lines]
    for line, arguments, key, vanilla_key in (*extra, *waiting):
        if key in found:
            raise UsageError(f"lines {found[key].line.key} and {line.key} of {suite.table.id} are the same run")
        identity = replace(bench.identify(arguments), needs=() if timed else suite.table.needs)
        folder = cell.path / ("seconds" if timed else "") / f"{_file_name(line.key)}-{key}"
        reference = references[vanilla_key]
        row = _finished(out / folder, identity)
        need = Need(line, arguments, identity, row, alone=timed)
        other = None if key == vanilla_key else folder.parent / f"{_file_name(reference.key)}-{vanilla_key}"
        found[key] = SuiteRun(need, cell, folder, other, timed)
    return sorted(found.values(), key=lambda run: run.reference is not None)  # vanilla first


def _own(suite: Suite, line: Line, cell: Cell) -> tuple[str, ...] | str:
    """A line's overrides on a model, or why it has none."""
    [*of_model] = suite.models[cell.model]
    model = next((o.partition("=")[2] for o in of_model if o.startswith("model=")), suite.table.model)
    own = line.overrides if model == suite.table.model or line.elsewhere is None else line.elsewhere
    if own is None:
        return f"{line.label}: {line.without}"
    given = {o.partition("=")[0]: o.partition("=")[2] for o in own}
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


def _without_method(own: Sequence[str], baseline: Sequence[str]) -> list[str]:
    """A line's parameters that vanilla AR has, too: sampling, prompts, sizes."""
    of_methods = {*parameters.method_parameters(), *_PARTS_OF_METHODS, *(o.partition("=")[0] for o in baseline)}
    return [override for override in own if override.partition("=")[0] not in of_methods]


def _arguments(suite: Suite, cell: Cell, own: Sequence[str], timed: bool) -> tuple[str, ...]:
    """The overrides of a run; what comes later replaces what comes before."""
    layers: list[Sequence[str]] = [suite.models[cell.model], suite.shared, suite.prompts[cell.prompts]]
    layers += [[] if cell.seed is None else [f"seed={cell.seed}"], [f"n={suite.table.n}"]]
    shared = {o.partition("=")[0]: o for layer in layers for o in layer}
    method = {o.partition("=")[0]: o for o in own}
    for name in ("baseline", "timing"):
        method.pop(name, None)
    if timed:
        batch = {"batch": method["batch"]} if "batch" in method else {}
        shared |= {"n": f"n={suite.timed}"}
        method = {**method, **{o.partition("=")[0]: o for o in _SECONDS}, **batch}
        method.pop("n", None)
    merged = {**{k: o for k, o in shared.items() if k == "model"}, **method}
    return tuple((merged | {k: o for k, o in shared.items() if k not in merged}).values())


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._=,+-" else "_" for c in text)


def _finished(folder: Path, identity: Any) -> Row | None:
    """The row in a run's folder, if it is this run's."""
    path = folder / "row.csv"
    try:
        rows = read_rows(path) if path.is_file() and has_runs(path) else []
    except UsageError:
        return None  # the run itself says what is wrong
    return next((text for row in rows if identity.fits(text := as_text(row))), None)


# --- the definition in the folder -------------------------------------------------------------------------------------


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
