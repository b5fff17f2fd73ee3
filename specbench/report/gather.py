"""What a report shows, as plain data: rows of runs with their commands, audits, pictures. Nothing here is HTML."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from specbench import configuration, parameters, records
from specbench.errors import UsageError

#: Figures of a row that a leaderboard can show and a plot can have on an axis, in order: label, better side, digits.
FIGURES: dict[str, tuple[str, str, int]] = {
    "accepted_length_mean": ("Accepted length (tokens/pass)", "up", 2),
    "step_compression": ("Step compression (×)", "up", 2),
    "speedup_latency": ("Speed-up in latency (×)", "up", 2),
    "speedup_throughput": ("Speed-up in throughput (×)", "up", 2),
    "latency_s_mean": ("Latency (s)", "down", 3),
    "images_per_s": ("Images/s", "up", 2),
    "acceptance_rate": ("Acceptance rate", "up", 3),
    "first_accept": ("Acceptance of the first token", "up", 3),
    "draft_tv": ("Total variation of draft and target", "down", 3),
    "perplexity": ("Perplexity", "down", 2),
    "fid": ("Fréchet distance", "down", 2),
    "clip_score": ("CLIP score", "up", 4),
    "image_reward": ("Reward", "up", 3),
    "hpsv2": ("HPSv2", "up", 4),
    "inception_score": ("Inception score", "up", 1),
    "kid": ("KID", "down", 4),
    "precision": ("Precision", "up", 3),
    "recall": ("Recall", "up", 3),
    "residual_tries": ("Tries of a residual", "down", 2),
    "peak_memory_mib": ("Peak memory (MiB)", "down", 0),
}
#: Columns of a row that are no figures and too long for a list of facts.
_ELSEWHERE = ("drafted_by_place", "acceptance_by_turn")


@dataclass
class Found:
    """rows: of runs, the newest of every configuration, each with the file where it stands; audits: rows of
    `specbench audit`; shots: run_id -> PNG files by prompt index; prompts: (data, seed, index) -> text."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    audits: list[dict[str, str]] = field(default_factory=list)
    shots: dict[str, dict[int, bytes]] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)


def gather(sources: Sequence[Path], runs: Sequence[Path], pictures: int) -> Found:
    """Everything in the CSV files and folders of CSV files `sources`, and the first `pictures` pictures of every run
    folder in `runs`.

    Raises UsageError where a source is not there or cannot be read, or where there is no row at all.
    """
    found, kept = Found(), dict[str, dict[str, Any]]()
    for path in _files(sources):
        if records.has_runs(path):
            for row in records.read_rows(path):
                other = kept.get(row["config_hash"])
                if other is None or (row["time"] or "") >= (other["time"] or ""):
                    kept[row["config_hash"]] = row | {"file": path.name}
        elif {"verdict", "samples"} <= set(records.header(path)):
            found.audits += [row for _, row in records.csv_lines(path)[1]]
    if not kept and not found.audits:
        raise UsageError(f"no rows of runs or audits in {', '.join(map(str, sources))}; name their CSV files or folder")
    found.rows = list(kept.values())
    for row in found.rows:
        row["command"], row["command_exact"] = command(row)
    wanted = {row["run_id"]: row for row in found.rows}
    for folder in _run_folders(runs):
        _take_pictures(folder, wanted, pictures, found)
    return found


