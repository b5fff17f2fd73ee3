"""The tensors of a batch that is being decoded: declared by name, on one device, and written in place by every step.

So a recorded step, which reads and writes the memory it was recorded with, and an eager one run the same code, and
another batch is a matter of copying.
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
    """A tensor that steps read or write. Its dimension `dim` has an entry per row of the batch or, with halves = 2, the
    conditional rows, then as many unconditional ones."""

    tensor: Tensor
    dim: int = 0
    halves: int = 1


Buffers = dict[str, Buffer]


def within(name: str, buffers: Mapping[str, Buffer]) -> Buffers:
    """The buffers of a part of something, under the part's name."""
    return {f"{name}.{key}": buffer for key, buffer in buffers.items()}


class DecodeState:
    """The buffers of `rows` images. `constants`: the tensors that steps read and that do not depend on the batch. They
    are held here, since a recorded step reads their memory. ValueError where a tensor lies on another device than the
    rest, or a buffer has no memory of its own for each row."""

    def __init__(self, rows: int, buffers: Mapping[str, Buffer], constants: Mapping[str, Tensor]) -> None:
        self.rows, self.buffers, self.constants = rows, dict(buffers), dict(constants)
        self.device = next(iter(self.buffers.values())).tensor.device
        for name, tensor in [*((name, b.tensor) for name, b in self.buffers.items()), *self.constants.items()]:
            if tensor.device != self.device:
                raise ValueError(f"{name} lies on {tensor.device}, but the batch is decoded on {self.device}")
        for name, buffer in self.buffers.items():
            shape = buffer.tensor.shape
            if shape[buffer.dim] != buffer.halves * rows:
                raise ValueError(
                    f"{name} of shape {tuple(shape)} does not hold {buffer.halves} x {rows} rows in dimension"
                    f" {buffer.dim}"
                )
            strides = buffer.tensor.stride() if buffer.tensor.numel() else ()
            if any(size > 1 and not stride for size, stride in zip(shape, strides, strict=False)):
                raise ValueError(f"{name} is one row expanded to several, which cannot be written row by row")

    @property
    def layout(self) -> tuple[Any, ...]:
        """What two states must have in common for one to be loaded into the other."""
        return tuple((name, tuple(b.tensor.shape), b.tensor.dtype, b.dim, b.halves) for name, b in self.buffers.items())

    def load(self, other: DecodeState) -> None:
        """Copy the values of another batch of the same layout."""
        for own, new in self._pairs(other):
            own.tensor.copy_(new.tensor)

    def load_rows(self, other: DecodeState, rows: Sequence[int]) -> None:
        """Copy another batch, one of len(rows) images, into `rows` of this one."""
        index = {
            halves: torch.tensor([half * self.rows + row for half in range(halves) for row in rows], device=self.device)
            for halves in {b.halves for b in self.buffers.values()}
        }
        for own, new in self._pairs(other):
            own.tensor.index_copy_(own.dim, index[own.halves], new.tensor)

    def _pairs(self, other: DecodeState) -> Iterator[tuple[Buffer, Buffer]]:
        if self.buffers.keys() != other.buffers.keys():
            odd = sorted(self.buffers.keys() ^ other.buffers.keys())
            raise ValueError(f"two batches of one configuration differ in their buffers: {', '.join(odd[:3])}")
        return ((own, other.buffers[name]) for name, own in self.buffers.items())


def put(owner: Any, device: torch.device) -> None:
    """Move the tensors in the attributes that `owner.constants` names to a device, once: those of dataclasses and lists
    of them, too."""
    for name in owner.constants:
        setattr(owner, name, _moved(getattr(owner, name), device))


def with_tensors(x: D, change: Callable[[Tensor], Tensor]) -> D:
    """A dataclass with each of its tensors changed, such as moved or picked by row."""
    changed: dict[str, Any] = {name: change(value) for name, value in vars(x).items() if isinstance(value, Tensor)}
    return replace(x, **changed)  # type: ignore[type-var]


def on_device(x: D, device: torch.device) -> D:
    """A dataclass with its tensors on a device."""
    return with_tensors(x, lambda tensor: tensor.to(device))


def constants(name: str, owner: Any) -> dict[str, Tensor]:
    """The tensors that `put` moves, by their names after that of their owner."""
    found: dict[str, Tensor] = {}
    for key in getattr(owner, "constants", ()):
        _collect(getattr(owner, key), f"{name}.{key}", found)
    return found


def _moved(x: Any, device: torch.device) -> Any:
    return [_moved(one, device) for one in x] if isinstance(x, list) else None if x is None else x.to(device)


def _collect(x: Any, name: str, found: dict[str, Tensor]) -> None:
    if isinstance(x, Tensor):
        found[name] = x
    elif isinstance(x, list):
        for i, one in enumerate(x):
            _collect(one, f"{name}.{i}", found)
    elif hasattr(x, "constants"):
        found |= constants(name, x)
    elif is_dataclass(x):
        for field in fields(x):
            _collect(getattr(x, field.name), f"{name}.{field.name}", found)
