"""Steps on fake CUDA tensors, which have shapes and a device but no values: operations that a CUDA graph cannot record
are reported without a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.engine.graph import Action
from specbench.models import mar

#: Operations of CUDA whose kernels make the host wait, though the shape of their result is known.
WAITING = ("multinomial", "record_stream", "pin_memory")


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors created in this block on "cuda" are fake, and so are the events of its streams."""
    try:
        with (
            mock.patch("torch.cuda.Event"),
            mock.patch("torch.cuda.current_stream"),
            mock.patch("torch.cuda.synchronize"),
            torch.inference_mode(False),
            torch.no_grad(),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            yield
    finally:
        mar.forget_tables()  # later tests would compute with those made here, which hold no numbers


def moved(network: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """The same network, with its parameters and buffers replaced by fake ones on CUDA."""
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None:
                    new = torch.empty(x.shape, dtype=dtype or x.dtype, device="cuda")
                    tensors[name] = nn.Parameter(new, requires_grad=False) if tensors is module._parameters else new
    return network


def moved_drafter(drafter: Any) -> Any:
    """The same drafter, with its network on fake CUDA."""
    for network in vars(drafter).values():
        if isinstance(network, nn.Module):
            moved(network)
    return drafter


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for item in x:
            yield from _tensors(item)


def _short(what: object) -> str:
    return str(what).removeprefix("aten.")


class Lint(TorchDispatchMode):
    """Collects in `faults` the operations of a step that a graph cannot record: copies and operations across devices,
    constants copied from the host, operations that read data, kernels with arguments on the host. (A zero-dimensional
    tensor on the host is passed to a kernel by value, unless it is copied.)"""

    def __init__(self, warm: bool = True) -> None:
        super().__init__()
        self.warm = warm
        self.faults: Counter[str] = Counter()
        self.operations = 0
        self.on = False

    def record(self, functions: Mapping[str, Action], device: torch.device) -> list[Action]:
        """See `graph.cuda_graphs`: a plain round, which creates the tensors that are created once (`warm`), then the
        recorded round."""
        rounds = list(functions.values())
        try:
            for function in rounds if self.warm else []:
                function()
            with self._recording():
                for function in rounds:
                    function()
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            self.faults[f"{_short(e)} asks for data"] += 1
        return rounds

    @contextmanager
    def _recording(self) -> Iterator[None]:
        with mock.patch("torch.cuda.synchronize", side_effect=lambda *_: self.faults.update(["the host waits"])), self:
            self.on = True
            try:
                yield
            finally:
                self.on = False

    def start(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Replaces `launch.start`."""
        if not self.on:
            return
        self.operations += 1
        for number, x in enumerate(arguments):
            for tensor in _tensors(x):
                if tensor.device.type != "cuda":
                    self.faults[f"{kernel.__name__}: argument {number} on {tensor.device.type}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self.operations += 1
            name = _short(func)
            inputs = [*_tensors(args), *_tensors(tuple((kwargs or {}).values()))]
            copies = name.startswith(("_to_copy", "copy_"))
            tensors = [*inputs, *_tensors(out)]
            devices = {x.device.type for x in tensors if x.dim() or copies or not inputs}
            if len(devices) > 1:
                self.faults[f"{name} between {' and '.join(sorted(devices))}"] += 1
            elif devices == {"cpu"} and any(x.dim() for x in tensors):
                self.faults[f"{name} on the host"] += 1
            if name.startswith(WAITING):
                self.faults[f"{name} makes the host wait"] += 1
        return out
