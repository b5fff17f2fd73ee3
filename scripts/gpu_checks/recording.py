"""Recorded steps against plain ones, image for image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from gpu_checks import models, results
from specbench.decoding.loop import DecoderConfig, Decoding, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Band, Mentored, Rule, cool, exact, uniform
from specbench.decoding.rules.groups import Grouped, Neighbourhood
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.relaxed import Redraw
from specbench.decoding.rules.thresholds import Typical
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


#: Tokens in a row of the images that are compared, which have 64.
SIDE = 8
IMAGES = 2
ENGINES = ("triton", "graph")
#: By name: target, drafter, rule and engine. The rules come first, since a stage that is stopped loses its last cases;
#: the last target has an image grammar.
CASES = {
    **{f"tree, {rule}, triton": ("xl", "tree", rule, "triton") for rule in RULES},
    **{
        f"{name}, exact, {engine}": ("xl", name, "exact", engine)
        for name in (*models.DRAFTERS, *models.PARALLEL)
        for engine in ENGINES
    },
    **{
        f"{name}, exact, triton, with a grammar": ("7b", name, "exact", "triton")
        for name in ("none", "tree", "sjd_vertical")
    },
}
FEW = ("none, exact, graph", "tree, lantern, released, triton", "eagle2, exact, triton")


def at_once(functions: Mapping[str, Action], device: torch.device) -> list[Action]:
    """Instead of a recorder, where nothing can be recorded."""
    for function in functions.values():
        function()
    return list(functions.values())


def checks(fast: bool) -> Iterator[results.Check]:
    """Every rule, every drafter with both engines, and a target with an image grammar."""
    for name in FEW if fast else CASES:
        yield name, partial(_same, *CASES[name])


def configured(target: str, drafter: str, rule: str, device: str) -> tuple[DecoderConfig, Any]:
    """A case's configuration, with wide layers in bfloat16, or with those for Triton's interpreter on the CPU; and what
    its images are conditioned on."""
    small = device == "cpu"
    dtype = torch.float32 if small else torch.bfloat16
    model = models.target(target, device, dtype, 1 if small else 2, small, SIDE)
    drafting = models.drafter(drafter, model, device, dtype, small)
    chosen = exact() if rule == "exact" else RULES[rule](model.vocab_size)
    conditioning = models.conditioning(target, 1 if small else IMAGES, device, dtype, small)
    return DecoderConfig(model, drafting, chosen, models.SAMPLING[target]), conditioning


def step_on_shapes(config: DecoderConfig, conditioning: Any) -> None:
    """The first step of a decoding with fused kernels on the meta device: tensors without values."""
    with torch.no_grad():
        rng = RandomStreams([(0, i) for i in range(len(conditioning))], "meta")
        decoding = Decoding(config, conditioning, rng, kernels=FusedKernels())
        decoding.step()
        decoding.record_stats()


def _same(target: str, drafter: str, rule: str, engine: str) -> dict[str, Any]:
    """Two batches by one recording, and by plain steps with the same kernels; on the CPU, where nothing is recorded,
    one image with fused kernels and without."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    config, conditioning = configured(target, drafter, rule, device)
    kernels = FusedKernels() if engine == "triton" else None
    recorded, plain = Graphs(None if cuda else at_once, kernels), Eager()
    if cuda:
        plain.kernels = kernels
        _never_waits(config, conditioning, device, kernels)
    steps = []
    for seed in range(2 if cuda else 1):
        rng = RandomStreams([(seed, i) for i in range(len(conditioning))], device)
        a, b = (decode(config, conditioning, rng, executed) for executed in (recorded, plain))
        if not (torch.equal(a.tokens, b.tokens) and torch.equal(a.steps, b.steps)):
            first = (a.tokens != b.tokens).int().argmax(1).tolist()
            return {"ok": False, "note": f"seed {seed}: tokens differ from numbers {first} on"}
        steps += a.steps.tolist()
    return {"note": f"steps {steps}"}


def _never_waits(config: Any, conditioning: Any, device: str, kernels: Any) -> None:
    """Three steps in which CUDA reports whatever makes the host wait as an error."""
    rng = RandomStreams([(0, i) for i in range(len(conditioning))], device)
    steps = Decoding(config, conditioning, rng, kernels=kernels)
    steps.step()  # kernels are compiled, workspaces allocated
    steps.record_stats()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            steps.step()
            steps.record_stats()
    finally:
        torch.cuda.set_sync_debug_mode("default")
