"""`specbench resume`: continues the run, the suite or the grid in a folder.

Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from specbench.cli.launch import Task
from specbench.errors import UsageError, integer, parse_arguments, values

_HELP = """\
usage: specbench resume DIR [name=value ...]

Continues the run, the suite or the grid in a folder, with the configuration in it; jobs=N of a suite: runs at a time.
Of a run, parameters that do not change an image may be given again:
n (a number, or all), metrics, metrics_dir, reference, baseline, data_dir, workers, ray_address, url.
"""


def main(arguments: list[str]) -> int:
    """`specbench resume DIR [name=value ...]`."""
    parsed = parse_arguments("resume", arguments)
    if parsed.help:
        print(_HELP, end="")
        return 0
    folders = [argument for argument in parsed.arguments if "=" not in argument or Path(argument).is_dir()]
    if len(folders) != 1:
        raise UsageError("name one folder of a run: specbench resume DIR")

    from specbench.cli import plans
    from specbench.config import configuration, registry
    from specbench.harness.folder import stored
    from specbench.harness.run import Stopped
    from specbench.rows.provenance import MAY_CHANGE
    from specbench.storage import home

    folder = home.expanded(folders[0])
    others = [argument for argument in parsed.arguments if argument not in folders]
    if (folder / plans.GRID).is_file() or plans.is_suite(folder):
        return _all_runs(folder, others)
    may = [name for name in MAY_CHANGE if name != "out"]
    given = configuration.values(others, may)
    if inside := sorted(path.parent.name for path in folder.glob("*/config.yaml")):
        raise UsageError(
            f"{folder} holds {len(inside)} runs: name one ({inside[0]}, ...), or give the `specbench run -m` that"
            " started them"
        )
    try:
        Task(registry.completed({**stored(folder), **given}), folder).run()
    except Stopped as e:
        raise KeyboardInterrupt(f"{e}; to go on: specbench resume {shlex.join(parsed.arguments)}") from e
    return 0


def _all_runs(folder: Path, others: Sequence[str]) -> int:
    """Continues the suite or the grid in a folder."""
    from specbench.cli import plans, run
    from specbench.config import command_line, configuration

    if not plans.is_suite(folder):
        if others:
            raise UsageError(f"a grid goes on as it was started: leave {others[0]} out")
        arguments = [*(plans.grid(folder) or []), f"out={command_line.quoted(str(folder))}"]
        hydras = [argument for argument in arguments if command_line.is_hydras(argument)]
        return run.grid(configuration.grid(arguments, multirun=True), arguments, hydras)
    from specbench.cli import suite
    from specbench.tables import suites
    from specbench.tables.collect import Bench

    jobs = integer("jobs", values(others, ["jobs"]).get("jobs", "1"), 1)
    return suite.execute(suites.in_folder(folder), folder, Bench(), jobs)
