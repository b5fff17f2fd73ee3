"""`log=mlflow`: a run of MLflow with the configuration, the numbers, the row and the sheet of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.rows import trackers

_LONGEST = 500  # characters of a parameter; MLflow's servers accept no more


def write(cfg: Mapping[str, Any], row: Mapping[str, Any], folder: trackers.TrackedRun) -> str:
    """Writes a row as a new run, whose tag specbench.run_id is that of the row; returns where."""
    import mlflow

    mlflow.set_experiment(cfg["log_project"])
    with mlflow.start_run(run_name=folder.path.name, tags={"specbench.run_id": row["run_id"]}) as run:
        mlflow.log_params({name: str(value)[:_LONGEST] for name, value in trackers.settings(cfg, row).items()})
        mlflow.log_metrics(trackers.numbers(row))
        for path in (folder.row, folder.sheet):
            mlflow.log_artifact(str(path))
    return f"run {run.info.run_id} at {mlflow.get_tracking_uri()}"
