"""How the steps of a decoding are executed: one by one, or on CUDA as graphs of kernels that are recorded once, perhaps
with Transformer blocks that are compiled by Inductor (`torch.compile`).

A recorded step costs the host one call, whatever it consists of. It reads and writes the buffers that it was recorded
with (`state.DecodeState`), so another batch of the same shapes is copied into them.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specbench.engine.ops import Kernels, KVCache
from specbench.engine.state import DecodeState
from specbench.errors import RunError, one_line


class Steps(Protocol):
    """Work that proceeds step by step; `config`: its configuration, without tensors, equal to nothing but itself.
    `record_stats` comes after each step and records its statistics, which no later step reads."""

    @property
    def config(self) -> Any: ...

    @property
    def state(self) -> DecodeState: ...

    def step(self) -> None: ...

    def record_stats(self) -> None: ...


S = TypeVar("S", bound=Steps)
K = TypeVar("K")
Action = Callable[[], None]
#: A function of tensors.
Call = Callable[..., list[Tensor]]
#: Records functions, by their names in messages, that are called one after the other on a device; returns functions
#: that replay them.
Recorder = Callable[[Mapping[str, Action], torch.device], Sequence[Action]]


@dataclass
class Runner(Generic[S]):
    """`steps`: the object to read, and functions that do one step of it, and then record the step's statistics."""

    steps: S
    step: Action
    record_stats: Action


class Eager:
    """Kernel by kernel: the specification that every other engine must agree with."""

    kernels: Kernels | None = None  #: of the decodings that it executes

    def begin(self, steps: S) -> Runner[S]:
        """How to continue with `steps`, valid until the next call; perhaps with another object in their place."""
        return Runner(steps, steps.step, steps.record_stats)

    def fresh(self) -> Eager:
        """A new engine of the same kind, for another configuration."""
        return Eager()

    def call(self, of: Any, function: Call, *given: Tensor) -> list[Tensor]:
        """The result of `function` on tensors; it must depend on nothing but them, their shapes and `of`."""
        return function(*given)

    def repeated(self, work: Action, device: torch.device) -> Action:
        """`work` as this engine executes what is done again and again: what it reads and writes keeps its memory."""
        return work


class RecordedCall:
    """A function of tensors alone, recorded for tensors of the shapes `given`."""

    def __init__(self, function: Call, given: Sequence[Tensor], recorder: Recorder) -> None:
        self._function, self._given = function, [tensor.clone() for tensor in given]
        self._came: list[Tensor] = []
        [self._replay] = recorder({"a trajectory of the diffusion head": self._once}, given[0].device)

    def _once(self) -> None:
        self._came = self._function(*self._given)

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        for own, tensor in zip(self._given, given, strict=True):
            own.copy_(tensor)
        self._replay()
        return [tensor.clone() for tensor in self._came]


class Graphs:
    """CUDA graphs, cached by the configuration and the shapes of their steps. `kernels`: as of `Eager`."""

    #: Graphs that are kept; a batch of another size needs another one.
    most, most_calls = 4, 16

    def __init__(self, recorder: Recorder | None = None, kernels: Kernels | None = None) -> None:
        self._recorder, self.kernels = recorder or cuda_graphs, kernels
        self._kept: dict[Any, Runner[Any]] = {}
        self._calls: dict[Any, RecordedCall] = {}

    def begin(self, steps: S) -> Runner[S]:
        """As of `Eager`."""
        key = steps.config, steps.state.layout
        one = self._kept.pop(key, None)
        if one is None:
            one = self.record(steps)
        else:
            one.steps.state.load(steps.state)
        self._keep(self._kept, key, one, self.most)
        return one

    @staticmethod
    def _keep(kept: dict[Any, K], key: Any, one: K, most: int) -> None:
        kept[key] = one  # the most recently used one is last
        while len(kept) > most:
            del kept[next(iter(kept))]

    def call(self, of: Any, function: Call, *given: Tensor) -> list[Tensor]:
        """As of `Eager`."""
        key = of, *((tuple(tensor.shape), tensor.dtype) for tensor in given)
        one = self._calls.pop(key, None) or RecordedCall(function, given, self._recorder)
        self._keep(self._calls, key, one, self.most_calls)
        return one(given)

    def record(self, steps: S) -> Runner[S]:
        """Recorded after some steps have been done one by one, which count."""
        functions = {"the decode step": steps.step, "the statistics of a step": steps.record_stats}
        step, record_stats = self._recorder(functions, steps.state.device)
        return Runner(steps, step, record_stats)

    def repeated(self, work: Action, device: torch.device) -> Action:
        """As of `Eager`: recorded."""
        [replay] = self._recorder({"a pass": work}, device)
        return partial(_replayed, replay, work)

    def fresh(self) -> Graphs:
        """As of `Eager`."""
        return Graphs(self._recorder, self.kernels)


