"""The tensors that an object of this project reaches: a check of its declarations (`engine.state`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class TensorSlot:
    """A reference to a tensor: an attribute of an object, or an entry of a list or dictionary."""

    owner: Any
    key: Any

    def put(self, tensor: Tensor) -> None:
        if isinstance(self.owner, list | dict):
            self.owner[self.key] = tensor
        else:
            object.__setattr__(self.owner, self.key, tensor)  # also where a dataclass is frozen


def named(x: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(x, dict):
        yield from x.items()
    elif isinstance(x, list | tuple):
        yield from enumerate(x)
    elif type(x).__module__.startswith("specbench.") and hasattr(x, "__dict__"):
        yield from vars(x).items()


def tensors(root: Any) -> dict[str, tuple[TensorSlot, Tensor]]:
    """Every tensor reachable from an object of this project, by the path to it, each object visited once; without the
    tensors of networks."""
    slots: dict[str, tuple[TensorSlot, Tensor]] = {}
    _visit(root, "", slots, set())
    return slots


def _visit(x: Any, path: str, slots: dict[str, tuple[TensorSlot, Tensor]], seen: set[int]) -> None:
    if id(x) in seen or isinstance(x, nn.Module):
        return
    seen.add(id(x))
    for key, value in named(x):
        here = f"{path}.{key}"
        if isinstance(value, Tensor):
            slots[here] = TensorSlot(x, key), value
        else:
            _visit(value, here, slots, seen)


def undeclared(steps: Any) -> dict[str, Tensor]:
    """The tensors of a decoding that share no memory with its declared buffers."""
    declared = {b.tensor.untyped_storage().data_ptr() for b in steps.state.buffers.values()}
    reached = {path: tensor for path, (_, tensor) in tensors(steps).items()}
    return {p: t for p, t in reached.items() if t.untyped_storage().data_ptr() not in declared}
