"""Copies of a run's row in experiment trackers, by their own libraries: `log=wandb`, `mlflow`, `tensorboard`.

A tracker is conf/log/NAME.yaml and the function `write` of NAME.py here. It gets what a folder has: the configuration,
the row and the contact sheet. The folder stays the run; a tracker that fails costs no image, and the same command tries
it again.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from specbench.config import parameters
from specbench.errors import RunError, UsageError, install
from specbench.rows.seconds import withheld


class TrackedRun(Protocol):
    """A run's folder, its row.csv and its contact sheet."""

    @property
    def path(self) -> Path: ...
    @property
    def row(self) -> Path: ...
    @property
    def sheet(self) -> Path: ...


#: Tracker -> the module that it needs, which the extra of its name installs.
_NEEDS = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard"}
#: Columns that identify a row, and are no parameters.
_IDENTITY = (
    "specbench",
    "commit",
    "config_hash",
    "prompts_hash",
    "baseline_run_id",
    "device_name",
    "torch",
    "server",
    "note",
)


def check(cfg: Mapping[str, Any]) -> None:
    """Raises UsageError where the library of the tracker is not installed."""
    name = cfg.get("log", "none")
    if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
        raise UsageError(f"log={name} needs {_NEEDS[name]}: {install(name)}")


def write(name: str, cfg: Mapping[str, Any], row: Mapping[str, Any], run: TrackedRun) -> str:
    """Writes a finished row to a tracker; returns where. RunError where its library fails."""
    try:
        found: str = importlib.import_module(f"specbench.rows.trackers.{name}").write(cfg, row, run)
        return found
    except Exception as e:  # each library has its own errors
        why = " ".join(str(e).split())[:300] or type(e).__name__
        raise RunError(
            f"not written to log={name} ({why}); the row is in {run.row}, the same command tries again"
        ) from e


def settings(cfg: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was: its parameters and its identity, without empty ones."""
    own = {name: value for name, value in cfg.items() if not name.startswith("log") and name != "out"}
    own |= {name: row[name] for name in ("model", *_IDENTITY)}
    return {name: value for name, value in own.items() if value is not None}


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What a run measured: the columns with numbers that are no parameters, without speed-ups that do not hold."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in parameters.table() and isinstance(value, int | float) and not isinstance(value, bool)
        if not withheld(row, name)
    }
