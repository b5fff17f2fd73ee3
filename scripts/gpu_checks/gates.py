"""The gates: times of recorded steps and passes, next to what the measured bandwidth allows.

Without a device the same steps are done on small shapes, and not timed against a gate.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from gpu_checks import models, results
from gpu_checks.recording import RULES, at_once
from specbench.bench import floor
from specbench.decoding.continuous.rule import ContinuousRule
from specbench.decoding.continuous.trajectory import draw_trajectory
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import exact
from specbench.decoding.trees import build, chain_paths
from specbench.engine.graph import Graphs, Recorder
from specbench.engine.kernels import FusedKernels
from specbench.engine.kernels.tiles import Tiles
from specbench.models.mar import MAR, MARConfig
from specbench.models.mar_sampling import Guided

#: Bytes a second that a sum over a large buffer reads, by part of the device's name: the gates are those of an H200,
#: and elsewhere as much longer as reading the same bytes takes.
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
LAYERS = {"xl": 36, "7b": 32}
#: Rows of one image with guidance.
ROWS = 2
#: Nodes of the passes whose tiles are tuned, some of EAGLE's drafting among them, and positions in the cache.
TUNED = {"xl": ((1, 4, 6, 26), 376), "7b": ((1, 33, 65), 2400)}
#: Milliseconds of one step of MAR-L's diffusion head.
DIFFUSION = 0.20
MAR_L = MARConfig.even(1024, 16, 16, head_depth=8, head_width=1280)
SMALL_MAR = MARConfig.even(16, 1, 1, length=4, buffer=2, head_depth=1, head_width=16, steps=4)


def checks(cuda: bool, fast: bool) -> Iterator[results.Check]:
    """Tiles are tuned before the gates of their target, or read where an earlier run has tuned them."""
    first = next(iter(STEPS))
    xl, large = (
        {name: partial(_step, *case) for name, case in STEPS.items() if case[0] == target} for target in ("xl", "7b")
    )
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "bandwidth": lambda: {"measured": speed() / 1e9, "unit": "GB/s", "device": device_name()},
        f"{first}, tiles not tuned": partial(_step, *STEPS[first], tuned=False),
        "XL tiles": partial(_tuned, "xl"),
        **xl,
        "7B tiles": partial(_tuned, "7b"),
        **large,
        **{f"7B pass of {nodes} nodes, of one node's": partial(_pass, nodes, gate) for nodes, gate in PASSES.items()},
        "MAR-L diffusion step": _diffusion,
    }
    for name, check in measured.items():
        if not fast or not name.startswith("7B"):
            yield name, check if cuda else partial(dry, check)


def dry(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do what is measured on a device; its time says nothing."""
    check()
    raise results.SkippedError("there is no CUDA device; done on small shapes, and not timed")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if device().type == "cuda" else "cpu"


def small() -> bool:
    return device().type == "cpu"


def recorder() -> Recorder | None:
    """Of CUDA graphs; where nothing can be recorded, the work is done."""
    return at_once if small() else None


@lru_cache
def speed() -> float:
    """Bytes a second that this device reads."""
    return floor.bandwidth(device())


def line(measured: float, gate: float, read: int, aim: float | None = None) -> dict[str, Any]:
    """Of a time in ms whose gate holds on an H200; read: bytes that must be read."""
    name = device_name()
    here = next((value for part, value in BANDWIDTH.items() if part in name), speed())
    longer = 1e3 * read * (1 / here - 1 / BANDWIDTH["H200"])
    least = 1e3 * read / speed()
    row = {"measured": measured, "gate": gate + longer, "floor": least, "unit": "ms", "device": name}
    return (
        row
        | {"share_of_bandwidth": least / measured, "ok": measured <= gate + longer}
        | ({"aim": aim + longer} if aim else {})
    )


def stored_tiles() -> Tiles:
    """The tiles that were tuned for this device, in the folder of the results, if there is one."""
    folder = os.environ.get("OUT")
    return Tiles.load(Path(folder) / results.TILES) if folder else Tiles()


@lru_cache(1)
def network(name: str) -> Any:
    """A target at its full size; one is kept at a time."""
    if not small():
        torch.cuda.empty_cache()
        return models.target(name, "cuda", torch.bfloat16, LAYERS[name])
    return models.target(name, "cpu", torch.float32, 1, small=True)


def _given(name: str) -> tuple[Any, torch.dtype]:
    """What one image is conditioned on, and the format of the network."""
    dtype = network(name).output.weight.dtype
    return models.conditioning(name, 1, device().type, dtype, small()), dtype


