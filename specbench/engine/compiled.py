"""Recorded steps whose Transformer blocks are compiled by Inductor (`torch.compile`): fewer launches than one per
operation of PyTorch, without kernels of this package.

A compiled function serves every block of the same shapes, since it contains neither their weights nor their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specbench.engine.graph import Action, Recorder, cuda_graphs
from specbench.engine.ops import KVCache

#: A block, its input (N, dim) and the `AttentionContext` of a pass -> its output (N, dim).
BlockCall = Callable[[Any, Tensor, Any], Tensor]

#: Shapes of blocks that are compiled in one process, at most.
_MOST_SHAPES = 1000

_block_call: ContextVar[BlockCall | None] = ContextVar("_block_call", default=None)


def run_block(block: Any, x: Any, context: Any, layer: int) -> Any:
    """`Block.forward`; inside the steps of a recorder that compiles, by the compiled function."""
    call = _block_call.get()
    if call is None:
        return block(x, context, layer)
    # Inductor generates no code for complex numbers
    layer_cache = _LayerCache(context.cache.k[layer], context.cache.v[layer])
    return call(block, x, replace(context, rope_factors=context.rope.unsqueeze(2), cache=layer_cache))


class _LayerCache(KVCache):
    """Keys and values of one layer, each (rows, kv heads, slots, head dim), so that compiled code contains no layer
    number."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVCache.write`; `layer` is ignored. Inductor does this in place, but not `scatter_`, for which it would
        copy the cache twice."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        self.k[rows, :, slots] = k.transpose(1, 2)
        self.v[rows, :, slots] = v.transpose(1, 2)
        return self.k, self.v


def call_block(block: Any, x: Tensor, context: Any) -> Tensor:
    """The function that is compiled; see `BlockCall`. The context's cache is a `_LayerCache`."""
    y: Tensor = block.forward(x, context, 0)
    return y


@cache
def inductor() -> BlockCall:
    """Compiles at the first call with new shapes. Products are tuned: Inductor's templates are timed against cuBLAS."""
    return torch.compile(call_block, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")


def compiling(record: Recorder = cuda_graphs, compiled: Callable[[], BlockCall] = inductor) -> Recorder:
    """A `Recorder` that records with `record`, and with `compiled()` as the blocks. The rounds before a recording
    compile them; what is not recorded, such as a prefill, remains plain."""

    def recorder(functions: Mapping[str, Action], device: torch.device) -> Sequence[Action]:
        call = compiled()
        return record({name: _with_blocks(call, function) for name, function in functions.items()}, device)

    return recorder


def _with_blocks(call: BlockCall, function: Action) -> Action:
    def run() -> None:
        token = _block_call.set(call)
        try:
            # one entry for each shape: every level of a draft tree has its own, and so has the last batch of a run
            with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES, accumulated_recompile_limit=_MOST_SHAPES):
                function()
        finally:
            _block_call.reset(token)

    return run