def _replayed(replay: Action, work: Action) -> None:
    """`replay`; holds `work`, and so the memory that a recording of it reads."""
    replay()


def cuda_graphs(functions: Mapping[str, Action], device: torch.device) -> list[Action]:
    """A `Recorder`: one graph per function, after two eager rounds on a separate stream, as CUDA requires. The rounds
    count. RunError where a function cannot be recorded; the device stays usable."""
    with torch.cuda.device(device):
        stream = _stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                for function in functions.values():
                    function()
        torch.cuda.current_stream().wait_stream(stream)
        pool = torch.cuda.graph_pool_handle()  # one for all: they are replayed in the order of their recording
        return [_captured(name, function, pool, stream).replay for name, function in functions.items()]


@lru_cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of all recordings on a device, and of the rounds before: cuBLAS keeps a workspace for each stream,
    which the rounds allocate outside of any graph."""
    return torch.cuda.Stream(device)


def _captured(name: str, function: Action, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of what `function` does on the current device.

    `torch.cuda.graph` leaves its stream the current one where ending an invalid capture fails, and every later capture
    fails, too; here such a capture is ended and dropped.
    """
    torch.cuda.synchronize()
    gc.collect()  # a graph that Python finds unused during the capture would be destroyed then, which CUDA forbids
    torch.cuda.empty_cache()
    graph, reason = torch.cuda.CUDAGraph(), ""
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may use the device
        try:
            function()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                graph.capture_end()
            if any("graph is empty" in str(warning.message).lower() for warning in caught):
                reason = "it started no kernel"
        except BaseException as error:
            _abandon(graph, pool)
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, Exception):
                raise
            first = one_line(error)
            raise RunError(f"recording {name} as a CUDA graph failed ({first}); use engine=eager") from error
    if reason:
        graph.reset()
        raise RunError(f"recording {name} as a CUDA graph failed ({reason}); use engine=eager")
    return graph


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End and drop a capture that failed, on its own stream, and leave nothing of it behind in the device's
    allocator."""
    device = torch.cuda.current_device()

    def end_allocation() -> None:
        torch._C._cuda_endAllocateToPool(device, pool)

    # each fails where the capture had not come so far, or where PyTorch did it in the one before
    for undo in (graph.capture_end, end_allocation, torch.cuda.synchronize, graph.reset):
        try:
            undo()
        except (RuntimeError, AttributeError):
            continue


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
    layer_cache = LayerCache(*context.cache.layer(layer))
    return call(block, x, replace(context, rope_factors=context.rope.unsqueeze(2), cache=layer_cache))


class LayerCache(KVCache):
    """Keys and values of one layer, each (rows, kv heads, slots, head dim), so that compiled code contains no layer
    number."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVCache.layer`; `layer` is ignored."""
        return self.k, self.v

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVCache.write`; `layer` is ignored. Inductor does this in place, but not `scatter_`, for which it would
        copy the cache twice."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        self.k[rows, :, slots] = k.transpose(1, 2)
        self.v[rows, :, slots] = v.transpose(1, 2)
        return self.k, self.v


def call_block(block: Any, x: Tensor, context: Any) -> Tensor:
    """The function that is compiled; see `BlockCall`. The context's cache is a `LayerCache`."""
    y: Tensor = block.forward(x, context, 0)
    return y


@cache
def inductor() -> BlockCall:
    """Fewer launches than one per operation of PyTorch, without kernels of this package. Compiles at the first call
    with new shapes; a compiled function serves every block of these shapes, since it contains neither their weights nor
    their numbers. Products are tuned: Inductor's templates are timed against cuBLAS."""
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
