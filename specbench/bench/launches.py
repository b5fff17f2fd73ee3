"""Kernel launches of a step, counted on fake CUDA tensors at full size: without a device, weights or memory.

An operation of PyTorch counts as one launch, unless it is a view or only allocates; `addmm` of a matrix counts as two,
since it copies the summand first; attention by PyTorch counts as one, and as three more where it makes what it adds to
the scores of a bool mask. Some operations (sort, topk, cumsum) launch more:
the count is a lower bound.
Fused kernels are counted where they are started, `engine.kernels.launch.start`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.bench.shapes import DEVICE, Shapes, attended, attending, shapes, starting
from specbench.decoding.continuous.trajectory import draw_trajectory
from specbench.engine.clock import Idle
from specbench.engine.graph import Eager, Graphs
from specbench.models.mar import MarBlock
from specbench.models.transformer import Block

#: Operations that launch nothing and are not marked as views.
_NONE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view detach alias lift lift_fresh resize_ set_"
    " is_same_size sym_size sym_stride sym_numel sym_storage_offset _local_scalar_dense".split()
)
#: Eager steps before the one that is counted, as before a recording.
WARMUP = 2


class Launches(TorchDispatchMode):
    """Counts launches while `counting`, by the name of the kernel or operation; inside of Transformer blocks apart from
    the rest. Enter it within `Shapes.entered`."""

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
        """Knows of the blocks that run within, and counts fused kernels instead of starting them."""

        def enter(module: Any, given: Any) -> None:
            self._depth += isinstance(module, Block | MarBlock)

        def leave(module: Any, given: Any, out: Any) -> None:
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
    """Of a Triton function, compiled, interpreted or tuned."""
    return str(getattr(getattr(kernel, "fn", kernel), "__name__", kernel))


def engine_on_shapes(name: str) -> Eager | Graphs:
    """The engine of a name, for counting: it is not asked to record."""
    if name != "triton":
        return Eager()
    from specbench.engine.kernels import FusedKernels

    return Graphs(kernels=FusedKernels())


def launches(cfg: Mapping[str, Any], engine: str = "triton") -> dict[str, Any]:
    """Launches of one step of a checked configuration of discrete tokens: {"layers": n, "outside": n, "by_kernel":
    {name: n}, "parts": {part of the step: n}}. Needs Triton for engine="triton"."""
    return counted(shapes(cfg, engine_on_shapes(engine)))


def counted(made: Shapes) -> dict[str, Any]:
    """As of `launches`, of a step after two others."""
    clock = PartLaunches()
    with made.entered():
        decoding = made.pipeline.images(made.conditioning, made.rng, clock)
        for _ in range(WARMUP):
            decoding.step()
        return count_step(decoding, clock)


def count_step(decoding: Any, clock: PartLaunches) -> dict[str, Any]:
    """As of `launches`, of the next step of a decoding on fake tensors, whose clock is `clock`."""
    found = clock.of = Launches()
    with found.watching():
        found.counting = True
        decoding.step()
        found.counting = False
    return {
        "layers": found.layers.total(),
        "outside": found.outside.total(),
        "by_kernel": dict((found.layers + found.outside).most_common()),
        "parts": dict(clock.counts),
    }


def count_trajectory(cfg: Mapping[str, Any]) -> int:
    """Launches of one step of the diffusion head of a configuration of continuous tokens: the difference between
    trajectories of five steps and of four, as one image's token is drawn."""
    few, more = (_of_trajectory({**cfg, "diffusion_steps": steps, "drafter": "none"}) for steps in (4, 5))
    return more - few


def _of_trajectory(cfg: Mapping[str, Any]) -> int:
    made, found = shapes(cfg), Launches()
    model = made.pipeline.model.target
    with made.entered(), found.watching():
        session = model.open(made.conditioning, len(made.rng))
        row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        tokens, at = torch.zeros(1, model.length, model.dim, device=DEVICE), row[:, None]
        z = session.condition(tokens, tokens[..., 0] > 0, row, at, at, model.length)[:, 0]
        noise = torch.zeros(1, model.steps + 1, model.dim, device=DEVICE)
        found.counting = True
        draw_trajectory(session, z, noise, made.pipeline.rule, made.pipeline.engine)
    return found.total


class PartLaunches(Idle):
    """A clock whose time is launches."""

    def __init__(self) -> None:
        self.of: Launches | None = None
        self.counts: Counter[str] = Counter()

    def lap(self, part: str) -> None:
        if self.of is not None:
            self.counts[part] = self.of.total - sum(n for name, n in self.counts.items() if name != part)
