"""How the steps of a decoding are executed: one by one, or on CUDA as a graph of kernels that is recorded once.

A recorded step costs the host one call, whatever it consists of. Its tensors keep the memory they had when it was
recorded (`fixed.Fixed`), so another batch of the same shapes is copied into that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specbench.engine.fixed import Fixed
from specbench.engine.ops import Kernels


class Steps(Protocol):
    """Work that proceeds step by step; `config`: its configuration, without tensors, equal to nothing but itself."""

    @property
    def config(self) -> Any: ...

    def step(self) -> None: ...


S = TypeVar("S", bound=Steps)
K = TypeVar("K")
#: A function of tensors.
Call = Callable[..., list[Tensor]]
#: Records a function and returns a function that replays it.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class Eager:
    """Kernel by kernel: the specification that every other engine must agree with."""

    kernels: Kernels | None = None  #: of the decodings that it executes

    def begin(self, steps: S) -> tuple[S, Callable[[], None]]:
        """The object to continue with instead of `steps`, valid until the next call, and a function that does one step
        of it."""
        return steps, steps.step

    def fresh(self) -> Eager:
        """A new engine of the same kind, for another configuration."""
        return Eager()

    def call(self, of: Any, function: Call, *given: Tensor) -> list[Tensor]:
        """The result of `function` on tensors; it must depend on nothing but them, their shapes and `of`."""
        return function(*given)

    def repeated(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` as this engine executes what is done again and again: what it reads and writes keeps its memory."""
        return work


class Recorded:
    """Steps whose tensors keep their memory, recorded after some have been done one by one: `recorder` records a
    function and returns a function that replays it."""

    def __init__(self, steps: Any, recorder: Recorder) -> None:
        self.steps, self.fixed = steps, Fixed(steps)
        self.replay = recorder(self._step)

    def _step(self) -> None:
        self.steps.step()
        self.fixed.settle()


class RecordedCall:
    """A function of tensors alone, recorded for tensors of the shapes `given`."""

    def __init__(self, function: Call, given: Sequence[Tensor], recorder: Recorder) -> None:
        self._function, self._given = function, [tensor.clone() for tensor in given]
        self._came: list[Tensor] = []
        self._replay = recorder(self._once)

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
        self._recorder, self.kernels = recorder or cuda_graph, kernels
        self._kept: dict[Any, Recorded] = {}
        self._calls: dict[Any, RecordedCall] = {}

    def begin(self, steps: S) -> tuple[S, Callable[[], None]]:
        """As of `Eager`."""
        key = steps.config, Fixed.shapes(steps)
        one = self._kept.pop(key, None)
        if one is None:
            one = self.record(steps)
        else:
            one.fixed.load(steps)
        self._keep(self._kept, key, one, self.most)
        return one.steps, one.replay

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

    def record(self, steps: Steps) -> Recorded:
        return Recorded(steps, self._recorder)

    def repeated(self, work: Callable[[], None]) -> Callable[[], None]:
        """As of `Eager`: recorded."""
        return self._recorder(work)

    def fresh(self) -> Graphs:
        """As of `Eager`."""
        return Graphs(self._recorder, self.kernels)


def cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Record `step` after two eager steps on a separate stream, as CUDA requires. The two steps count."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def _triton() -> Graphs:
    """Graphs of the fused kernels, which need Triton."""
    from specbench.engine.kernels import FusedKernels

    return Graphs(kernels=FusedKernels())


ENGINES: dict[str, Callable[[], Eager | Graphs]] = {
    "eager": Eager,
    "graph": Graphs,
    "triton": _triton,
}
