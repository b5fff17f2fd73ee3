"""The runs that a suite or a grid will have in its folder, whether they were started or not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import UsageError
from specbench.storage.files import write_atomically

if TYPE_CHECKING:
    from specbench.config.configuration import Job
    from specbench.config.run_config import RunConfig
    from specbench.harness.status import Status
    from specbench.tables.suites import SuitePlan

GRID = "grid.json"  # in a grid's folder: the arguments of `specbench run -m`


@dataclass(frozen=True)
class PlannedRun:
    """A run: its folder and its checked configuration."""

    folder: Path
    cfg: RunConfig


def write_grid(root: Path, arguments: Sequence[str]) -> None:
    """Keeps the arguments of a grid in its folder, from which `status` and `resume` read them."""
    write_atomically(root / GRID, (json.dumps(list(arguments)) + "\n").encode())


def grid(root: Path) -> list[str] | None:
    """The arguments of the grid in a folder; None where there is none."""
    try:
        found = json.loads((root / GRID).read_text(encoding="utf-8"))
    except OSError:
        return None
    except (ValueError, RecursionError):
        raise UsageError(f"cannot read {root / GRID}; give the `specbench run -m` that started the grid") from None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise UsageError(f"{root / GRID} holds no arguments; give the `specbench run -m` that started the grid")
    return found


def is_suite(folder: Path) -> bool:
    return (folder / "suite.yaml").is_file()


def runs(folder: Path) -> list[PlannedRun]:
    """All runs of the suite or of the grid in a folder; none where it is neither."""
    from specbench.config import configuration

    if is_suite(folder):
        from specbench.tables import suites
        from specbench.tables.measure import LocalBench

        return of_suite(suites.plan(suites.in_folder(folder), folder, LocalBench()))
    arguments = grid(folder)
    return [] if arguments is None else of_grid(folder, configuration.grid(arguments, multirun=True))


def of_suite(plan: SuitePlan) -> list[PlannedRun]:
    """The runs of a suite, each in its folder."""
    from specbench.config import configuration

    return [PlannedRun(plan.out / one.folder, configuration.compose(one.need.overrides)) for one in plan.runs]


def of_grid(root: Path, jobs: Sequence[Job]) -> list[PlannedRun]:
    """The jobs of a grid, each in its folder."""
    return [PlannedRun(root / re.sub(r"[^\w.=,+-]+", "_", job.name), job.cfg) for job in jobs]


def state(run: PlannedRun) -> Status:
    """The state of a run that was not started."""
    from specbench.harness.status import not_started

    return not_started(run.folder, run.cfg)
