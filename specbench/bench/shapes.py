"""A configuration at its full size without weights, without memory and without a device: the networks hold fake CUDA
tensors (PyTorch's FakeTensorMode), of which only shape, type and device exist. The real decode loop runs on them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from specbench.config import parameters, registry
from specbench.decoding.rng import RandomStreams
from specbench.engine.graph import Eager, Graphs
from specbench.harness.method import build_continuous, build_drafter, build_method
from specbench.harness.pipeline import DTYPES, ContinuousPipeline, Pipeline
from specbench.models.mar import forget_tables

#: The device of fake tensors.
DEVICE = torch.device("cuda", 0)
#: A prompt of every model: a text, or a class.
_PROMPT = "0"


@dataclass
class Shapes:
    """A pipeline on fake tensors. networks: by name, those that a run holds, the drafter's included; conditioning: of
    as many prompts as were asked for; continuous: whether its tokens are. Use the pipeline within `entered`."""

    pipeline: Any
    networks: dict[str, nn.Module]
    conditioning: Any
    rng: RandomStreams
    mode: FakeTensorMode
    continuous: bool = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Tensors that are made within are fake, no fused kernel is started, and attention takes no memory but its
        output's, as on the device; no gradients. (Inference mode would hide which operations a composite one consists
        of.)"""
        try:
            with self.mode, torch.no_grad(), starting(lambda *_, **__: None), attending(attended):
                yield
        finally:
            forget_tables()


def attended(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """A tensor like the output of attention."""
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def attending(attend: Callable[..., Tensor]) -> Any:
    """A context that replaces PyTorch's attention."""
    return mock.patch.object(F, "scaled_dot_product_attention", attend)


def has_triton() -> bool:
    """Whether the fused kernels can be imported here."""
    return importlib.util.find_spec("triton") is not None


@contextmanager
def starting(start: Callable[..., None]) -> Iterator[None]:
    """Replaces the one function that starts fused kernels."""
    if not has_triton():
        yield
        return
    from specbench.engine.kernels import launch

    with mock.patch.object(launch, "start", start):
        yield


def shapes(cfg: Mapping[str, Any], engine: Eager | Graphs | None = None, rows: int | None = None) -> Shapes:
    """Of a checked configuration, with random weights at the official sizes; rows: images at once (default: the
    batch); engine: its kernels are used (default: kernel by kernel, the plain functions)."""
    cfg, engine = {**cfg, "weights": "random", "drafter_weights": None}, engine or Eager()
    continuous = parameters.is_continuous("model", cfg["model"])
    rows = int(cfg["batch"]) if rows is None else rows
    model = registry.find("model", cfg["model"])(cfg, torch.device("meta"), DTYPES[cfg["dtype"]])
    given = model.encode([_PROMPT] * rows)
    parts: tuple[Any, Any] = build_continuous(cfg, model) if continuous else (build_drafter(cfg, model), None)
    drafter, rule = parts
    model.device = DEVICE
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = dict(_networks(model)) | {f"drafter {name}": network for name, network in _networks(drafter)}
    with mode, torch.no_grad():
        for network in found.values():
            _to_fake(network)
        conditioning, rng = _fake(given), RandomStreams([(0, i) for i in range(rows)], DEVICE)
        pipeline: Pipeline | ContinuousPipeline
        if continuous:
            pipeline = ContinuousPipeline(model, drafter, rule, DEVICE, cfg["model"], "random", engine)
        else:
            method = build_method(cfg, model, drafter, near=_no_neighbours)
            pipeline = Pipeline(model, method, DEVICE, cfg["model"], "random", engine)
    return Shapes(pipeline, found, conditioning, rng, mode, continuous)


def _networks(holder: Any) -> Iterator[tuple[str, nn.Module]]:
    """The networks that an object holds itself, and those within a target with its guidance."""
    for name, value in vars(holder).items() if holder is not None else ():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(getattr(value, "model", None), nn.Module):
            yield name, value.model


def _to_fake(network: nn.Module) -> None:
    """Replaces parameters and buffers by fake ones; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for part in network.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    made.setdefault(id(tensor), _fake(tensor))
                    tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def _fake(x: Any) -> Any:
    """A fake tensor like a tensor, on `DEVICE`; of a dataclass, the same of its fields."""
    if isinstance(x, nn.Parameter):
        return nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device=DEVICE), requires_grad=False)
    if isinstance(x, Tensor):
        return torch.empty(x.shape, dtype=x.dtype, device=DEVICE)
    if is_dataclass(x) and not isinstance(x, type):
        return type(x)(**{f.name: _fake(getattr(x, f.name)) for f in fields(x)})
    return x


def _no_neighbours(codebook: Tensor, k: int, proximity: str) -> Tensor:
    """A table of neighbours (V, k) by shape alone."""
    return torch.zeros(len(codebook), min(k, len(codebook) - 1), dtype=torch.int64, device=codebook.device)
