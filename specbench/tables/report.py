"""A report: rows of runs with their commands, audits and images as plain data, and the page that shows them."""

from __future__ import annotations

import base64
import json
import re
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from specbench.compare import breakdown, passes
from specbench.compare.breakdown import Group
from specbench.config import configuration, parameters, registry
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError, plain
from specbench.rows import baseline, collected, provenance, remark_text, selection
from specbench.rows.columns import COLUMNS, FLOAT32, METRICS, OF_RECORDS, SHOWN, TIMED_COLUMNS, Columns, Row, stderr_of
from specbench.rows.csv_files import ROW, write_run_row
from specbench.rows.journal import IMAGE_NAME
from specbench.rows.remark import remarks_of
from specbench.rows.shown import common_machine, doubt, elsewhere, shown
from specbench.storage.csv_text import csv_lines, read_header
from specbench.storage.files import content, write_atomically
from specbench.storage.package import __version__

#: Columns of a row that are neither numbers nor short enough for a list of facts.
_ELSEWHERE = ("drafted_by_position", "acceptance_by_step")
#: Columns that can distinguish two runs with the same label, in the order in which they are tried: what a user sets,
#: then the machine. No measured value names a run.
APART = (*(name for name in parameters.table() if name in COLUMNS), "device_name", "run_id")
#: The columns of speed, in the report's order: the x axis of the trade-off. Its y axis is a column of `METRICS`.
SPEEDS = (
    "speedup_latency",
    "step_compression",
    "speedup_throughput",
    "speedup_step",
    "speedup_expected",
    "accepted_length_mean",
)
#: The columns of a report that follow a run's name; the others follow in the order of `SHOWN`.
_FIRST = (*SPEEDS[:2], "emitted_kl", *(name for name in METRICS if name not in OF_RECORDS))
#: Exact rule -> the values of parameters with which it is exact, see `DraftShape.biased`, `verify.chains.Longest` and
#: `ContinuousRule.exact`, which need torch.
_EXACT_RULES: dict[str, dict[str, tuple[str, ...]]] = {
    "exact": {
        "coupling": ("none", "maximal", "gumbel", "height"),
        "stored": ("new",),
        "siblings": ("stored",),
        "select": ("first",),
        "opening": ("random",),
    },
    "density": {
        "criterion": ("exact", "path"),
        "verify": ("causal",),
        "on_reject": ("stop",),
        "inner_temperature": ("1", "1.0"),
        "final_noise": ("true",),
    },
}
#: Maximum numbers of methods or models, and of differing parameters, in the first sentence of a report.
_MOST_NAMES, _MOST_DIFFERING = 5, 4


@dataclass(frozen=True)
class Shot:
    """An image of a run: its PNG file and its prompt."""

    png: bytes
    prompt: str


