"""The folder of fetched files and of files derived from them: $SPECBENCH_HOME, or ~/.cache/specbench."""

from __future__ import annotations

import os
import re
from pathlib import Path


def home() -> Path:
    return expanded(os.environ.get("SPECBENCH_HOME") or Path.home() / ".cache" / "specbench")


def expanded(path: str | Path) -> Path:
    """A path with ~ expanded. As in a shell, a ~ that names no user is part of the name."""
    return Path(os.path.expanduser(path))


def model_folder(name: str) -> Path:
    """The folder that `weights=official` of a model selects."""
    return home() / "models" / name


def metrics_folder() -> Path:
    """The default folder of the weights of real evaluators (`metrics_dir`)."""
    return home() / "metrics"


def data_folder(name: str) -> Path:
    """The default folder of a data set (`data_dir`)."""
    return home() / "data" / name


def plan_file(key: str) -> Path:
    """The file with what a configuration needs of a GPU, computed once by `tables --dry-run`."""
    return home() / "plans" / f"{key}.json"


def tiles_file(device: str) -> Path:
    """The file with the tiles into which the fused kernels divide their work, tuned once on a device of this name."""
    return home() / "tiles" / f"{re.sub('[^A-Za-z0-9]+', '-', device).strip('-')}.json"
