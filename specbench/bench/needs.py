"""What a configuration needs of a GPU, from shapes alone: weights, state, peak memory, and the memory floor of a step.
Nothing is fetched and no weights are created: the real loop runs on tensors without values (`bench.shapes`)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.bench import floor
from specbench.bench.benchmark import position_of
from specbench.bench.devices import Device
from specbench.bench.shapes import DEVICE, Shapes, shapes
from specbench.config.run_config import RunConfig
from specbench.decoding.continuous import Conditions, GenerationOrder
from specbench.harness.pipeline import check_engine
from specbench.models import language
from specbench.models.transformer import run_blocks

GB = 1e9
#: Estimate of the memory of every process on the device besides its tensors: the CUDA context, loaded kernels and the
#: workspaces of libraries.
RUNTIME_GB = 1.0


class Memory(TorchDispatchMode):
    """Bytes of the device's tensors that are created inside this context, at present and at most. It does not see
    memory that kernels allocate themselves, or that an allocator loses by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _on_device(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in filter(_on_device, tree_leaves(out)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in inputs and key not in self._known:
                self._known.add(key)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._drop, key, storage.nbytes())
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import torch._dynamo to switch it off, which takes 3 s

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def above(self) -> int:
        """How far the peak since the last call was above the present bytes."""
        excess, self.peak = self.peak - self.live, self.live
        return excess


def _on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == DEVICE.type


@dataclass(frozen=True)
class ImageNeeds:
    """What is known without a step: the resolution in pixels, the tokens, and the GB that a pass over one token
    reads."""

    resolution: int
    tokens: int
    forward_gb: float


@dataclass(frozen=True)
class Needs:
    """What a configuration needs. Bytes are in GB, 1e9 of them. Parts of the peak that only a run can measure are
    estimates, and named so.

    resolution: pixels of a side of an image; rows: sequences of a pass; tokens: of an image; nodes: positions of a pass
    for each sequence; context: positions before the step, None for continuous tokens; reads_gb: what each part of a
    step reads; weights_gb: of each network.
    """

    model: str
    method: str
    drafter: str
    rule: str
    batch: int
    dtype: str
    engine: str
    resolution: int
    rows: int
    tokens: int
    context: int | None
    nodes: int
    reads_gb: Mapping[str, float]
    weights_gb: Mapping[str, float]
    all_weights_gb: float
    state_gb: float
    prefill_estimate_gb: float
    step_estimate_gb: float
    pixels_estimate_gb: float
    runtime_estimate_gb: float
    peak_estimate_gb: float


@dataclass(frozen=True)
class _Step:
    """A step on shapes: fields as in `Needs`; resident: bytes of the state; above: bytes above it, by part."""

    rows: int
    tokens: int
    context: int | None
    nodes: int
    reads_gb: Mapping[str, float]
    resident: int
    above: Mapping[str, int]


@dataclass(frozen=True)
class DeviceNeeds:
    """A plan on a device: its bandwidth in GB/s, the floor in ms of each part of a step, and whether the peak fits into
    its memory; None if that is unknown."""

    bandwidth: float
    floors: Mapping[str, float]
    fits: bool | None

    def plain(self) -> dict[str, float | bool | None]:
        floors = {f"{part}_floor_ms": ms for part, ms in self.floors.items()}
        return {"bandwidth_gb_s": self.bandwidth, **floors, "fits": self.fits}


def plan(cfg: RunConfig, context: int | None = None) -> Needs:
    """The needs of a checked configuration. context: positions before the step (default: the middle of the image)."""
    check_engine(cfg)
    on_shapes = shapes(cfg)
    step = _continuous(cfg, on_shapes) if on_shapes.continuous else _discrete(cfg, on_shapes, context)
    model = on_shapes.pipeline.model
    bytes_each = torch.empty((), dtype=model.dtype).element_size()
    weights = {name: floor.nbytes(network) / GB for name, network in on_shapes.networks.items()}
    weights |= {name: count * bytes_each / GB for name, count in model.absent().items()}
    state, total = step.resident / GB, sum(weights.values())
    extra = {name: size / GB for name, size in step.above.items()}
    if cfg.engine == "eager":
        peak = total + state + max(extra.values())
    else:  # a graph keeps the memory of its step, and a later batch is prefilled beside the state of the recorded one
        peak = total + 2 * state + extra["step"] + max(extra["prefill"], extra["pixels"])
    return Needs(
        cfg.model,
        cfg.method,
        cfg.drafter,
        cfg.rule,
        cfg.batch,
        cfg.dtype,
        cfg.engine,
        resolution=on_shapes.pipeline.resolution,
        rows=step.rows,
        tokens=step.tokens,
        context=step.context,
        nodes=step.nodes,
        reads_gb=step.reads_gb,
        weights_gb=weights,
        all_weights_gb=total,
        state_gb=state,
        prefill_estimate_gb=extra["prefill"],
        step_estimate_gb=extra["step"],
        pixels_estimate_gb=extra["pixels"],
        runtime_estimate_gb=RUNTIME_GB,
        peak_estimate_gb=peak + RUNTIME_GB,
    )


def size(cfg: RunConfig) -> ImageNeeds:
    """The needs of an image for which no step has to run."""
    on_shapes = shapes(cfg)
    if on_shapes.continuous:
        planned = plan(cfg)
        return ImageNeeds(planned.resolution, planned.tokens, planned.reads_gb["forward"])
    pipeline, target = on_shapes.pipeline, on_shapes.pipeline.model.target
    rows = int(cfg.batch) * (2 if pipeline.config.sampling.guided else 1)
    with on_shapes.entered(), _few_blocks():
        at = position_of(pipeline.images(on_shapes.conditioning, on_shapes.rng), None)
    forward = (floor.of_target(target) + floor.of_cache(target, rows, at)) / GB
    return ImageNeeds(pipeline.resolution, pipeline.tokens_per_image, forward)


def _few_blocks() -> Any:
    """A context in which a pass of the target runs only its first blocks: the others need as much memory again."""

    def run(blocks: nn.ModuleList, *args: Any) -> Tensor:
        *_, layers = args
        return run_blocks(blocks if layers else blocks[:2], *args)

    return mock.patch.object(language, "run_blocks", run)


def _discrete(cfg: RunConfig, on_shapes: Shapes, context: int | None) -> _Step:
    pipeline, memory, above = on_shapes.pipeline, Memory(), dict[str, int]()
    target, drafter = pipeline.model.target, pipeline.config.drafter
    codes = target.length if target.grammar is None else len(target.grammar.free)
    rows = int(cfg.batch) * (2 if pipeline.config.sampling.guided else 1)
    with on_shapes.entered(), _few_blocks(), memory:
        decoding = pipeline.images(on_shapes.conditioning, on_shapes.rng)
        above["prefill"] = memory.above()
        decoding.step()
        above["step"] = memory.above()
        resident = memory.live
        _pixels(on_shapes, codes)
        above["pixels"] = memory.above()
    at = position_of(decoding, context)
    read = floor.of_target(target) + floor.of_cache(target, rows, at), floor.of_drafts(drafter, target)
    nodes = drafter.shape.num_chains(target) * drafter.shape.tree.nodes
    reads = {"forward": read[0] / GB, "draft": read[1] / GB, "step": sum(read) / GB}
    return _Step(rows, pipeline.tokens_per_image, at, nodes, reads, resident, above)


def _continuous(cfg: RunConfig, on_shapes: Shapes) -> _Step:
    """The target's pass over all images with their drafts, and steps of the diffusion head."""
    pipeline, memory, above, rows = on_shapes.pipeline, Memory(), dict[str, int](), int(cfg.batch)
    model, gamma, length = pipeline.model.target, pipeline.rule.gamma, pipeline.model.target.length
    with on_shapes.entered(), memory:
        session = model.open(on_shapes.conditioning, rows)
        conditions = Conditions(session, GenerationOrder.raster(rows, length, DEVICE))
        tokens = torch.zeros(rows, length + 1, model.dim, device=DEVICE)
        row = torch.arange(rows, device=DEVICE)
        memory.above()
        z = conditions.following(tokens, row, torch.zeros_like(row), gamma + 1, length)
        above["prefill"] = memory.above()
        states = torch.zeros(min(8192, max(1, gamma * model.steps) * rows), model.dim, device=DEVICE)
        index = states[:, 0].long()
        session.moments(states, index, z.flatten(0, 1)[:1].expand(len(states), -1))
        above["step"] = memory.above()
        del states, index, z
        _pixels(on_shapes, length)
        above["pixels"] = memory.above()
    reads = {"forward": floor.of_pass(model) / GB, "diffusion_step": floor.of_diffusion_step(model) / GB}
    return _Step(rows * model.halves, length, None, gamma + 1, reads, memory.live, above)


def _pixels(on_shapes: Shapes, codes: int) -> None:
    """Decodes the pixels of one image of this number of codes; only the copy to the host is left out."""
    model = on_shapes.pipeline.model
    shape, dtype = ((1, codes, model.target.dim), torch.float32) if on_shapes.continuous else ((1, codes), torch.int64)
    with mock.patch.multiple(Tensor, cpu=lambda x: x, numpy=lambda x: x):
        model.decode_image(torch.zeros(shape, dtype=dtype, device=DEVICE))


def on_devices(planned: Needs, chosen: Mapping[str, Device]) -> dict[str, DeviceNeeds]:
    """The plan on each of these devices."""
    by_device = {}
    for name, device in chosen.items():
        floors = {part: 1e3 * size / device.bandwidth for part, size in planned.reads_gb.items()}
        fits = None if device.memory == 0 else planned.peak_estimate_gb <= device.memory
        by_device[name] = DeviceNeeds(device.bandwidth, floors, fits)
    return by_device


def describe(planned: Needs, devices: Mapping[str, DeviceNeeds]) -> str:
    """A plan as text."""
    p = planned
    parts = ", ".join(f"{name} {size:.3f}" for name, size in p.weights_gb.items())
    estimates = (
        f"prefill {p.prefill_estimate_gb:.3f}, step {p.step_estimate_gb:.3f}, pixels {p.pixels_estimate_gb:.3f},"
        f" runtime {p.runtime_estimate_gb:.3f}"
    )
    reads = ", ".join(f"{name.replace('_', ' ')} {size:.3f}" for name, size in p.reads_gb.items())
    parts_of_step = "".join(f"{name.replace('_', ' '):>16}" for name in p.reads_gb)
    where = "" if p.context is None else f" at position {p.context}"
    lines = [
        f"{p.model}, {p.method}, batch {p.batch}, {p.dtype}, {p.engine}: {p.nodes} nodes a step",
        f"  {'weights':14} {p.all_weights_gb:9.3f} GB   {parts}",
        f"  {'state':14} {p.state_gb:9.3f} GB   caches and buffers of {p.rows} sequences",
        f"  {'peak, estimate':14} {p.peak_estimate_gb:9.3f} GB   weights and state, and above them: {estimates}",
        f"  reads{where}, GB: {reads}",
        f"  floor, ms   {'GB/s':>6}  {parts_of_step}   fits",
    ]
    for name, device in devices.items():
        floors = "".join(f"{ms:16.3f}" for ms in device.floors.values())
        fits = {True: "yes", False: "no", None: ""}[device.fits]
        lines.append(f"  {name:10s}  {device.bandwidth:6.0f}  {floors}   {fits}")
    return "\n".join(lines)
