"""Batches of images that are decoded step by step, timed, until all are complete: one batch, or a stream of images
through its rows."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from specbench.decoding.rng import RandomStreams
from specbench.engine.clock import Clock
from specbench.engine.graph import Eager, Graphs, Runner
from specbench.engine.state import DecodeState
from specbench.errors import NumberError, RunError

T = TypeVar("T")


@dataclass
class Decoded(Generic[T]):
    """tokens (B, T) int64 or, continuous ones, (B, T, D) float32; steps (B,): target forward passes of the decode
    phase; drafted, accepted (B,): draft tokens verified and accepted inside the image; seconds: wall time from the
    first target forward to the last token; trace: per-step statistics."""

    tokens: Tensor
    steps: Tensor
    drafted: Tensor
    accepted: Tensor
    seconds: float
    trace: T


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one, on which fused kernels start."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext()


def not_finite(who: str, what: str, key: tuple[int, int], step: int) -> NumberError:
    """The error of a model that produced `what` at a step of the image `key`, (seed, index)."""
    return NumberError(
        f"the {who} produced {what} for the image (seed, index) {key}, step {step}: lower cfg_scale or raise the"
        " precision (dtype=float32)"
    )


class BatchDecoding(ABC, Generic[T]):
    """Images in progress, one per row of `rng`. A step adds at least one and at most `reach` tokens to every image
    that is not complete. step_stats: what the last step leaves for its statistics, until they are recorded."""

    step_stats: T | None = None
    rng: RandomStreams
    reach: int
    config: Any  # the decoder configuration; see `engine.graph.Steps`
    state: DecodeState

    @abstractmethod
    def step(self) -> None:
        """Draft, verify, commit: what is timed."""

    def record_stats(self) -> None:
        """Record the statistics of the step before, once. No later step reads them, and their time does not count."""
        stats, self.step_stats = self.step_stats, None
        if stats is None:
            raise RuntimeError("the statistics of a step are recorded once, after the step")
        self.record(stats)

    @abstractmethod
    def record(self, stats: T) -> None:
        """Record the statistics of a step."""

    @abstractmethod
    def remaining_tokens(self, keys: Sequence[tuple[int, int]]) -> list[int]:
        """Tokens that each row lacks; synchronizes with the device. NumberError where a model produced values that are
        not finite, or probabilities that do not sum to 1; `keys`: (seed, index) of the image of each row."""

    @abstractmethod
    def result(self, seconds: float, rows: list[int] | None = None) -> Decoded[Any]:
        """The result of the rows (default: all of them)."""


class Progress:
    """Stops a decoding whose steps no longer add tokens, such as a recorded step that lacks its kernels."""

    def __init__(self) -> None:
        self._left: Sequence[int] = ()

    def check(self, left: Sequence[int]) -> None:
        """left: tokens that each row lacks, after at least one step since the last call."""
        if any(now and now >= before for now, before in zip(left, self._left, strict=False)):
            row = next(i for i, now in enumerate(left) if now and now >= self._left[i])
            raise RunError(
                f"decoding stopped: row {row} still lacks {left[row]} tokens, and the last steps added none; this is a"
                " fault of the engine (try engine=eager)"
            )
        self._left = left


def finished(start: Callable[[], BatchDecoding[Any]], rng: RandomStreams, engine: Eager | Graphs) -> Decoded[Any]:
    """The result of the images that `start` returns, one per row of `rng`, with the seconds from its call on. The host
    reads the rows only when the slowest could be done, at most once per `reach` tokens that it still lacks."""
    device = rng.key.device
    synchronize(device)
    before = time.perf_counter()
    with current(device):
        runner, aside = engine.begin(start()), Clock(device)
        images, progress = runner.steps, Progress()
        while remaining_tokens := max(left := images.remaining_tokens(rng.keys)):
            progress.check(left)
            take_steps(runner, -(-remaining_tokens // images.reach), aside)
    synchronize(device)
    return images.result(time.perf_counter() - before - aside.total())


def take_steps(runner: Runner[Any], count: int, aside: Clock) -> None:
    """Do steps and record their statistics; `aside` measures the seconds of the latter."""
    for _ in range(count):
        runner.step()
        aside.begin()
        runner.record_stats()
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
    """Decode images 0 .. count - 1, `batch` (two or more) at a time: a row that is done takes the next image, so that
    no row waits for the slowest. Yields which images are done, and their result; their seconds are those since the
    previous ones, without `encode`. encode, rng_for: conditioning and random streams of some images.

    Rows are refilled together when a quarter of them are done, since a prefill of several costs as much as one of them.
    After `stop` returns true none is refilled, and the images in progress are finished.
    start: returns the images of a conditioning and of random streams.
    """
    if batch < 2:
        raise ValueError("a stream needs two rows or more; use decode() for one image after the other")
    engine, rows = engine or Eager(), min(batch, count)
    queue, few = deque(range(count)), max(1, rows // 4)
    owners: list[int | None] = [None] * rows  # by row; None where nothing is left to decode
    keys, done = [(0, 0)] * rows, list(range(rows))
    while True:
        if stop():
            queue.clear()
        following = [queue.popleft() for _ in range(min(len(done), len(queue)))]
        for row, owner in zip_longest(done, following):
            owners[row] = owner
        if not any(owner is not None for owner in owners):
            return
        if following:
            conditioning, rng = encode(following), rng_for(following)
            for row, key in zip(done, rng.keys):
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
                    images.state.load_rows(fresh.state, done[: len(following)])
                del fresh  # its values are in `images`
        progress = Progress()
        while True:  # until enough rows are done to be refilled; without a queue, until all are
            with torch.inference_mode(), current(device):
                left = images.remaining_tokens(keys)
                progress.check(left)
                under_way = sorted(left[row] for row, owner in enumerate(owners) if owner is not None)
                behind = under_way[: few if queue else None][-1]  # of the row that determines the next look
                take_steps(runner, -(-behind // images.reach), aside)
            if not behind:
                break
        done = [row for row, owner in enumerate(owners) if owner is not None and not left[row]]
        synchronize(device)
        seconds = time.perf_counter() - before - aside.total()
        with torch.inference_mode():
            result = images.result(seconds, done)
        yield [owner for row in done if (owner := owners[row]) is not None], result
