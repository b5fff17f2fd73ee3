"""An object whose tensors keep their memory from step to step, as a recorded graph of kernels needs.

A step may bind new tensors to names; here their values are copied back into the previous ones, so that the next step,
or the replay of a recorded one, reads and writes the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
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


def _named(x: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(x, dict):
        yield from x.items()
    elif isinstance(x, list | tuple):
        yield from enumerate(x)
    elif type(x).__module__.startswith("specbench.") and hasattr(x, "__dict__"):
        yield from vars(x).items()


def tensors(root: Any) -> tuple[dict[str, tuple[TensorSlot, Tensor]], list[Tensor]]:
    """Every tensor reachable from an object of this project, by the path to it, each object visited once; and those of
    networks (their tables), which belong to the networks and must not be moved."""
    found: dict[str, tuple[TensorSlot, Tensor]] = {}
    theirs: list[Tensor] = []
    _visit(root, "", found, theirs, set())
    return found, theirs


def _visit(
    x: Any, path: str, found: dict[str, tuple[TensorSlot, Tensor]], theirs: list[Tensor], seen: set[int]
) -> None:
    """(A function within `tensors` would keep itself and all tensors it found alive until Python collects cycles.)"""
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, nn.Module):
        theirs.extend(t for module in x.modules() for t in vars(module).values() if isinstance(t, Tensor))
        return
    for key, value in _named(x):
        here = f"{path}.{key}"
        if not isinstance(value, Tensor):
            _visit(value, here, found, theirs, seen)
        elif isinstance(x, tuple):
            raise TypeError(f"{path[1:]} is a tuple, whose tensors cannot be replaced: make it a list")
        else:
            found[here] = TensorSlot(x, key), value


class Fixed:
    """Gives an object its own tensors, whose memory stays the same."""

    def __init__(self, root: Any) -> None:
        self.root = root
        found, self._theirs = tensors(root)  # held, so that their memory is not reused
        self._own = {path: tensor.clone(memory_format=torch.contiguous_format) for path, (_, tensor) in found.items()}
        for path, (slot, _) in found.items():
            slot.put(self._own[path])

    @staticmethod
    def shapes(root: Any) -> tuple[Any, ...]:
        """What two objects must have in common for one to replace the other."""
        return tuple((path, tuple(t.shape), t.dtype) for path, (_, t) in tensors(root)[0].items())

    def settle(self) -> None:
        """After a step: copy newly bound tensors into the memory of the previous ones."""
        now, _ = tensors(self.root)
        if now.keys() != self._own.keys():
            odd = sorted(now.keys() ^ self._own.keys())
            raise RuntimeError(f"a step must keep its tensors' names; it added or dropped {', '.join(odd[:3])}")
        changed = [(slot, self._own[path], t) for path, (slot, t) in now.items() if t is not self._own[path]]
        for _, own, tensor in changed:
            own.copy_(tensor)
        for slot, own, _ in changed:
            slot.put(own)

    def load(self, other: Any) -> None:
        """Copy the values of another object of the same shapes."""
        for path, (_, tensor) in tensors(other)[0].items():
            if tensor is not self._own[path]:
                self._own[path].copy_(tensor)


def load_rows(root: Any, other: Any, rows: list[int], count: int) -> None:
    """Copy the rows of `other`, an object of len(rows) rows, into `rows` of `root`, one of `count` rows, in place.

    A tensor's row dimension is the one in which the two differ, `count` rows or twice as many (a conditional half, then
    an unconditional one); a tensor that does not differ has no rows. So the counts must differ.
    """
    few = len(rows)
    if few == count:
        raise ValueError("load_rows cannot replace all rows at once; use the other object instead")
    theirs = {path: tensor for path, (_, tensor) in tensors(other)[0].items()}
    for path, (slot, tensor) in tensors(root)[0].items():
        new = theirs[path]
        odd = [d for d in range(tensor.dim()) if tensor.shape[d] != new.shape[d]]
        if not odd:
            continue
        [d] = odd
        halves = tensor.shape[d] // count
        if (tensor.shape[d], new.shape[d]) != (halves * count, halves * few) or halves not in (1, 2):
            raise ValueError(
                f"{path[1:]} has {tensor.shape[d]} and {new.shape[d]} rows, where there are {count} and {few}"
            )
        if 0 in tensor.stride():  # one row expanded to several
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            slot.put(tensor)
        index = torch.tensor([half * count + row for half in range(halves) for row in rows], device=tensor.device)
        tensor.index_copy_(d, index, new)
