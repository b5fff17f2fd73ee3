"""`log=wandb`: a run of Weights & Biases with the name of the run, its configuration, its numbers and its sheet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from specbench.rows import trackers


def write(cfg: Mapping[str, Any], row: Mapping[str, Any], folder: trackers.TrackedRun) -> str:
    """Writes a row; returns where. The same run_id continues the same run, as when it gets more prompts."""
    import wandb

    run = wandb.init(
        project=cfg["log_project"],
        id=row["run_id"],
        name=folder.path.name,
        resume="allow",
        job_type="run",
        dir=os.environ.get("WANDB_DIR") or str(folder.path),
        config=trackers.settings(cfg, row),
        settings=wandb.Settings(console="off"),
    )
    try:
        run.config.update(trackers.settings(cfg, row), allow_val_change=True)
        run.log({**trackers.numbers(row), "contact_sheet": wandb.Image(str(folder.sheet))})
    finally:
        run.finish()
    return str(run.url or run.dir)
