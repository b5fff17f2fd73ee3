"""Times on a GPU with random weights: gates of `specbench bench`, and a recorded step of each method at the real sizes,
in alternation with one of vanilla AR. A step's time hardly depends on which tokens are accepted. Without a device the
work is done on small shapes, and nothing is timed."""

from __future__ import annotations

import contextlib
import io
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch

from gpu_checks import models
from specbench.bench import floor
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import exact
from specbench.engine.graph import Action, Graphs, cuda_graphs
from specbench.engine.kernels import FusedKernels
from specbench.engine.kernels.tiles import Tiles
from specbench.storage import home

Check = tuple[str, Callable[[], dict[str, Any]]]

# --- gates ------------------------------------------------------------------------------------------------------------

#: Bytes a second that a sum over a large buffer reads, by part of the device's name: the gates are for an H200;
#: on another device they are longer by the ratio of the bandwidths.
BANDWIDTH = {"H200": 4.3e12, "H100": 3.0e12}
XL = "model=llamagen_xl method=vanilla"
LUMINA = "model=lumina_mgpt method=vanilla bench.context=2400 bench.nodes=1,33,65"
#: Words of a benchmark, what is read of its row and its floor, and the most milliseconds on an H200. With a number of
#: nodes instead of a floor: how much longer a pass of so many nodes may take than a pass of one node.
GATES = {
    "XL vanilla, a token": (XL, "recorded_step_ms", "step_floor_ms", 0.75),
    "XL EAGLE tree of 26, a step": ("model=llamagen_xl method=eagle1", "recorded_step_ms", "step_floor_ms", 2.0),
    "7B vanilla at 2,400 keys, a token": (LUMINA, "recorded_step_ms", "step_floor_ms", 4.4),
    "7B pass of 33 nodes, of one node's": (LUMINA, "node_cost", "33", 1.10),
    "7B pass of 65 nodes, of one node's": (LUMINA, "node_cost", "65", 1.20),
    "MAR-L diffusion step": (
        "model=mar_l method=vanilla engine=graph dtype=bfloat16", "diffusion_step_ms", "diffusion_floor_ms", 0.20
    ),
}  # fmt: skip
#: What every benchmark has, and what it has without a device.
BENCH = "weights=random device=cuda engine=triton bench.images=0 bench.steps=50"
DRY = "weights=random device=cpu engine=eager bench.images=0 bench.steps=1 reduced=true bench.nodes=1"


def gates() -> Iterator[Check]:
    yield "bandwidth", lambda: {"measured": speed() / 1e9, "unit": "GB/s"}
    for name, gate in list(GATES.items())[: 1 if small() else None]:
        yield name, partial(_gate, *gate)


def _gate(words: str, column: str, by: str, gate: float) -> dict[str, Any]:
    row = benchmark(words)
    if small():
        return {}
    if column == "node_cost":
        measured = json.loads(row["node_cost"])[by]
        return {"measured": measured, "unit": "x", "gate": gate, "ok": measured <= gate}
    return gated(row[column], gate, row[by], 1e9 * row["bandwidth_gb_s"])


def gated(measured: float, gate: float, least: float, bandwidth: float) -> dict[str, Any]:
    """The cells of a time in ms, for a gate that holds on an H200; least: the time at the measured bandwidth."""
    here = next((value for part, value in BANDWIDTH.items() if part in device_name()), bandwidth)
    gate += least * bandwidth * (1 / here - 1 / BANDWIDTH["H200"])
    return of_time(measured, least) | {"gate": gate, "ok": measured <= gate}


def of_time(measured: float, least: float) -> dict[str, Any]:
    return {"measured": measured, "floor": least, "unit": "ms", "share_of_bandwidth": least / measured}


@lru_cache
def benchmark(words: str) -> dict[str, Any]:
    """The row of a benchmark, whose last line of output it is."""
    from specbench import cli

    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(["bench", *arguments(words)])
    if code:
        raise RuntimeError(f"specbench bench {words}: exit code {code}")
    return json.loads(out.getvalue().splitlines()[-1])


def arguments(words: str) -> list[str]:
    """The words of all benchmarks and its own, which prevail; without a device, those of a dry one do."""
    first, then = (words, DRY) if small() else (BENCH, words)
    pairs = (word.partition("=") for word in f"{first} {then}".split())
    return [f"{name}={value}" for name, value in {name: value for name, _, value in pairs}.items()]


# --- a step of each method --------------------------------------------------------------------------------------------

#: Drafter, window and rule of a method.
METHODS = {
    "SJD 32": ("sjd", 32, None),
    "SJD-PAC 64": ("sjd_pac", 64, None),
    "SCD 32": ("scd", 32, None),
    "EAGLE-1, tree of 26": ("tree", 0, None),
    "LANTERN, tree of 26": ("tree", 0, "lantern"),
    "Cool-SD, tree of 26": ("tree", 0, "cool"),
}
#: Layers of a target, and positions before a step (of XL the middle of an image of 256 tokens).
TARGETS = {"emu3": (32, 4100), "7b": (32, 2400), "xl": (36, 248)}
ENGINES = ("triton", "graph")
#: Nodes of the passes whose tiles are tuned, some of EAGLE's drafting among them, and positions in the cache.
TUNED = {"xl": ((1, 4, 6, 26), 376), "7b": ((1, 33, 65), 2400), "emu3": ((1, 33, 65), 4100)}
#: Rows of one image with guidance.
ROWS = 2


