"""`specbench resume`: continues the run in a folder. Importing this module imports neither torch nor Hydra."""

from __future__ import annotations

import shlex
from pathlib import Path

from specbench.cli.launch import Task
from specbench.errors import UsageError, parse_arguments

_HELP = """\
usage: specbench resume DIR [name=value ...]

Continues the run in a folder, with the configuration in it. Parameters that do not change an image may be given again:
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

    from specbench.config import configuration
    from specbench.harness.folder import MAY_CHANGE, stored
    from specbench.harness.run import Stopped
    from specbench.storage import home

    folder = home.expanded(folders[0])
    may = [name for name in MAY_CHANGE if name != "out"]
    given = configuration.values([argument for argument in parsed.arguments if argument not in folders], may)
    if inside := sorted(path.parent.name for path in folder.glob("*/config.yaml")):
        raise UsageError(
            f"{folder} holds {len(inside)} runs: name one ({inside[0]}, ...), or give the `specbench run -m` that"
            " started them"
        )
    try:
        Task(configuration.completed({**stored(folder), **given}), folder).run()
    except Stopped as e:
        raise KeyboardInterrupt(f"{e}; to go on: specbench resume {shlex.join(parsed.arguments)}") from e
    return 0
