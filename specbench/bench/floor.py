"""The references for a step's time: the bytes that must be read, the measured bandwidth of this device, and a second
measurement of the same pass.

Every weight of a network is read once per pass, whatever the number of rows and nodes. Every cached key and value up to
the step's position is read once for the target's pass. Embedding tables do not count, because only some of their rows
are read.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specbench.decoding.loop import NetworkPass
from specbench.errors import RunError
from specbench.models.language import Language
from specbench.storage import figure_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most attempts until the two measurements agree.
ATTEMPTS = 3
#: The fewest steps from which the spread of their times is estimated.
_FEWEST = 5
#: Relative difference that is not noise: a step's other parts change the state of the caches.
_SYSTEMATIC = 0.05
#: Two measurements with a larger relative difference never agree, however noisy they are.
_MOST = 0.15
#: Okabe and Ito's colours, distinguishable for colour-blind readers, each with its own marker for print.
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "v"), ("#E69F00", "D"), ("#56B4E9", "P"))


def nbytes(*modules: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())


def of_target(model: Language) -> int:
    """Bytes of weights that a pass of the target reads."""
    return nbytes(*model.pass_weights)


def _of_drafter(drafter: Any, target: Any) -> list[NetworkPass]:
    return drafter.network_passes(target) if hasattr(drafter, "network_passes") else []


def of_drafts(drafter: Any, target: Language) -> int:
    """Bytes of weights that drafting reads in one step, in all of its passes."""
    network_passes = _of_drafter(drafter, target)
    return sum(each.times * sum(p.numel() * p.element_size() for p in each.read) for each in network_passes)


def passes(target: Any, drafter: Any) -> list[tuple[nn.Module, str]]:
    """The methods, with their owners, that are the network passes of a step, including the drafter's."""
    drafting = [(each.owner, each.method) for each in _of_drafter(drafter, target) if each.method]
    return [(target, "hidden"), (target, "head"), *drafting]


def of_cache(model: Language, rows: int, context: int) -> int:
    """Bytes of keys and values that a pass reads, for `rows` sequences of `context` positions."""
    b = model.block
    return 2 * len(model.layers) * rows * b.n_kv_heads * b.head_dim * context * model.output.weight.element_size()


def operations(model: Language, rows: int, context: int) -> int:
    """Floating-point operations of a pass per node: two per weight, and attention over the positions before."""
    weights = of_target(model) // model.output.weight.element_size()
    return rows * (2 * weights + 4 * len(model.layers) * model.block.n_heads * model.block.head_dim * context)


def of_diffusion_step(target: Any) -> int:
    """Bytes of weights that one diffusion step of a continuous target's head reads."""
    return nbytes(*target.net.step_layers())


def of_pass(target: Any) -> int:
    """Bytes of weights that a pass of a continuous target reads, without its head."""
    return nbytes(*target.pass_layers())


