"""Several processes that decode one run with Ray: on this machine, or on a cluster (`ray_address`).

The process that owns the run's folder keeps the queue of prompts, and only this process writes. It gives every worker
one batch at a time and reassigns the batch of a dead worker, so that each image exists once, whichever worker dies.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from specbench import data
from specbench.config.run_config import RunConfig
from specbench.errors import RunError, UsageError, install, plain
from specbench.harness import processes
from specbench.harness.log import say
from specbench.harness.worker import Died, Event, Failure, Loader, Worker

WAIT_S = 60  # seconds for which a cluster may be silent
MOST_DEATHS = 3  # workers that may die on one image, or before the first of them is ready

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage reports
    "RAY_worker_niceness": "0",  # the latency of a worker with low priority would depend on other processes
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_STORE_BYTES = 128 * 2**20  # memory for images in transit; Ray's default is a third of the machine's memory


def is_used(cfg: RunConfig) -> bool:
    """Whether a run decodes in other processes."""
    return bool(cfg.workers > 1 or cfg.ray_address)


def check(cfg: RunConfig) -> None:
    """Raises UsageError if a run needs Ray and it is not installed."""
    if is_used(cfg) and importlib.util.find_spec("ray") is None:
        raise UsageError(f"workers= above 1 and ray_address= need Ray: {install('ray')}")


def check_address(cfg: RunConfig) -> None:
    """Raises UsageError if no cluster answers at `ray_address` within `WAIT_S`. Another process tries it, because Ray
    ends its own process if it cannot connect."""
    if not (address := cfg.ray_address):
        return
    say(f"connecting to the Ray cluster at {address}")
    program = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"
    command = [sys.executable, "-c", program, address]
    environment = {**_QUIET, **os.environ}
    why = f"no answer within {WAIT_S} s"
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        pass
    else:
        if done.returncode == 0:
            return
        why = _last_line(done.stderr)
    raise UsageError(f"cannot connect to ray_address={address}: {plain(why)}; start Ray there, or name another address")


class WorkerActor:
    """The Ray actor of a worker. The constructor does not load the model, so that a bad argument is reported as such
    and not as the death of the worker."""

    def __init__(self, cfg: RunConfig, loader: Loader, num_workers: int) -> None:
        self._args = cfg, loader, num_workers

    def load(self) -> list[Event]:
        import torch

        if self._args[0].device == "cpu":
            torch.set_num_threads(1)
        self._worker = Worker(*self._args)
        return [self._worker.joined]

    def decode(self, items: Sequence[data.Item], baseline: bool) -> list[Event]:
        return [event for events in self._worker.decode(items, baseline) for event in events]


@dataclass(frozen=True)
class _Task:
    """The task of a worker: decode some prompts in one of the passes, or load the model (no items)."""

    worker: Any
    items: Sequence[data.Item] = ()
    baseline: bool = False


class Workers:
    """The workers of a run. They start when there is something to decode, and end with the `with` block."""

    def __init__(self, cfg: RunConfig, loader: Loader) -> None:
        self._cfg, self._loader, self._num_workers = cfg, loader, cfg.workers
        self._idle: list[Any] = []
        self._busy: dict[Any, _Task] = {}  # by the reference to its result
        self._failed_starts = 0  # workers that died while loading since a worker last finished loading

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if not self._cfg.ray_address:
                stack.enter_context(processes.guarded())
            self._ray = _connected(self._num_workers, self._cfg.ray_address)
            stack.callback(self._ray.shutdown)
            device = self._device()
            self._cfg = self._cfg.changed(device=device)
            self._end = stack.pop_all()
        gpus = 1 if device == "cuda" else 0
        actor = self._ray.remote(WorkerActor).options(num_cpus=1, num_gpus=gpus, max_restarts=0)
        self._new = lambda: actor.remote(self._cfg, self._loader, self._num_workers)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def _device(self) -> str:
        """The device of each worker. UsageError if there are too few."""
        resources, requested = self._ray.cluster_resources(), self._cfg.device
        if requested not in ("auto", "cpu", "cuda"):
            raise UsageError(
                f"device={requested} names one device, but each worker uses its own GPU: use device=cuda, or workers=1"
            )
        device = requested if requested != "auto" else "cuda" if resources.get("GPU") else "cpu"
        count = int(resources.get("GPU" if device == "cuda" else "CPU", 0))
        if count < self._num_workers:
            kind = "GPUs" if device == "cuda" else "processors"
            raise UsageError(
                f"workers={self._num_workers} needs as many {kind}, but there are {count}: use fewer workers"
            )
        return device

    def decode(self, items: Sequence[data.Item], baseline: bool, stop: Callable[[], bool]) -> Iterator[list[Event]]:
        """See `Worker.decode`. Events arrive in the order in which batches finish."""
        size = self._cfg.batch
        queue = deque(items[start : start + size] for start in range(0, len(items), size))
        deaths: Counter[tuple[int, int]] = Counter()  # by a batch's first index and its size
        while (in_progress := any(task.items for task in self._busy.values())) or queue:
            stopping = stop()
            if stopping and not in_progress:
                return
            while queue and self._idle and not stopping:
                worker, batch = self._idle.pop(), queue.popleft()
                self._busy[worker.decode.remote(batch, baseline)] = _Task(worker, batch, baseline)
            loading = sum(not task.items for task in self._busy.values())
            to_start = min(self._num_workers - len(self._busy) - len(self._idle), len(queue) - loading)
            for _ in range(0 if stopping else to_start):
                worker = self._new()
                self._busy[worker.load.remote()] = _Task(worker)
            ready, _ = self._ray.wait(list(self._busy), timeout=1.0)  # returns often enough to notice a Ctrl-C
            for reference in ready:
                yield self._events(reference, self._busy.pop(reference), queue, deaths)

    def _events(
        self, reference: Any, task: _Task, queue: deque[Sequence[data.Item]], deaths: Counter[tuple[int, int]]
    ) -> list[Event]:
        """The events of a finished task. The batch of a dead worker returns to the queue; after two deaths, in
        halves."""
        try:
            events: list[Event] = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as e:  # the worker is alive and raised an error
            raise e.cause if isinstance(e.cause, Exception) else e from None
        except self._ray.exceptions.RayError as e:  # killed, out of memory, its machine is gone, its answer is lost
            return self._handle_death(task, queue, deaths, f"{type(e).__name__}: {_last_line(e)}")
        self._idle.append(task.worker)
        if not task.items:
            self._failed_starts = 0
        return events

    def _handle_death(
        self, task: _Task, queue: deque[Sequence[data.Item]], deaths: Counter[tuple[int, int]], how: str
    ) -> list[Event]:
        if not task.items:
            self._failed_starts += 1
            if self._failed_starts >= MOST_DEATHS * self._num_workers:
                raise RunError(f"{self._failed_starts} workers died while loading {self._cfg.model} ({how})")
            return [Died(f"a worker died while loading ({how})")]
        first, size = task.items[0].index, len(task.items)
        deaths[first, size] += 1
        if deaths[first, size] < (2 if size > 1 else MOST_DEATHS):
            queue.appendleft(task.items)
        elif size > 1:
            queue.extendleft((task.items[size // 2 :], task.items[: size // 2]))
        else:
            return [Failure(first, f"{MOST_DEATHS} workers died while decoding it ({how})", task.baseline)]
        return [Died(f"a worker died ({how}) while decoding {size} images")]


def _last_line(text: object) -> str:
    """The last line of a long text of Ray."""
    return next((line.strip() for line in reversed(str(text).splitlines()) if line.strip()), "")[:200]


def _connected(num_workers: int, address: str | None) -> Any:
    """Ray, connected. UsageError if the cluster does not answer, RunError if Ray does not start on this machine."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    if address:
        try:
            ray.init(address=address, **quiet)
        except Exception as e:
            why = " ".join(str(e).split())[:200]
            raise UsageError(f"cannot connect to ray_address={address}: {why}") from None
        return ray
    for last in (False, True):  # on a busy machine Ray's own timeout may expire
        try:
            ray.init("local", num_cpus=num_workers, object_store_memory=_STORE_BYTES, include_dashboard=False, **quiet)
            break
        except Exception as e:
            ray.shutdown()
            if last:
                raise RunError(f"Ray did not start: {' '.join(str(e).split())[:200]}") from None
    return ray