def methods() -> Iterator[Check]:
    """Without a device, one method of each engine."""
    for engine in ENGINES:
        for target in ("xl",) if small() else TARGETS if engine == "triton" else reversed(TARGETS):
            if engine == "triton" and not small():
                yield f"{target.upper()} tiles", partial(tuned, target)
            yield f"{target.upper()} vanilla, {engine}", partial(_vanilla, target, engine)
            for method, case in list(METHODS.items())[: 1 if small() else None]:
                yield f"{target.upper()} {method}, {engine}", partial(_method, target, engine, *case)


def small() -> bool:
    """Whether there is no device: then the sizes are for Triton's interpreter."""
    return not torch.cuda.is_available()


def device_name() -> str:
    return "cpu" if small() else torch.cuda.get_device_name()


@lru_cache
def speed() -> float:
    """Bytes per second that this device reads."""
    return floor.bandwidth(torch.device("cpu" if small() else "cuda"))


def kernels() -> FusedKernels:
    """With the tiles tuned for this device."""
    return FusedKernels(Tiles() if small() else Tiles.load(home.tiles_file(device_name())))


@lru_cache(1)
def network(name: str) -> Any:
    """A target at its full size; only one is kept at a time."""
    if small():
        return models.target(name, "cpu", torch.bfloat16, 2, small=True)
    torch.cuda.empty_cache()
    return models.target(name, "cuda", torch.bfloat16, TARGETS[name][0])


def tuned(name: str) -> dict[str, Any]:
    """Choose the fastest tiles of this device for a target's passes, and store them."""
    fused, (nodes, slots) = kernels(), TUNED[name]
    tiles = fused.layers.tiles
    before = len(tiles.tuned) + len(tiles.tuned_attention)
    fused.tune(network(name).layers, nodes, ROWS, slots)
    return {"note": f"{len(tiles.tuned) + len(tiles.tuned_attention) - before} tuned, {before} read"}


def recorded(name: str, engine: str, drafter: str, window: int = 0, rule: str | None = None) -> tuple[Action, float]:
    """A function that replays the recorded step of one image, and the least milliseconds that it takes. rule: one of
    `models.RULES` (default: exact). Without a device the step is not recorded."""
    model, here = network(name), "cpu" if small() else "cuda"
    dtype = model.output.weight.dtype
    drafting = models.drafter(drafter, model, here, dtype, small(), 0 if small() else window)
    chosen = exact() if rule is None else models.RULES[rule](model.vocab_size)
    config = DecoderConfig(model, drafting, chosen, models.SAMPLING[name])
    conditioning = models.conditioning(name, 1, here, dtype, small())
    fused = kernels() if engine == "triton" else None
    decoding = Decoding(config, conditioning, RandomStreams([(0, 0)], here), kernels=fused)
    before = decoding.session.prefix_length
    context = before + decoding.total // 2 if small() else TARGETS[name][1]
    decoding.history.random_(0, decoding.session.codes)
    decoding.num_committed.fill_(context - before)
    execution = Graphs(models.at_once if small() else cuda_graphs, decoding.kernels).begin(decoding)

    def step() -> None:
        decoding.num_committed.fill_(context - before)
        decoding.steps.zero_()
        execution.step()

    read = floor.of_target(model) + floor.of_cache(model, ROWS, context) + floor.of_drafts(drafting, model)
    return step, 1e3 * read / speed()


def timed(actions: Mapping[str, Action]) -> dict[str, float]:
    """Milliseconds. The actions alternate, so that a change of the device's clock affects all. Without a device each
    runs once, and its time is not a number."""
    if small():
        for run in actions.values():
            run()
        return dict.fromkeys(actions, math.nan)
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(5):
        for name, run in actions.items():
            seconds[name] += floor.seconds(run, torch.device("cuda"), least=0.02, samples=3)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


@lru_cache(1)
def _vanilla_step(target: str, engine: str) -> tuple[Action, float]:
    """Kept for the methods that are measured next to it."""
    return recorded(target, engine, "none")


def _vanilla(target: str, engine: str) -> dict[str, Any]:
    step, least = _vanilla_step(target, engine)
    return of_time(timed({"vanilla": step})["vanilla"], least)


def _method(target: str, engine: str, drafter: str, window: int, rule: str | None) -> dict[str, Any]:
    vanilla, _ = _vanilla_step(target, engine)
    step, least = recorded(target, engine, drafter, window, rule)
    ms = timed({"vanilla": vanilla, "method": step})
    return of_time(ms["method"], least) | {"vanilla_ms": ms["vanilla"], "of_vanilla": ms["method"] / ms["vanilla"]}
