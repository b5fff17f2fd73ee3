"""Checks on a CPU that a step needs no value of a tensor on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from reachable import tensors
from torch._subclasses.fake_tensor import FakeTensorMode

from specbench.engine import ops


@contextmanager
def numbers_unknown(*roots: Any) -> Iterator[None]:
    """In the block, the tensors of some objects have shapes, but no values: reading a value, or a shape that depends
    on one, raises DataDependentOutputException or DynamicOutputShapeException. Statistics are computed as on a GPU."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    slots = [slot for root in roots for slot in tensors(root).values()]
    for slot, tensor in slots:
        slot.put(mode.from_tensor(tensor))
    try:
        with mode, mock.patch.object(ops, "DYNAMIC_SHAPES", ()):
            yield
    finally:
        for slot, tensor in slots:
            slot.put(tensor)
