"""Fused kernels in bfloat16 against plain functions in float64, by passes of real networks and by whole decisions, for
tests/engine/test_gpu.py."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gpu_checks import models
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Band, Mentored, Rule, cool, exact, uniform
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.thresholds import Typical
from specbench.decoding.sampling import draw_distinct
from specbench.decoding.trees import build, chain_paths, parse
from specbench.decoding.verify import Draft, TokenWise
from specbench.engine.kernels import FusedKernels

NODES = (1, 6, 26, 33, 65)
#: How much larger the error of a fused pass may be than the error of the plain pass in the same format.
MORE = 1.5


def passes() -> list[tuple[str, int, int]]:
    """Targets, nodes and images."""
    return list(itertools.product(models.TARGETS, NODES, (1, 2)))


def verifications() -> list[tuple[int, str, str]]:
    """Tokens of a vocabulary, shape of a draft, and rule."""
    exactly = itertools.product((16384, 8194, 32772, 65536), ("chain", "tree"), ("exact", "uniform", "cool", "band"))
    return [*exactly, *((size, "tree", x) for size in (16384, 8194) for x in ("mentored", "lantern", "typical"))]


@contextmanager
def poisoned() -> Iterator[None]:
    """In the block, memory that is allocated holds NaN and the largest integers until it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@lru_cache(1)
def _networks(name: str, device: str, small: bool) -> tuple[Any, Any]:
    """A target of two layers in bfloat16 (float32 where Triton interprets), and the same in float64."""
    model = models.target(name, device, torch.float32 if small else torch.bfloat16, 1 + (not small), small)
    exactly = copy.deepcopy(model)
    return model, exactly.double()


def outputs(
    network: Any, name: str, nodes: int, images: int, device: str, small: bool, kernels: FusedKernels | None
) -> tuple[Tensor, Tensor]:
    """Logits and new keys of a pass, in float64."""
    tree = build(parse("mc_sim_7b_63") if nodes == 26 else chain_paths(nodes - 1)).to(torch.device(device))
    generator = torch.Generator().manual_seed(nodes)
    conditioning = models.conditioning(name, images, device, network.output.weight.dtype, small)
    session = network.open(conditioning, images, True, nodes)
    fill = torch.randn(session.cache.k[0].shape, generator=generator)
    for cached in (session.cache.k, session.cache.v):
        for layer in cached:
            layer.copy_(fill.to(device, torch.bfloat16))  # the same numbers in every format
    tokens = torch.randint(0, session.codes, (images, nodes), generator=generator).to(device)
    count = torch.full((images,), session.length // 2, device=device)
    history = torch.zeros(images, session.length + 2 * nodes, dtype=torch.int64, device=device)
    if kernels is not None:
        session.use(kernels)
        session.forward(tokens, tree, history, count)  # memory that is allocated once is not poisoned
    with poisoned() if kernels else nullcontext():
        logits = session.forward(tokens, tree, history, count)[0]
    root = session.prefix_length - 1 + session.length // 2
    return logits.double(), session.cache.k[:, :, :, root : root + nodes].double()


@torch.no_grad()
def pass_on_shapes(name: str, nodes: int, images: int) -> None:
    """A fused pass of one layer on the meta device: tensors without values."""
    network = models.target(name, "meta", torch.bfloat16, 1)
    outputs(network, name, nodes, images, "meta", False, FusedKernels())


def error_of_pass(name: str, nodes: int, images: int, device: str) -> float:
    """The distance of a fused pass's logits and cached keys from float64, in units of the plain pass's distance."""
    small = device == "cpu"
    model, exactly = _networks(name, device, small)
    case = name, nodes, images, device, small
    (exact_logits, exact_keys), *others = (
        outputs(network, *case, kernels)
        for network, kernels in ((exactly, None), (model, None), (model, FusedKernels()))
    )
    errors = [((a - exact_logits).norm() / exact_logits.norm()).item() for a, _ in others]
    keys = [((b - exact_keys).norm() / exact_keys.norm()).item() for _, b in others]
    return max(fused / max(plain, 2.0 ** (-18 if small else -9)) for plain, fused in (errors, keys))


def _logits(rows: int, n: int, size: int, device: str, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, n, size, generator=torch.Generator().manual_seed(seed)).to(device)


def verified(size: int, shape: str, rule: str, device: str) -> tuple[Any, Any]:
    """What plain functions and kernels decide on the same draft with the same uniforms."""
    deep = 5 if size < 1000 else 64
    tree = build(chain_paths(deep) if shape == "chain" else parse("mc_sim_7b_63")).to(torch.device(device))
    rules: dict[str, Rule] = {"exact": exact(), "uniform": uniform(0.8), "cool": cool(1.3, tree.height)}
    rules |= {"band": Band(0.45, 0.5, tree.height), "mentored": Mentored(0.05), "typical": Typical()}
    rules["lantern"] = Lantern("lantern", models.near(size, min(size, 1100) - 1), 1050, "tvd", 0.2)
    rows, chosen = 4, rules[rule]
    chosen.open(torch.device(device))
    q = _logits(rows, tree.inner.shape[1], size, device).softmax(-1)
    p = 0.4 * _logits(rows, tree.nodes, size, device, 1).softmax(-1)
    p[:, tree.inner[0]] += 0.6 * q
    p /= p.sum(-1, keepdim=True)
    tokens = torch.zeros(rows, tree.nodes, dtype=torch.int64, device=device)
    for i, _ in enumerate(tree.inner[0].tolist()):
        below = tree.children[0, i][tree.children[0, i] >= 0]
        noise = torch.empty(rows, size).exponential_(generator=torch.Generator().manual_seed(i)).to(device)
        tokens[:, below] = draw_distinct(q[:, i], noise, len(below))
    draft = Draft(tree, tokens, q, torch.ones_like(tokens, dtype=torch.bool))
    rng, step = (
        RandomStreams([(0, i) for i in range(rows)], device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )
    plain = TokenWise().verify(p, replace(draft, probs=q.clone()), chosen, rng, step)
    with poisoned():
        fused = TokenWise().verify(
            p.clone(), replace(draft, probs=q.clone()), chosen, rng, step, kernels=FusedKernels()
        )
    return plain, fused
