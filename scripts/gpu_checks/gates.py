"""The gates: times of recorded steps and passes, next to the limit of the measured bandwidth; and the ten most
expensive kernels of some steps. Without a device the same is done on small shapes, and nothing is timed."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_checks import models, results
from gpu_checks.recording import RULES, at_once
from specbench.bench import floor
from specbench.decoding.continuous.rule import ContinuousRule
from specbench.decoding.continuous.trajectory import draw_trajectory
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import exact
from specbench.decoding.trees import build, chain_paths
from specbench.engine.graph import Action, Graphs, Recorder, cuda_graphs
from specbench.engine.kernels import FusedKernels
from specbench.engine.kernels.tiles import Tiles
from specbench.models.mar import MAR, MARConfig
from specbench.models.mar_sampling import Guided

#: Bytes a second that a sum over a large buffer reads, by part of the device's name: the gates are for an H200;
#: on another device they are longer by the ratio of the bandwidths.
BANDWIDTH = {"H200": 4.3e12, "H100": 3.0e12}
#: Target, drafter, window and context of a step; milliseconds on an H200, and what would be better still.
STEPS = {
    "XL vanilla, a token": ("xl", "none", 0, None, 0.75, 0.60),
    "XL EAGLE tree of 26, a step": ("xl", "tree", 0, None, 2.0, None),
    "7B vanilla at 2,400 keys, a token": ("7b", "none", 0, 2400, 4.4, None),
}
#: Nodes of a recorded pass of 7B at 2,400 keys (windows of 32 and 64 with their root), and how much longer it may take
#: than a pass of one node.
PASSES = {33: 1.10, 65: 1.20}
#: Target, drafter, window and context of a step whose kernels are listed, and a rule of stage 3 (default: exact).
PROFILES = {
    "XL vanilla": ("xl", "none", 0, None),
    "XL EAGLE tree of 26": ("xl", "tree", 0, None),
    "XL LANTERN tree of 26": ("xl", "tree", 0, None, "lantern"),
    "7B vanilla at 2,400 keys": ("7b", "none", 0, 2400),
    "7B SJD 64 at 2,400 keys": ("7b", "sjd", 64, 2400),
}
#: Steps that are profiled.
PROFILED = 10
#: Positions before the nodes of a pass (of XL the middle of an image of 256 tokens), and the most nodes without a
#: device: two rows of them are more than few.
CONTEXT, MOST_DRY = {"xl": 248, "7b": 2400, "emu3": 4100}, 9
LAYERS = {"xl": 36, "7b": 32, "emu3": 32}
#: Rows of one image with guidance.
ROWS = 2
#: Nodes of the passes whose tiles are tuned, some of EAGLE's drafting among them, and positions in the cache.
TUNED = {"xl": ((1, 4, 6, 26), 376), "7b": ((1, 33, 65), 2400), "emu3": ((1, 33, 65), 4100)}
#: Milliseconds of one step of MAR-L's diffusion head.
DIFFUSION = 0.20
MAR_L = MARConfig.even(1024, 16, 16, head_depth=8, head_width=1280)
SMALL_MAR = MARConfig.even(16, 1, 1, length=4, buffer=2, head_depth=1, head_width=16, steps=4)


def checks(fast: bool) -> Iterator[results.Check]:
    """The tiles of a target are tuned before its gates, or read if an earlier run has tuned them."""
    first = next(iter(STEPS))
    xl, large = (
        {name: partial(_step, *case) for name, case in STEPS.items() if case[0] == target} for target in ("xl", "7b")
    )
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "bandwidth": lambda: {"measured": speed() / 1e9, "unit": "GB/s", "device": device_name()},
        f"{first}, tiles not tuned": partial(_step, *STEPS[first], tuned=False),
        "XL tiles": partial(tuned_of, "xl"),
        **xl,
        "7B tiles": partial(tuned_of, "7b"),
        **large,
        **{f"7B pass of {nodes} nodes, of one node's": partial(_pass, nodes, gate) for nodes, gate in PASSES.items()},
        "MAR-L diffusion step": _diffusion,
    }
    yield from ((name, check) for name, check in measured.items() if not fast or not name.startswith("7B"))


def profiles(fast: bool) -> Iterator[results.Check]:
    """The profiles of all cases; fast: only the case whose step has no gate."""
    for name, case in PROFILES.items():
        if not fast or name == "XL LANTERN tree of 26":
            yield name, partial(_most_expensive, *case)


def small() -> bool:
    """Whether there is no device: then the sizes are for Triton's interpreter."""
    return not torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cpu" if small() else "cuda")


