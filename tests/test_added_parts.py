"""A part that is added to the tree as the docs say, one module and one YAML file or one YAML file alone, is known to
every command; no other file is touched."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from commands import copy_package, run_copy

from specbench.config import parameters, plugins, yaml_files
from specbench.config.parameter import METADATA
from specbench.errors import UsageError
from specbench.rows.columns import COLUMNS

FILES = {
    "conf/rule/lazy.yaml": """# @package _global_
# Lazy: every token is accepted with a given probability at least.
rule: lazy
laziness: 0.7
parameters:
  laziness: {kind: number, line: least probability of acceptance, low: 0, high: 1}
""",
    "specbench/decoding/rules/lazy.py": '''"""Lazy acceptance."""

from specbench.decoding.rules.base import Rule, at, normalise, ratio


class Lazy(Rule):
    name = "lazy"

    def __init__(self, laziness):
        self.laziness = laziness

    def accept(self, r, q, token, depth):
        return ratio(at(r, token), at(q, token)).clamp_min(self.laziness)

    def residual(self, r, q, token, depth):
        return normalise((r - q).clamp_min(0), r)


def build(cfg, setting):
    return Lazy(cfg["laziness"])
''',
    "conf/drafter/reaching.yaml": """# @package _global_
# A Jacobi window of a given reach.
drafter: reaching
reach: 3
parameters:
  reach: {kind: integer, line: length of the window, low: 1, high: 2000, unit: tokens}
""",
    "specbench/decoding/drafters/reaching.py": '''"""A Jacobi window."""

from specbench.decoding.drafters.window import Window


def shape(cfg):
    return Window(cfg["reach"]).shape


def build(cfg, model):
    return Window(cfg["reach"])
''',
    "conf/model/llamagen_b.yaml": """# @package _global_
# LlamaGen-B (111M), class-conditional: 384x384 images of 576 tokens.
defaults: [base/llamagen_c2i]
model: llamagen_b
shape: {dim: 768, n_layer: 12, n_head: 12, ffn_hidden: 2048}
files:
  target: {repository: somebody/small, files: [c2i_B_384.pt], licence: MIT}
""",
}
LINES = [
    "run --help method=sjd rule=lazy drafter=reaching",
    "run --help model=llamagen_b method=vanilla",
    "list rules drafters models",
    "audit method=eagle_chain rule=lazy laziness=0.9 audit.samples=1000 audit.model=v3t5 out=audit.csv",
    "fetch model=llamagen_b --dry-run",
    "bench --plan model=llamagen_b method=vanilla weights=random",
    "run method=sjd rule=lazy laziness=0.6 drafter=reaching reach=4 n=1 warmup=0 metrics=none baseline=false device=cpu"
    " out=parts",
    "run model=llamagen_b method=vanilla weights=random reduced=true n=1 warmup=0 metrics=none baseline=false"
    " device=cpu dtype=float32 out=model",
]


def test_added_parts_are_known_to_every_command(tmp_path: Path) -> None:
    copy_package(tmp_path)
    for name, text in FILES.items():
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(text)
    out = run_copy(tmp_path, [line.split() for line in LINES])
    helps, _, listed = out.partition("\nmodels\n")
    for text in ("laziness             0.7               number of at least 0", "least probability of acceptance"):
        assert text in helps
    assert "reach                3                 integer of at least" in helps
    assert "model                llamagen_b" in helps
    for text in ("lazy +Lazy: every token", "reaching +A Jacobi window of", "llamagen_b +LlamaGen-B .* absent"):
        assert re.search(f"^  {text}", listed, re.MULTILINE)
    assert "target/: somebody/small, main (MIT)" in listed
    assert "tokenizer/: FoundationVision/LlamaGen, dc1fec5" in listed
    assert "llamagen_b" in listed.rpartition("tokenizer/: FoundationVision")[2]  # the plan
    with (tmp_path / "audit.csv").open() as f:
        assert {row["rule"] for row in csv.DictReader(f)} == {"lazy"}
    with (tmp_path / "parts/row.csv").open() as f:
        [row] = csv.DictReader(f)
    assert (row["rule"], float(row["laziness"]), row["drafter"], int(row["reach"])) == ("lazy", 0.6, "reaching", 4)
    assert row["plugins"] == ""
    with (tmp_path / "model/row.csv").open() as f:
        [row] = csv.DictReader(f)
    assert (row["model"], row["weights"]) == ("llamagen_b", "random")


@pytest.mark.parametrize("group", parameters.PARAMETER_GROUPS)
def test_every_choice_declares_its_parameters(group: str) -> None:
    """In its own file, or in one that it builds on; and each has its value there."""
    common = parameters.declarations("", "config")
    for name in parameters.choices(group):
        own = parameters.declarations(group, name)
        held = parameters.content(group, name)
        assert set(held) - {*METADATA, *common} == set(own) - set(common)
        assert not {p.kind for p in own.values() if p.unit} - {"integer", "number"}
        for one in own.keys() & held.keys():  # what must be given, such as url, is null
            assert own[one].allows(held[one]) or held[one] is None, (name, one)
    assert set(parameters.declared("", "config")) <= set(common)


def test_the_columns_are_those_of_the_parameters() -> None:
    hidden = {name for name in parameters.table() if name not in COLUMNS}
    assert hidden == {*"out data_dir metrics metrics_dir reference baseline workers ray_address url".split(),
                      *"model_name log log_project log_dir".split()}  # fmt: skip
    assert list(parameters.table()).index("weights") < list(parameters.table()).index("window")


def test_a_name_has_one_kind(tmp_path: Path) -> None:
    (tmp_path / "rule").mkdir()
    file = tmp_path / "rule/mine.yaml"
    head = "# @package _global_\n# Mine.\nrule: mine\n"
    file.write_text(f"{head}delta: a\nparameters: {{delta: {{kind: string, line: x}}}}\n")
    with parameters.including([tmp_path]):
        [fault] = parameters.found_choices().faults_included
        assert "parameter delta has kind string in " in fault
        assert str(file) in fault
        assert "conf/rule/cool.yaml" in fault
        file.write_text(f"{head}delta: 0.5\nparameters: {{delta: {{kind: number, line: x, low: 0, high: 1}}}}\n")
        yaml_files.clear()
        assert parameters.found_choices().faults_included == ()
        assert parameters.in_run({"rule": "mine"})["delta"].high == 1
        assert parameters.in_run({"rule": "cool"})["delta"].high is None
        with pytest.raises(UsageError, match="delta must be a number of at least 0 and at most 1"):
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
    with pytest.raises(Exception, match="duplicate key a"):
        yaml_files.read(file.with_name("y.yaml"))
