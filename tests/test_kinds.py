"""Kinds are declared: a part's parameters may have any names, and nothing is guessed from them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from commands import copy_package, run_copy

from specbench.config import configuration, parameters
from specbench.config.parameter import METADATA
from specbench.errors import UsageError

#: A drafter that uses a network of the target's, a discrete drafter with a parameter that continuous drafters have, and
#: a rule with one that continuous rules have.
FILES = {
    "specbench/decoding/drafters/twig.py": """
from types import SimpleNamespace

import torch

from specbench.decoding.drafters.medusa import Medusa
from specbench.decoding.drafters.medusa import _shape
from specbench.decoding.trees import chain_paths

NETWORK = {"folder": "twig", "loader": f"{__name__}:Loader"}


class Heads(torch.nn.Linear):
    # the same logits for both positions ahead
    cfg = SimpleNamespace(heads=2)

    def forward(self, hidden, heads=2):
        return super().forward(hidden)[..., None, :].expand(*hidden.shape[:-1], heads, -1)


class Loader:
    def __init__(self, bundle, folder):
        self.bundle = bundle

    def load(self):
        weight = self.bundle.target.output.weight
        return Heads(weight.shape[1], len(weight)).requires_grad_(False)


def shape(cfg):
    return _shape(chain_paths(cfg["window"]))


def build(cfg, model):
    return Medusa(model.drafter_network(NETWORK), chain_paths(cfg["window"]))
""",
    "conf/drafter/twig.yaml": """
# @package _global_
# A short chain of heads of its own.
network: {folder: twig, loader: "specbench.decoding.drafters.twig:Loader"}
drafter: twig
window: 2
parameters:
  window: {kind: integer, line: length of the chain, low: 1, high: 9}
""",
    "specbench/decoding/drafters/steady.py": """
from specbench.decoding.drafters.window import Window, window_shape


def shape(cfg):
    return window_shape(cfg["gamma"])


def build(cfg, model):
    return Window(cfg["gamma"])
""",
    "conf/drafter/steady.yaml": """
# @package _global_
# A Jacobi window of `gamma` tokens.
kind: discrete
drafter: steady
gamma: 4
parameters:
  gamma: {kind: integer, line: length of the window, low: 1, high: 9}
""",
    "specbench/decoding/rules/strict.py": """
from specbench.decoding.rules.relaxed import Relaxed


def build(cfg, setting):
    return Relaxed("strict", [0.5 if cfg["criterion"] == "paper" else 1.0])
""",
    "conf/rule/strict.yaml": """
# @package _global_
# Half the acceptance of the exact rule with criterion=paper.
rule: strict
criterion: paper
parameters:
  criterion: {kind: string, line: whose acceptance, choices: [exact, paper]}
""",
}


def test_every_preset_has_the_kind_of_its_parts() -> None:
    for method in parameters.choices("method"):
        parts = {parameters.kind(group, name) for group, name in parameters.method_choices(method).items()} - {"any"}
        assert parts <= {parameters.kind("method", method)} or (
            parameters.kind("method", method) == "any" and not parts
        )


def test_metadata_is_no_parameter() -> None:
    cfg = configuration.compose(["model=mar_scenes"])
    assert not {*METADATA} & {*cfg}
    assert (cfg["method"], cfg["data"]) == ("cspd", "scenes_classes")  # as its file prefers
    with pytest.raises(UsageError, match="kind"):
        configuration.compose(["kind=continuous"])


def test_discrete_parts_may_have_the_parameters_of_continuous_ones(tmp_path: Path) -> None:
    """A drafter with gamma and a rule with criterion were taken for parts of models of vectors."""
    copy_package(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.lstrip())
    small = "n=1 warmup=0 metrics=none baseline=false device=cpu".split()
    lines = []
    for words, weights, out in (
        (["method=sjd", "drafter=steady", "rule=strict", "gamma=3"], "embedded", "one"),
        (["method=eagle_chain", "drafter=twig"], "random", "two"),
    ):
        lines += [["run", *words, f"weights={weights}", f"out={out}", *small]]
        lines += [["audit", *words, "audit.samples=2000", "audit.model=v3t5"]]
    printed = run_copy(tmp_path, lines)
    with (tmp_path / "one/row.csv").open() as f:
        [row] = csv.DictReader(f)
    assert (row["drafter"], row["rule"], float(row["draft_passes"])) == ("steady", "strict", 0)  # it has no network
    assert "drafter=steady rule=strict" in printed
    assert ",twig,exact," in (tmp_path / "two/row.csv").read_text()
    assert "drafter=twig rule=exact" in printed
