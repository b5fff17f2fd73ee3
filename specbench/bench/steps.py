"""Measured steps, and the one that is nearest to a planned step: from `specbench bench`'s rows (results/bench) and from
the checks of a GPU (results/gpu/checks.csv)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specbench.bench import devices
from specbench.bench.benchmark_rows import ROWS
from specbench.config import registry
from specbench.errors import UsageError
from specbench.rows.csv_files import has_runs, read_rows
from specbench.storage.csv_text import csv_lines

_SPEED = {"eager": 0, "graph": 1, "triton": 2}


@dataclass(frozen=True)
class MeasuredStep:
    """A timed step, or a planned one without `ms`. device: `cpu`, a name in `DEVICES`, or another GPU; width: nodes of
    the target's pass times images at once; network: whether a network drafts; continuous: whether the tokens are; gb:
    weights that a pass of the target reads."""

    name: str
    device_name: str
    device: str
    engine: str
    width: int
    network: bool
    continuous: bool
    gb: float
    ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}, {self.engine} {self.ms:.3g} ms on {self.device_name}"

    def distance(self, planned: MeasuredStep) -> tuple[float, ...]:
        """In the model's size, then the device, the engine, the width, and the drafter."""
        engines = abs(_SPEED.get(self.engine, 0) - _SPEED.get(planned.engine, 0))
        size, width = (abs(math.log2(a / b)) for a, b in ((self.gb, planned.gb), (self.width, planned.width)))
        elsewhere, other = self.device != planned.device, self.network != planned.network
        return round(size, 1), elsewhere, engines, round(width), other, width, size


def read(results: Path) -> list[MeasuredStep]:
    """The measured steps in a folder of results; files with other content are left out."""
    steps: list[MeasuredStep] = []
    for path in sorted((results / "bench").glob("*.csv")):
        with suppress(UsageError):
            steps += (step for row in ROWS.read(path) for step in _of_benchmark(row))
    path = results / "gpu" / "checks.csv"
    return steps + (list(_of_checks([row for _, row in csv_lines(path)[1]])) if path.is_file() else [])


def _of_benchmark(row: dict[str, str]) -> Iterator[MeasuredStep]:
    """The step of the method, vanilla's, and the target's passes by number of nodes."""
    batch, continuous, drafts = int(row["batch"]), bool(row["diffusion_step_ms"]), row["drafter"]
    steps = [(row["method"], int(row["nodes"]), drafts, row["recorded_step_ms"] or row["step_ms"])]
    steps += [("vanilla", 1, "none", row["vanilla_recorded_step_ms"] or row["vanilla_step_ms"])]
    by_nodes = json.loads(row["by_nodes"] or "{}")
    steps += [(f"pass of {n} nodes", int(n), "none", ms) for n, ms in by_nodes.items() if n != "1"]
    for name, nodes, drafter, ms in steps:
        yield MeasuredStep(
            f"{row['model']} {name}, batch {batch}",
            row["device_name"],
            "cpu" if row["device"] == "cpu" else devices.of_name(row["device_name"]),
            row["engine"],
            nodes * batch,
            registry.drafter_network(drafter) is not None,
            continuous,
            float(row["weights_gb"]),
            float(ms),
        )


def _of_checks(rows: Sequence[dict[str, str]]) -> Iterator[MeasuredStep]:
    """The timed steps of the checks, such as `7B SJD 32, graph`; vanilla's floor gives the size of the model."""
    [bandwidth] = [float(row["measured"]) for row in rows if row["check"] == "bandwidth"][-1:] or [0.0]
    floors = {row["check"].split()[0]: float(row["floor"]) for row in rows if " vanilla, " in row["check"]}
    for row in rows:
        made = re.fullmatch(r"(\w+) (vanilla|.+ (\d+)), (graph|triton)", row["check"])
        if made is None or row["unit"] != "ms" or made[1] not in floors:
            continue
        nodes = 1 if made[3] is None else int(made[3]) + (" tree of " not in made[2])  # of a window, and the root
        yield MeasuredStep(
            f"{made[1]} {made[2]}",
            row["device_name"],
            devices.of_name(row["device_name"]),
            made[4],
            nodes,
            " tree of " in made[2],
            False,
            floors[made[1]] * bandwidth / 1e3,
            float(row["measured"]),
        )


def nearest(steps: Sequence[MeasuredStep], planned: MeasuredStep) -> tuple[MeasuredStep, float] | None:
    """The measured step that is nearest to a planned one, and its milliseconds on the planned device. None: no such
    step was measured. On another GPU a step is taken to last longer by the ratio of the bandwidths in the data
    sheets."""
    is_cpu = planned.device == "cpu"
    same = [step for step in steps if (step.device == "cpu", step.continuous) == (is_cpu, planned.continuous)]
    if not same:
        return None
    chosen = min(same, key=lambda step: step.distance(planned))
    there, here = (devices.DEVICES.get(step.device) for step in (chosen, planned))
    return chosen, chosen.ms * (there.bandwidth / here.bandwidth if there and here else 1.0)


def tokens_per_step(results: Path) -> dict[tuple[str, str], float]:
    """The mean accepted length in rows of runs, by model and method."""
    lengths: dict[tuple[str, str], list[float]] = {}
    for path in sorted(results.glob("*.csv")):
        with suppress(UsageError):
            for row in read_rows(path) if has_runs(path) else ():
                if row["accepted_length_mean"] is not None:
                    lengths.setdefault((row["model"], row["method"]), []).append(float(row["accepted_length_mean"]))
    return {key: sum(values) / len(values) for key, values in lengths.items()}