def _files(sources: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            files += sorted(path for path in source.glob("*.csv") if path.is_file())
        elif source.is_file():
            files.append(source)
        else:
            raise UsageError(f"there is no file or folder {source}")
    return files


# --- commands ---------------------------------------------------------------------------------------------------------


def command(row: Mapping[str, Any]) -> tuple[str, bool]:
    """The command line of the run behind a row, and whether it was found to give the very configuration: a row lacks
    some of a run's parameters, and those of an older version may mean something else today."""
    words = [f"model={row['model']}", f"method={row['method']}"]
    try:
        plain = _composed(tuple(words))
        for part in ("drafter", "rule"):
            if row[part] and row[part] != plain[part]:
                words.append(f"{part}={row[part]}")
        plain = _composed(tuple(words))
        for name, value in plain.items():
            told = name in row and name not in ("model", "method", "drafter", "rule", "device", "weights")
            if told and _word(row[name]) != _word(value):
                words.append(f"{name}={_word(row[name])}")
        if row["weights"] == "random":
            words.append("weights=random")
        if row["baseline_run_id"] is None and row["method"] != "vanilla":
            words.append("baseline=false")
        exact = False
        for more in ([], ["baseline=false"], ["metrics=none"], ["baseline=false", "metrics=none"]):
            if exact := _hash((*words, *more)) == row["config_hash"]:
                words += more
                break
    except UsageError:
        named = [name for name in parameters.TABLE if row.get(name) is not None and name not in ("device", "weights")]
        words, exact = [f"{name}={_word(row[name])}" for name in named], False
    return f"specbench run {shlex.join(words)}", exact


@cache
def _composed(words: tuple[str, ...]) -> dict[str, Any]:
    return configuration.compose(words)


def _hash(words: tuple[str, ...]) -> str:
    return records.config_hash(configuration.compose(words))


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else _word(value)


# --- pictures ---------------------------------------------------------------------------------------------------------


def _run_folders(places: Sequence[Path]) -> list[Path]:
    folders: list[Path] = []
    for place in places:
        if not place.is_dir():
            raise UsageError(f"there is no folder {place} with runs")
        folders += sorted(path.parent for path in place.rglob("row.csv"))
    return folders


def _take_pictures(folder: Path, wanted: Mapping[str, Mapping[str, Any]], most: int, found: Found) -> None:
    """The first pictures of a run whose row is shown; `wanted`: those rows by run_id."""
    rows = records.read_rows(folder / "row.csv")
    if len(rows) != 1:
        raise UsageError(f"{folder / 'row.csv'} has {len(rows)} rows, where a run has one; leave its folder out")
    [row] = rows
    if row["run_id"] not in wanted or not (folder / "records.jsonl").is_file():
        return
    shots: dict[int, bytes] = {}
    for line in (folder / "records.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            index, name, prompt = record["index"], record["image"], record["prompt"]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue  # a half-written line
        # A name as a run gives it: no record leads out of the folder.
        told = type(index) is int and isinstance(prompt, str) and isinstance(name, str)
        if not told or not 0 <= index < most or not re.fullmatch(records.PICTURE, name):
            continue
        if (image := folder / name).is_file():
            shots[index] = image.read_bytes()
            found.prompts[f"{_set(wanted[row['run_id']])} {index}"] = prompt
    if shots:
        found.shots[str(row["run_id"])] = shots


def _set(row: Mapping[str, Any]) -> str:
    """What prompts of one index have in common, to be the same."""
    return f"{row['data']} {row['split']} {row['seed']}"


def keep(found: Found, folder: Path) -> None:
    """Puts the pictures that are shown, with what is needed to show them again, into a folder of small run folders."""
    for row in found.rows:
        shots = found.shots.get(str(row["run_id"]), {})
        if not shots:
            continue
        place = folder / re.sub(r"[^\w-]+", "_", str(row["run_id"]))  # whoever wrote the row, a name and no path
        (place / "images").mkdir(parents=True, exist_ok=True)
        lines = []
        for index, png in sorted(shots.items()):
            image = f"images/{index:05d}.png"
            (place / image).write_bytes(png)
            lines.append(json.dumps({"index": index, "prompt": found.prompts[f"{_set(row)} {index}"], "image": image}))
        records.write_atomically(place / "records.jsonl", "".join(line + "\n" for line in lines).encode())
        told = {name: row[name] for name in records.COLUMNS}
        records.write_atomically(place / "row.csv", records.to_csv([told]).encode())


# --- what the page reads ----------------------------------------------------------------------------------------------


def page_data(found: Found) -> dict[str, Any]:
    """The JSON that the page draws everything from."""
    rows = []
    for row in found.rows:
        told = {k: v for k, v in row.items() if v is not None and k not in _ELSEWHERE and k != "file"}
        rows.append(
            {
                "id": row["run_id"],
                "model": row["model"],
                "method": row["method"],
                "label": label(row),
                "n": row["n"],
                "command": row["command"],
                "exact": row["command_exact"],
                "file": row["file"],
                "figures": {name: row[name] for name in FIGURES if row[name] is not None},
                "errors": {
                    name: row[other]
                    for name in FIGURES
                    if (other := records.stderr_of(name)) in row and row[other] is not None
                },
                "facts": told,
                "map": _numbers(row["drafted_by_place"]),
                "pictures": {
                    i: base64.b64encode(png).decode() for i, png in found.shots.get(str(row["run_id"]), {}).items()
                },
                "prompts": _set(row),
            }
        )
    rows.sort(key=lambda r: (r["model"], r["method"] != "vanilla", r["method"], r["label"]))
    shown = [name for name in FIGURES if any(name in row["figures"] for row in rows)]
    return {
        "figures": [
            {
                "key": n,
                "label": FIGURES[n][0],
                "better": FIGURES[n][1],
                "digits": FIGURES[n][2],
                "is": records.COLUMNS[n],
            }
            for n in shown
        ],
        "rows": rows,
        "audits": found.audits,
        "prompts": found.prompts,
        "columns": records.COLUMNS,
    }


def _numbers(text: str | None) -> list[float] | None:
    """A JSON list of numbers; None for anything else, since a cell may hold whatever somebody wrote into it."""
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    whole = isinstance(found, list) and all(type(v) in (int, float) and abs(v) < 1e100 for v in found)
    return found if whole else None


def label(row: Mapping[str, Any]) -> str:
    """A method and what makes it differ from its preset, such as "cool_sd delta=2"."""
    try:
        plain = _composed((f"model={row['model']}", f"method={row['method']}"))
    except UsageError:
        return str(row["method"])
    of_method = {*parameters.of_methods(), "temperature", "top_k", "top_p", "cfg_scale"}
    parts = [name for name in ("drafter", "rule") if row[name] and row[name] != plain[name]]
    own = [
        name
        for name in of_method
        if name in plain and name not in ("drafter", "rule") and _word(row.get(name)) != _word(plain[name])
    ]
    # a parameter that another drafter or rule has not is none of this method
    words = [f"{name}={_short(row[name])}" for name in (*parts, *sorted(own)) if row.get(name) is not None]
    return " ".join([str(row["method"]), *words])
