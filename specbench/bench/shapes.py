"""Runs a configuration at its full size without weights, memory or a device. The networks hold fake CUDA tensors
(PyTorch's FakeTensorMode), which have only a shape, a type and a device. The real decode loop runs on them, and the
kernel launches of a step are counted.

An operation of PyTorch counts as one launch, unless it is a view or only allocates. `addmm` of a matrix counts as two,
since it copies the summand first. Attention by PyTorch counts as one, and as three more if it converts a bool mask into
values that it adds to the scores. Some operations (sort, topk, cumsum) launch more, so the count is a lower bound.
Fused kernels are counted where they are started, in `engine.kernels.launch.start`.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.config import parameters, registry
from specbench.decoding.continuous import Conditions, GenerationOrder
from specbench.decoding.continuous.trajectory import draw_trajectory
from specbench.decoding.rng import RandomStreams
from specbench.engine.clock import Idle
from specbench.engine.graph import Eager, Graphs
from specbench.harness.method import build_continuous, build_drafter, build_method
from specbench.harness.pipeline import DTYPES, ContinuousPipeline, Pipeline
from specbench.models import mar
from specbench.models.mar import MarBlock
from specbench.models.transformer import Block

#: The device of fake tensors.
DEVICE = torch.device("cuda", 0)
#: A prompt of every model: a text, or a class.
_PROMPT = "0"
#: Operations that launch nothing and are not marked as views.
_NONE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view detach alias lift lift_fresh resize_ set_"
    " is_same_size sym_size sym_stride sym_numel sym_storage_offset _local_scalar_dense".split()
)
#: Eager steps before the step that is counted, as many as before a recording.
WARMUP = 2


@dataclass
class Shapes:
    """A pipeline on fake tensors. networks: the networks of a run by name, including the drafter's; conditioning: for
    as many prompts as requested; continuous: whether its tokens are. Use the pipeline within `entered`."""

    pipeline: Any
    networks: dict[str, nn.Module]
    conditioning: Any
    rng: RandomStreams
    mode: FakeTensorMode
    continuous: bool = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which new tensors are fake, no fused kernel is started, attention allocates only its output, as
        on the device, and gradients are off. (Inference mode would hide the operations that a composite operation
        consists of.)"""
        try:
            with self.mode, torch.no_grad(), starting(lambda *_, **__: None), attending(attended):
                yield
        finally:
            mar.forget_tables()


