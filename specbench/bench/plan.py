"""What a configuration needs of a GPU, from shapes alone: weights, cache, peak memory, launches and the memory floor of
a step. Nothing is fetched and no weights are created: the real loop runs on fake tensors (`bench.shapes`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.bench import floor
from specbench.bench.devices import Device
from specbench.bench.measure import position_of
from specbench.bench.shapes import (
    DEVICE,
    WARMUP,
    Launches,
    PartLaunches,
    Shapes,
    count_step,
    count_trajectory,
    engine_on_shapes,
    has_triton,
    shapes,
)
from specbench.config import parameters
from specbench.decoding.continuous import Conditions, GenerationOrder
from specbench.engine.ops import KVCache
from specbench.harness.pipeline import check_engine
from specbench.models.transformer import FeedForward

GB, TERA = 1e9, 1e12
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


@contextmanager
def _caches() -> Iterator[list[KVCache]]:
    """The caches that are created inside this context, the target's first."""
    caches: list[KVCache] = []
    make = KVCache.__init__

    def noted(cache: KVCache, *args: Any, **kwargs: Any) -> None:
        make(cache, *args, **kwargs)
        caches.append(cache)

    with mock.patch.object(KVCache, "__init__", noted):
        yield caches


def plan(cfg: Mapping[str, Any], context: int | None = None) -> dict[str, Any]:
    """The plan of a checked configuration. context: positions before the step (default: the middle of the image). Bytes
    are in GB, 1e9 of them. Parts of the peak that only a run can measure are estimates, and named so."""
    check_engine(cfg)
    recorded = cfg["engine"] != "eager"
    fused = cfg["engine"] == "triton" and has_triton()
    on_shapes = shapes(cfg, engine_on_shapes("triton" if fused else "graph"))
    if parameters.is_continuous("model", cfg["model"]):
        values = _continuous(cfg, on_shapes)
    else:
        values = _discrete(cfg, on_shapes, context)
    weights = {name: floor.nbytes(network) / GB for name, network in on_shapes.networks.items()}
    bytes_each = torch.empty((), dtype=on_shapes.pipeline.model.dtype).element_size()
    weights |= {name: count * bytes_each / GB for name, count in on_shapes.pipeline.model.absent().items()}
    above = values.pop("above")
    state = values.pop("resident") / GB
    states = state * (
        2 if recorded else 1
    )  # a later batch is prefilled, then copied into the memory of the recorded one
    extra = {name: size / GB for name, size in above.items()}
    if recorded:
        step, transient = extra["step"], max(extra["prefill"], extra["pixels"])  # a graph keeps its memory
    else:
        step, transient = 0.0, max(extra.values())
    total = sum(weights.values())
    return {
        **{name: cfg[name] for name in ("model", "method", "drafter", "rule", "batch", "dtype", "engine")},
        "resolution": on_shapes.pipeline.resolution,
        **values,
        "weights_gb": weights,
        "all_weights_gb": total,
        "state_gb": state,
        **{f"{name}_estimate_gb": size for name, size in extra.items()},
        "runtime_estimate_gb": RUNTIME_GB,
        "peak_estimate_gb": total + states + step + transient + RUNTIME_GB,
    }


def uncounted(engine: str) -> str | None:
    """Why the launches of an engine cannot be counted here, or None if they can."""
    return "engine=triton needs Triton" if engine == "triton" and not has_triton() else None


def _discrete(cfg: Mapping[str, Any], on_shapes: Shapes, context: int | None) -> dict[str, Any]:
    memory, pipeline = Memory(), on_shapes.pipeline
    target, drafter, above = pipeline.model.target, pipeline.config.drafter, {}
    rows = int(cfg["batch"]) * (2 if pipeline.config.sampling.guided else 1)
    codes = target.length if target.grammar is None else len(target.grammar.free)
    with on_shapes.entered(), _caches() as caches:
        clock = PartLaunches()
        for part in (module for network in on_shapes.networks.values() for module in network.modules()):
            if isinstance(part, FeedForward):
                part.joined()  # like fused kernels: in the memory of the weights, so it is no state of a step
        with memory:
            decoding = pipeline.images(on_shapes.conditioning, on_shapes.rng, clock)
            above["prefill"] = memory.above()
            for _ in range(WARMUP):
                decoding.step()
            above["step"] = memory.above()
            resident = memory.live
            _pixels(on_shapes, codes)
            above["pixels"] = memory.above()
        launches = count_step(decoding, clock)
    at, nodes = position_of(decoding, context), drafter.shape.num_chains(target) * drafter.shape.tree.nodes
    sizes = [2 * cache.k.numel() * cache.k.element_size() / GB for cache in caches]
    read = floor.of_target(target) + floor.of_cache(target, rows, at), floor.of_drafts(drafter, target)
    work = nodes * floor.operations(target, rows, at), 2 * rows * read[1] // target.output.weight.element_size()
    return {
        "rows": rows,
        "tokens": pipeline.tokens_per_image,
        "context": at,
        "nodes": nodes,
        "cache_gb": sizes[0],
        "draft_cache_gb": sum(sizes[1:]),
        "logits_gb": rows * nodes * target.vocab_size * target.output.weight.element_size() / GB,
        "launches": None if uncounted(cfg["engine"]) else launches,
        "reads_gb": {"forward": read[0] / GB, "draft": read[1] / GB, "step": sum(read) / GB},
        "tera_operations": {"forward": work[0] / TERA, "draft": work[1] / TERA, "step": sum(work) / TERA},
        "resident": resident,
        "above": above,
    }