def seconds(call: Callable[[], object], device: torch.device, least: float = 0.05, samples: int = 7) -> list[float]:
    """Seconds of a call, sampled: each sample repeats the call until `least` seconds have passed. On CUDA the host
    waits only at the end of a sample."""

    def repeated(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    repeated(2)
    times = max(1, round(least / max(repeated(1), 1e-7)))
    return [repeated(times) / times for _ in range(samples)]


def bandwidth(device: torch.device) -> float:
    """Bytes per second read from memory: the best of several sums over a buffer far larger than any cache."""
    size = (4 << 30 if device.type == "cuda" else 1 << 29) // 4
    buffer = torch.ones(size, device=device)
    into = torch.empty((), device=device)
    return 4 * size / min(seconds(lambda: torch.sum(buffer, dim=0, out=into), device))


def arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second: the best of several products of square matrices."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in "ab")
    c: Tensor = torch.empty_like(a)
    return 2 * n**3 / min(seconds(lambda: torch.mm(a, b, out=c), device))


@dataclass(frozen=True)
class Bases:
    """Checks whether other work disturbed a benchmark. Both fields are seconds, several each, of the target's pass over
    one node, the reference of every relative cost: in the `steps` of vanilla AR, and `alone`."""

    steps: Sequence[float]
    alone: Sequence[float]

    @property
    def difference(self) -> float:
        """The difference of their medians, relative to the smaller one."""
        low, high = sorted((statistics.median(self.steps), statistics.median(self.alone)))
        return high / low - 1

    @property
    def noise(self) -> float | None:
        """The largest difference of undisturbed measurements: three standard errors of both medians, plus the
        systematic part. None: too few steps to estimate their spread."""
        if len(self.steps) < _FEWEST:
            return None
        return min(_MOST, _SYSTEMATIC + 3 * math.hypot(_relative_error(self.steps), _relative_error(self.alone)))

    @property
    def agree(self) -> bool:
        return self.noise is None or self.difference <= self.noise

    def refusal(self) -> RunError:
        """The error that explains why there is no row."""
        steps, alone = (1e3 * statistics.median(times) for times in (self.steps, self.alone))
        return RunError(
            f"the target's pass over one token took {steps:.3g} ms in a step of vanilla decoding and {alone:.3g} ms"
            f" alone; they differ by {self.difference:.0%}, and their noise allows {self.noise or 0:.0%}. {ATTEMPTS}"
            " attempts disagreed, so this benchmark has no row: measure again while nothing else uses the machine"
        )


def _relative_error(samples: Sequence[float]) -> float:
    """The standard error of the median, relative to it, from the interquartile range (for normal noise)."""
    low, _, high = statistics.quantiles(samples, n=4)
    return 1.253 * (high - low) / 1.349 / math.sqrt(len(samples)) / statistics.median(samples)


def draw_roofline(rows: Sequence[Mapping[str, str]], stem: Path) -> list[Path]:
    """Draws the roofline of a device, with the passes timed by number of nodes, from rows as read from their file, as
    SVG and PNG. Draws nothing if no row has such passes. Returns the files written. The newest row gives the
    ceilings."""
    shown = [row for row in rows if row["by_nodes"] and row["node_gflop"]]
    if not shown:
        return []
    return figure_files.save(lambda: _roofline(shown), stem.parent, f"{stem.name}_roofline")


def _roofline(shown: Sequence[Mapping[str, str]]) -> Figure:
    """The figure of `draw_roofline`, of at least one row with passes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axis = figure.subplots()
    latest: dict[str, Mapping[str, str]] = {_name(row): row for row in shown}
    intensities = []
    for number, (name, row) in enumerate(latest.items()):
        colour, marker = _STYLES[number % len(_STYLES)]
        work, read = float(row["node_gflop"]), float(row["weights_gb"]) + float(row["cache_gb"])
        nodes = {int(n): ms for n, ms in json.loads(row["by_nodes"]).items()}
        x = [n * work / read for n in nodes]
        y = [n * work / (ms / 1e3) for n, ms in nodes.items()]
        intensities += x
        axis.plot(x, y, color=colour, marker=marker, linewidth=1, markersize=5, label=name)
        for n, a, b in zip(nodes, x, y, strict=True):
            axis.annotate(str(n), (a, b), textcoords="offset points", xytext=(4, -9), fontsize=7, color=colour)
    newest = shown[-1]
    speed, peak = float(newest["bandwidth_gb_s"]), float(newest["arithmetic_gflop_s"])
    ends = min(*intensities, peak / speed) / 2, max(*intensities, peak / speed) * 2
    edge = [ends[0], peak / speed, ends[1]]
    roof = [min(x * speed, peak) for x in edge]
    axis.plot(edge, roof, color="black", linewidth=1.5, label=f"{speed:,.0f} GB/s, {peak:,.0f} GFLOP/s measured")
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte that must be read (FLOP/B); numbers at the points: nodes",
        ylabel="operations per second (GFLOP/s)",
        title=f"The target's pass on {newest['device_name']}",
    )
    axis.grid(True, which="both", linewidth=0.3, alpha=0.6)
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def _name(row: Mapping[str, str]) -> str:
    return f"{row['model']}, {row['rows']} rows, {row['context']} positions before ({row['dtype']})"
