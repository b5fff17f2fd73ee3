"""Decodes batches of images step by step, and times them: one batch, or a stream of images through the rows of a
batch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from specbench.decoding.rng import RandomStreams
from specbench.engine.clock import Clock, synchronize
from specbench.engine.graph import Eager, Graphs, Runner
from specbench.engine.state import DecodeState
from specbench.errors import NumberError, RunError

T = TypeVar("T")
_WATCHER: ContextVar[Callable[[float], None] | None] = ContextVar("watcher", default=None)


@dataclass
class Decoded(Generic[T]):
    """The images of a batch. tokens (B, T) int64, or (B, T, D) float32 for continuous tokens; steps (B,): target
    forward passes of the decode phase; drafted, accepted (B,): draft tokens verified and accepted inside the image;
    seconds: wall time from the first target forward pass to the last token; trace: statistics of every step."""

    tokens: Tensor
    steps: Tensor
    drafted: Tensor
    accepted: Tensor
    seconds: float
    trace: T


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a CUDA device is the current one; fused kernels start on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext()


def not_finite(who: str, what: str, key: tuple[int, int], step: int) -> NumberError:
    """The error for a model, `who`, that produced `what` at a step of the image `key`, (seed, index)."""
    return NumberError(
        f"the {who} produced {what} for the image (seed, index) {key}, step {step}: lower cfg_scale or raise the"
        " precision (dtype=float32)"
    )


class BatchDecoding(ABC, Generic[T]):
    """Images in progress, one per row of `rng`. A step adds at least one and at most `reach` tokens to every image that
    is not complete. step_stats: what the last step computed for its statistics; None once they are recorded."""

    step_stats: T | None = None
    rng: RandomStreams
    reach: int
    config: Any  # the decoder configuration; see `engine.graph.Steps`
    state: DecodeState

    @abstractmethod
    def step(self) -> None:
        """Draft, verify and commit. The timed part."""

    def record_stats(self) -> None:
        """Record the statistics of the last step, once. No later step reads them, and their time is not counted.
        RuntimeError without a step since the last call."""
        stats, self.step_stats = self.step_stats, None
        if stats is None:
            raise RuntimeError("the statistics of a step are recorded once, after the step")
        self.record(stats)

    @abstractmethod
    def record(self, stats: T) -> None:
        """Record the statistics of a step."""

    @abstractmethod
    def remaining_tokens(self, keys: Sequence[tuple[int, int]]) -> list[int]:
        """The number of tokens that each row still needs. Synchronizes with the device. NumberError if a model produced
        values that are not finite, or probabilities that do not sum to 1. keys: (seed, index) of the image of each
        row."""

    @abstractmethod
    def result(self, seconds: float, rows: list[int] | None = None) -> Decoded[Any]:
        """The result of the rows (default: all of them)."""


class Progress:
    """Stops a decoding whose steps no longer add tokens, for example a recorded step without its kernels."""

    def __init__(self) -> None:
        self._remaining: Sequence[int] = ()

    def check(self, remaining: Sequence[int]) -> None:
        """remaining: tokens that each row still needs, after at least one step since the last call. RunError if a row
        has as many as before."""
        if any(now and now >= before for now, before in zip(remaining, self._remaining, strict=False)):
            row = next(i for i, now in enumerate(remaining) if now and now >= self._remaining[i])
            raise RunError(
                f"decoding stopped: row {row} still needs {remaining[row]} tokens, and the last steps added none;"
                " this is a fault of the engine (try engine=eager)"
            )
        self._remaining = remaining


@contextmanager
def watched(watcher: Callable[[float], None] | None) -> Iterator[None]:
    """Inside, `watcher` is called after every step of a batch with the part of its images that is certainly complete,
    such as 1.5: a step adds a token or more to each. The host reads nothing from the device for it, and the seconds of
    an image do not contain it. None: no calls."""
    before = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(before)


def finished(start: Callable[[], BatchDecoding[Any]], rng: RandomStreams, engine: Eager | Graphs) -> Decoded[Any]:
    """The result of the images that `start` returns, one per row of `rng`. Its seconds begin with the call of `start`.
    The host reads the rows only when the slowest row could be complete: at most once per `reach` tokens that it still
    needs."""
    device = rng.key.device
    synchronize(device)
    before = time.perf_counter()
    with current(device):
        runner, aside = engine.begin(start()), Clock(device)
        images, progress, whole = runner.steps, Progress(), 0
        while remaining_tokens := max(per_row := images.remaining_tokens(rng.keys)):
            progress.check(per_row)
            whole = max(whole, remaining_tokens)
            take_steps(runner, -(-remaining_tokens // images.reach), aside, per_row, whole)
    synchronize(device)
    return images.result(time.perf_counter() - before - aside.total())


def take_steps(runner: Runner[Any], count: int, aside: Clock, left: Sequence[int], whole: int) -> None:
    """Do `count` steps and record their statistics. `aside` measures the seconds of the recording and of the watcher.
    left: tokens that each image in progress needs before these steps; whole: tokens that a new one needs."""
    watcher = _WATCHER.get()
    for done in range(1, count + 1):
        runner.step()
        aside.begin()
        runner.record_stats()
        if watcher is not None:
            watcher(sum(1 - max(0, tokens - done) / whole for tokens in left))
        aside.lap("statistics")


def decode_stream(
    start: Callable[[Any, RandomStreams], BatchDecoding[Any]],
    encode: Callable[[list[int]], Any],
    rng_for: Callable[[list[int]], RandomStreams],
    count: int,
    batch: int,
    engine: Eager | Graphs | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[list[int], Decoded[Any]]]:
    """Decode images 0 .. count - 1, `batch` (two or more) at a time. A row whose image is complete takes the next
    image, so no row waits for the slowest. Yields the numbers of the complete images and their result. Its seconds are
    the time since the previous result, without `encode`.

    Rows are refilled together, once a quarter of them are complete, because a prefill of several rows costs as much as
    a prefill of one. After `stop` returns true no row is refilled, and the images in progress are finished.

    start: returns the images for a conditioning and random streams.
    encode, rng_for: return the conditioning and the random streams for a list of image numbers.
    """
    if batch < 2:
        raise ValueError("a stream needs two rows or more; use decode() for one image after the other")
    engine, rows = engine or Eager(), min(batch, count)
    queue, few = deque(range(count)), max(1, rows // 4)
    owners: list[int | None] = [None] * rows  # the image of each row; None: no image left
    keys, complete, whole = [(0, 0)] * rows, list(range(rows)), 1
    while True:
        if stop():
            queue.clear()
        following = [queue.popleft() for _ in range(min(len(complete), len(queue)))]
        for row, owner in zip_longest(complete, following):
            owners[row] = owner
        if not any(owner is not None for owner in owners):
            return
        if following:
            conditioning, rng = encode(following), rng_for(following)
            for row, key in zip(complete, rng.keys):
                keys[row] = key
            device = rng.key.device
        synchronize(device)
        before, aside = time.perf_counter(), Clock(device)
        if following:
            with torch.inference_mode(), current(device):
                fresh = start(conditioning, rng)
                if len(following) == rows:
                    runner = engine.begin(fresh)
                    images = runner.steps
                else:
                    images.state.load_rows(fresh.state, complete[: len(following)])
                del fresh  # its values are in `images`
        progress = Progress()
        while True:  # until enough rows are complete for a refill, or all rows once the queue is empty
            with torch.inference_mode(), current(device):
                remaining = images.remaining_tokens(keys)
                progress.check(remaining)
                under_way = sorted(remaining[row] for row, owner in enumerate(owners) if owner is not None)
                longest = under_way[: few if queue else None][-1]  # of the row after which to look again
                whole = max(whole, under_way[-1])
                take_steps(runner, -(-longest // images.reach), aside, under_way, whole)
            if not longest:
                break
        complete = [row for row, owner in enumerate(owners) if owner is not None and not remaining[row]]
        synchronize(device)
        seconds = time.perf_counter() - before - aside.total()
        with torch.inference_mode():
            result = images.result(seconds, complete)
        yield [owner for row in complete if (owner := owners[row]) is not None], result