def device_name() -> str:
    return "cpu" if small() else torch.cuda.get_device_name()


def recorder() -> Recorder:
    """Records CUDA graphs; without a device, runs the work directly."""
    return at_once if small() else cuda_graphs


@lru_cache
def speed() -> float:
    """Bytes per second that this device reads."""
    return floor.bandwidth(device())


def of_time(measured: float, read: int) -> dict[str, Any]:
    """The row of a time in ms; read: the bytes that must be read."""
    least = 1e3 * read / speed()
    row = {"measured": measured, "floor": least, "unit": "ms", "device": device_name()}
    return row | {"share_of_bandwidth": least / measured}


def line(measured: float, gate: float, read: int, aim: float | None = None) -> dict[str, Any]:
    """See `of_time`, for a gate that holds on an H200."""
    here = next((value for part, value in BANDWIDTH.items() if part in device_name()), speed())
    longer = 1e3 * read * (1 / here - 1 / BANDWIDTH["H200"])
    row = of_time(measured, read) | {"gate": gate + longer, "ok": not measured > gate + longer}
    return row | ({"aim": aim + longer} if aim else {})


def stored_tiles() -> Tiles:
    """The tiles tuned for this device, in the folder of the results if there is one."""
    folder = os.environ.get("OUT")
    return Tiles.load(Path(folder) / results.TILES) if folder else Tiles()


@lru_cache(1)
def network(name: str) -> Any:
    """A target at its full size; only one is kept at a time."""
    if small():
        return models.target(name, "cpu", torch.bfloat16, 2 if name == "xl" else 1, small=True)
    torch.cuda.empty_cache()
    return models.target(name, "cuda", torch.bfloat16, LAYERS[name])


def _conditioning(name: str) -> Any:
    """The conditioning of one image."""
    return models.conditioning(name, 1, device().type, network(name).output.weight.dtype, small())


def recorded(
    name: str,
    drafter: str,
    window: int = 0,
    context: int | None = None,
    rule: str | None = None,
    *,
    kernels: FusedKernels | None,
) -> tuple[Action, int]:
    """A function that replays the recorded step of one image at the position `context` (default: the middle of the
    image), and the bytes that the step must read. rule: one of `recording.RULES` (default: exact); kernels: None for
    engine=graph."""
    model, here = network(name), device()
    drafting = models.drafter(drafter, model, here.type, model.output.weight.dtype, small(), 0 if small() else window)
    chosen = exact() if rule is None else RULES[rule](model.vocab_size)
    config = DecoderConfig(model, drafting, chosen, models.SAMPLING[name])
    decoding = Decoding(config, _conditioning(name), RandomStreams([(0, 0)], here), kernels=kernels)
    before = decoding.session.prefix_length
    context = before + decoding.total // 2 if context is None or small() else context
    decoding.history.random_(0, decoding.session.codes)
    decoding.num_committed.fill_(context - before)
    execution = Graphs(recorder(), decoding.kernels).begin(decoding)

    def step() -> None:
        decoding.num_committed.fill_(context - before)
        decoding.steps.zero_()
        execution.step()

    read = floor.of_target(model) + floor.of_cache(model, ROWS, context) + floor.of_drafts(drafting, model)
    return step, read


