"""A report: rows of runs with their commands, audits and images as plain data, and the page that shows them."""

from __future__ import annotations

import base64
import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from specbench.compare import breakdown, passes
from specbench.config import configuration, parameters, variants
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError, plain
from specbench.rows import baseline, provenance, selection, sources
from specbench.rows.columns import COLUMNS, METRICS, SHOWN, stderr_of
from specbench.rows.csv_files import to_csv
from specbench.rows.journal import IMAGE_NAME
from specbench.rows.shown import shown
from specbench.storage.csv_text import csv_lines, read_header
from specbench.storage.files import content, write_atomically
from specbench.storage.package import __version__

#: Columns of a row that are not numbers and too long for a list of facts.
_ELSEWHERE = ("drafted_by_position", "acceptance_by_step")
#: Columns that can distinguish two runs with the same label, in the order in which they are tried.
APART = (*(name for name in parameters.table() if name in COLUMNS), "device_name", "time", "run_id")
#: Methods or models, and differing parameters, that the first sentence of a report names; more are counted.
_MOST_NAMES, _MOST_DIFFERING = 5, 4


@dataclass(frozen=True)
class Shot:
    """An image of a run: its PNG file and its prompt."""

    png: bytes
    prompt: str


@dataclass
class Found:
    """rows: of runs, each with its source file; baselines: of the vanilla AR images that these runs decoded, see
    `rows.baseline`; audits: rows of `specbench audit`; shots: run_id -> images by prompt index; groups: run_id -> its
    `rows.breakdown`; folders: of the runs, with their run_id; notes: what was left out, and why; by_id: run_id -> row
    of everything that was read."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    baselines: list[dict[str, Any]] = field(default_factory=list)
    audits: list[dict[str, str]] = field(default_factory=list)
    shots: dict[str, dict[int, Shot]] = field(default_factory=dict)
    groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    folders: list[tuple[Path, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    by_id: dict[str, dict[str, Any]] = field(default_factory=dict)


def gather(given: Sequence[Path], runs: Sequence[Path], images: int, gallery: Sequence[Path] = ()) -> Found:
    """The rows of the files `given` (CSV, Parquet, stores), of the tables in the folders `given`, and of every run at
    or below these folders and the folders `runs`; of those runs also the first `images` images. Folders `gallery`
    provide images of these rows, and no rows.

    A run_id appears once. Of several rows of one configuration in CSV files the newest is shown; a run whose folder is
    given is always shown. A damaged or foreign row.csv below a folder is left out, with a note.

    Raises UsageError for a source that is absent or unreadable, for a folder without runs, or if there is no row.
    """
    found = Found()
    for source in given:
        if source.is_file():
            _add_table(source, found)
        elif source.is_dir():
            is_table = [_add_table(path, found) for path in sources.tables_in(source)]
            found.folders += _add_runs(source, found, needed=not any(is_table))
        else:
            raise UsageError(f"there is no file or folder {source}")
    for folder in runs:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder} with runs")
        found.folders += _add_runs(folder, found, needed=True)
    found.audits = [dict(cells) for cells in dict.fromkeys(tuple(row.items()) for row in found.audits)]
    shown = _shown(found)
    if not shown and not found.audits:
        raise UsageError(
            f"no rows of runs or audits in {', '.join(map(str, [*given, *runs]))}; name their CSV files or folder"
        )
    found.rows = [row for row in shown if not baseline.is_baseline(row)]
    found.baselines = [row for row in shown if baseline.is_baseline(row)]
    for row in baseline.baselines(shown, [(folder, found.by_id[run_id]) for folder, run_id in found.folders]):
        found.baselines.append(row | {"file": found.by_id[baseline.run_of(row)]["file"]})
    for row in (*found.rows, *found.baselines):
        row["command"], row["command_exact"] = command(row)
    others = Found(notes=found.notes)
    of_gallery = [one for folder in gallery for one in _add_runs(folder, others, needed=False)]
    for folder, run_id in (*found.folders, *of_gallery):
        if run_id in found.by_id:
            _add_images(folder / "records.jsonl", run_id, images, found)
            _add_groups(folder, run_id, found)
        for row in found.baselines:
            if baseline.run_of(row) == run_id:
                _add_images(folder / baseline.RECORDS, row["run_id"], images, found)
    return found


def _add_table(path: Path, found: Found) -> bool:
    """Adds the rows of one file; returns whether it is a table of runs or audits. Other files have no rows."""
    rows = sources.rows_of_table(path)
    if rows is not None:
        for row in rows:
            _add_row(row, path.name, found)
        return True
    if {"verdict", "samples"} <= set(read_header(path)):
        found.audits += [row for _, row in csv_lines(path)[1]]
        return True
    return False


def _add_runs(folder: Path, found: Found, needed: bool) -> list[tuple[Path, str]]:
    """The runs at or below a folder, nested as in grids, whose rows are added. UsageError if `needed` and no run is
    there."""
    taken: list[tuple[Path, str]] = []
    faults: list[str] = []
    for path, row in sources.runs_in(folder):
        if isinstance(row, UsageError):
            faults.append(str(row))
        elif _add_row(row, (Path(folder.name) / path.relative_to(folder)).as_posix(), found):
            taken.append((path.parent, str(row["run_id"])))
    if needed and not taken:
        raise UsageError(faults[0] if faults else f"there are no runs in {folder}: no {sources.ROW} is at or below it")
    found.notes.extend(f"left out: {fault}" for fault in faults)
    return taken


def _add_row(row: dict[str, Any], file: str, found: Found) -> bool:
    """Adds a row and returns whether it can be shown; of one run_id the newest is shown, of equal ones the first."""
    if row["model"] is None or row["method"] is None:  # images that specbench evaluate scored, from elsewhere
        found.notes.append(f"left out: run {plain(row['run_id'])} of {file} names no model and method")
        return False
    other = found.by_id.get(row["run_id"])
    if other is None or (row["time"] or "") > (other["time"] or ""):
        found.by_id[row["run_id"]] = row | {"file": file}
    return True


def _shown(found: Found) -> list[dict[str, Any]]:
    """The newest row of every configuration, and the rows of the runs whose folders were given."""
    newest: dict[tuple[str | None, ...], dict[str, Any]] = {}
    for run_id, row in found.by_id.items():
        # Of a served run the server names the model and its own version.
        key = row["config_hash"] or f"run {run_id}", row["server"], row["server"] and row["model"]
        if key not in newest or (row["time"] or "") >= (newest[key]["time"] or ""):
            newest[key] = row
    chosen = {row["run_id"] for row in newest.values()} | {run_id for _, run_id in found.folders}
    return [row for run_id, row in found.by_id.items() if run_id in chosen]


def command(row: Mapping[str, Any]) -> tuple[str, bool]:
    """The command line of the run of a row, and whether it gives exactly the same configuration: a row lacks some of a
    run's parameters, and those of an older version may have another meaning today; of images that a server decoded, its
    address."""
    if parameters.is_served(row):
        own = [name for name in parameters.parameters_of(row) if name not in (*parameters.SERVED, "device")]
        given = [f"{name}={_text(row[name])}" for name in own if row.get(name) is not None]
        return f"specbench run {shlex.join(['url=...', 'model_name=' + str(row['model']), *given])}", False
    try:
        arguments, preset = _preset(row)
        for name, value in preset.items():
            in_row = name in row and name not in ("model", "method", *parameters.PARTS, "device", "weights")
            if row.get(name) is None and variants.ADDED.get(name) == value:
                continue  # of a version without the parameter
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


def _preset(row: Mapping[str, Any]) -> tuple[list[str], RunConfig]:
    """The arguments that name the model, the method and its parts, and their configuration."""
    arguments = [f"model={row['model']}", f"method={row['method']}"]
    preset = _composed(tuple(arguments))
    arguments += [f"{part}={row[part]}" for part in parameters.PARTS if row[part] and row[part] != preset[part]]
    return arguments, _composed(tuple(arguments))


@cache
def _composed(arguments: tuple[str, ...]) -> RunConfig:
    return configuration.compose(arguments)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else _text(value)


def _add_images(records: Path, run_id: str, most: int, found: Found) -> None:
    """Adds the first images that records name; those from another folder of the same run stay."""
    folder = records.parent
    try:
        lines = content(records).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UsageError) as e:
        found.notes.append(f"no images of {folder}: cannot read its {records.name} ({getattr(e, 'strerror', e)})")
        return
    shots, unreadable = found.shots.get(run_id, {}), 0
    for line in lines:
        try:
            record = json.loads(line)
            index, name, prompt = record["index"], record["image"], record["prompt"]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue  # a half-written line
        # A name in the form that a run writes: no record points outside the folder.
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
        found.notes.append(f"{unreadable} images of {folder} are absent or not PNG files")
    if shots:
        found.shots[run_id] = shots


def _add_groups(folder: Path, run_id: str, found: Found) -> None:
    """Adds the breakdown of a run, if everything that it needs is there and undamaged."""
    with suppress(UsageError):
        rows = breakdown.of_pass(passes.read(str(folder)))
        found.groups[run_id] = [{name: row[name] for name in row if name not in ("run_id", "method")} for row in rows]


def keep(found: Found, folder: Path) -> None:
    """Writes the shown images, with what is needed to show them again, into a folder of small run folders."""
    for row in (*found.rows, *found.baselines):
        shots = found.shots.get(str(row["run_id"]), {})
        if not shots:
            continue
        run = folder / re.sub(r"[^\w-]+", "_", str(row["run_id"]))  # a name and not a path, for untrusted rows too
        (run / "images").mkdir(parents=True, exist_ok=True)
        lines = []
        for index, shot in sorted(shots.items()):
            image = f"images/{index:05d}.png"
            (run / image).write_bytes(shot.png)
            lines.append(json.dumps({"index": index, "prompt": shot.prompt, "image": image}))
        write_atomically(run / "records.jsonl", "".join(line + "\n" for line in lines).encode())
        write_atomically(run / sources.ROW, to_csv([{name: row[name] for name in COLUMNS}]).encode())


def page(found: Found) -> str:
    """The HTML page. Whatever texts the rows hold, they are data in it, never markup."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    texts = {"about": about(found), "made": f"Drawn by specbench {__version__} on {day}"}
    content = json.dumps(page_data(found) | texts, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        content = content.replace(sign, f"\\u{ord(sign):04x}")
    template = (resources.files("specbench.tables") / "page.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/", content)


def page_data(found: Found) -> dict[str, Any]:
    """The JSON from which the page draws everything."""
    rows = []
    for row in map(shown, (*found.rows, *found.baselines)):
        values = {name: row[name] for name in SHOWN if row[name] is not None}
        rows.append(
            {
                "id": row["run_id"],
                "model": row["model"],
                "method": row["method"],
                "label": label(row),
                "parameters": differences(row),
                "n": row["n"],
                "command": row["command"],
                "exact": row["command_exact"],
                "file": row["file"],
                "values": values,
                "errors": {name: row[stderr_of(name)] for name in values if row.get(stderr_of(name)) is not None},
                "facts": {k: v for k, v in row.items() if v is not None and k not in (*_ELSEWHERE, "file")},
                "groups": found.groups.get(str(row["run_id"]), []),
                "map": _numbers(row["drafted_by_position"]),
                "images": {
                    i: {"prompt": shot.prompt, "png": base64.b64encode(shot.png).decode()}
                    for i, shot in found.shots.get(str(row["run_id"]), {}).items()
                },
            }
        )
    rows.sort(key=lambda r: (r["model"], r["method"] != "vanilla", r["method"], r["label"]))
    order = (*(name for name in selection.RESULTS if name in SHOWN), *SHOWN)
    return {
        "shown": [
            {"key": name, **asdict(SHOWN[name]), "is": COLUMNS[name], "quality": name in METRICS}
            for name in dict.fromkeys(order)
            if any(name in row["values"] for row in rows)
        ],
        "rows": rows,
        "audits": found.audits,
        "columns": COLUMNS,
        "statistics": breakdown.STATISTICS,
        "apart": APART,
    }


def about(found: Found) -> str:
    """What the runs are, in a few words: how many, methods, models, prompts, and in what they differ."""
    rows = [*found.baselines, *found.rows]
    counts = {"run": len(found.rows), "audit": len(found.audits)}
    text = " and ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
    if not rows:
        return f"{text}."
    methods, models = (_count_or_list([str(row[name]) for row in rows], name) for name in ("method", "model"))
    numbers = sorted({row["n"] for row in rows if row["n"]})
    prompts = f", {numbers[0]}{f' to {numbers[-1]}' * (len(numbers) > 1)} prompts a run" if numbers else ""
    differing = selection.differing(rows)
    told = f" The runs differ in {', '.join(differing)}." if 0 < len(differing) <= _MOST_DIFFERING else ""
    return f"{text}: {methods} on {models}{prompts}.{told}"


def _count_or_list(values: Sequence[str], name: str) -> str:
    some = list(dict.fromkeys(values))
    if len(some) > _MOST_NAMES:
        return f"{len(some)} {name}s"
    return " and ".join(filter(None, [", ".join(some[:-1]), some[-1]]))


def _numbers(text: str | None) -> list[float] | None:
    """A JSON list of numbers; None for anything else, since a cell may hold any text."""
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(found, list) and all(type(v) in (int, float) and abs(v) < 1e100 for v in found)
    return found if is_list else None


def label(row: Mapping[str, Any]) -> str:
    """A method and its differences from its preset, such as "cool_sd delta=2"."""
    return " ".join([str(row["method"]), *(f"{name}={value}" for name, value in differences(row).items())])


def differences(row: Mapping[str, Any]) -> dict[str, str]:
    """The parameters in which the method of a row, or its sampling, differs from the preset of the method with its
    parts."""
    if parameters.is_served(row):
        return {name: _short(row[name]) for name in ("concurrency", "request_rate") if row[name] is not None}
    try:
        arguments, preset = _preset(row)
    except UsageError:
        return {}
    parts = [argument.partition("=")[0] for argument in arguments[2:]]
    sampling = ("temperature", "top_k", "top_p", "entropy_temperature", "top_n_sigma", "cfg_scale")
    own = [
        name
        for name in {*parameters.method_parameters(), *sampling} - {*parameters.PARTS}
        if name in preset and _text(row.get(name)) != _text(preset[name])
    ]
    # a parameter without a value does not belong to this method's drafter or rule
    return {name: _short(row[name]) for name in (*parts, *sorted(own)) if row.get(name) is not None}
