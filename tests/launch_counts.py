"""Counts the kernel launches of a step of the real loop at full size, on tensors without values.

An operation of PyTorch counts as one launch, unless it is a view or only allocates. `addmm` of a matrix counts as two,
since it copies the summand first. Attention by PyTorch counts as one, and as three more if it converts a bool mask into
values that it adds to the scores. A norm by PyTorch counts as one. Some operations (sort, topk, cumsum) launch more, so
the count is a lower bound. Fused kernels are counted where they are started, in `engine.kernels.launch.start`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.bench.shapes import DEVICE, Shapes, attended, shapes
from specbench.decoding.continuous import Conditions, GenerationOrder
from specbench.decoding.continuous.trajectory import draw_trajectory
from specbench.engine.clock import Idle
from specbench.engine.graph import Eager, Graphs
from specbench.engine.kernels import FusedKernels, launch
from specbench.models.mar import MarBlock
from specbench.models.transformer import Block

#: Operations that launch nothing and are not marked as views.
_NONE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view detach alias lift lift_fresh resize_ set_"
    " is_same_size sym_size sym_stride sym_numel sym_storage_offset _local_scalar_dense".split()
)
#: Eager steps before the step that is counted: what is created once is created in the first.
WARMUP = 1


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

        def normalize(x: Tensor, *_: Any, **__: Any) -> Tensor:
            self.add("rms_norm")
            return x.new_empty(x.shape)

        hooks = torch.nn.modules.module
        handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
        try:
            with (
                self,
                mock.patch.object(F, "scaled_dot_product_attention", attend),
                mock.patch.object(F, "rms_norm", normalize),
                mock.patch.object(launch, "start", lambda kernel, *_, **__: self.add(kernel_name(kernel))),
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
    return any(isinstance(t, Tensor) and t.device == DEVICE for t in tree_leaves(x))


def kernel_name(kernel: Any) -> str:
    """The name of a Triton function, compiled, interpreted or tuned."""
    return str(getattr(getattr(kernel, "fn", kernel), "__name__", kernel))


def launches(cfg: Mapping[str, Any], engine: str = "triton") -> dict[str, Any]:
    """Launches of one step of a checked configuration of discrete tokens: {"layers": n, "outside": n, "by_kernel":
    {name: n}, "parts": {part of the step: n}}."""
    return counted(shapes(cfg, Graphs(kernels=FusedKernels()) if engine == "triton" else Eager()))


def counted(on_shapes: Shapes) -> dict[str, Any]:
    """The counts of a step after another one; see `launches`."""
    clock = PartLaunches()
    with on_shapes.entered(), mock.patch.object(launch, "start"):
        decoding = on_shapes.pipeline.images(on_shapes.conditioning, on_shapes.rng, clock)
        for _ in range(WARMUP):
            decoding.step()
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
    few, more = (_of_trajectory(cfg.changed(diffusion_steps=steps, drafter="none")) for steps in (4, 5))
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
