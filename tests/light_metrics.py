"""Metrics without networks; tests add and remove their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specbench import metrics
from specbench.config import parameters
from specbench.harness import contact_sheet
from specbench.metrics import Score, base
from specbench.rows.remark import free
from specbench.storage import origin


class Light(base.Metric):
    """The mean of a picture, shifted by the metric's name, its weights and its reference."""

    def __init__(self, name: str, context: base.ScoringContext, weights: dict[str, str]) -> None:
        super().__init__(context, {})
        self.name, self.weights = name, weights
        self.columns = real_columns(name)  # type: ignore[misc]

    @property
    def reads_prompt(self) -> bool:  # type: ignore[override]
        return self.name.startswith("clip")

    @property
    def cache_key(self) -> str:
        if self.name not in self.weights or "nowhere" in str(self.context.weights):
            raise base.Unavailable(f"no weights of {self.name}")
        return f"{self.name}@{self.weights[self.name]}"

    def fingerprint(self) -> str:
        return f"{self.cache_key} {self.context.reference}"

    def scorer(self) -> Any:
        return lambda pictures, items: np.array([[float(p.mean())] for p in pictures])

    def score(self, outputs: np.ndarray, items: Sequence[Any]) -> tuple[Score, ...]:
        if self.weights[self.name] == "broken":
            return tuple(Score.unmeasured("these pictures are too small", "") for _ in self.columns)
        move = float(len(self.fingerprint())) + self.name.count("2")
        return tuple(
            Score(outputs.mean() + move + i, 0.5, self.fingerprint(), (free("few"),)) for i in range(len(self.columns))
        )

    def per_image(self, outputs: np.ndarray) -> np.ndarray | None:
        return outputs[:, 0]


real_columns = parameters.metric_columns


@pytest.fixture
def light_metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The metrics whose weights exist -> the version of the weights."""
    here = dict.fromkeys(("fid", "fid_clean", "clip_b16", "clip_b32", "image_reward", "kid"), "1")
    monkeypatch.setattr(metrics, "metric", lambda name, context: Light(name, context, here))
    monkeypatch.setattr(contact_sheet, "save", lambda path, *_: path.touch())
    monkeypatch.setattr(origin, "_output", lambda *command: "")  # of git, some hundred times
    return here
