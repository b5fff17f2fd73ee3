"""Recorded steps against plain ones, image for image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from gpu_checks import models, results
from specbench.decoding.loop import Decoded, DecoderConfig, Decoding, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Band, Mentored, Rule, cool, exact, uniform
from specbench.decoding.rules.gsd import Grouped
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.neighbourhood import Neighbourhood
from specbench.decoding.rules.redraw import Redraw
from specbench.decoding.rules.typical import Typical
from specbench.engine.graph import Action, Eager, Graphs
from specbench.engine.kernels import FusedKernels

RULES: dict[str, Callable[[int], Rule]] = {
    "uniform": lambda size: uniform(0.8),
    "cool": lambda size: cool(1.3, 3),
    "band": lambda size: Band(0.45, 0.5, 3),
    "mentored": lambda size: Mentored(0.05),
    "lantern": lambda size: Lantern("lantern", models.near(size), 4, "tvd", 0.2),
    "lantern, released": lambda size: Lantern("lantern", models.near(size), 4, "jsd", 0.2, "released"),
    "lantern, optimal": lambda size: Lantern("lantern_pp", models.near(size), 4, "total", 2.0, "optimal"),
    "neighbourhood": lambda size: Neighbourhood(models.near(size), "optimal"),
    "gsd": lambda size: Grouped(torch.arange(size)[:, None] / 8, 6),
    "typical": lambda size: Typical(),
    "redraw": lambda size: Redraw(),
}


def at_once(functions: Mapping[str, Action], device: torch.device) -> list[Action]:
    """Instead of a recorder, where nothing can be recorded."""
    for function in functions.values():
        function()
    return list(functions.values())


def checks(cuda: bool, fast: bool) -> Iterator[results.Check]:
    """Every drafter with both engines, every rule, and a target with an image grammar."""
    device = "cuda" if cuda else "cpu"
    drafters = ("none", "sjd") if fast else (*models.DRAFTERS, *models.PARALLEL)
    engines = ("graph", "triton")
    for name in drafters:
        for engine in engines[: 1 if fast and not (cuda and name == "none") else None]:
            yield f"{name}, exact, {engine}", partial(_same, "xl", name, "exact", engine, device)
    for rule in () if fast else RULES:
        yield f"tree, {rule}, triton", partial(_same, "xl", "tree", rule, "triton", device)
    for name in () if fast else ("none", "tree", "sjd_vertical"):
        yield f"{name}, exact, triton, with a grammar", partial(_same, "7b", name, "exact", "triton", device)


def _same(target: str, name: str, rule: str, engine: str, device: str) -> dict[str, Any]:
    """Two batches by one recording, and by plain steps with the same kernels."""
    cuda = device == "cuda"
    small, dtype = not cuda or target != "xl", torch.bfloat16 if cuda else torch.float32
    model = models.target(target, device, dtype, 2 if cuda else 1, small)
    drafter = models.drafter(name, model, device, dtype, small)
    chosen = exact() if rule == "exact" else RULES[rule](model.vocab_size)
    config = DecoderConfig(model, drafter, chosen, models.SAMPLING[target])
    kernels = FusedKernels() if engine == "triton" else None
    recorded, plain = Graphs(None if cuda else at_once, kernels), Eager()
    plain.kernels = kernels
    if cuda:
        _never_waits(config, model, target, device, dtype, small, kernels)
    steps = []
    for seed in range(2 if cuda else 1):
        given = models.conditioning(target, 2 if cuda else 1, device, dtype, small)
        rng = RandomStreams([(seed, i) for i in range(len(given))], device)
        a, b = (decode(config, given, rng, executed) for executed in (recorded, plain))
        if not _equal(a, b):
            first = (a.tokens != b.tokens).int().argmax(1).tolist()
            return {"ok": False, "note": f"seed {seed}: tokens differ from numbers {first} on"}
        steps += a.steps.tolist()
    return {"note": f"steps {steps}"}


def _equal(a: Decoded[Any], b: Decoded[Any]) -> bool:
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.steps, b.steps)


def _never_waits(
    config: Any, model: Any, target: str, device: str, dtype: torch.dtype, small: bool, kernels: Any
) -> None:
    """Three steps in which CUDA reports whatever makes the host wait as an error."""
    given = models.conditioning(target, 2, device, dtype, small)
    with torch.inference_mode():
        steps = Decoding(config, given, RandomStreams([(0, 0), (0, 1)], device), kernels=kernels)
        steps.step()  # kernels are compiled, workspaces allocated
        steps.observe()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                steps.step()
                steps.observe()
        finally:
            torch.cuda.set_sync_debug_mode("default")
