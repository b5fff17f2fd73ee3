"""Copies of a run's row in experiment trackers, written with their own libraries: `log=wandb`, `mlflow`, `tensorboard`.

A tracker is conf/log/NAME.yaml and a function here. It receives the configuration, the row and the contact sheet. The
folder stays the complete run: a tracker that fails costs no image, and the same command tries it again.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.errors import RunError, UsageError, install
from specbench.rows import remark_text
from specbench.rows.columns import Row
from specbench.rows.csv_files import DETAILS
from specbench.rows.remark import remarks_of
from specbench.storage import home, image_files

_LONGEST = 500  # maximum characters of a parameter on servers of MLflow
#: Columns that identify a row and are not parameters.
_IDENTITY = (*("specbench", "commit", "config_hash", "prompts_hash", "baseline_run_id", "device_name", "torch"),)


class TrackedRun(Protocol):
    """A run's folder, its row.csv and its contact sheet."""

    @property
    def path(self) -> Path: ...
    @property
    def row(self) -> Path: ...
    @property
    def sheet(self) -> Path: ...


def check(cfg: RunConfig) -> None:
    """Raises UsageError if the library of the tracker is not installed."""
    name = cfg.log
    if name in _WRITERS and importlib.util.find_spec(name) is None:
        raise UsageError(f"log={name} needs {name}: {install(name)}")


def write(name: str, cfg: RunConfig, row: Row, run: TrackedRun) -> str:
    """Writes a finished row to a tracker and returns where. RunError if its library fails."""
    try:
        return _WRITERS[name](cfg, row, run)
    except Exception as e:  # each library has its own errors
        why = " ".join(str(e).split())[:300] or type(e).__name__
        raise RunError(
            f"not written to log={name} ({why}); the row is in {run.row}, and the same command tries again"
        ) from e


def settings(cfg: RunConfig, row: Row) -> dict[str, Any]:
    """The parameters and the identity of a run, without empty values."""
    values = {name: value for name, value in cfg.plain().items() if not name.startswith("log") and name != "out"}
    values |= {name: row[name] for name in ("model", *_IDENTITY)}
    values["remarks"] = remark_text.joined(remarks_of(row)) or None
    return {name: value for name, value in values.items() if value is not None}


def numbers(row: Row) -> dict[str, float]:
    """The measurements of a run: the columns of numbers that are not parameters."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in parameters.table() and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _mlflow(cfg: RunConfig, row: Row, folder: TrackedRun) -> str:
    """A new run, with the run_id of the row in its tag specbench.run_id."""
    import mlflow

    mlflow.set_experiment(cfg.own["log_project"])
    with mlflow.start_run(run_name=folder.path.name, tags={"specbench.run_id": row["run_id"]}) as run:
        mlflow.log_params({name: str(value)[:_LONGEST] for name, value in settings(cfg, row).items()})
        mlflow.log_metrics(numbers(row))
        for path in (folder.row, folder.row.with_name(DETAILS), folder.sheet):
            mlflow.log_artifact(str(path))
    return f"run {run.info.run_id} at {mlflow.get_tracking_uri()}"


def _tensorboard(cfg: RunConfig, row: Row, folder: TrackedRun) -> str:
    """An event file with the numbers over the number of prompts: in log_dir/run_id, or tensorboard/ in the run's
    folder."""
    from torch.utils.tensorboard import SummaryWriter

    where = folder.path / "tensorboard"
    if folders := cfg.own["log_dir"]:
        where = Path(home.expanded(folders)) / str(row["run_id"])
    with SummaryWriter(str(where)) as writer:
        for name, value in numbers(row).items():
            writer.add_scalar(name, value, row["n"])
        writer.add_text("configuration", f"```\n{json.dumps(settings(cfg, row), indent=1)}\n```", row["n"])
        writer.add_image("contact sheet", image_files.read(folder.sheet), row["n"], dataformats="HWC")
    return str(where)


def _wandb(cfg: RunConfig, row: Row, folder: TrackedRun) -> str:
    """The same run_id continues the same run, for example with more prompts."""
    import wandb

    run = wandb.init(
        project=cfg.own["log_project"],
        id=row["run_id"],
        name=folder.path.name,
        resume="allow",
        job_type="run",
        dir=os.environ.get("WANDB_DIR") or str(folder.path),
        config=settings(cfg, row),
        settings=wandb.Settings(console="off"),
    )
    try:
        run.config.update(settings(cfg, row), allow_val_change=True)
        run.log({**numbers(row), "contact_sheet": wandb.Image(str(folder.sheet))})
    finally:
        run.finish()
    return str(run.url or run.dir)


#: Tracker -> its writer. The module that it needs, and the extra that installs it, have the tracker's name.
_WRITERS: dict[str, Callable[[RunConfig, Row, TrackedRun], str]] = {
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
