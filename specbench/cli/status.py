"""`specbench status DIR`: how far the runs in a folder are."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.config.indices import label
from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.files import format_size

if TYPE_CHECKING:
    from specbench.harness.status import Status


@command(
    "status",
    {
        "DIR": Words("the folder of a run, a suite or a grid, or one with runs in it", 1, 1),
        "--json": Own("flag", "as JSON, a list with an entry a run"),
    },
)
def main(line: CommandLine) -> int:
    """How far the runs in a folder are."""
    from specbench.cli import plans
    from specbench.harness.status import of_run

    folder = home.expanded(line.words[0])
    planned = plans.in_folder(folder).runs if plans.is_suite(folder) or plans.is_grid(folder) else ()
    there = [folder] if (folder / "config.yaml").is_file() else [p.parent for p in sorted(folder.rglob("config.yaml"))]
    if not there and not planned:
        raise UsageError(f"{folder} holds no run" if folder.is_dir() else f"there is no folder {folder}")
    found = [of_run(run) for run in there]
    found += [run.status() for run in planned if run.folder not in there]
    if line["--json"]:
        print(json.dumps([asdict(one) for one in found], indent=1, ensure_ascii=False))
    else:
        print("\n".join([*([_summary(folder, found)] if planned else []), *map(_text, found)]))
    return 0


def _summary(folder: Path, found: Sequence[Status]) -> str:
    """A line on all runs of a suite or of a grid."""
    states = Counter(one.state for one in found)
    parts = [f"{states[name]} {name}" for name in ("finished", "running", "stopped", "not started") if states[name]]
    passes = [one for run in found for one in (run.images, run.baseline) if one is not None]
    done, count = sum(one.done for one in passes), sum(one.done + one.left for one in passes)
    more = "" if states["finished"] == len(found) else f"; continue with specbench resume {shlex.quote(str(folder))}"
    return f"{folder}: {len(found)} runs, {', '.join(parts)}; {done} of {count} images{more}"


def _text(one: Status) -> str:
    """A run's status as text."""
    lines = [f"{one.folder}: {one.method} on {one.model}, n={one.n}: {one.state}"]
    if one.state == "not started":
        return lines[0]
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
        image = label(int(last["index"]))
        lines.append(f"  failures   {len(one.failures)}, the last: {last['pass']} image {image}: {last['reason']}")
    lines.append(f"  on disk    {format_size(one.bytes)}")
    if one.state == "stopped":
        lines.append(f"  continue with specbench resume {shlex.quote(one.folder)}")
    return "\n".join(lines)
