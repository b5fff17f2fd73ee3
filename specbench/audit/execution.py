"""The measurements of an audit, one after the other or in several processes. Every sequence has random numbers of its
own, and a measurement has one thread, so the rows do not depend on the number of processes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from specbench.audit import audit, densities, models
from specbench.audit.audit import Progress
from specbench.audit.densities import DensityPair
from specbench.errors import RunError
from specbench.harness import processes

#: The models of an audit.
Subject = models.Subject | DensityPair

_DIED = "a process of the audit died, probably for lack of memory: use audit.workers=1"


@dataclass(frozen=True)
class Measurement:
    """Of a checked configuration on a model; samples: sequences."""

    cfg: Mapping[str, Any]
    model: Subject
    samples: int
    seed: int
    margin: float


def assemble(cfg: Mapping[str, Any], model: Subject) -> Callable[..., dict[str, Any]]:
    """The function that measures a configuration on a model, given the samples, the seed, the progress callback and the
    margin. Raises UsageError for parameters that do not go together."""
    if isinstance(model, DensityPair):
        return partial(densities.measure, densities.assemble(cfg), model)
    return partial(audit.measure, audit.assemble(cfg, model), model)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rows(jobs: Sequence[Measurement], workers: int, progress: Progress) -> Generator[dict[str, Any]]:
    """The row of each measurement, in order. Raises RunError where a process dies."""
    if min(workers, len(jobs)) > 1:
        yield from _rows_of_processes(jobs, min(workers, len(jobs)), progress)
        return
    for job in jobs:
        with _one_thread():
            row = _measured(job.cfg, job.model, job.samples, job.seed, job.margin, progress)
        yield row


def _rows_of_processes(jobs: Sequence[Measurement], workers: int, progress: Progress) -> Generator[dict[str, Any]]:
    # pickled here, models do not travel through shared memory, of which containers have little
    pickled = {id(job.model): pickle.dumps(job.model) for job in jobs}
    with processes.pool(workers, RunError(_DIED)) as pool:
        futures = [
            pool.submit(_measured_elsewhere, dict(job.cfg), pickled[id(job.model)], job.samples, job.seed, job.margin)
            for job in jobs
        ]
        for job, future in zip(jobs, futures, strict=True):
            row = future.result()
            progress(job.samples)
            yield row


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _loaded(model: bytes) -> Subject:
    found: Subject = pickle.loads(model)  # noqa: S301 (it comes from the process that started this one)
    return found


def _measured_elsewhere(cfg: Mapping[str, Any], model: bytes, *rest: Any) -> dict[str, Any]:
    return _measured(cfg, _loaded(model), *rest)


def _measured(
    cfg: Mapping[str, Any],
    model: Subject,
    samples: int,
    seed: int,
    margin: float,
    progress: Progress | None = None,
) -> dict[str, Any]:
    return assemble(cfg, model)(samples, seed, progress, margin)
