"""The gates: times of recorded steps and passes, next to what the measured bandwidth allows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from gpu_checks import models, results
from specbench.bench import floor
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import exact
from specbench.decoding.trees import build, chain_paths
from specbench.engine.graph import Graphs
from specbench.engine.kernels import FusedKernels

#: Bytes a second that a sum over a large buffer reads, by part of the device's name: the gates are those of an H200,
#: and elsewhere as much longer as reading the same bytes takes.
BANDWIDTH = {"H200": 4.3e12, "H100": 3.0e12}
#: Milliseconds on an H200, and what is aimed at.
STEPS = {
    "XL vanilla, a token": ("xl", "none", 0, None, 1.0, 0.75),
    "XL EAGLE tree of 26, a step": ("xl", "tree", 0, None, 2.5, None),
    "7B vanilla at 2,400 keys, a token": ("7b", "none", 0, 2400, 5.0, 4.4),
}
#: Nodes of a recorded pass of 7B at 2,400 keys, and how much longer it may take than a pass of one node.
PASSES = {32: 1.20, 64: 1.30}
LAYERS = {"xl": 36, "7b": 32}
#: Milliseconds of one step of MAR-L's diffusion head.
DIFFUSION = 0.20


def checks(cuda: bool, fast: bool) -> Iterator[results.Check]:
    names = [
        "bandwidth",
        *STEPS,
        *(f"7B pass of {nodes} nodes, of one node's" for nodes in PASSES),
        "MAR-L diffusion step",
        "XL vanilla, a token, tiles tuned",
    ]
    if not cuda:
        for name in names:
            yield name, _no_device
        return
    yield names[0], lambda: {"measured": speed() / 1e9, "unit": "GB/s", "device": torch.cuda.get_device_name()}
    for name, case in STEPS.items():
        if not fast or case[0] == "xl":
            yield name, partial(_step, *case)
    if not fast:
        for nodes, gate in PASSES.items():
            yield f"7B pass of {nodes} nodes, of one node's", partial(_pass, nodes, gate)
        yield "MAR-L diffusion step", _diffusion
        yield "XL vanilla, a token, tiles tuned", _tuned


def _no_device() -> dict[str, Any]:
    raise results.SkippedError("there is no CUDA device")


@lru_cache
def speed() -> float:
    """Bytes a second that this device reads."""
    return floor.bandwidth(torch.device("cuda"))


def line(measured: float, gate: float, read: int, aim: float | None = None) -> dict[str, Any]:
    """Of a time in ms whose gate holds on an H200; read: bytes that must be read."""
    device = torch.cuda.get_device_name()
    here = next((value for name, value in BANDWIDTH.items() if name in device), speed())
    longer = 1e3 * read * (1 / here - 1 / BANDWIDTH["H200"])
    least = 1e3 * read / speed()
    found = {"measured": measured, "gate": gate + longer, "floor": least, "unit": "ms", "device": device}
    return (
        found
        | {"share_of_bandwidth": least / measured, "ok": measured <= gate + longer}
        | ({"aim": aim + longer} if aim else {})
    )


@lru_cache(1)
def network(name: str) -> Any:
    """A target at its full size; one is held at a time."""
    torch.cuda.empty_cache()
    return models.target(name, "cuda", torch.bfloat16, LAYERS[name])


def recorded(
    name: str, drafter: str, window: int = 0, context: int | None = None, kernels: FusedKernels | None = None
) -> tuple[Decoding, Any, int]:
    """A decoding of one image and a function that replays its recorded step at the position `context` (default: the
    middle of the image); and the bytes that the step must read."""
    model = network(name)
    drafting = models.drafter(drafter, model, "cuda", torch.bfloat16, window=window)
    config = DecoderConfig(model, drafting, exact(), models.SAMPLING[name])
    given = models.conditioning(name, 1, "cuda", torch.bfloat16)
    decoding = Decoding(config, given, RandomStreams([(0, 0)], "cuda"), kernels=kernels or FusedKernels())
    before = decoding.session.prefix_length
    context = context or before + decoding.total // 2
    decoding.history.random_(0, decoding.session.codes)
    decoding.count.fill_(context - before)
    execution = Graphs(kernels=decoding.kernels).begin(decoding)

    def step() -> None:
        decoding.count.fill_(context - before)
        decoding.steps.zero_()
        execution.step()

    read = floor.of_target(model) + floor.of_cache(model, 2, context) + floor.of_drafts(drafting, model)
    return decoding, step, read


def _median(call: Any) -> float:
    """Milliseconds."""
    return 1e3 * statistics.median(floor.seconds(call, torch.device("cuda"), samples=9))


@torch.inference_mode()
def _step(name: str, drafter: str, window: int, context: int | None, gate: float, aim: float | None) -> dict[str, Any]:
    _, step, read = recorded(name, drafter, window, context)
    return line(_median(step), gate, read, aim)


@torch.inference_mode()
def _tuned() -> dict[str, Any]:
    """XL vanilla once more, with the best tiles of this device."""
    kernels = FusedKernels()
    kernels.tune(network("xl").layers, (1,), 2, 696)
    *_, gate, aim = STEPS["XL vanilla, a token"]
    _, step, read = recorded("xl", "none", kernels=kernels)
    return line(_median(step), gate, read, aim)


@lru_cache
def _pass_ms(nodes: int) -> float:
    model, context = network("7b"), 2400
    tree = build(chain_paths(nodes - 1)).to(torch.device("cuda"))
    session = model.open(models.conditioning("7b", 1, "cuda", torch.bfloat16), 1, True, nodes)
    kernels = FusedKernels()
    session.use(kernels)
    count = torch.full((1,), context - session.prefix_length, device="cuda")
    history = torch.zeros(1, session.length + nodes, dtype=torch.int64, device="cuda")
    tokens = history[:, :nodes]

    def forward() -> None:
        session.forward(tokens, tree, history, count)

    return _median(Graphs(kernels=kernels).repeated(forward, torch.device("cuda")))


@torch.inference_mode()
def _pass(nodes: int, gate: float) -> dict[str, Any]:
    one, many = _pass_ms(1), _pass_ms(nodes)
    found = {"measured": many / one, "gate": gate, "unit": "x", "device": torch.cuda.get_device_name()}
    return found | {"ok": many / one <= gate, "note": f"{many:.3f} ms, one node {one:.3f} ms"}


def _diffusion() -> dict[str, Any]:
    """By `specbench bench`, which needs the configuration files."""
    try:
        from specbench.bench.measure import BenchPlan, measure
        from specbench.config import configuration
    except ImportError as e:
        raise results.SkippedError(f"{e}: this gate needs the packages of specbench") from e
    network.cache_clear()
    torch.cuda.empty_cache()
    words = ["model=mar_l", "weights=random", "method=vanilla", "device=cuda", "engine=graph", "dtype=bfloat16"]
    found = measure(configuration.compose(words), BenchPlan(steps=10, images=1))
    read = int(found["diffusion_floor_ms"] * found["bandwidth_gb_s"] * 1e6)
    return line(found["diffusion_step_ms"], DIFFUSION, read)
