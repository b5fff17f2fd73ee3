"""`specbench resume`: continues the run, the suite or the grid in a folder.

Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from specbench.cli.arguments import CommandLine, Words, command
from specbench.cli.exits import unmeasured
from specbench.cli.run import start
from specbench.errors import UsageError, integer, values
from specbench.storage import home


@command(
    "resume",
    {"DIR": Words("the folder of a run, a suite or a grid", 1, 1)},
    others=["specbench.rows.provenance:MAY_CHANGE"],
)
def main(line: CommandLine) -> int:
    """Continues the run, the suite or the grid in a folder, with the configuration in it; jobs=N of a suite: runs at a
    time. Of a run, parameters that do not change an image may be given again: n (a number, or all), metrics,
    metrics_dir, reference, baseline, data_dir, workers, ray_address, url.
    """
    from specbench.cli import plans
    from specbench.config import configuration, parameters, registry
    from specbench.harness.folder import RunFolder, stored
    from specbench.harness.planned import PlannedRun
    from specbench.harness.run import Stopped
    from specbench.rows.provenance import MAY_CHANGE

    folder = home.expanded(line.words[0])
    if plans.is_grid(folder) or plans.is_suite(folder):
        return _all_runs(folder, line.others)
    given = configuration.values(line.others, [name for name in MAY_CHANGE if name != "out"])
    if inside := sorted(path.parent.name for path in folder.glob("*/config.yaml")):
        raise UsageError(
            f"{folder} holds {len(inside)} runs: name one ({inside[0]}, ...), or give the `specbench run -m` that"
            " started them"
        )
    config = {**stored(folder), **given}
    if asked := "metrics" in given:
        parameters.check_world(config)
    planned = PlannedRun(folder, registry.completed(config), asked=asked or RunFolder(folder).memory().asked)
    try:
        start(planned)
    except Stopped as e:
        raise KeyboardInterrupt(f"{e}; to go on: specbench resume {shlex.join([*line.words, *line.others])}") from e
    return unmeasured([planned])


def _all_runs(folder: Path, others: Sequence[str]) -> int:
    """Continues the suite or the grid in a folder."""
    from specbench.cli import plans, run

    if not plans.is_suite(folder):
        if others:
            raise UsageError(f"a grid goes on as it was started: leave {others[0]} out")
        return run.grid(plans.in_folder(folder), plans.arguments(folder))
    from specbench.cli import suite
    from specbench.tables import suites
    from specbench.tables.collect import Bench

    jobs = integer("jobs", values(others, ["jobs"]).get("jobs", "1"), 1)
    return suite.execute(suites.in_folder(folder), folder, Bench(), jobs)
