"""How long the parts of a step take, told without holding the device up."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch


class Clock:
    """Marks between the parts of steps. On CUDA they are events in the stream: setting one waits for nothing, and
    `seconds` reads them all at the end."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: list[list[tuple[str, Any]]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """A step begins."""
        self._steps.append([("", self._now())])

    def lap(self, part: str) -> None:
        """What was done since the last mark is `part` of the step; a part may come several times."""
        self._steps[-1].append((part, self._now()))

    def seconds(self) -> list[dict[str, float]]:
        """Of every step, its parts in seconds."""
        if self._cuda:
            torch.cuda.synchronize()
        told = []
        for marks in self._steps:
            parts: dict[str, float] = {}
            for (_, before), (part, after) in itertools.pairwise(marks):
                spent = before.elapsed_time(after) / 1e3 if self._cuda else after - before
                parts[part] = parts.get(part, 0.0) + spent
            told.append(parts)
        return told


class Idle:
    """A clock that nobody reads."""

    def begin(self) -> None: ...

    def lap(self, part: str) -> None: ...
