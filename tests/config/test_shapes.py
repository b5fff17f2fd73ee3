"""Properties of a method that are known before anything is loaded: the shapes of drafts, and every error in its
parts."""

from __future__ import annotations

import re
from dataclasses import fields, make_dataclass
from types import NoneType, SimpleNamespace
from typing import Any, NoReturn, get_args, get_type_hints

import pytest
import torch
from commands import case, usage_error
from torch import Tensor, nn

from specbench.bench import floor
from specbench.config import configuration, parameter, parameters, registry
from specbench.config.run_config import RunConfig
from specbench.data.coco import Captions
from specbench.decoding.continuous import NoiseParameters
from specbench.decoding.drafters import medusa
from specbench.decoding.drafters.window import Window
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import base
from specbench.decoding.rules.base import Rule
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import Tree, build
from specbench.errors import UsageError
from specbench.harness import method
from specbench.harness.pipeline import ContinuousPipeline, Pipeline, load_model
from specbench.models.loading.unified_official import Prompting
from specbench.models.mar_sampling import MaskedSampling

DRAFTERS = [name for name in parameters.choices("drafter") if parameters.kind("drafter", name) != "continuous"]
PRESETS = parameters.choices("method")


def compose(preset: str) -> RunConfig:
    model = "mar_scenes" if parameters.kind("method", preset) == "continuous" else "llamagen_scenes"
    return configuration.compose([f"method={preset}", f"model={model}"])


def refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a check needs no part of a method")


def equal(value: object, other: object) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    if isinstance(value, DraftShape | Tree):
        return all(equal(getattr(value, f.name), getattr(other, f.name)) for f in fields(value))
    return value == other


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_has_the_shape_of_its_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the embedded model with random weights, in a step with a draft: no tree is larger than the shape allows, and
    the network passes as often as the shape says."""
    words = ["method=vanilla", f"drafter={name}", "weights=random", "device=cpu"]
    cfg = configuration.compose(words)
    pipeline = Pipeline.load(cfg)
    assert isinstance(pipeline, Pipeline)
    drafter: Any = pipeline.config.drafter
    assert equal(drafter.shape, method.shape_of(cfg))
    assert (pipeline.passes, pipeline.vanilla().passes) == (drafter.shape.passes, 0)
    passed: list[str] = []
    for network, call in floor.passes(pipeline.config.target, drafter)[2:]:
        if call in ("hidden", "forward"):  # the other calls are parts of a pass: its output layer, its context
            original = getattr(network, call)
            counted = lambda *a, original=original, **k: passed.append("") or original(*a, **k)  # type: ignore[func-returns-value] # noqa: E731
            monkeypatch.setattr(network, call, counted)
    with torch.inference_mode():
        decoding = pipeline.images(pipeline.encode(["a red circle"]), RandomStreams([(0, 0)]))
        for _ in range(3):
            passed.clear()
            decoding.step()
            assert decoding.step_stats is not None
            tree, limit = decoding.step_stats.draft.tree, drafter.shape.tree
            assert tree.nodes <= limit.nodes
            assert int(tree.depth.max()) <= limit.height
            assert len(passed) == drafter.shape.passes
            decoding.record_stats()


def test_continuous_drafts_have_a_shape() -> None:
    cfg = configuration.compose(["model=mar_scenes", "method=cspd", "gamma=3", "weights=random", "device=cpu"])
    shape, pipeline = method.shape_of(cfg), Pipeline.load(cfg)
    assert isinstance(pipeline, ContinuousPipeline)
    assert (shape.passes, shape.height, shape.tree.is_chain) == (3, 3, True)
    assert (pipeline.passes, pipeline.vanilla().passes) == (3, 0)


def test_rows_in_parallel_have_fronts() -> None:
    """With 24 tokens per row, the next row begins when the row above has `lag` tokens."""
    tree = build([])
    assert [DraftShape(tree, lag=lag).num_chains(SimpleNamespace(width=24)) for lag in (24, 12, 8, None)] == [
        1,
        3,
        4,
        1,
    ]
    assert method.shape_of(configuration.compose(["method=zipar", "window=5"])).lag == 5
    assert method.shape_of(configuration.compose(["method=pjd", "lead=7"])).lag == 6


def test_a_check_builds_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts used to be built on a model without content, with a codebook of two codes. (A window has no network: it is
    its parameters.)"""

    def descendants(kind: type) -> set[type]:
        return {kind}.union(*(descendants(part_class) for part_class in kind.__subclasses__()))

    checked = [compose(name) for name in PRESETS]
    classes = {nn.Module}
    for group in ("drafter", "rule"):
        for name in parameters.choices(group):
            module = registry.module(group, name)
            classes |= {
                part_class
                for part_class in vars(module).values()
                if isinstance(part_class, type)
                and part_class.__module__ == module.__name__
                and hasattr(part_class, "propose")
                and not issubclass(part_class, Window)
            }
    classes |= descendants(Rule) - {Rule}
    names = {part_class.__name__ for part_class in classes}
    assert names >= {"NoDraft", "DraftModel", "Eagle", "Eagle2", "VVS", "Medusa"}
    assert names >= {"DFlash"}
    assert names >= {"ZipAR", "ParallelJacobi", "Relaxed", "Band", "Mentored", "Lantern", "Grouped", "Neighbourhood"}
    for part_class in classes:
        monkeypatch.setattr(part_class, "__init__", refuse)
    monkeypatch.setattr(method, "neighbours", refuse)
    monkeypatch.setattr(base, "neighbours", refuse)
    for cfg in checked:
        method.check(cfg)