@dataclass
class ReportContent:
    """rows: of runs, each with its source file; baselines: of the vanilla AR images that these runs decoded, see
    `rows.baseline`; audits: rows of `specbench audit`; shots: run_id -> images by prompt index; groups: run_id -> its
    `compare.breakdown`; folders: of the runs, with their run_id; notes: skipped runs, and why; by_id: run_id -> row,
    for all rows that were read."""

    rows: list[Columns] = field(default_factory=list)
    baselines: list[Columns] = field(default_factory=list)
    audits: list[dict[str, str]] = field(default_factory=list)
    shots: dict[str, dict[int, Shot]] = field(default_factory=dict)
    groups: dict[str, list[Group]] = field(default_factory=dict)
    folders: list[tuple[Path, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    by_id: dict[str, Columns] = field(default_factory=dict)


def gather(paths: Sequence[Path], runs: Sequence[Path], images: int, gallery: Sequence[Path] = ()) -> ReportContent:
    """The rows of the files in `paths` (CSV, Parquet), of the tables in the folders in `paths`, and of every
    run in these folders, in the folders `runs`, and in their subfolders; of these runs also the first `images` images.
    Folders in `gallery` only provide images of these rows.

    A run_id appears once. If CSV files have several rows of one configuration, the newest is shown; a run whose folder
    is given is always shown. A damaged or foreign row.csv in a folder is skipped, with a note.

    Raises UsageError for a source that is missing or unreadable, for a folder without runs, or if there is no row.
    """
    result = ReportContent()
    for source in paths:
        if source.is_file():
            _add_table(source, result)
        elif source.is_dir():
            is_table = [_add_table(path, result) for path in collected.tables_in(source)]
            result.folders += _add_runs(source, result, needed=not any(is_table))
        else:
            raise UsageError(f"there is no file or folder {source}")
    for folder in runs:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder} with runs")
        result.folders += _add_runs(folder, result, needed=True)
    result.audits = [dict(cells) for cells in dict.fromkeys(tuple(row.items()) for row in result.audits)]
    shown = _shown(result)
    if not shown and not result.audits:
        raise UsageError(
            f"no rows of runs or audits in {', '.join(map(str, [*paths, *runs]))}; name their CSV files or folder"
        )
    result.rows = [row for row in shown if not baseline.is_baseline(row)]
    result.baselines = [row for row in shown if baseline.is_baseline(row)]
    of_vanilla, unread = baseline.baselines(
        shown, [(folder, result.by_id[run_id]) for folder, run_id in result.folders]
    )
    result.notes += unread
    for row in of_vanilla:
        result.baselines.append(row | {"file": result.by_id[baseline.run_of(row)]["file"]})
    with configuration.session():  # one for all rows
        for row in (*result.rows, *result.baselines):
            row["command"], row["command_exact"] = command(row)
    others = ReportContent(notes=result.notes)
    of_gallery = [run for folder in gallery for run in _add_runs(folder, others, needed=False)]
    for folder, run_id in (*result.folders, *of_gallery):
        if run_id in result.by_id:
            _add_images(folder / "records.jsonl", run_id, images, result)
            _add_groups(folder, run_id, result)
        for row in result.baselines:
            if baseline.run_of(row) == run_id:
                _add_images(folder / baseline.RECORDS, row["run_id"], images, result)
    return result


def _add_table(path: Path, report: ReportContent) -> bool:
    """Adds the rows of one file. Returns whether it is a table of runs or audits; other files have no rows."""
    rows = collected.rows_of_table(path)
    if rows is not None:
        for row in rows:
            _add_row(row, path.name, report)
        return True
    if {"verdict", "samples"} <= set(read_header(path)):
        report.audits += [row for _, row in csv_lines(path)[1]]
        return True
    return False


def _add_runs(folder: Path, report: ReportContent, needed: bool) -> list[tuple[Path, str]]:
    """Adds the rows of the runs in a folder and its subfolders, and returns the runs. UsageError if `needed` and there
    is no run."""
    runs: list[tuple[Path, str]] = []
    faults: list[str] = []
    for path, row in collected.runs_in(folder):
        if isinstance(row, UsageError):
            faults.append(str(row))
        elif _add_row(row, (Path(folder.name) / path.relative_to(folder)).as_posix(), report):
            runs.append((path.parent, str(row["run_id"])))
    if needed and not runs:
        raise UsageError(faults[0] if faults else f"there are no runs in {folder}: no {ROW} is in or below it")
    report.notes.extend(f"left out: {fault}" for fault in faults)
    return runs


def _add_row(row: Columns, file: str, report: ReportContent) -> bool:
    """Adds a row and returns whether it can be shown. Of one run_id the newest row is shown; in a tie, the first."""
    if row["model"] is None or row["method"] is None:  # images of another origin, scored by specbench evaluate
        report.notes.append(f"left out: run {plain(row['run_id'])} of {file} names no model and method")
        return False
    other = report.by_id.get(row["run_id"])
    if other is None or (row["time"] or "") > (other["time"] or ""):
        report.by_id[row["run_id"]] = row | {"file": file}
    return True


def _shown(report: ReportContent) -> list[Columns]:
    """The newest row of every configuration, and the rows of the runs whose folders are given."""
    newest: dict[str, Columns] = {}
    for run_id, row in report.by_id.items():
        key = row["config_hash"] or f"run {run_id}"
        if key not in newest or (row["time"] or "") >= (newest[key]["time"] or ""):
            newest[key] = row
    chosen = {row["run_id"] for row in newest.values()} | {run_id for _, run_id in report.folders}
    return [row for run_id, row in report.by_id.items() if run_id in chosen]


def command(row: Row) -> tuple[str, bool]:
    """The command line of the run of a row, and whether it gives exactly the same configuration. A row does not contain
    all parameters of a run."""
    try:
        arguments, preset = _preset(row)
        for name, value in preset.plain().items():
            in_row = name in row and name not in ("model", "method", *parameters.PARTS, "device", "weights")
            if in_row and _text(row[name]) != _text(value):
                arguments.append(f"{name}={_text(row[name])}")
        if row["weights"] == "random":
            arguments.append("weights=random")
        if row["baseline_run_id"] is None and row["method"] != "vanilla":
            arguments.append("baseline=false")
        exact = False
        for more in ([], ["baseline=false"], ["metrics=none"], ["baseline=false", "metrics=none"]):
            if exact := provenance.config_hash(configuration.compose([*arguments, *more])) == row["config_hash"]:
                arguments += more
                break
    except UsageError:
        named = [name for name in parameters.table() if row.get(name) is not None and name not in ("device", "weights")]
        arguments, exact = [f"{name}={_text(row[name])}" for name in named], False
    return f"specbench run {shlex.join(arguments)}", exact


def _preset(row: Row) -> tuple[list[str], RunConfig]:
    """The arguments that name the model, the method and its parts, and their configuration."""
    arguments = [f"model={row['model']}", f"method={row['method']}"]
    preset = _composed(tuple(arguments))
    arguments += [
        f"{part}={row[part]}" for part in parameters.PARTS if row[part] and row[part] != getattr(preset, part)
    ]
    return arguments, _composed(tuple(arguments))


@cache
def _composed(arguments: tuple[str, ...]) -> RunConfig:
    return configuration.compose(arguments)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else _text(value)


def _add_images(records: Path, run_id: str, most: int, report: ReportContent) -> None:
    """Adds the first images that records name. Images from another folder of the same run stay."""
    folder = records.parent
    try:
        lines = content(records).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UsageError) as e:
        report.notes.append(f"no images of {folder}: cannot read its {records.name} ({getattr(e, 'strerror', e)})")
        return
    shots, unreadable = report.shots.get(run_id, {}), 0
    for line in lines:
        try:
            record = json.loads(line)
            index, name, prompt = record["index"], record["image"], record["prompt"]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue  # a half-written line
        # A name in the form that a run writes, so that no record points outside the folder.
        typed = type(index) is int and isinstance(prompt, str) and isinstance(name, str)
        if not typed or not 0 <= index < most or index in shots or not re.fullmatch(IMAGE_NAME, name):
            continue
        try:
            png = content(folder / name)
        except (OSError, UsageError):
            png = b""
        if png.startswith(b"\x89PNG\r\n\x1a\n"):
            shots[index] = Shot(png, prompt)
        else:
            unreadable += 1
    if unreadable:
        report.notes.append(f"{unreadable} images of {folder} are missing or not PNG files")
    if shots:
        report.shots[run_id] = shots


