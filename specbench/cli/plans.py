"""The runs that a suite or a grid will have in its folder, whether they were started or not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import UsageError
from specbench.harness.planned import PlannedRun
from specbench.storage.files import write_atomically

if TYPE_CHECKING:
    from specbench.config.configuration import Job

GRID = "grid.json"  # in a grid's folder: the arguments of `specbench run -m`


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


def runs(folder: Path) -> Sequence[PlannedRun]:
    """All runs of the suite or of the grid in a folder; none where it is neither."""
    if is_suite(folder):
        from specbench.tables import suites

        return suites.plan(suites.in_folder(folder), folder).runs
    from specbench.config import configuration

    arguments = grid(folder)
    return [] if arguments is None else of_grid(folder, configuration.grid(arguments, multirun=True))


def of_grid(root: Path, jobs: Sequence[Job]) -> list[PlannedRun]:
    """The jobs of a grid, each in its folder."""
    return [PlannedRun(root / re.sub(r"[^\w.=,+-]+", "_", job.name), job.cfg) for job in jobs]
