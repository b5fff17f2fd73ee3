"""The tensors of a batch that is being decoded: declared by name, on one device, and written in place by every step.

So a recorded step, which reads and writes the memory it was recorded with, runs the same code as an eager step. To
decode another batch, its tensors are copied in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

D = TypeVar("D")


@dataclass(frozen=True)
class Buffer:
    """A tensor that steps read or write. Its dimension `dim` has one entry per row of the batch or, with halves = 2,
    the conditional rows followed by as many unconditional ones."""

    tensor: Tensor
    dim: int = 0
    halves: int = 1


Buffers = dict[str, Buffer]


def within(name: str, buffers: Mapping[str, Buffer]) -> Buffers:
    """The buffers of a part, with the part's name in front of their names."""
    return {f"{name}.{key}": buffer for key, buffer in buffers.items()}


class DecodeState:
    """The buffers of `rows` images. `constants`: the tensors that steps read and that do not depend on the batch. They
    are referenced here, because a recorded step reads their memory. ValueError if a tensor is on another device than
    the others, or if a buffer has no separate memory for each row."""

    def __init__(self, rows: int, buffers: Mapping[str, Buffer], constants: Mapping[str, Tensor]) -> None:
        self.rows, self.buffers, self.constants = rows, dict(buffers), dict(constants)
        self.device = next(iter(self.buffers.values())).tensor.device
        for name, tensor in [*((name, b.tensor) for name, b in self.buffers.items()), *self.constants.items()]:
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}, but the batch is decoded on {self.device}")
        for name, buffer in self.buffers.items():
            shape = buffer.tensor.shape
            if shape[buffer.dim] != buffer.halves * rows:
                raise ValueError(
                    f"{name} of shape {tuple(shape)} does not have {buffer.halves} x {rows} rows in dimension"
                    f" {buffer.dim}"
                )
            strides = buffer.tensor.stride() if buffer.tensor.numel() else ()
            if any(size > 1 and not stride for size, stride in zip(shape, strides, strict=False)):
                raise ValueError(f"{name} is one row expanded to several, so it cannot be written row by row")

    @property
    def layout(self) -> tuple[Any, ...]:
        """Two states with equal layouts can be loaded into each other."""
        return tuple((name, tuple(b.tensor.shape), b.tensor.dtype, b.dim, b.halves) for name, b in self.buffers.items())

    def load(self, other: DecodeState) -> None:
        """Copy the values of another batch of the same layout."""
        for buffer, new in self._pairs(other):
            buffer.tensor.copy_(new.tensor)

    def load_rows(self, other: DecodeState, rows: Sequence[int]) -> None:
        """Copy another batch, of len(rows) images, into the `rows` of this one."""
        index = {
            halves: torch.tensor([half * self.rows + row for half in range(halves) for row in rows], device=self.device)
            for halves in {b.halves for b in self.buffers.values()}
        }
        for buffer, new in self._pairs(other):
            buffer.tensor.index_copy_(buffer.dim, index[buffer.halves], new.tensor)

    def _pairs(self, other: DecodeState) -> Iterator[tuple[Buffer, Buffer]]:
        if self.buffers.keys() != other.buffers.keys():
            odd = sorted(self.buffers.keys() ^ other.buffers.keys())
            raise ValueError(f"two batches of one configuration differ in their buffers: {', '.join(odd[:3])}")
        return ((buffer, other.buffers[name]) for name, buffer in self.buffers.items())


def put(owner: Any, device: torch.device) -> None:
    """Move the tensors in the attributes that `owner.constants` names to a device, once, including those in dataclasses
    and in lists of them."""
    for name in owner.constants:
        setattr(owner, name, _moved(getattr(owner, name), device))


def with_tensors(x: D, change: Callable[[Tensor], Tensor]) -> D:
    """A dataclass with each of its tensors changed, for example moved or selected by row."""
    changed: dict[str, Any] = {name: change(value) for name, value in vars(x).items() if isinstance(value, Tensor)}
    return replace(x, **changed)  # type: ignore[type-var]


def on_device(x: D, device: torch.device) -> D:
    """A dataclass with its tensors on a device."""
    return with_tensors(x, lambda tensor: tensor.to(device))


def constants(name: str, owner: Any) -> dict[str, Tensor]:
    """The tensors that `put` moves, by their names after the owner's."""
    tensors: dict[str, Tensor] = {}
    for key in getattr(owner, "constants", ()):
        _collect(getattr(owner, key), f"{name}.{key}", tensors)
    return tensors


def _moved(x: Any, device: torch.device) -> Any:
    return [_moved(item, device) for item in x] if isinstance(x, list) else None if x is None else x.to(device)


def _collect(x: Any, name: str, tensors: dict[str, Tensor]) -> None:
    if isinstance(x, Tensor):
        tensors[name] = x
    elif isinstance(x, list):
        for i, item in enumerate(x):
            _collect(item, f"{name}.{i}", tensors)
    elif hasattr(x, "constants"):
        tensors |= constants(name, x)
    elif is_dataclass(x):
        for field in fields(x):
            _collect(getattr(x, field.name), f"{name}.{field.name}", tensors)