def _add_groups(folder: Path, run_id: str, report: ReportContent) -> None:
    """Adds the breakdown of a run, if all its files exist and are undamaged."""
    with suppress(UsageError):
        report.groups[run_id] = breakdown.of_pass(passes.read(str(folder)))


def keep(report: ReportContent, folder: Path) -> None:
    """Writes the shown images, with the rows and records to show them again, into a folder of small run folders."""
    for row in (*report.rows, *report.baselines):
        shots = report.shots.get(str(row["run_id"]), {})
        if not shots:
            continue
        run = folder / re.sub(r"[^\w-]+", "_", str(row["run_id"]))  # never a path, even for untrusted rows
        (run / "images").mkdir(parents=True, exist_ok=True)
        lines = []
        for index, shot in sorted(shots.items()):
            image = f"images/{index:05d}.png"
            (run / image).write_bytes(shot.png)
            lines.append(json.dumps({"index": index, "prompt": shot.prompt, "image": image}))
        write_atomically(run / "records.jsonl", "".join(line + "\n" for line in lines).encode())
        write_run_row(run, {name: row[name] for name in COLUMNS})


def page(report: ReportContent) -> str:
    """The HTML page. All texts of the rows are data in it, never markup."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    texts = {"about": about(report), "made": f"Drawn by specbench {__version__} on {day}"}
    content = json.dumps(page_data(report) | texts, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        content = content.replace(sign, f"\\u{ord(sign):04x}")
    template = (resources.files("specbench.tables") / "page.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/", content)


def page_data(report: ReportContent) -> dict[str, Any]:
    """The JSON data from which the page draws everything.

    Of a row: sampling: the parameters of its target's distribution, besides model and data; doubts: column -> why its
    seconds or speed-up cannot be compared.
    """
    rows, all_rows = [], [shown(row) for row in (*report.rows, *report.baselines)]
    machines = {
        (model, data, name): common_machine([r for r in all_rows if (r["model"], r["data"]) == (model, data)], [name])
        for model, data in {(row["model"], row["data"]) for row in all_rows}
        for name in SHOWN
        if name in TIMED_COLUMNS
    }
    for row in all_rows:
        values = {name: row[name] for name in SHOWN if row[name] is not None}
        rows.append(
            {
                "id": row["run_id"],
                "model": row["model"],
                "method": row["method"],
                "lossless": is_lossless(row),
                "sampling": _sampling(row),
                "label": label(row),
                "parameters": changed_parameters(row),
                "n": row["n"],
                "command": row["command"],
                "exact": row["command_exact"],
                "file": row["file"],
                "values": values,
                "errors": {name: row[stderr_of(name)] for name in values if row.get(stderr_of(name)) is not None},
                "doubts": _doubts(row, machines),
                "facts": _facts(row),
                "groups": [group.cells() for group in report.groups.get(str(row["run_id"]), [])],
                "map": _numbers(row["drafted_by_position"]),
                "images": {
                    i: {"prompt": shot.prompt, "png": base64.b64encode(shot.png).decode()}
                    for i, shot in report.shots.get(str(row["run_id"]), {}).items()
                },
            }
        )
    rows.sort(key=lambda r: (r["model"], r["method"] != "vanilla", r["method"], r["label"]))
    return {
        "shown": [
            {"key": name, **asdict(SHOWN[name]), "is": COLUMNS[name], "axis": _axis(name)}
            for name in dict.fromkeys((*_FIRST, *SHOWN))
            if any(name in row["values"] for row in rows)
        ],
        "rows": rows,
        "audits": report.audits,
        "columns": COLUMNS,
        "statistics": breakdown.STATISTICS,
        "apart": APART,
    }


def _axis(name: str) -> str:
    return "x" if name in SPEEDS else "y" if name in METRICS else ""


def is_lossless(row: Row) -> bool:
    """Whether a run has the target's distribution: the rule and the drafter are exact with their parameters, and no
    emitted divergence above rounding was measured. (A relaxed rule without a measured divergence is not lossless.)"""
    if any(row[name] is not None and row[name] > FLOAT32 for name in ("emitted_kl", "emitted_tv")):
        return False
    if row["drafter"] == "none":
        return not row["iterations"]
    exact = _EXACT_RULES.get(row["rule"])
    if exact is None or row["drafter"] == "vvs" or not parameters.in_raster_order(row["drafter"]):
        return False
    declared = parameters.in_run(row)
    return all(
        row[name] is None or _text(row[name]) in values or declared[name].unused_in(name, row)
        for name, values in exact.items()
    )


def _doubts(row: Row, machines: dict[tuple[str, str, str], tuple[str, ...] | None]) -> dict[str, str]:
    doubts = {}
    for (model, data, name), machine in machines.items():
        if machine and (row["model"], row["data"]) == (model, data) and row[name] is not None:
            doubts[name] = doubt(row, name) or elsewhere(row, name, machine)
    return {name: why for name, why in doubts.items() if why}


def _sampling(row: Row) -> dict[str, str]:
    names = parameters.declared("model", row["model"]) & COLUMNS.keys() - {"model"}
    values = {name: row[name] for name in sorted(names) if row[name] is not None}
    if "weights" in values:
        values["weights"] = registry.target_weights(values["weights"])
    return {name: _short(value) for name, value in values.items()}


def _facts(row: Row) -> Columns:
    """What a row says, without what the page shows elsewhere."""
    facts = {name: value for name, value in row.items() if value is not None and name not in (*_ELSEWHERE, "file")}
    return facts | ({"remarks": remark_text.joined(remarks_of(row))} if "remarks" in facts else {})


def about(report: ReportContent) -> str:
    """A short description of the runs: how many, methods, models, prompts, and in what they differ."""
    rows = [*report.baselines, *report.rows]
    counts = {"run": len(report.rows), "audit": len(report.audits)}
    text = " and ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
    if not rows:
        return f"{text}."
    methods, models = (_count_or_list([str(row[name]) for row in rows], name) for name in ("method", "model"))
    numbers = sorted({row["n"] for row in rows if row["n"]})
    prompts = f", {numbers[0]}{f' to {numbers[-1]}' * (len(numbers) > 1)} prompts per run" if numbers else ""
    differing = selection.differing(rows)
    differences = f" The runs differ in {', '.join(differing)}." if 0 < len(differing) <= _MOST_DIFFERING else ""
    return f"{text}: {methods} on {models}{prompts}.{differences}"


def _count_or_list(values: Sequence[str], name: str) -> str:
    names = list(dict.fromkeys(values))
    if len(names) > _MOST_NAMES:
        return f"{len(names)} {name}s"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _numbers(text: str | None) -> list[float] | None:
    """A JSON list of numbers; None for anything else, since a cell may contain any text."""
    try:
        values = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(values, list) and all(type(v) in (int, float) and abs(v) < 1e100 for v in values)
    return values if is_list else None


def label(row: Row) -> str:
    """A method and its differences from its preset, such as "cool_sd delta=2"."""
    return " ".join([str(row["method"]), *(f"{name}={value}" for name, value in changed_parameters(row).items())])


def changed_parameters(row: Row) -> dict[str, str]:
    """The parameters of a row's method or sampling that differ from the preset of the method with its parts."""
    try:
        arguments, preset = _preset(row)
    except UsageError:
        return {}
    parts = [argument.partition("=")[0] for argument in arguments[2:]]
    sampling = ("temperature", "top_k", "top_p", "entropy_temperature", "top_n_sigma", "cfg_scale")
    changed = [
        name
        for name in {*parameters.method_parameters(), *sampling} - {*parameters.PARTS}
        if name in preset and _text(row.get(name)) != _text(preset.get(name))
    ]
    # A parameter without a value does not belong to this method's drafter or rule.
    return {name: _short(row[name]) for name in (*parts, *sorted(changed)) if row.get(name) is not None}
