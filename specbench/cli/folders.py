"""`specbench status`, `resume` and `merge`: show, continue and merge the runs in folders."""

from __future__ import annotations

import json
import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.cli.arguments import Argument, CommandLine, Words, command
from specbench.cli.commands import USAGE, code_of, fail
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
        "DIR": Words("the folder of a run, a suite or a grid, or a folder that contains runs", 1, 1),
        "--json": Argument("flag", "as JSON: a list with one entry per run"),
    },
)
def status(line: CommandLine) -> int:
    """Shows the progress of the runs in a folder."""
    from specbench.harness.status import of_run, summary

    folder = home.expanded(line.words[0])
    planned = in_folder(folder).runs if is_suite(folder) or is_grid(folder) else ()
    folders = (
        [folder] if (folder / "config.yaml").is_file() else [p.parent for p in sorted(folder.rglob("config.yaml"))]
    )
    if not folders and not planned:
        raise UsageError(f"{folder} holds no run" if folder.is_dir() else f"there is no folder {folder}")
    runs: list[Status] = []
    code = 0
    for path in folders:
        try:
            runs.append(of_run(path))
        except UsageError as e:  # it does not hide the other runs
            code = fail(e, USAGE)
    shown = {run.folder for run in runs}
    runs += [run.status() for run in planned if str(run.folder) not in shown]
    if code and not runs:
        return code
    if line["--json"]:
        print(json.dumps([run.plain() for run in runs], indent=1, ensure_ascii=False))
    else:
        print("\n".join([*([summary(folder, runs)] if planned else []), *map(_text, runs)]))
    return code


def _text(run: Status) -> str:
    """A run's status as text."""
    lines = [f"{run.folder}: {run.method} on {run.model}, n={run.n}: {run.state}"]
    if run.state == "not started":
        return lines[0]
    for name, progress in (("images", run.images), ("baseline", run.baseline)):
        if progress is not None:
            speed = f", {progress.per_s:.3g} a second" if progress.per_s and run.state == "running" else ""
            lines.append(f"  {name:<10} {progress.done} done, {progress.left} left{speed}")
    if run.state != "finished":
        left = "not known yet"
        if run.time_left_s is not None:
            past = "" if run.state == "running" else " at its last speed"
            left = f"{timedelta(seconds=round(run.time_left_s))}{past}, without scoring"
        lines.append(f"  time left  {left}")
    if run.failures:
        last = run.failures[-1]
        what = f"{last.label} image {label(last.index)}: {last.reason}"
        lines.append(f"  failures   {len(run.failures)}, the last: {what}")
    lines += [f"  images     {text}" for text in run.degenerate]
    lines.append(f"  on disk    {format_size(run.bytes)}")
    if run.state == "stopped":
        lines.append(f"  continue with specbench resume {shlex.quote(run.folder)}")
    return "\n".join(lines)


@command(
    "resume",
    {
        "DIR": Words("the folder of a run, a suite or a grid", 1, 1),
        "jobs=N": Argument("integer", "of a suite: how many runs at a time (default: 1)", low=1),
    },
    others=["specbench.rows.provenance:MAY_CHANGE"],
)
def resume(line: CommandLine) -> int:
    """Continues the run, the suite or the grid in a folder, with the configuration in it. For a run, parameters that do
    not change an image may be given again: n (a number, or all), metrics, metrics_dir, reference, baseline, data_dir,
    workers, ray_address.
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
        raise UsageError(f"jobs= is for a suite, but {folder} holds none: leave it out")
    if is_grid(folder):
        if line.others:
            raise UsageError(f"a grid continues as it was started: leave {line.others[0]} out")
        return grid(in_folder(folder), arguments_of(folder))
    overrides = configuration.values(line.others, [name for name in MAY_CHANGE if name != "out"])
    if inside := sorted(path.parent.name for path in folder.glob("*/config.yaml")):
        raise UsageError(
            f"{folder} holds {len(inside)} runs: name one ({inside[0]}, ...), or repeat the `specbench run -m` that"
            " started them"
        )
    earlier = stored(folder)
    values = earlier.plain()
    if (log := overrides.get("log", earlier.log)) != earlier.log:  # each tracker has its own parameters
        for name in parameters.declared("log", earlier.log):
            del values[name]
        values |= {name: parameters.default("log", log, name) for name in parameters.declared("log", log)}
    values = parameters.validate({**values, **overrides})  # before anything is stored
    if by_name := "metrics" in overrides:
        parameters.check_measurable(values["model"], values["metrics"])
    planned = PlannedRun(folder, registry.completed(values), asked=by_name or RunFolder(folder).metadata().asked)
    try:
        start(planned)
    except Stopped as e:
        raise KeyboardInterrupt(f"{e}; to continue: specbench resume {shlex.join([*line.words, *line.others])}") from e
    return code_of([planned])


def _suite(folder: Path, line: CommandLine) -> int:
    from specbench.cli import tables
    from specbench.tables.collect import Bench
    from specbench.tables.table_runs import in_folder

    if line.others:
        raise UsageError(f"a suite continues as it was started: leave {line.others[0]} out")
    return tables.execute(in_folder(folder), folder, Bench(), line["jobs"] or 1)


@command(
    "merge",
    {
        "DIR": Words("the folders of all shards of one run", 1),
        "out=DIR": Argument("path", "a new folder for the whole run", required=True),
        "metrics=NAME|[..]": Argument("text", "further metrics of the whole run"),
    },
)
def merge(line: CommandLine) -> int:
    """Makes one run of the finished runs with shard=1/N to shard=N/N: it has all their records and images, and its
    images are scored as a whole. If a merge was stopped, the same command continues it.

      specbench run method=sjd n=64 shard=1/2 out=part1
      specbench run method=sjd n=64 shard=2/2 out=part2
      specbench merge part1 part2 out=whole
    """
    from specbench.config import configuration
    from specbench.harness import run as running
    from specbench.harness.planned import PlannedRun

    metrics = [f"metrics={line['metrics']}"] if line["metrics"] else []
    further = configuration.values(metrics, ["metrics"]).get("metrics", ())
    folders = [home.expanded(word) for word in line.words]
    if absent := [folder for folder in folders if not (folder / "config.yaml").is_file()]:
        raise UsageError(f"{absent[0]} holds no run; name the folders of all shards")
    outcome = running.merge(folders, line["out"], running.Rescoring(further))
    print(outcome.report())
    return code_of([PlannedRun(outcome.folder.path, outcome.config, asked=bool(metrics))])
