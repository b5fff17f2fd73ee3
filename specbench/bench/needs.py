"""What a configuration needs of a GPU, from shapes alone: weights, state, peak memory, and the memory floor of a step.
Nothing is fetched and no weights are created: the real loop runs on tensors without values (`bench.shapes`)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
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


def plan(cfg: RunConfig, context: int | None = None) -> dict[str, Any]:
    """The plan of a checked configuration. context: positions before the step (default: the middle of the image). Bytes
    are in GB, 1e9 of them. Parts of the peak that only a run can measure are estimates, and named so."""
    check_engine(cfg)
    on_shapes = shapes(cfg)
    values, above = _continuous(cfg, on_shapes) if on_shapes.continuous else _discrete(cfg, on_shapes, context)
    model = on_shapes.pipeline.model
    bytes_each = torch.empty((), dtype=model.dtype).element_size()
    weights = {name: floor.nbytes(network) / GB for name, network in on_shapes.networks.items()}
    weights |= {name: count * bytes_each / GB for name, count in model.absent().items()}
    state, total = values.pop("resident") / GB, sum(weights.values())
    extra = {name: size / GB for name, size in above.items()}
    if cfg.engine == "eager":
        peak = total + state + max(extra.values())
    else:  # a graph keeps the memory of its step, and a later batch is prefilled beside the state of the recorded one
        peak = total + 2 * state + extra["step"] + max(extra["prefill"], extra["pixels"])
    return {
        **{name: cfg.get(name) for name in ("model", "method", "drafter", "rule", "batch", "dtype", "engine")},
        "resolution": on_shapes.pipeline.resolution,
        **values,
        "weights_gb": weights,
        "all_weights_gb": total,
        "state_gb": state,
        **{f"{name}_estimate_gb": size for name, size in extra.items()},
        "runtime_estimate_gb": RUNTIME_GB,
        "peak_estimate_gb": peak + RUNTIME_GB,
    }


def size(cfg: RunConfig) -> dict[str, Any]:
    """The part of a plan that needs no step: the resolution, the tokens, and what a pass over one token reads."""
    on_shapes = shapes(cfg)
    if on_shapes.continuous:
        return plan(cfg)
    pipeline, target = on_shapes.pipeline, on_shapes.pipeline.model.target
    rows = int(cfg.batch) * (2 if pipeline.config.sampling.guided else 1)
    with on_shapes.entered(), _few_blocks():
        at = position_of(pipeline.images(on_shapes.conditioning, on_shapes.rng), None)
    forward = (floor.of_target(target) + floor.of_cache(target, rows, at)) / GB
    of_image = {"resolution": pipeline.resolution, "tokens": pipeline.tokens_per_image}
    return {**of_image, "reads_gb": {"forward": forward}}


def _few_blocks() -> Any:
    """A context in which a pass of the target runs only its first blocks: the others need as much memory again."""

    def run(blocks: nn.ModuleList, *args: Any) -> Tensor:
        *_, layers = args
        return run_blocks(blocks if layers else blocks[:2], *args)

    return mock.patch.object(language, "run_blocks", run)


def _discrete(cfg: RunConfig, on_shapes: Shapes, context: int | None) -> tuple[dict[str, Any], dict[str, int]]:
    """Values, and the bytes above the state that each part needs."""
    pipeline, memory, above = on_shapes.pipeline, Memory(), {}
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
    return {
        "rows": rows,
        "tokens": pipeline.tokens_per_image,
        "context": at,
        "nodes": drafter.shape.num_chains(target) * drafter.shape.tree.nodes,
        "reads_gb": {"forward": read[0] / GB, "draft": read[1] / GB, "step": sum(read) / GB},
        "resident": resident,
    }, above


def _continuous(cfg: RunConfig, on_shapes: Shapes) -> tuple[dict[str, Any], dict[str, int]]:
    """The target's pass over all images with their drafts, and steps of the diffusion head."""
    pipeline, memory, above, rows = on_shapes.pipeline, Memory(), {}, int(cfg.batch)
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
    return {
        "rows": rows * model.halves,
        "tokens": length,
        "nodes": gamma + 1,
        "reads_gb": {"forward": floor.of_pass(model) / GB, "diffusion_step": floor.of_diffusion_step(model) / GB},
        "resident": memory.live,
    }, above


def _pixels(on_shapes: Shapes, codes: int) -> None:
    """Decodes the pixels of one image of this number of codes; only the copy to the host is left out."""
    model = on_shapes.pipeline.model
    shape, dtype = ((1, codes, model.target.dim), torch.float32) if on_shapes.continuous else ((1, codes), torch.int64)
    with mock.patch.multiple(Tensor, cpu=lambda x: x, numpy=lambda x: x):
        model.decode_image(torch.zeros(shape, dtype=dtype, device=DEVICE))


def on_devices(planned: Mapping[str, Any], chosen: Mapping[str, Device]) -> dict[str, dict[str, Any]]:
    """For each device: the floor in ms of the bytes that are read, and whether the peak fits (None: its memory is
    unknown)."""
    by_device: dict[str, dict[str, Any]] = {}
    for name, device in chosen.items():
        floors = {f"{part}_floor_ms": 1e3 * size / device.bandwidth for part, size in planned["reads_gb"].items()}
        fits = None if device.memory == 0 else planned["peak_estimate_gb"] <= device.memory
        by_device[name] = {"bandwidth_gb_s": device.bandwidth, **floors, "fits": fits}
    return by_device


def describe(planned: Mapping[str, Any]) -> str:
    """A plan as text, including its `devices`."""
    p = planned
    parts = ", ".join(f"{name} {size:.3f}" for name, size in p["weights_gb"].items())
    estimates = ", ".join(f"{name} {p[f'{name}_estimate_gb']:.3f}" for name in ("prefill", "step", "pixels", "runtime"))
    reads = ", ".join(f"{name.replace('_', ' ')} {size:.3f}" for name, size in p["reads_gb"].items())
    parts_of_step = "".join(f"{name.replace('_', ' '):>16}" for name in p["reads_gb"])
    where = f" at position {p['context']}" if "context" in p else ""
    lines = [
        f"{p['model']}, {p['method']}, batch {p['batch']}, {p['dtype']}, {p['engine']}: {p['nodes']} nodes a step",
        f"  {'weights':14} {p['all_weights_gb']:9.3f} GB   {parts}",
        f"  {'state':14} {p['state_gb']:9.3f} GB   caches and buffers of {p['rows']} sequences",
        f"  {'peak, estimate':14} {p['peak_estimate_gb']:9.3f} GB   weights and state, and above them: {estimates}",
        f"  reads{where}, GB: {reads}",
        f"  floor, ms   {'GB/s':>6}  {parts_of_step}   fits",
    ]
    for name, device in p["devices"].items():
        floors = "".join(f"{device[f'{part}_floor_ms']:16.3f}" for part in p["reads_gb"])
        fits = {True: "yes", False: "no", None: ""}[device["fits"]]
        lines.append(f"  {name:10s}  {device['bandwidth_gb_s']:6.0f}  {floors}   {fits}")
    return "\n".join(lines)
