"""Steps without a host that looks at their numbers, shown without a device that would be held up by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from specbench.engine.fixed import tensors


@contextmanager
def numbers_unknown(*roots: Any) -> Iterator[None]:
    """Within, the tensors that hang on some objects of the project have shapes, but no numbers: to ask for one, or for
    something whose shape depends on one, raises (DataDependentOutputException, DynamicOutputShapeException)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    places = [found for root in roots for found in tensors(root)[0].values()]
    for place, tensor in places:
        place.put(mode.from_tensor(tensor))
    try:
        with mode:
            yield
    finally:
        for place, tensor in places:
            place.put(tensor)
