"""A part that is added to the tree as the docs say (one module and one YAML file, or one YAML file alone) is known to
every command. No other file is changed."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from commands import copy_package, run_copy

from specbench.config import parameters, plugins, yaml_files
from specbench.config.parameter import METADATA
from specbench.errors import UsageError

#: A drafter that uses a network of the target's, a discrete drafter with a parameter that continuous drafters have, a
#: rule with one that continuous rules have, and a model.
FILES = {
    "specbench/decoding/drafters/twig.py": """from dataclasses import dataclass
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


@dataclass(frozen=True)
class Choice:
    window: int

    @property
    def shape(self):
        return _shape(chain_paths(self.window))

    def build(self, model):
        return Medusa(model.drafter_network(NETWORK), chain_paths(self.window))
""",
    "conf/drafter/twig.yaml": """# @package _global_
# A short chain of heads of its own.
network: {folder: twig, loader: "specbench.decoding.drafters.twig:Loader"}
drafter: twig
window: 2
parameters:
  window: {kind: integer, line: length of the chain, low: 1, high: 9}
""",
    "specbench/decoding/drafters/steady.py": """from dataclasses import dataclass

from specbench.decoding.drafters.window import Window


@dataclass(frozen=True)
class Choice:
    gamma: int

    @property
    def shape(self):
        return self.build(None).shape

    def build(self, model):
        return Window(self.gamma)
""",
    "conf/drafter/steady.yaml": """# @package _global_
# A Jacobi window of `gamma` tokens.
kind: discrete
drafter: steady
gamma: 4
parameters:
  gamma: {kind: integer, line: length of the window, low: 1, high: 9}
""",
    "specbench/decoding/rules/strict.py": """from dataclasses import dataclass

from specbench.decoding.rules.relaxed import Relaxed


@dataclass(frozen=True)
class Choice:
    criterion: str

    def build(self, context):
        return Relaxed("strict", [0.5 if self.criterion == "paper" else 1.0])
""",
    "conf/rule/strict.yaml": """# @package _global_
# Half the acceptance of the exact rule with criterion=paper.
rule: strict
criterion: paper
parameters:
  criterion: {kind: string, line: whose acceptance, choices: [exact, paper]}
""",
    "conf/model/llamagen_b.yaml": """# @package _global_
# LlamaGen-B (111M), class-conditional: 384x384 images of 576 tokens.
defaults: [base/llamagen_c2i]
model: llamagen_b
shape: {dim: 768, n_layer: 12, n_head: 12, ffn_hidden: 2048}
files:
  target: {repository: somebody/small, files: [c2i_B_384.pt], licence: MIT}
