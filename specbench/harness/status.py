"""`specbench status DIR`: how far a run is, read from its folder without changing it; also while it is running."""

from __future__ import annotations

import fcntl
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from specbench.errors import Parser, UsageError
from specbench.harness.run import FAILURES, Run, stored
from specbench.rows.csv_files import read_rows
from specbench.rows.journal import read_records
from specbench.storage import home
from specbench.storage.files import format_size

_RECENT = 200  # images over which the speed is computed


@dataclass(frozen=True)
class PassProgress:
    """One pass over the prompts: finished and remaining images, and images per second since the latest start; None
    before the second image."""

    done: int
    left: int
    per_s: float | None


@dataclass(frozen=True)
class Status:
    """A run's folder. state: running, finished or stopped; time_left_s: None where an unfinished pass has no speed yet;
    failures: of images that are still missing."""

    folder: str
    state: str
    method: str
    model: str
    n: int
    images: PassProgress
    baseline: PassProgress | None
    time_left_s: float | None
    failures: list[dict[str, Any]]
    bytes: int


def of_run(folder: Path) -> Status:
    """The state of the run in a folder. UsageError where it holds none that can be read."""
    run = Run({**stored(folder), "weights": "random"}, folder)  # the weights need not exist here
    memory = _memory(folder / "run.json")
    started = memory.get("begun")
    images = _pass(folder / "records.jsonl", run.cfg["n"], started)
    baseline = _pass(folder / "baseline.jsonl", run.cfg["n"], started) if run.wants_baseline else None
    passes = [one for one in (images, baseline) if one is not None and one.left]
    done = not passes and _row(run, memory)
    state = "running" if _locked(folder / ".lock") else "finished" if done else "stopped"
    times = [one.left / one.per_s if one.per_s else None for one in passes]
    return Status(
        str(folder),
        state,
        run.cfg["method"],
        run.cfg["model"],
        run.cfg["n"],
        images,
        baseline,
        None if None in times else sum(time for time in times if time),
        _failures(folder, run) if passes else [],
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    )


def _memory(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _pass(path: Path, n: int, started: float | None) -> PassProgress:
    here = read_records(path) if path.is_file() else []
    done = len({record.index for record in here if record.index < n})
    times = sorted((r.done, r.batch) for r in here if r.done is not None and started is not None and r.done >= started)
    recent = times[-_RECENT:]
    together = recent[0][1] if recent else 0  # images of the first batch, whose time is before it
    span = recent[-1][0] - recent[0][0] if recent else 0.0
    return PassProgress(
        done, n - done, (len(recent) - together) / span if span > 0 and len(recent) > together else None
    )


def _locked(path: Path) -> bool:
    """Whether a process holds a run's lock."""
    try:
        with path.open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _row(run: Run, memory: Mapping[str, Any]) -> bool:
    """Whether the row covers all images and all metrics."""
    rows = read_rows(run.row_path) if run.row_path.is_file() else []
    scored = memory.get("metrics", run.cfg["metrics"])  # older versions did not record it
    return bool(rows) and rows[0]["n"] == run.cfg["n"] and set(run.cfg["metrics"]) <= set(scored)


def _failures(folder: Path, run: Run) -> list[dict[str, Any]]:
    """The last failure of each image that is missing."""
    if not (folder / FAILURES).is_file():
        return []
    there = {
        label: {record.index for record in read_records(path)} if path.is_file() else set()
        for label, path in (
            (run.cfg["method"], folder / "records.jsonl"),
            ("vanilla", folder / "baseline.jsonl"),
        )
    }
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (folder / FAILURES).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            key = str(entry["pass"]), int(entry["index"])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # cut by a kill
        if key[0] in there and key[1] not in there[key[0]]:
            last[key] = entry
    return list(last.values())


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """`specbench status DIR [--json]`."""
    parser = Parser(prog="specbench status", description="How far the runs in a folder are.")
    parser.add_argument("folder", metavar="DIR", help="a run's folder, or one with runs in it, such as a grid's")
    parser.add_argument("--json", action="store_true", help="as JSON, a list with an entry a run")
    try:
        options = parser.parse_args(list(arguments))
    except SystemExit as e:  # --help
        return int(e.code or 0)
    folder = home.expanded(options.folder)
    places = [folder] if (folder / "config.yaml").is_file() else [p.parent for p in sorted(folder.rglob("config.yaml"))]
    if not places:
        raise UsageError(f"{folder} holds no run" if folder.is_dir() else f"there is no folder {folder}")
    found = [of_run(place) for place in places]
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1, ensure_ascii=False))
    else:
        print("\n".join(map(_text, found)))
    return 0


def _text(one: Status) -> str:
    """A run's status as text."""
    lines = [f"{one.folder}: {one.method} on {one.model}, n={one.n}: {one.state}"]
    for name, some in (("images", one.images), ("baseline", one.baseline)):
        if some is not None:
            speed = f", {some.per_s:.3g} a second" if some.per_s and one.state == "running" else ""
            lines.append(f"  {name:<10} {some.done} done, {some.left} left{speed}")
    if one.state != "finished":
        left = "not known yet"
        if one.time_left_s is not None:
            past = "" if one.state == "running" else " at its last speed"
            left = f"{timedelta(seconds=round(one.time_left_s))}{past}, without scoring"
        lines.append(f"  time left  {left}")
    if one.failures:
        last = one.failures[-1]
        lines.append(
            f"  failures   {len(one.failures)}, the last: {last['pass']} image {last['index']}: {last['reason']}"
        )
    lines.append(f"  on disk    {format_size(one.bytes)}")
    if one.state == "stopped":
        lines.append(f"  continue with specbench resume {shlex.quote(one.folder)}")
    return "\n".join(lines)