def _continuous(cfg: Mapping[str, Any], on_shapes: Shapes) -> dict[str, Any]:
    """The target's pass over all images with their drafts, and steps of the diffusion head."""
    memory, pipeline, above = Memory(), on_shapes.pipeline, {}
    model, gamma, rows = pipeline.model.target, pipeline.rule.gamma, int(cfg["batch"])
    length = model.length
    launches = Launches()
    with on_shapes.entered(), memory, _caches() as caches:
        session = model.open(on_shapes.conditioning, rows)
        conditions = Conditions(session, GenerationOrder.raster(rows, length, DEVICE))
        tokens = torch.zeros(rows, length + 1, model.dim, device=DEVICE)
        row = torch.arange(rows, device=DEVICE)
        memory.above()
        with launches.watching():
            launches.counting = True
            z = conditions.following(tokens, row, torch.zeros_like(row), gamma + 1, length)
            launches.counting = False
        above["prefill"] = memory.above()
        states = torch.zeros(min(8192, max(1, gamma * model.steps) * rows), model.dim, device=DEVICE)
        index = states[:, 0].long()
        session.moments(states, index, z.flatten(0, 1)[:1].expand(len(states), -1))
        above["step"] = memory.above()
        del states, index, z
        _pixels(on_shapes, length)
        above["pixels"] = memory.above()
    cache_bytes = [2 * cache.k.numel() * cache.k.element_size() for cache in caches]
    read = {"forward": floor.of_pass(model) + sum(cache_bytes) // 2, "diffusion_step": floor.of_diffusion_step(model)}
    guided = rows * model.halves
    positions = {"forward": model.pass_positions(gamma + 1), "diffusion_step": 1}
    element_bytes = torch.empty((), dtype=pipeline.model.dtype).element_size()
    return {
        "rows": guided,
        "tokens": length,
        "nodes": gamma + 1,
        "launches": {
            "forward": {"layers": launches.layers.total(), "outside": launches.outside.total()},
            "diffusion_step": count_trajectory(cfg),
        },
        "reads_gb": {name: size / GB for name, size in read.items()},
        "tera_operations": {
            name: 2 * guided * positions[name] * size / element_bytes / TERA for name, size in read.items()
        },
        "resident": memory.live,
        "above": above,
    }


def _pixels(on_shapes: Shapes, codes: int) -> None:
    """Decodes the pixels of one image of this number of codes; only the copy to the host is left out."""
    model = on_shapes.pipeline.model
    shape, dtype = ((1, codes, model.target.dim), torch.float32) if on_shapes.continuous else ((1, codes), torch.int64)
    with mock.patch.object(Tensor, "numpy", lambda x: x):
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
    head = f"{p['model']}, {p['method']}, batch {p['batch']}, {p['dtype']}, engine={p['engine']}"
    parts = ", ".join(f"{name} {size:.3f}" for name, size in p["weights_gb"].items())
    lines = [f"{head}: {p['nodes']} nodes a step", _line("weights", p["all_weights_gb"], parts)]
    if "cache_gb" in p:
        lines.append(_line("cache", p["cache_gb"], f"{p['rows']} sequences at the end of the image"))
        lines.append(_line("drafter's cache", p["draft_cache_gb"], ""))
        lines.append(_line("logits", p["logits_gb"], "of a step"))
    estimates = ", ".join(f"{name} {p[f'{name}_estimate_gb']:.3f}" for name in ("prefill", "step", "pixels", "runtime"))
    lines.append(_line("peak, estimate", p["peak_estimate_gb"], f"in addition to weights and state: {estimates}"))
    launches = p["launches"]
    if launches is None:
        lines.append(f"  launches cannot be counted: {uncounted(p['engine'])}")
    elif "diffusion_step" in launches:
        layers, outside = launches["forward"].values()
        lines.append(f"  launches: {layers + outside} per pass of the target ({layers} in the layers),")
        lines.append(f"            {launches['diffusion_step']} per diffusion step")
    else:
        total = launches["layers"] + launches["outside"]
        lines.append(
            f"  launches of a step: {total} ({launches['layers']} in the layers, {launches['outside']} outside)"
        )
    where = f" at position {p['context']}" if "context" in p else ""
    reads = ", ".join(f"{name.replace('_', ' ')} {size:.3f}" for name, size in p["reads_gb"].items())
    lines.append(f"  reads{where}, GB: {reads}")
    names = list(p["reads_gb"])
    lines.append(
        f"  floor, ms   {'GB/s':>6}  " + "".join(f"{name.replace('_', ' '):>16}" for name in names) + "   fits"
    )
    for name, device in p["devices"].items():
        floors = "".join(f"{device[f'{part}_floor_ms']:16.3f}" for part in names)
        fits = {True: "yes", False: "no", None: ""}[device["fits"]]
        lines.append(f"  {name:10s}  {device['bandwidth_gb_s']:6.0f}  {floors}   {fits}")
    return "\n".join(lines)


def _line(name: str, size: float, more: str) -> str:
    return f"  {name:16s} {size:9.3f} GB   {more}".rstrip()