def recorded_pass(name: str, nodes: int, engine: Graphs) -> Action:
    """A pass of a target over a chain of nodes including the root: inputs, layers and head, for one image with
    guidance."""
    model, here, nodes = network(name), device(), min(nodes, MOST_DRY) if small() else nodes
    session = model.open(_conditioning(name), 1, True, nodes)
    if engine.kernels is not None:
        session.use(engine.kernels)
    tree = build(chain_paths(nodes - 1)).to(here)
    before = 1 if small() else CONTEXT[name] - session.prefix_length
    if before + nodes > session.length:
        raise ValueError(f"a pass of {nodes} nodes after {before} tokens leaves the image of {session.length}")
    count = torch.full((1,), before, device=here)
    history = torch.zeros(1, session.length + nodes, dtype=torch.int64, device=here)

    def forward() -> None:
        session.forward(history[:, :nodes], tree, history, count)

    return engine.repeated(forward, here)


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
            seconds[name] += floor.seconds(run, device(), least=0.02, samples=3)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def _step(
    name: str,
    drafter: str,
    window: int,
    context: int | None,
    gate: float,
    aim: float | None,
    tuned: bool = True,
) -> dict[str, Any]:
    step, read = recorded(name, drafter, window, context, kernels=FusedKernels(stored_tiles() if tuned else None))
    return line(timed({name: step})[name], gate, read, aim) | ({} if tuned else {"ok": True})


def tuned_of(name: str) -> dict[str, Any]:
    """Choose the fastest tiles of this device for a target's passes, and store them."""
    tiles, (nodes, slots) = stored_tiles(), TUNED[name]
    before = len(tiles.tuned) + len(tiles.tuned_attention)
    FusedKernels(tiles).tune(network(name).layers, nodes, ROWS, slots)
    more = len(tiles.tuned) + len(tiles.tuned_attention) - before
    return {"note": f"{more} tuned, {before} read", "device": device_name()}


def _pass(nodes: int, gate: float) -> dict[str, Any]:
    engine = Graphs(recorder(), FusedKernels(stored_tiles()))
    one_ms, ms = timed({str(n): recorded_pass("7b", n, engine) for n in (1, nodes)}).values()
    row = {"measured": ms / one_ms, "gate": gate, "unit": "x", "device": device_name()}
    return row | {"ok": not ms / one_ms > gate, "note": f"{ms:.3f} ms, one node {one_ms:.3f} ms"}


def _diffusion() -> dict[str, Any]:
    """A step of a recorded trajectory of the head, with guidance, of one token."""
    network.cache_clear()
    shape, dtype, here = (SMALL_MAR, torch.float32, "cpu") if small() else (MAR_L, torch.bfloat16, "cuda")
    model = models.made(lambda: MAR(shape), here, dtype)
    target = Guided(model, 3.0, "linear")
    session = target.open(torch.zeros(1, dtype=torch.int64, device=here), 1)
    noise = torch.randn(1, shape.steps + 1, shape.token_dim, device=here)
    first = torch.zeros(1, dtype=torch.int64, device=here)
    tokens = torch.zeros(1, shape.length, shape.token_dim, device=here)
    known = torch.zeros(1, shape.length, dtype=torch.bool, device=here)
    z = session.condition(tokens, known, first, first[None], first[None], 0).flatten(0, 1)
    engine, rule = Graphs(recorder()), ContinuousRule()
    [took] = timed({"a trajectory": lambda: draw_trajectory(session, z, noise, rule, engine)}).values()
    return line(took / shape.steps, DIFFUSION, floor.of_diffusion_step(target))


def _most_expensive(
    name: str, drafter: str, window: int, context: int | None, rule: str | None = None
) -> dict[str, Any]:
    """The most expensive kernels by name: microseconds and launches per step."""
    step, _ = recorded(name, drafter, window, context, rule, kernels=FusedKernels(stored_tiles()))
    synchronize = (lambda: None) if small() else torch.cuda.synchronize
    if not small():  # recording has done it once
        step()
    synchronize()
    with profile(activities=[ProfilerActivity.CPU if small() else ProfilerActivity.CUDA]) as seen:
        for _ in range(1 if small() else PROFILED):
            step()
        synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.device_time)
    most = sorted(spent.items(), key=lambda item: -sum(item[1]))
    table = [[kernel[:100], round(sum(us) / PROFILED, 2), len(us) / PROFILED] for kernel, us in most[:10]]
    for kernel, us, count in table:
        print(f"      {us:9.2f} us  {count:6.1f} x  {kernel}")
    total, launches = (sum(map(size, spent.values())) / PROFILED for size in (sum, len))
    return {"kernels": table, "note": f"{total / 1e3:.3f} ms in {launches:.0f} launches a step"}
