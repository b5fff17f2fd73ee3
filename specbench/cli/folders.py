"""`specbench status`, `resume` and `merge`: what is in the folders of runs, and going on with them."""

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
from specbench.cli.commands import code_of
from specbench.cli.run import arguments_of, grid, in_folder, is_grid, is_suite, start
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
def status(line: CommandLine) -> int:
    """How far the runs in a folder are."""
    from specbench.harness.status import of_run

    folder = home.expanded(line.words[0])
    planned = in_folder(folder).runs if is_suite(folder) or is_grid(folder) else ()
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
    lines += [f"  images     {text}" for text in one.degenerate]
    lines.append(f"  on disk    {format_size(one.bytes)}")
    if one.state == "stopped":
        lines.append(f"  continue with specbench resume {shlex.quote(one.folder)}")
    return "\n".join(lines)


@command(
    "resume",
    {
        "DIR": Words("the folder of a run, a suite or a grid", 1, 1),
        "jobs=N": Own("integer", "of a suite: runs at a time (default: 1)", low=1),
    },
    others=["specbench.rows.provenance:MAY_CHANGE"],
)
def resume(line: CommandLine) -> int:
    """Continues the run, the suite or the grid in a folder, with the configuration in it. Of a run, parameters
    that do not change an image may be given again: n (a number, or all), metrics, metrics_dir, reference, baseline,
    data_dir, workers, ray_address, url.
    """
    from specbench.config import configuration, parameters, registry
    from specbench.harness.folder import RunFolder, stored
    from specbench.harness.planned import PlannedRun
    from specbench.harness.run import Stopped
    from specbench.rows.provenance import MAY_CHANGE

    folder = home.expanded(line.words[0])
    if is_suite(folder):
        return _suite(folder, line)
    if line["jobs"]:
        raise UsageError(f"jobs= is for a suite, and {folder} holds none: leave it out")
    if is_grid(folder):
        if line.others:
            raise UsageError(f"a grid continues as it was started: leave {line.others[0]} out")
        return grid(in_folder(folder), arguments_of(folder))
    given = configuration.values(line.others, [name for name in MAY_CHANGE if name != "out"])
    if inside := sorted(path.parent.name for path in folder.glob("*/config.yaml")):
        raise UsageError(
            f"{folder} holds {len(inside)} runs: name one ({inside[0]}, ...), or give the `specbench run -m` that"
            " started them"
        )
    config = {**stored(folder), **given}
    if asked := "metrics" in given:
        parameters.check_measurable(config)
    planned = PlannedRun(folder, registry.completed(config), asked=asked or RunFolder(folder).metadata().asked)
    try:
        start(planned)
    except Stopped as e:
        raise KeyboardInterrupt(f"{e}; to go on: specbench resume {shlex.join([*line.words, *line.others])}") from e
    return code_of([planned])


def _suite(folder: Path, line: CommandLine) -> int:
    from specbench.cli import tables
    from specbench.tables import suites
    from specbench.tables.collect import Bench

    if line.others:
        raise UsageError(f"a suite continues as it was started: leave {line.others[0]} out")
    return tables.execute(suites.in_folder(folder), folder, Bench(), line["jobs"] or 1)


@command(
    "merge",
    {
        "DIR": Words("the folders of all shards of one run", 1),
        "out=DIR": Own("path", "a new folder for the whole run", required=True),
        "metrics=NAME|[..]": Own("text", "further metrics of the whole run"),
    },
)
def merge(line: CommandLine) -> int:
    """Makes one run of the finished runs with shard=1/N to shard=N/N: its records and images are theirs, and its images
    are scored as a whole. A merge that was stopped continues with the same command.

      specbench run method=sjd n=64 shard=1/2 out=part1
      specbench run method=sjd n=64 shard=2/2 out=part2
      specbench merge part1 part2 out=whole
    """
    from specbench.config import configuration
    from specbench.harness import run as running
    from specbench.harness.planned import PlannedRun

    metrics = [f"metrics={line['metrics']}"] if line["metrics"] else []
    given = configuration.values(metrics, ["metrics"])
    folders = [home.expanded(word) for word in line.words]
    if absent := [folder for folder in folders if not (folder / "config.yaml").is_file()]:
        raise UsageError(f"{absent[0]} holds no run; name the folders of all shards")
    outcome = running.merge(folders, line["out"], given)
    print(outcome.report())
    return code_of([PlannedRun(outcome.folder.path, outcome.config, asked=bool(metrics))])