def attended(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """A tensor like the output of attention."""
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def attending(attend: Callable[..., Tensor]) -> Any:
    """A context that replaces PyTorch's attention."""
    return mock.patch.object(F, "scaled_dot_product_attention", attend)


def has_triton() -> bool:
    """Whether the fused kernels can be imported here."""
    return importlib.util.find_spec("triton") is not None


@contextmanager
def starting(start: Callable[..., None]) -> Iterator[None]:
    """Replaces the one function that starts fused kernels."""
    if not has_triton():
        yield
        return
    from specbench.engine.kernels import launch

    with mock.patch.object(launch, "start", start):
        yield


def shapes(cfg: Mapping[str, Any], engine: Eager | Graphs | None = None, rows: int | None = None) -> Shapes:
    """A checked configuration with random weights at the official sizes. rows: images at once (default: the batch);
    engine: its kernels are used (default: the plain functions, kernel by kernel)."""
    cfg, engine = {**cfg, "weights": "random", "drafter_weights": None}, engine or Eager()
    continuous = parameters.is_continuous("model", cfg["model"])
    rows = int(cfg["batch"]) if rows is None else rows
    model = registry.find("model", cfg["model"])(cfg, torch.device("meta"), DTYPES[cfg["dtype"]])
    encoded = model.encode([_PROMPT] * rows)
    parts: tuple[Any, Any] = build_continuous(cfg, model) if continuous else (build_drafter(cfg, model), None)
    drafter, rule = parts
    model.device = DEVICE
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    networks = dict(_networks(model)) | {f"drafter {name}": network for name, network in _networks(drafter)}
    with mode, torch.no_grad():
        for network in networks.values():
            _to_fake(network)
        conditioning, rng = _fake(encoded), RandomStreams([(0, i) for i in range(rows)], DEVICE)
        pipeline: Pipeline | ContinuousPipeline
        if continuous:
            pipeline = ContinuousPipeline(model, drafter, rule, DEVICE, cfg["model"], "random", engine)
        else:
            method = build_method(cfg, model, drafter, near=_no_neighbours)
            pipeline = Pipeline(model, method, DEVICE, cfg["model"], "random", engine)
    return Shapes(pipeline, networks, conditioning, rng, mode, continuous)


def _networks(holder: Any) -> Iterator[tuple[str, nn.Module]]:
    """The networks that an object stores itself, and those within a target with its guidance."""
    for name, value in vars(holder).items() if holder is not None else ():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(getattr(value, "model", None), nn.Module):
            yield name, value.model


def _to_fake(network: nn.Module) -> None:
    """Replaces parameters and buffers by fake ones; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    for part in network.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fakes.setdefault(id(tensor), _fake(tensor))
                    tensors[name] = fakes[id(tensor)]  # type: ignore[assignment]


def _fake(x: Any) -> Any:
    """A fake tensor like a tensor, on `DEVICE`; for a dataclass, one with fake fields."""
    if isinstance(x, nn.Parameter):
        return nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device=DEVICE), requires_grad=False)
    if isinstance(x, Tensor):
        return torch.empty(x.shape, dtype=x.dtype, device=DEVICE)
    if is_dataclass(x) and not isinstance(x, type):
        return type(x)(**{f.name: _fake(getattr(x, f.name)) for f in fields(x)})
    return x


def _no_neighbours(codebook: Tensor, k: int, proximity: str) -> Tensor:
    """A table of neighbours (V, k) with the right shape."""
    return torch.zeros(len(codebook), min(k, len(codebook) - 1), dtype=torch.int64, device=codebook.device)


class Launches(TorchDispatchMode):
    """Counts launches while `counting`, by the name of the kernel or operation, and separately inside and outside of
    Transformer blocks. Enter it within `Shapes.entered`."""

    def __init__(self) -> None:
        super().__init__()
        self.counting, self._depth = False, 0
        self.layers: Counter[str] = Counter()
        self.outside: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.layers.total() + self.outside.total()

    def add(self, name: str, count: int = 1) -> None:
        if self.counting:
            (self.layers if self._depth else self.outside)[name] += count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        launched = space != "prim" and name not in _NONE and not _is_view(func)
        if self.counting and launched and _on_device((args, kwargs, out)):
            self.add(name, 2 if name == "addmm" and args[0].dim() > 1 else 1)
        return out

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tracks the blocks that run inside this context, and counts fused kernels instead of starting them."""

        def enter(module: Any, args: Any) -> None:
            self._depth += isinstance(module, Block | MarBlock)

        def leave(module: Any, args: Any, out: Any) -> None:
            self._depth -= isinstance(module, Block | MarBlock)

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            self.add("scaled_dot_product_attention")
            mask = kwargs.get("attn_mask")
            if mask is not None and mask.dtype == torch.bool:
                self.add("masks of attention", 3)
            return attended(*args, **kwargs)

        hooks = torch.nn.modules.module
        handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
        try:
            with (
                self,
                attending(attend),
                starting(lambda kernel, *_, **__: self.add(kernel_name(kernel))),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()


def _is_view(func: Any) -> bool:
    """Whether an operation's result shares an argument's memory, and nothing is written."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _on_device(x: Any) -> bool:
    return any(isinstance(t, Tensor) and t.device.type == "cuda" for t in tree_leaves(x))


def kernel_name(kernel: Any) -> str:
    """The name of a Triton function, compiled, interpreted or tuned."""
    return str(getattr(getattr(kernel, "fn", kernel), "__name__", kernel))


def engine_on_shapes(name: str) -> Eager | Graphs:
    """The engine of a name, for counting; it does not record."""
    if name != "triton":
        return Eager()
    from specbench.engine.kernels import FusedKernels

    return Graphs(kernels=FusedKernels())


def launches(cfg: Mapping[str, Any], engine: str = "triton") -> dict[str, Any]:
    """Launches of one step of a checked configuration of discrete tokens: {"layers": n, "outside": n, "by_kernel":
    {name: n}, "parts": {part of the step: n}}. Needs Triton for engine="triton"."""
    return counted(shapes(cfg, engine_on_shapes(engine)))


def counted(on_shapes: Shapes) -> dict[str, Any]:
    """The counts of a step after two others; see `launches`."""
    clock = PartLaunches()
    with on_shapes.entered():
        decoding = on_shapes.pipeline.images(on_shapes.conditioning, on_shapes.rng, clock)
        for _ in range(WARMUP):
            decoding.step()
        return count_step(decoding, clock)


def count_step(decoding: Any, clock: PartLaunches) -> dict[str, Any]:
    """The counts of the next step of a decoding on fake tensors, whose clock is `clock`; see `launches`."""
    launches = clock.launches = Launches()
    with launches.watching():
        launches.counting = True
        decoding.step()
        launches.counting = False
    return {
        "layers": launches.layers.total(),
        "outside": launches.outside.total(),
        "by_kernel": dict((launches.layers + launches.outside).most_common()),
        "parts": dict(clock.counts),
    }


def count_trajectory(cfg: Mapping[str, Any]) -> int:
    """Launches of one step of the diffusion head of a configuration of continuous tokens: the difference between
    trajectories of five steps and of four, for one token of one image."""
    few, more = (_of_trajectory({**cfg, "diffusion_steps": steps, "drafter": "none"}) for steps in (4, 5))
    return more - few


def _of_trajectory(cfg: Mapping[str, Any]) -> int:
    on_shapes, launches = shapes(cfg), Launches()
    model = on_shapes.pipeline.model.target
    with on_shapes.entered(), launches.watching():
        session = model.open(on_shapes.conditioning, len(on_shapes.rng))
        row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        tokens = torch.zeros(1, model.length + 1, model.dim, device=DEVICE)
        order = GenerationOrder.raster(1, model.length, DEVICE)
        z = Conditions(session, order).following(tokens, row, row, 1, model.length)[:, 0]
        noise = torch.zeros(1, model.steps + 1, model.dim, device=DEVICE)
        launches.counting = True
        draw_trajectory(session, z, noise, on_shapes.pipeline.rule, on_shapes.pipeline.engine)
    return launches.total


class PartLaunches(Idle):
    """A clock that counts launches instead of time."""

    def __init__(self) -> None:
        self.launches: Launches | None = None
        self.counts: Counter[str] = Counter()

    def lap(self, part: str) -> None:
        if self.launches is not None:
            self.counts[part] = self.launches.total - sum(n for name, n in self.counts.items() if name != part)
