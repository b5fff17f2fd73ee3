"""What all metrics share: the score, the protocol, the error of a mean. Imports nothing heavy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


class Item(Protocol):
    """What a metric needs of an entry of a data set (`specbench.data.Item`)."""

    @property
    def prompt(self) -> str: ...
    @property
    def labels(self) -> tuple[int, ...] | None: ...


@dataclass(frozen=True)
class Score:
    """One metric's answer.

    value: None where it was not measured; `note` then says why.
    stderr: standard error of `value` over pictures; None where it cannot be estimated.
    backend: the network that judged and the hash of its weights, such as "scenes-reader@1a2b3c4d".
    note: one line on how to read the value; may be empty.
    """

    value: float | None
    stderr: float | None
    backend: str
    note: str

    @classmethod
    def unmeasured(cls, note: str, backend: str = "") -> Score:
        return cls(None, None, backend, note)


class Metric(ABC):
    """A metric on one device, its weights read from `assets`; pictures pass through it `batch` at a time.

    Its result depends on the set of pairs (picture, item) alone, not on their order or on the batches.
    """

    def __init__(self, assets: Path, device: str = "cpu", batch: int = 128) -> None:
        self.assets, self.device, self.batch = assets, device, batch

    @abstractmethod
    def score(self, images: np.ndarray, items: Sequence[Item]) -> Score:
        """Score images (N, H, W, 3) uint8, N >= 1, each against the item at the same position."""


def mean_and_stderr(values: np.ndarray) -> tuple[float, float | None]:
    """Mean of values (N,), summed exactly so that their order cannot matter, and its standard error (None if N = 1)."""
    n = len(values)
    mean = math.fsum(values.tolist()) / n
    if n < 2:
        return mean, None
    variance = math.fsum((v - mean) ** 2 for v in values.tolist()) / (n - 1)
    return mean, math.sqrt(variance / n)
