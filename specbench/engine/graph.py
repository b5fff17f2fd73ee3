"""Executes the steps of a decoding: one by one, or on CUDA as graphs of kernels that are recorded once.

A recorded step costs the host one call, whatever it consists of. It reads and writes the buffers that it was recorded
with (`state.DecodeState`), so another batch of the same shapes is copied into them.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specbench.engine.ops import Kernels
from specbench.engine.state import DecodeState
from specbench.errors import RunError, one_line


class Steps(Protocol):
    """Work that proceeds step by step. `config`: its configuration, without tensors, equal only to itself.
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
#: Records functions that are called one after the other on a device, given by their names in messages; returns
#: functions that replay them.
Recorder = Callable[[Mapping[str, Action], torch.device], Sequence[Action]]


@dataclass
class Runner(Generic[S]):
    """`steps`: the object to read, and functions that do one of its steps and record the step's statistics."""

    steps: S
    step: Action
    record_stats: Action


class Eager:
    """Kernel by kernel. All other engines must agree with this specification."""

    kernels: Kernels | None = None  #: used by the decodings that it executes

    def begin(self, steps: S) -> Runner[S]:
        """A runner that continues with `steps`, valid until the next call. It may hold another object instead of
        `steps`."""
        return Runner(steps, steps.step, steps.record_stats)

    def fresh(self) -> Eager:
        """A new engine of the same kind, for another configuration."""
        return Eager()

    def call(self, key: Any, function: Call, *inputs: Tensor) -> list[Tensor]:
        """The result of `function` on tensors; it must depend only on them, their shapes and `key`."""
        return function(*inputs)

    def repeated(self, work: Action, device: torch.device) -> Action:
        """`work` as this engine executes repeated work; the memory that it reads and writes must not change."""
        return work


class RecordedCall:
    """A function of tensors only, recorded for the shapes of `inputs`."""

    def __init__(self, function: Call, inputs: Sequence[Tensor], recorder: Recorder) -> None:
        self._function, self._inputs = function, [tensor.clone() for tensor in inputs]
        self._outputs: list[Tensor] = []
        [self._replay] = recorder({"a trajectory of the diffusion head": self._run}, inputs[0].device)

    def _run(self) -> None:
        self._outputs = self._function(*self._inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for recorded, tensor in zip(self._inputs, inputs, strict=True):
            recorded.copy_(tensor)
        self._replay()
        return [tensor.clone() for tensor in self._outputs]


class Graphs:
    """CUDA graphs, cached by the configuration and the shapes of their steps. `kernels`: see `Eager`."""

    #: The most graphs that are cached; a batch of another size needs another graph.
    most, most_calls = 4, 16

    def __init__(self, recorder: Recorder | None = None, kernels: Kernels | None = None) -> None:
        self._recorder, self.kernels = recorder or cuda_graphs, kernels
        self._runners: dict[Any, Runner[Any]] = {}
        self._calls: dict[Any, RecordedCall] = {}

    def begin(self, steps: S) -> Runner[S]:
        key = steps.config, steps.state.layout
        runner = self._runners.pop(key, None)
        if runner is None:
            runner = self.record(steps)
        else:
            runner.steps.state.load(steps.state)
        self._keep(self._runners, key, runner, self.most)
        return runner

    @staticmethod
    def _keep(cached: dict[Any, K], key: Any, value: K, most: int) -> None:
        cached[key] = value  # the most recently used value is last
        while len(cached) > most:
            del cached[next(iter(cached))]

    def call(self, key: Any, function: Call, *inputs: Tensor) -> list[Tensor]:
        key = key, *((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        recorded = self._calls.pop(key, None) or RecordedCall(function, inputs, self._recorder)
        self._keep(self._calls, key, recorded, self.most_calls)
        return recorded(inputs)

    def record(self, steps: S) -> Runner[S]:
        """Record the steps. Before that some steps are done one by one; they count."""
        functions = {"the decode step": steps.step, "the statistics of a step": steps.record_stats}
        step, record_stats = self._recorder(functions, steps.state.device)
        return Runner(steps, step, record_stats)

    def repeated(self, work: Action, device: torch.device) -> Action:
        [replay] = self._recorder({"a pass": work}, device)
        return partial(_replayed, replay, work)

    def fresh(self) -> Graphs:
        return Graphs(self._recorder, self.kernels)


def _replayed(replay: Action, work: Action) -> None:
    """Calls `replay`. It holds a reference to `work`, and so to the memory that a recording of it reads."""
    replay()


def cuda_graphs(functions: Mapping[str, Action], device: torch.device) -> list[Action]:
    """A `Recorder`: one graph per function, after two eager rounds on a separate stream, as CUDA requires. These rounds
    count. RunError if a function cannot be recorded; the device stays usable."""
    with torch.cuda.device(device):
        stream = _stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                for function in functions.values():
                    function()
        torch.cuda.current_stream().wait_stream(stream)
        # One pool for all graphs: they are replayed in the order of their recording.
        pool = torch.cuda.graph_pool_handle()
        return [_captured(name, function, pool, stream).replay for name, function in functions.items()]


@lru_cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of all recordings on a device, and of the rounds before them. cuBLAS has a workspace per stream, which
    the rounds allocate outside of any graph."""
    return torch.cuda.Stream(device)


def _captured(name: str, function: Action, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of the work of `function` on the current device.

    If ending an invalid capture fails, `torch.cuda.graph` leaves its stream the current one, and every later capture
    fails, too. Here such a capture is ended and dropped.
    """
    torch.cuda.synchronize()
    gc.collect()  # else Python might destroy an unused graph during the capture, which CUDA forbids
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
    """End and drop a failed capture on its own stream, so that nothing of it remains in the device's allocator."""
    device = torch.cuda.current_device()

    def end_allocation() -> None:
        torch._C._cuda_endAllocateToPool(device, pool)

    # each of these fails if the capture did not get that far, or if PyTorch did it in the one before
    for undo in (graph.capture_end, end_allocation, torch.cuda.synchronize, graph.reset):
        try:
            undo()
        except (RuntimeError, AttributeError):
            continue
