"""How the steps of a decoding are executed: one by one, or on CUDA as a graph of kernels that is recorded once.

A recorded step costs the host one call, whatever it consists of. Its tensors lie where they lay when it was recorded
(`fixed.Fixed`), so another batch of the same shapes is copied into their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from specbench.engine.fixed import Fixed


class Steps(Protocol):
    """Something that goes on step by step; `parts`: what it is made of, beside tensors, equal to nothing but itself."""

    @property
    def parts(self) -> Any: ...

    def step(self) -> None: ...


S = TypeVar("S", bound=Steps)


class Eager:
    """Kernel by kernel: the specification that every other engine must agree with."""

    def begin(self, steps: S) -> tuple[S, Callable[[], None]]:
        """What to go on with in the place of `steps`, valid until the next call, and what does a step of it."""
        return steps, steps.step

    def fresh(self) -> Eager:
        """One of the same kind, for other parts."""
        return Eager()


class Recorded:
    """Steps whose tensors stay in place, recorded after some have been done one by one: `recorder` takes what is to be
    recorded and gives what replays it."""

    def __init__(self, steps: Any, recorder: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        self.steps, self.fixed = steps, Fixed(steps)
        self.replay = recorder(self._step)

    def _step(self) -> None:
        self.steps.step()
        self.fixed.settle()


class Graphs:
    """CUDA graphs by the parts and the shapes of what they step through."""

    #: Graphs that are kept; a batch of another size needs another one.
    most = 4

    def __init__(self, recorder: Callable[[Callable[[], None]], Callable[[], None]] | None = None) -> None:
        self._recorder = recorder or cuda_graph
        self._kept: dict[Any, Recorded] = {}

    def begin(self, steps: S) -> tuple[S, Callable[[], None]]:
        """As of `Eager`."""
        key = steps.parts, Fixed.shapes(steps)
        one = self._kept.pop(key, None)
        if one is None:
            one = self.record(steps)
        else:
            one.fixed.load(steps)
        self._kept[key] = one  # the one used last stands last
        while len(self._kept) > self.most:
            del self._kept[next(iter(self._kept))]
        return one.steps, one.replay

    def record(self, steps: Steps) -> Recorded:
        return Recorded(steps, self._recorder)

    def fresh(self) -> Graphs:
        """As of `Eager`."""
        return Graphs(self._recorder)


def cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Records `step` after two that are done one by one, on a stream of their own, as CUDA asks for. They count."""
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


ENGINES: dict[str, Callable[[], Eager | Graphs]] = {"eager": Eager, "graph": Graphs}
