"""Measures how long the parts of a step take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Clock:
    """Marks between the parts of steps. On CUDA they are events in the stream: recording one does not block, and
    `seconds` reads them all at the end. On MPS a mark waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._steps: list[list[tuple[str, Any]]] = []

    def _now(self) -> Any:
        if not self._cuda:
            synchronize(self._device)
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self) -> None:
        """Start a step."""
        self._steps.append([("", self._now())])

    def lap(self, part: str) -> None:
        """Attribute the time since the last mark to `part` of the step; a part may occur several times."""
        self._steps[-1].append((part, self._now()))

    def seconds(self) -> list[dict[str, float]]:
        """The parts of every step, in seconds."""
        synchronize(self._device)
        steps = []
        for marks in self._steps:
            parts: dict[str, float] = {}
            for (_, before), (part, after) in itertools.pairwise(marks):
                spent = before.elapsed_time(after) / 1e3 if self._cuda else after - before
                parts[part] = parts.get(part, 0.0) + spent
            steps.append(parts)
        return steps

    def total(self) -> float:
        """The seconds of all parts of all steps."""
        return sum(sum(parts.values()) for parts in self.seconds())


class Passes:
    """A context that times every call of the given methods: the passes of networks, without the work between them."""

    def __init__(self, device: torch.device, methods: Iterable[tuple[Any, str]]) -> None:
        """methods: objects and the names of their methods; no method may call another one of them."""
        self._clock, self._methods = Clock(device), list(methods)

    def begin(self) -> None:
        """Start a step."""
        self._clock.begin()

    def seconds(self) -> list[float]:
        """The seconds that the calls of every step took."""
        return [parts.get("inside", 0.0) for parts in self._clock.seconds()]

    def __enter__(self) -> Self:
        for owner, name in self._methods:
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name in self._methods:
            delattr(owner, name)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._clock.lap("between")
            out = call(*args, **kwargs)
            self._clock.lap("inside")
            return out

        return timed


class Idle:
    """A clock that records nothing."""

    def begin(self) -> None: ...

    def lap(self, part: str) -> None: ...
