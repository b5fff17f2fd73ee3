"""The scoring of a run's or a folder's images: context, device, validity of earlier scores, and columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specbench import metrics
from specbench.config import parameters
from specbench.errors import UsageError
from specbench.rows import indices
from specbench.rows.columns import TAKEN
from specbench.rows.journal import Journal
from specbench.storage import home

_UNMEASURED = "cannot be measured here: "


def scoring_context(
    cfg: Mapping[str, Any], device: str = "cpu", batch: int = metrics.ScoringContext.batch
) -> metrics.ScoringContext:
    """The scoring context of a configuration: its `metrics_dir`, `reference` (a file, or the name of a data set) and
    `data`."""
    folder, reference, data = cfg["metrics_dir"], cfg["reference"], cfg["data"]
    if reference in parameters.choices("data"):
        reference, data = None, reference
    return metrics.ScoringContext(
        metrics.ASSETS,
        home.expanded(folder) if folder else home.metrics_folder(),
        home.expanded(reference) if reference else None,
        data,
        device,
        batch,
    )


def scoring_device(device: str) -> str:
    """The device of the metrics' networks for device=...; UsageError for an absent device."""
    from specbench.harness.pipeline import resolve_device

    found = str(resolve_device(device))
    return "cpu" if found == "mps" else found  # mps has no float64


def basis(name: str, context: metrics.ScoringContext) -> str:
    """What determines the value of a metric besides the images and prompts, or the reason why it has none here.
    UsageError for a metric of a plug-in that fills a column of another meaning."""
    if taken := TAKEN.intersection(parameters.metric_columns(name)):
        raise UsageError(f"metric {name} fills the column {min(taken)}, which every row has already; rename it")
    try:
        return metrics.metric(name, context).basis()
    except metrics.Unavailable as e:
        return f"{_UNMEASURED}{e}"


def is_unmeasured(basis: str) -> bool:
    return basis.startswith(_UNMEASURED)


def score_columns(scores: Mapping[str, metrics.Score]) -> dict[str, Any]:
    """The columns of a row for the scores of some metrics by column, with their notes under "note"."""
    columns: dict[str, Any] = {}
    for name, score in scores.items():
        columns |= {name: score.value, f"{name}_stderr": score.stderr, f"{name}_backend": score.backend or None}
    columns["note"] = "; ".join(f"{name}: {score.note}" for name, score in scores.items() if score.note)
    return columns


class RecordedImages:
    """The images of the first n prompts, `each` of a prompt, each read when it is needed."""

    def __init__(self, journal: Journal, n: int, each: int) -> None:
        self._journal, self._indices = journal, indices.of_prompts(n, each)
        self.digests = [record.sha256 for record in journal.first(n, each)]

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._journal.image(self._indices[index])
