"""Code that the checks of all families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from specbench.models.loading import official
from specbench.models.loading.naming import ParameterSlice

M = TypeVar("M", bound=nn.Module)
Tensors = dict[str, Tensor]
#: (name of the output, ours, the golden's)
Compared = Iterator[tuple[str, Tensor, Tensor]]


def weights(t: Tensors) -> Tensors:
    return {k.removeprefix("param/"): v.float() for k, v in t.items() if k.startswith("param/")}


def load(build: Callable[[], M], t: Tensors, table: Mapping[str, ParameterSlice]) -> M:
    """A module with a golden's parameters, by the naming table that official files use."""
    return official.load(build, official.from_tensors(weights(t), "golden"), table, "cpu", torch.float32)
