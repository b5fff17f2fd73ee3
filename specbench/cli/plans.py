"""The runs of a command line, and those that a suite or a grid will have in its folder, started or not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config import command_line
from specbench.errors import UsageError
from specbench.harness.planned import Plan, PlannedRun
from specbench.storage import home
from specbench.storage.files import write_atomically
from specbench.storage.reading import read_json

if TYPE_CHECKING:
    from specbench.config.configuration import Job

GRID = "grid.json"  # in a grid's folder: the arguments of `specbench run -m`


def of_jobs(jobs: Sequence[Job], multirun: bool, new: Path) -> Plan[PlannedRun]:
    """The run of a command line, or the runs of its grid, each in its folder inside one folder. new: the folder where
    out= names none. UsageError for a grid that names several, or one that Hydra cannot read."""
    outs = {job.cfg["out"] for job in jobs}
    if len(outs) > 1:
        raise UsageError("out= names the folder of the grid: give one")
    root = home.expanded(outs.pop() or new)
    if not multirun:
        return Plan(str(root), root, (PlannedRun(root, jobs[0].cfg, asked=jobs[0].asked),))
    if "${" in str(root):
        raise UsageError(f"the folder of a grid cannot hold ${{ (out={root}); choose another out=")
    folders = [root / re.sub(r"[^\w.=,+-]+", "_", job.name) for job in jobs]
    runs = [
        PlannedRun(folder, job.cfg, label=f"job {i}: {job.name}", asked=job.asked)
        for i, (folder, job) in enumerate(zip(folders, jobs, strict=True))
    ]
    return Plan(f"{len(jobs)} jobs in {root}", root, tuple(runs))


def write_grid(root: Path, arguments: Sequence[str]) -> None:
    """Keeps the arguments of a grid in its folder, from which `status` and `resume` read them."""
    write_atomically(root / GRID, (json.dumps(list(arguments)) + "\n").encode())


def arguments(root: Path) -> list[str]:
    """The arguments of the grid in a folder. UsageError where they cannot be read."""
    found = read_json(root / GRID, list[str], "give the `specbench run -m` that started the grid")
    return list(found)


def is_suite(folder: Path) -> bool:
    return (folder / "suite.yaml").is_file()


def is_grid(folder: Path) -> bool:
    return (folder / GRID).is_file()


def in_folder(folder: Path) -> Plan[Any]:
    """The runs of the suite or of the grid in a folder."""
    if is_suite(folder):
        from specbench.tables import suites

        return suites.plan(suites.in_folder(folder), folder)
    from specbench.config import configuration

    given = [*arguments(folder), f"out={command_line.quoted(str(folder))}"]
    return of_jobs(configuration.grid(given, multirun=True), True, folder)