def test_incompatible_parameters() -> None:
    def check(words: list[str]) -> None:
        method.check(configuration.compose(words))

    for words, fault in [
        ("method=band decay=[0.5]", "decays"),
        ("method=cool_sd drafter=eagle window=9 schedule=linear", "shorter than linear_length=8"),
        ("method=cool_sd resample=paper", "resample must be one of .*paper"),
        ("method=lantern bound=total", "bound must be one of .*total"),
        ("method=lantern_pp bound=tvd", "bound must be one of .*tvd"),
        ("method=gsd resample=paper", "resample must be one of .*paper"),
        ("method=sjd rule=neighbourhood resample=paper", "resample must be one of .*paper"),
        ("method=sjd rule=redraw resample=optimal", "resample must be one of .*optimal"),
        ("method=eagle2 nodes=3", "nodes=3"),
        ("method=eagle2 depth=900 width=900", "depth=900"),
        ("method=vvs nodes=4", "nodes=4"),
        ("method=vvs rule=exact verification=block", "verification=block"),
        ("method=eagle1 tree=[[0],[0,0,0]]", "parent"),
        ("method=sjd_pac window=3", "window=3"),
        ("method=jacobi_built_in opening=greedy rule=exact verification=block", "verification=block"),
        ("method=cspd model=mar_scenes iterations=4", "iterations"),
        ("method=cspd model=mar_scenes criterion=path final_noise=false", "criterion=path"),
    ]:
        message = usage_error(check, words.split())
        assert re.search(fault, message), words


def test_a_drafter_without_a_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configuration.compose(["method=medusa", "weights=random", "device=cpu"])
    built = medusa.Choice.build
    monkeypatch.setattr(medusa.Choice, "build", lambda *args: vars(built(*args)).pop("shape") and object())
    with pytest.raises(UsageError, match="medusa"):
        Pipeline.assemble(cfg, *load_model(cfg))
    monkeypatch.delattr(medusa.Choice, "shape")
    with pytest.raises(UsageError, match="medusa"):
        method.check(cfg)


def test_a_part_has_the_parameters_of_its_file() -> None:
    """Each field is declared in the file, with the field's type, and each declared parameter is a field."""
    own = {"drafter_weights"}  # read by what loads the network
    for group in parameters.PARTS:
        for name in parameters.choices(group):
            with case(group, name):
                part = registry.find(group, name)
                declared = parameters.declarations(group, name)
                hints = get_type_hints(part)
                names = {field.name for field in fields(part)}
                assert names == parameters.declared(group, name) - own - {group}
                assert all(_fits(hints[parameter], declared[parameter]) for parameter in names)


def _fits(hint: Any, declared: parameter.Parameter) -> bool:
    """Whether a field has the type of a declared parameter."""
    kinds = {"integer": int, "number": float, "flag": bool, "string": str, "text": str, "path": str}
    kind, allowed = kinds.get(declared.kind), {*get_args(hint)} or {hint}
    same = kind is None or kind in allowed
    return same and ((NoneType in allowed) == bool(declared.null) or hint is Any)


def test_what_is_read_from_a_run_has_the_types_of_the_files() -> None:
    """The dataclasses that models, data sets and sampling read. Each field is declared by a file of the group."""
    read = {"model": (Prompting, MaskedSampling, NoiseParameters, Sampling), "data": (Captions,)}
    for group, kinds in read.items():
        for kind in kinds:
            for name, hint in get_type_hints(kind).items():
                declared = [
                    found[name]
                    for choice in parameters.choices(group)
                    if name in (found := parameters.declarations(group, choice))
                ]
                assert declared or (kind, name) == (Sampling, "kernels"), name
                assert all(_fits(hint, one) for one in declared), name


def test_a_run_has_the_parameters_of_every_run_as_fields() -> None:
    declared = parameters.declarations("", "config")
    hints = get_type_hints(RunConfig)
    names = {field.name for field in fields(RunConfig)} - {"own"}
    assert names == declared.keys() - {"variant"}
    assert all(_fits(hints[name], declared[name]) for name in names)


def test_a_part_of_a_plug_in_is_a_dataclass_of_declared_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configuration.compose(["method=sjd", "rule=uniform"])
    for kind, fault in ((object, "dataclass"), (make_dataclass("Mine", [("warmth", float)]), "warmth")):
        monkeypatch.setattr(registry, "find", lambda group, name, kind=kind: kind)
        assert fault in usage_error(registry.chosen, "rule", cfg)