def recorded(
    name: str,
    drafter: str,
    window: int = 0,
    context: int | None = None,
    rule: str | None = None,
    kernels: FusedKernels | None = None,
) -> tuple[Decoding, Any, int]:
    """A decoding of one image and a function that replays its recorded step at the position `context` (default: the
    middle of the image); and the bytes that the step must read. rule: one of `recording.RULES` (default: exact);
    kernels: default: with the stored tiles."""
    model, (given, dtype), here = network(name), _given(name), device()
    drafting = models.drafter(drafter, model, here.type, dtype, small(), 0 if small() else window)
    chosen = exact() if rule is None else RULES[rule](model.vocab_size)
    config = DecoderConfig(model, drafting, chosen, models.SAMPLING[name])
    kernels = kernels or FusedKernels(stored_tiles())
    decoding = Decoding(config, given, RandomStreams([(0, 0)], here), kernels=kernels)
    before = decoding.session.prefix_length
    context = before + decoding.total // 2 if context is None or small() else context
    decoding.history.random_(0, decoding.session.codes)
    decoding.count.fill_(context - before)
    execution = Graphs(recorder(), decoding.kernels).begin(decoding)

    def step() -> None:
        decoding.count.fill_(context - before)
        decoding.steps.zero_()
        execution.step()

    read = floor.of_target(model) + floor.of_cache(model, ROWS, context) + floor.of_drafts(drafting, model)
    return decoding, step, read


def _median(call: Any) -> float:
    """Milliseconds; not a number without a device, where it is called once."""
    if small():
        call()
        return math.nan
    return 1e3 * statistics.median(floor.seconds(call, device(), samples=9))


@torch.inference_mode()
def _step(
    name: str,
    drafter: str,
    window: int,
    context: int | None,
    gate: float,
    aim: float | None,
    tuned: bool = True,
) -> dict[str, Any]:
    _, step, read = recorded(name, drafter, window, context, kernels=None if tuned else FusedKernels())
    return line(_median(step), gate, read, aim) | ({} if tuned else {"ok": True})


@torch.inference_mode()
def _tuned(name: str) -> dict[str, Any]:
    """Choose the fastest tiles of this device for a target's passes, and store them."""
    tiles, (nodes, slots) = stored_tiles(), TUNED[name]
    before = len(tiles.tuned) + len(tiles.tuned_attention)
    FusedKernels(tiles).tune(network(name).layers, nodes, ROWS, slots)
    more = len(tiles.tuned) + len(tiles.tuned_attention) - before
    return {"note": f"{more} tuned, {before} read", "device": device_name()}


@lru_cache
def _pass_ms(nodes: int) -> float:
    model, context = network("7b"), 2400
    nodes = min(nodes, 5) if small() else nodes
    tree = build(chain_paths(nodes - 1)).to(device())
    session = model.open(_given("7b")[0], 1, True, nodes)
    kernels = FusedKernels(stored_tiles())
    session.use(kernels)
    before = session.prefix_length
    count = torch.full((1,), session.length // 2 if small() else context - before, device=device())
    history = torch.zeros(1, session.length + nodes, dtype=torch.int64, device=device())
    tokens = history[:, :nodes]

    def forward() -> None:
        session.forward(tokens, tree, history, count)

    return _median(Graphs(recorder(), kernels).repeated(forward, device()))


@torch.inference_mode()
def _pass(nodes: int, gate: float) -> dict[str, Any]:
    one, many = _pass_ms(1), _pass_ms(nodes)
    row = {"measured": many / one, "gate": gate, "unit": "x", "device": device_name()}
    return row | {"ok": many / one <= gate, "note": f"{many:.3f} ms, one node {one:.3f} ms"}


@torch.inference_mode()
def _diffusion() -> dict[str, Any]:
    """A step of a recorded trajectory of the head, with guidance, of one token."""
    network.cache_clear()
    shape, dtype, here = (SMALL_MAR, torch.float32, "cpu") if small() else (MAR_L, torch.bfloat16, "cuda")
    model = models.made(lambda: MAR(shape), here, dtype)
    session = Guided(model, 3.0, "linear").open(torch.zeros(1, dtype=torch.int64, device=here), 1)
    noise = torch.randn(1, shape.steps + 1, shape.token_dim, device=here)
    first = torch.zeros(1, dtype=torch.int64, device=here)
    tokens = torch.zeros(1, shape.length, shape.token_dim, device=here)
    known = torch.zeros(1, shape.length, dtype=torch.bool, device=here)
    z = session.condition(tokens, known, first, first[None], first[None], 0).flatten(0, 1)
    engine, rule = Graphs(recorder()), ContinuousRule()
    took = _median(lambda: draw_trajectory(session, z, noise, rule, engine)) / shape.steps
    return line(took, DIFFUSION, floor.of_head(model))