""",
}
SMALL = "model=llamagen_b weights=random reduced=true dtype=float32 n=1 warmup=0 metrics=none baseline=false device=cpu"
LINES = [
    "run --help method=sjd rule=strict drafter=steady",
    "run --help model=llamagen_b method=vanilla",
    "list rules drafters models",
    "audit method=sjd rule=strict drafter=steady gamma=3 audit.samples=1000 audit.model=v3t5 out=audit.csv",
    "audit method=eagle_chain drafter=twig audit.samples=1000 audit.model=v3t5",
    "fetch model=llamagen_b --dry-run",
    "bench --plan model=llamagen_b method=vanilla weights=random",
    f"run method=sjd drafter=steady rule=strict gamma=3 criterion=exact out=parts {SMALL}",
    f"run method=eagle_chain drafter=twig out=network {SMALL}",
    f"run method=vanilla out=model {SMALL}",
]


def row_of(file: Path) -> dict[str, str]:
    """The only row of a file. It is read without specbench, which does not know its parts."""
    with file.open() as f:
        [row] = csv.DictReader(f)
    return row


def test_added_parts_are_known_to_every_command(tmp_path: Path) -> None:
    """Parameters may have any names. A drafter with gamma and a rule with criterion used to be taken for parts of
    models of vectors."""
    copy_package(tmp_path)
    for name, text in FILES.items():
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(text)
    out = run_copy(tmp_path, [line.split() for line in LINES])
    helps, _, listed = out.partition("\nmodels\n")
    for text in ("criterion            paper             one of exact, paper", "whose acceptance"):
        assert text in helps
    assert re.search("gamma +4 +integer", helps)
    assert re.search("model +llamagen_b", helps)
    for text in (
        "strict +Half the acceptance",
        "steady +A Jacobi window of",
        "llamagen_b +LlamaGen-B .*weights missing",
    ):
        assert re.search(f"^  {text}", listed, re.MULTILINE)
    assert "target/: somebody/small, main (MIT)" in listed
    assert "tokenizer/: FoundationVision/LlamaGen, dc1fec5" in listed
    assert "llamagen_b" in listed.rpartition("tokenizer/: FoundationVision")[2]  # the plan
    assert "drafter=twig rule=exact" in listed
    audited = row_of(tmp_path / "audit.csv")
    assert (audited["drafter"], audited["rule"]) == ("steady", "strict")
    row = row_of(tmp_path / "parts/row.csv")
    assert (row["rule"], row["criterion"], row["drafter"], int(row["gamma"])) == ("strict", "exact", "steady", 3)
    assert "plugins" not in row
    assert json.loads((tmp_path / "parts/details.json").read_text())["draft_passes"] == 0  # it has no network
    row = row_of(tmp_path / "network/row.csv")
    assert (row["drafter"], row["rule"], int(row["window"])) == ("twig", "exact", 2)
    row = row_of(tmp_path / "model/row.csv")
    assert (row["model"], row["weights"]) == ("llamagen_b", "random")


def test_every_choice_declares_its_parameters() -> None:
    """Declared in its own file, or in a file that it builds on, and with a value there."""
    for group in parameters.PARAMETER_GROUPS:
        common = parameters.declarations("", "config")
        for name in parameters.choices(group):
            declared = parameters.declarations(group, name)
            content = parameters.content(group, name)
            assert set(content) - {*METADATA, *common} == set(declared) - set(common), group
            assert not {p.kind for p in declared.values() if p.unit} - {"integer", "number"}, group
            for parameter in declared.keys() & content.keys():  # what must be given is null
                assert declared[parameter].allows(content[parameter]) or content[parameter] is None, (name, parameter)
        assert set(parameters.declared("", "config")) <= set(common), group


def test_a_name_has_one_kind(tmp_path: Path) -> None:
    (tmp_path / "rule").mkdir()
    file = tmp_path / "rule/mine.yaml"
    head = "# @package _global_\n# Mine.\nrule: mine\n"
    file.write_text(f"{head}delta: a\nparameters: {{delta: {{kind: string, line: x}}}}\n")
    with parameters.including([tmp_path]):
        [fault] = parameters.found_choices().faults_included
        assert all(name in fault for name in ("delta", "string"))
        assert str(file) in fault
        assert "conf/rule/cool.yaml" in fault
        file.write_text(f"{head}delta: 0.5\nparameters: {{delta: {{kind: number, line: x, low: 0, high: 1}}}}\n")
        yaml_files.clear()
        assert parameters.found_choices().faults_included == ()
        assert parameters.in_run({"rule": "mine"})["delta"].high == 1
        assert parameters.in_run({"rule": "cool"})["delta"].high is None
        with pytest.raises(UsageError, match="delta.*at least 0.*1"):
            parameters.in_run({"rule": "mine"})["delta"].checked("delta", 2)
    assert plugins.load(parameters.conf_dir()).plugins == ()


def test_yaml_is_read_as_hydra_reads_it(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    for file in {*parameters.conf_dir().rglob("*.yaml")} - {*parameters.conf_dir().glob("suite/*")}:
        assert repr(dict(yaml_files.read(file))) == repr(OmegaConf.to_container(OmegaConf.load(file))), file
    file = tmp_path / "x.yaml"
    file.write_text("a: 1e-3\nb: 2023-04-13\nc: 1_000\nd: .5\ne: 08\nf: 1.\ng: -.inf\nh: 1:30\ni: on\n")
    assert repr(dict(yaml_files.read(file))) == repr(OmegaConf.to_container(OmegaConf.load(file)))
    file.with_name("y.yaml").write_text("a: 1\na: 2\n")
    with pytest.raises(Exception, match="duplicate"):
        yaml_files.read(file.with_name("y.yaml"))
