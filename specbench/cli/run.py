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

from specbench.cli.exits import FAILED, USAGE
from specbench.cli.launch import Task, by_hydra, launch
from specbench.errors import Parser, UsageError

if TYPE_CHECKING:
    from specbench.config.configuration import Job

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")  # of Hydra


def main(arguments: list[str]) -> int:
    """`specbench run [-m] [name=value ...]`."""
    parser = Parser(prog="specbench run", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--info", nargs="?", const="all", choices=_INFO)
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    if options.shell_completion:
        return by_hydra(arguments)

    from specbench.config import command_line, configuration

    overrides = command_line.read(options.overrides, options.multirun)
    if options.help:
        from specbench.cli import manual

        print(manual.run(configuration.described(overrides)), end="")
        return 0
    jobs = configuration.grid(overrides, options.multirun)
    hydras = [argument for argument in overrides if command_line.is_hydras(argument)]
    if options.info:
        return by_hydra(["--info", options.info, *overrides])
    if options.hydra_help:
        return by_hydra(["--hydra-help", *hydras])
    if options.cfg:
        return _show(options.cfg, jobs, hydras)
    if options.dry_run:
        return _foresee(jobs, options.multirun)
    if options.multirun:
        return grid(jobs, overrides, hydras)
    try:
        for error in launch([Task(jobs[0].cfg)], hydras):
            raise error
    except KeyboardInterrupt as e:
        folder = getattr(e, "folder", None)  # of run.Stopped
        raise KeyboardInterrupt(f"{e}; to go on: {_command(overrides, folder)}" if folder else str(e)) from e
    return 0


def _show(what: str, jobs: Sequence[Job], hydras: Sequence[str]) -> int:
    """Prints the configurations of the jobs, that of Hydra, or both."""
    import yaml

    if what != "hydra":
        texts = (yaml.safe_dump(job.cfg.plain(), sort_keys=False, allow_unicode=True) for job in jobs)
        print("---\n".join(texts), end="", flush=True)
    return 0 if what == "job" else by_hydra(["--cfg", "hydra", *hydras])


def _foresee(jobs: Sequence[Job], multirun: bool) -> int:
    """Prints what the jobs would do."""
    from specbench.bench import forecast
    from specbench.cli import plans
    from specbench.harness.planned import PlannedRun
    from specbench.storage import home

    out = jobs[0].cfg["out"]
    root = home.expanded(out) if out else Path("runs", "NEW")
    planned = plans.of_grid(root, jobs) if multirun else [PlannedRun(root, jobs[0].cfg)]
    print(forecast.report(f"{len(jobs)} jobs in {root}" if multirun else str(root), planned))
    return 0


def grid(jobs: Sequence[Job], overrides: Sequence[str], hydras: Sequence[str]) -> int:
    """Runs the jobs of a grid, each in its folder inside one folder. A job that fails does not stop the others."""
    from specbench.cli import plans
    from specbench.harness.folder import new_folder
    from specbench.harness.run import check
    from specbench.storage import home

    outs = {job.cfg["out"] for job in jobs}
    if len(outs) > 1:
        raise UsageError("out= names the folder of the grid: give one")
    root = home.expanded(outs.pop() or new_folder())
    if "${" in str(root):
        raise UsageError(f"the folder of a grid cannot hold ${{ (out={root}); choose another out=")
    for job in jobs:
        check(job.cfg)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write into {root} ({e.strerror}); choose another out=") from None
    if (root / "config.yaml").exists():
        raise UsageError(f"{root} holds a single run; choose another out= for the grid")
    try:
        plans.write_grid(root, [argument for argument in overrides if not argument.startswith("out=")])
    except OSError as e:
        raise UsageError(f"cannot write into {root} ({e.strerror}); choose another out=") from None
    planned = plans.of_grid(root, jobs)
    tasks = [
        Task(job.cfg, run.folder, f"job {i}: {job.name}")
        for i, (job, run) in enumerate(zip(jobs, planned, strict=True))
    ]
    again = _command(["-m", *overrides], root)
    print(f"specbench: {len(jobs)} jobs in {root}", file=sys.stderr)
    try:
        failed = launch(tasks, hydras, root)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"{str(e) or 'stopped'}; to go on: {again}") from e
    if not failed:
        return 0
    print(f"specbench: {len(failed)} of {len(jobs)} jobs failed; only they run again with {again}", file=sys.stderr)
    return USAGE if all(isinstance(error, UsageError) for error in failed) else FAILED


def _command(overrides: Sequence[str], folder: Path) -> str:
    """The command that continues in a folder."""
    from specbench.config import command_line

    others = [argument for argument in overrides if not argument.startswith("out=")]
    simple = re.fullmatch(r"[A-Za-z0-9_./-]+", str(folder))
    return f"specbench run {shlex.join([*others, f'out={folder if simple else command_line.quoted(str(folder))}'])}"
