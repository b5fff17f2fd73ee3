"""`specbench run`: checks the arguments of all jobs, then starts the first one.

Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.cli.exits import FAILED, USAGE, unmeasured
from specbench.cli.launch import by_hydra, hydras_own, launch
from specbench.config import parameters
from specbench.errors import Parser, UsageError, values

if TYPE_CHECKING:
    from specbench.config.configuration import Job
    from specbench.harness.planned import Plan, PlannedRun

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")  # of Hydra


def main(arguments: list[str]) -> int:
    """`specbench run [-m] [name=value ...]`."""
    parser = Parser("run", lambda: (*parameters.table(), "device_for"))
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--info", nargs="?", const="all", choices=_INFO)
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.read(arguments)
    if options.shell_completion:
        return by_hydra(arguments)

    from specbench.config import command_line, configuration

    device_for = values([one for one in options.overrides if one.startswith("device_for=")], ["device_for"])
    given = [one for one in options.overrides if not one.startswith("device_for=")]
    overrides = command_line.read(given, options.multirun)
    if options.help:
        from specbench.cli import manual

        print(manual.run(configuration.described(overrides)), end="")
        return 0
    jobs = configuration.grid(overrides, options.multirun)
    if options.info:
        return by_hydra(["--info", options.info, *overrides])
    if options.hydra_help:
        return by_hydra(["--hydra-help", *hydras_own(overrides)])
    if options.cfg:
        return _show(options.cfg, jobs, overrides)
    from specbench.bench.devices import only_dry
    from specbench.cli import plans
    from specbench.harness.folder import new_folder

    only_dry(device_for, options.dry_run)
    plan = plans.of_jobs(jobs, options.multirun, Path("runs", "NEW") if options.dry_run else new_folder())
    if options.dry_run:
        from specbench.tables import forecast

        command = shlex.join(["specbench", "run", *["-m"] * options.multirun, *overrides])
        print(forecast.report(plan.title, plan.runs, command, device_for.get("device_for")))
        return 0
    if options.multirun:
        return grid(plan, overrides)
    try:
        for error in launch(plan, overrides):
            raise error
    except KeyboardInterrupt as e:
        folder = getattr(e, "folder", None)  # of run.Stopped
        raise KeyboardInterrupt(f"{e}; to go on: {_command(overrides, folder)}" if folder else str(e)) from e
    return unmeasured(plan.runs)


def _show(what: str, jobs: Sequence[Job], overrides: Sequence[str]) -> int:
    """Prints the configurations of the jobs, that of Hydra, or both."""
    import yaml

    if what != "hydra":
        texts = (yaml.safe_dump(job.cfg.plain(), sort_keys=False, allow_unicode=True) for job in jobs)
        print("---\n".join(texts), end="", flush=True)
    return 0 if what == "job" else by_hydra(["--cfg", "hydra", *hydras_own(overrides)])


def grid(plan: Plan[PlannedRun], overrides: Sequence[str]) -> int:
    """Runs the jobs of a grid. One that fails does not stop the others."""
    from specbench.cli import plans
    from specbench.harness.run import check

    root, again = plan.home, _command(["-m", *overrides], plan.home)
    for run in plan.runs:
        check(run.config)
    if (root / "config.yaml").exists():
        raise UsageError(f"{root} holds a single run; choose another out= for the grid")
    try:
        root.mkdir(parents=True, exist_ok=True)
        plans.write_grid(root, [argument for argument in overrides if not argument.startswith("out=")])
    except OSError as e:
        raise UsageError(f"cannot write into {root} ({e.strerror}); choose another out=") from None
    print(f"specbench: {plan.title}", file=sys.stderr)
    try:
        failed = launch(plan, overrides)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"{str(e) or 'stopped'}; to go on: {again}") from e
    code = unmeasured(plan.runs)
    if not failed:
        return code
    count = f"{len(failed)} of {len(plan.runs)}"
    print(f"specbench: {count} jobs failed; only they run again with {again}", file=sys.stderr)
    return USAGE if all(isinstance(error, UsageError) for error in failed) else FAILED


def _command(overrides: Sequence[str], folder: Path) -> str:
    """The command that continues in a folder."""
    from specbench.config import command_line

    others = [argument for argument in overrides if not argument.startswith("out=")]
    simple = re.fullmatch(r"[A-Za-z0-9_./-]+", str(folder))
    return f"specbench run {shlex.join([*others, f'out={folder if simple else command_line.quoted(str(folder))}'])}"
