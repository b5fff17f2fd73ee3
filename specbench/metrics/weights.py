"""The files and packages of real evaluators: their paths, or one sentence on how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from specbench.errors import install
from specbench.metrics.base import ScoringContext, Unavailable
from specbench.storage import home


def find(context: ScoringContext, choice: str, part: str, *names: str) -> Path:
    """The first of `names` in the folder `part` of the context's weights; Unavailable where there is none.

    choice: the metric whose name fetches them with `specbench fetch metrics=`.
    """
    folder = context.weights / part
    for name in names:
        if (folder / name).is_file():
            return folder / name
    arguments = f"metrics={choice}" + (
        "" if context.weights == home.metrics_folder() else f" metrics_dir={context.weights}"
    )
    raise Unavailable(f"no {names[0]}: run `specbench fetch {arguments}`, or put {names[0]} into {folder}")


def need(module: str) -> None:
    """Raises Unavailable where a package of the extra `metrics` is not installed. Imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{module} is not installed: {install('metrics')}")


def package(module: str) -> Any:
    """A package of the extra `metrics`; Unavailable where it cannot be imported."""
    need(module)
    try:
        return importlib.import_module(module)
    except Exception as e:  # such as a torchvision that was built for another torch
        reason = str(e).partition("\n")[0][:200]
        raise Unavailable(f"{module} cannot be imported ({reason}): again, {install('metrics')}") from e
