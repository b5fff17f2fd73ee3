"""`log=tensorboard`: an event file with the numbers of a run over its number of prompts, its configuration and its
sheet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench.rows import trackers
from specbench.storage import home, image_files


def write(cfg: Mapping[str, Any], row: Mapping[str, Any], folder: trackers.TrackedRun) -> str:
    """Writes a row; returns the folder of the event file: log_dir/run_id, or tensorboard/ in the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    where = folder.path / "tensorboard"
    if cfg["log_dir"]:
        where = Path(home.expanded(cfg["log_dir"])) / str(row["run_id"])
    with SummaryWriter(str(where)) as writer:
        for name, value in trackers.numbers(row).items():
            writer.add_scalar(name, value, row["n"])
        writer.add_text("configuration", f"```\n{json.dumps(trackers.settings(cfg, row), indent=1)}\n```", row["n"])
        writer.add_image("contact sheet", image_files.read(folder.sheet), row["n"], dataformats="HWC")
    return str(where)
