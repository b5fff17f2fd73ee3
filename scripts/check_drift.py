"""Measure one speed-up twice next to a process that loads a core half of the time, by two protocols.

    OMP_NUM_THREADS=1 python scripts/check_drift.py [REPEATS] [name=value ...]    # 2 runs of each; method=sjd n=32

Interleaved: `specbench run` as it is, method and vanilla alternating prompt by prompt, error by block bootstrap.
Separate passes: all prompts by the method, then all by vanilla (what the project did before), error by the delta
method over prompts. Both protocols decode the same prompts with the same pipeline.

The load repeats a period: busy in the first half, idle in the second. Each run begins at another point of it. Its
length is that of a run, so that separate passes see it in different states; PERIOD= (seconds) sets another one, and
LOADS= starts more than one process. Decoding has as many processors as threads, and the load is on the first of
them: elsewhere, an idle processor would hide it.

Prints each run's speed-up with its 95 % interval, and whether the runs of a protocol agree: each two differ by at most
1.96 standard errors of the difference. Exit 1 where interleaved runs do not agree.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LOADS = int(os.environ.get("LOADS", 1))  # processes that load a core each
Found = tuple[float, float]  # a speed-up and its standard error


def load(period: float, stop: Any, ready: Any) -> None:
    """Busy in the first half of every period (seconds), idle in the second."""
    pin(1)
    began = time.monotonic()
    ready.set()
    while not stop.is_set():
        if (time.monotonic() - began) % period < period / 2:
            sum(range(100_000))
        else:
            time.sleep(0.01)


def pin(count: int) -> None:
    """Keeps this process on the first processors that it may use; a system without such calls is left alone."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def interleaved(overrides: list[str], pipeline: Any, out: Path) -> tuple[Found, float]:
    """The product's own run. Returns its speed-up with its error, and its drift."""
    from specbench.config import configuration
    from specbench.harness import run

    cfg = configuration.compose([*overrides, "timing=true", "metrics=none"])
    row = run.run(cfg, out, loader=lambda cfg: pipeline).row
    return (row["speedup_latency"], row["speedup_latency_stderr"]), row["drift"]


def separate(overrides: list[str], pipeline: Any, out: Path) -> tuple[Found, float]:
    """One pass after the other; the speed-up is the ratio of their means. Returns it with its error, and the drift:
    vanilla's mean latency in the second half of its pass over that in the first, minus 1."""
    import numpy as np

    from specbench import data
    from specbench.config import configuration
    from specbench.rows import summary

    cfg = configuration.compose([*overrides, "metrics=none"])
    seconds = []
    for one in (pipeline, pipeline.vanilla()):
        items = data.load(cfg)
        keys = [(cfg["seed"], item.index) for item in items]
        for warm in (True, False):
            some = slice(0, 1 if warm else None)
            prompts = [item.prompt for item in items[some]]
            taken = [finished.decoded.seconds for finished in one.stream(prompts, keys[some], 1)]
        seconds.append(taken)
    method, vanilla = seconds
    first, second = np.array_split(np.array(vanilla), 2)
    found = summary.ratio(vanilla, method)
    assert found.value is not None
    assert found.stderr is not None
    return (found.value, found.stderr), float(second.mean() / first.mean() - 1)


def seconds_of_run(overrides: list[str], pipeline: Any) -> float:
    """Estimated from the first prompt, after a warm-up."""
    from specbench import data
    from specbench.config import configuration

    cfg = configuration.compose(overrides)
    item, total = data.load(cfg)[0], 0.0
    for one in (pipeline, pipeline.vanilla()):
        for _ in ("warm-up", "timed"):
            [finished] = one.stream([item.prompt], [(cfg["seed"], item.index)], 1)
        total += finished.decoded.seconds
    return total * int(cfg["n"])


def agree(runs: list[Found]) -> bool:
    return all(abs(a - b) <= 1.96 * (x**2 + y**2) ** 0.5 for (a, x), (b, y) in itertools.combinations(runs, 2))


def main() -> int:
    repeats = next((int(a) for a in sys.argv[1:] if a.isdigit()), 2)
    given = [a for a in sys.argv[1:] if not a.isdigit()]
    names = {a.partition("=")[0] for a in given}
    overrides = [a for a in ("method=sjd", "n=32", "device=cpu") if a.partition("=")[0] not in names] + given

    import torch

    from specbench.config import configuration
    from specbench.harness.pipeline import Pipeline
    from specbench.rows import provenance

    pin(torch.get_num_threads())
    pipeline = Pipeline.load(configuration.compose(overrides))
    period = float(os.environ.get("PERIOD", 0)) or seconds_of_run(overrides, pipeline)
    where = provenance.environment(pipeline.device)
    print(f"{' '.join(overrides)}; {where['device_name']}, {torch.get_num_threads()} of {os.cpu_count()} threads,")
    print(f"PyTorch {where['torch']}, Python {platform.python_version()}, commit {where['commit'][:8]},", end=" ")
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC;", end=" ")
    print(f"processes that load a core: {LOADS}, busy {period / 2:.0f} of every {period:.0f} s", flush=True)
    context = multiprocessing.get_context("spawn")
    stop, all_agree = context.Event(), {}
    loads = []
    for _ in range(LOADS):
        ready = context.Event()
        loads.append(context.Process(target=load, args=(period, stop, ready), daemon=True))
        loads[-1].start()
        ready.wait()
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, measure in (("interleaved", interleaved), ("separate passes", separate)):
                runs = []
                for i in range(repeats):
                    phase = period * i / repeats  # where in the period this run begins
                    time.sleep((phase - (time.monotonic() - began)) % period)
                    found, drift = measure(overrides, pipeline, Path(folder) / f"{name}{i}")
                    runs.append(found)
                    value, stderr = found
                    low, high = value - 1.96 * stderr, value + 1.96 * stderr
                    print(f"{name} {i + 1}: {value:.3f}, 95 % {low:.3f} to {high:.3f}, drift {drift:+.1%}", flush=True)
                all_agree[name] = agree(runs)
                print(f"{name}: {'agree' if all_agree[name] else 'do not agree'} within their intervals", flush=True)
    finally:
        stop.set()
        for one in loads:
            one.join()
    return 0 if all_agree["interleaved"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
