"""A configuration at its full size without weights, memory or a device. The networks hold tensors on PyTorch's device
"meta", which have a shape and a type, but no values; the real decode loop runs on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.config import parameters, registry
from specbench.config.run_config import RunConfig
from specbench.decoding.rng import RandomStreams
from specbench.engine.graph import Eager, Graphs
from specbench.harness.method import build_continuous, build_drafter, build_method
from specbench.harness.pipeline import DTYPES, ContinuousPipeline, Pipeline
from specbench.models import mar

#: The device of tensors without values.
DEVICE = torch.device("meta")
#: A prompt of every model: a text, or a class.
_PROMPT = "0"


@dataclass
class Shapes:
    """A pipeline on tensors without values. networks: the networks of a run by name, including the drafter's;
    conditioning: of a batch; continuous: whether its tokens are. Use the pipeline within `entered`."""

    pipeline: Any
    networks: dict[str, nn.Module]
    conditioning: Any
    rng: RandomStreams
    continuous: bool = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which attention allocates only its output, as on a GPU, and gradients are off. (Inference mode
        would hide the operations that a composite operation consists of.)"""
        try:
            with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", attended):
                yield
        finally:
            mar.forget_tables()


def attended(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """A tensor like the output of attention."""
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def shapes(cfg: RunConfig, engine: Eager | Graphs | None = None) -> Shapes:
    """A checked configuration with random weights at the official sizes. engine: its kernels are used (default: the
    plain functions)."""
    cfg, engine = cfg.on_random_weights(), engine or Eager()
    continuous = parameters.is_continuous("model", cfg.model)
    rows = int(cfg.batch)
    model = registry.find("model", cfg.model)(cfg, DEVICE, DTYPES[cfg.dtype])
    encoded = model.encode([_PROMPT] * rows)
    parts: tuple[Any, Any] = build_continuous(cfg, model) if continuous else (build_drafter(cfg, model), None)
    drafter, rule = parts
    model.device = DEVICE
    networks = dict(_networks(model)) | {f"drafter {name}": network for name, network in _networks(drafter)}
    with torch.no_grad():
        for network in networks.values():
            _without_values(network)
        conditioning, rng = _empty(encoded), RandomStreams([(0, i) for i in range(rows)], DEVICE)
        pipeline: Pipeline | ContinuousPipeline
        if continuous:
            pipeline = ContinuousPipeline(model, drafter, rule, DEVICE, cfg.model, "random", engine)
        else:
            method = build_method(cfg, model, drafter, near=_no_neighbours)
            pipeline = Pipeline(model, method, DEVICE, cfg.model, "random", engine)
    return Shapes(pipeline, networks, conditioning, rng, continuous)


def _networks(holder: Any) -> Iterator[tuple[str, nn.Module]]:
    """The networks that an object stores itself, and those within a target with its guidance."""
    for name, value in vars(holder).items() if holder is not None else ():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(getattr(value, "model", None), nn.Module):
            yield name, value.model


def _without_values(network: nn.Module) -> None:
    """Replaces parameters and buffers by ones without values; tied ones stay tied."""
    replaced: dict[int, Tensor] = {}
    for part in network.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    replaced.setdefault(id(tensor), _empty(tensor))
                    tensors[name] = replaced[id(tensor)]  # type: ignore[assignment]


def _empty(x: Any) -> Any:
    """A tensor like a tensor, without values; for a dataclass, one with such fields."""
    if isinstance(x, nn.Parameter):
        return nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device=DEVICE), requires_grad=False)
    if isinstance(x, Tensor):
        return torch.empty(x.shape, dtype=x.dtype, device=DEVICE)
    if is_dataclass(x) and not isinstance(x, type):
        return type(x)(**{f.name: _empty(getattr(x, f.name)) for f in fields(x)})
    return x


def _no_neighbours(codebook: Tensor, k: int, proximity: str) -> Tensor:
    """A table of neighbours (V, k) with the right shape."""
    return torch.zeros(len(codebook), min(k, len(codebook) - 1), dtype=torch.int64, device=codebook.device)
