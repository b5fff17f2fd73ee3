"""Plug-ins: the worked example as an installed package, folders that a user includes, and broken ones."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import ROOT, TOGETHER, Call, python, refused, row_of
from fake_pipeline import at, interrupt
from hatchling import build

from specbench import data
from specbench.config import composition, configuration, missing_weights, parameters, registry, yaml_files
from specbench.errors import UsageError
from specbench.harness import run
from specbench.harness.folder import stored

RULE = "# @package _global_\n# Mine.\nrule: mine\nwarmth: 0.5\n"
DECLARED = "parameters:\n  warmth: {kind: number, line: how warm it is, low: 0, unit: degrees}\n"
MODULE = """from dataclasses import dataclass

from helper import VALUE


@dataclass(frozen=True)
class Choice:
    warmth: float

    def build(self, context):
        return VALUE, self.warmth
"""


@pytest.fixture
def install_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a distribution `broken` with these files and entry points."""
    site = tmp_path / "site"
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])

    def install(files: dict[str, str], points: str) -> None:
        shutil.rmtree(site, ignore_errors=True)
        importlib.invalidate_caches()
        info = "broken-1.0.dist-info"
        written = {f"{info}/METADATA": "Name: broken\nVersion: 1.0\n", f"{info}/entry_points.txt": points}
        for name, text in {**files, **written}.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text)
        yaml_files.clear()

    yield install
    monkeypatch.undo()
    yaml_files.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to include: a rule with its own parameter, next to its module and a helper."""
    project = tmp_path / "mine"
    (project / "rule").mkdir(parents=True)
    (project / "rule/mine.yaml").write_text(RULE + DECLARED)
    (project / "rule/mine.py").write_text(MODULE)
    (project / "helper.py").write_text("VALUE = 7\n")
    return project


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the worked example."""
    folder = tmp_path_factory.mktemp("example")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT / "docs/plugin_example")
        wheel = build.build_wheel(str(folder))
    with zipfile.ZipFile(folder / wheel) as archive:  # as an installer does
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_example_is_a_package_that_adds_to_every_command(example: Path, tmp_path: Path) -> None:
    """A third-party package with a rule, a drafter, a preset and a metric with a column; nothing in specbench is
    edited."""
    lines = [
        "list rules plugins --json".split(),
        "run method=copy_softened n=1 warmup=0 metrics=contrast baseline=false device=cpu out=run".split(),
        "suite copying --no-run out=suite".split(),
        "audit method=copy_softened softness=1 audit.samples=1000 audit.model=v3t5 out=audit.csv".split(),
    ]
    process = python(TOGETHER, json.dumps(lines), cwd=tmp_path, package=Path(f"{ROOT}{os.pathsep}{example}"))
    assert process.returncode == 0, process.stdout + process.stderr
    listing, _ = json.JSONDecoder().raw_decode(process.stdout)
    [rule] = [entry for entry in listing["rules"] if entry["plugin"]]
    assert (rule["name"], rule["plugin"]) == ("softened", "specbench-example 0.1.0")
    [plugin] = listing["plugins"]
    assert "drafter=copy_above, method=copy_softened, metrics=contrast, rule=softened" in plugin["line"]
    with (tmp_path / "run/row.csv").open() as f:
        [cells] = csv.DictReader(f)
    assert cells["plugins"] == plugin["name"]
    assert plugin["name"].startswith("specbench-example 0.1.0:")
    assert (cells["rule"], float(cells["softness"])) == ("softened", 0.5)
    assert 0 < float(cells["contrast"]) < 0.5
    assert cells["contrast_backend"] == "standard deviation of grey levels"
    with (tmp_path / "audit.csv").open() as f:
        assert {line["plugins"] for line in csv.DictReader(f)} == {plugin["name"]}
    assert "drafter=copy_above rule=softened" in process.stdout
    assert "Copied, softness 0.25" in process.stdout  # the title of its suite
    with pytest.raises(UsageError, match="0.1.0"):
        row_of(tmp_path / "run")
    with pytest.raises(UsageError, match="'copy_above'.*0.1.0"):
        stored(tmp_path / "run")


def test_a_broken_plugin_is_a_short_error(install_broken: Callable[..., None], call: Call) -> None:
    for files, points, sentence in [
        ({}, "[specbench.rules]\nmine = gone.mine:build\n", "gone.conf"),
        (
            {"broken/conf/rule/other.yaml": "rule: other\n"},
            "[specbench.rules]\nmine = broken:build\n",
            "but no rule/mine.yaml",
        ),
        ({"broken/conf/rule/mine.yaml": "rule: [\n"}, "[specbench.conf]\na = broken.conf\n", "rule mine of plug-in"),
        ({"broken/conf/rule/mine.yaml": RULE}, "[specbench.conf]\na = broken.conf\n", "warmth is no parameter of"),
        ({"broken/conf/rule/cool.yaml": RULE}, "[specbench.conf]\na = broken.conf\n", "has a choice of this name"),
        ({"broken/conf/rules/mine.yaml": RULE}, "[specbench.suites]\na = broken.conf\n", "has no choice"),
        ({"broken/conf/rule/mine.yaml": "rule: mine\n"}, "[specbench.rule]\nmine = broken:b\n", "of an unknown group"),
        (
            {"broken/conf/rule/mine.yaml": RULE + DECLARED.replace("number", "float")},
            "[specbench.conf]\na = broken.conf\n",
            "warmth: kind must be one of integer",
        ),
        (
            {"broken/conf/metrics/mine.yaml": "mine: {metric: 'm:M', columns: {mine: {title: Mine}}}\n"},
            "[specbench.conf]\na = broken.conf\n",
            "column mine is declared wrongly (missing a required argument: 'better')",
        ),
        (
            {"broken/conf/metrics/mine.yaml": "mine: {metric: 'm:M', columns: {window: {}}}\n"},
            "[specbench.conf]\na = broken.conf\n",
            "the column window exists",
        ),
    ]:
        install_broken(files, points)
        code, out, err = call("list", "rules", "metrics")
        assert code == 0, files
        assert "cool" in out, files
        assert "mine" not in out, files
        [line] = err.splitlines()
        assert line.startswith("specbench: "), files
        assert "plug-in broken 1.0" in line, files
        assert sentence in line, files
        assert call("run", "--cfg", "job")[0] == 0, files


def test_a_module_that_cannot_be_imported_breaks_only_its_choice(
    install_broken: Callable[..., None], call: Call
) -> None:
    install_broken(
        {
            "broken/conf/rule/mine.yaml": "# @package _global_\n# Mine.\nrule: mine\n",
            "broken/conf/metrics/mine.yaml": "# Mine.\nmine: {columns: [fid]}\n",
            "broken/mine.py": "import not_there\n",
        },
        "[specbench.rules]\nmine = broken.mine:build\n[specbench.metrics]\nmine = broken.mine:Mine\n",
    )
    for _ in range(2):  # the second time, the package is already imported
        with pytest.raises(UsageError, match="1.0.*not_there"):
            registry.find("rule", "mine")
    code, out, err = call("list", "metrics")
    assert (code, err) == (0, "")
    assert "metrics mine of plug-in broken 1.0" in out
    assert registry.find("rule", "cool")


def test_a_folder_is_included_as_in_hydra(folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--include", str(folder)], [f"--config-dir={folder}"], [f"hydra.searchpath=[file://{folder}]"]):
        code, out, _ = call("run", *words, "rule=mine", "warmth=0.25", "--cfg", "job")
        assert code == 0
        assert "rule: mine\nwarmth: 0.25" in out or ("rule: mine" in out and "warmth: 0.25" in out)
    assert f"file://{folder}" in call("run", *words, "--info", "searchpath")[1]
    assert "how warm it is" in call("run", *words, "rule=mine", "--help")[1]
    assert "warmth" in refused(call, "run", *words, "rule=mine", "warmth=-1")
    assert "rule 'mine'" in refused(call, "run", "rule=mine")
    assert "nowhere" in refused(call, "--include", "nowhere", "list")
    assert "--include" in refused(call, "list", "--include")
    line = f"specbench run --include {folder} rule=mi"
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert call("-sc", "query=bash")[1].split() == ["rule=mine"]
    assert "warmth" not in parameters.table()


def test_a_stopped_run_names_its_folders(folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = run._load_pipeline
    monkeypatch.setattr(run, "_load_pipeline", at(1, interrupt))
    words = ("method=sjd", "rule=mine", "n=3", "metrics=none", "baseline=false", "out=one")
    code, _, err = call("run", "--include", str(folder), *words)
    assert code == 130
    assert f"specbench run --include {folder} " in err
    assert json.loads(Path("one/included.json").read_text()) == [str(folder)]
    monkeypatch.setattr(run, "_load_pipeline", complete)
    assert call("resume", "one")[0] == 0  # without the flag
    row = row_of(Path("one"))
    assert (row["rule"], row["n"]) == ("mine", 3)
    folder.rename(folder.parent / "moved")  # the row can still be shown
    code, out, err = call("show", "one", "--columns", "rule")
    assert (code, "mine" in out, str(folder) in err) == (0, True, True)


def test_a_folder_holds_one_module_and_one_file_per_choice(folder: Path) -> None:
    before = {*sys.modules}
    (folder / "method").mkdir()
    (folder / "method/mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults:\n  - override /drafter: sjd\n  - override /rule: mine\n  - _self_\n"
        "method: mine\nwarmth: 0.5\n"
    )
    with parameters.including([folder]), configuration.session():
        cfg = configuration.compose(["method=mine"])
        assert registry.chosen("rule", cfg).build(None) == (7, 0.5)
        assert registry.module("rule", "mine").__file__ == str(folder / "rule/mine.py")
        assert parameters.in_run(cfg.plain())["warmth"].unit == "degrees"
        assert composition.compose({"method": "mine"}) == configuration._by_hydra(
            parameters.conf_dir(), ("method=mine",)
        )
        [label] = parameters.plugins_of(cfg.plain())
        (folder / "helper.py").write_text("VALUE = 8\n")
        yaml_files.clear()
        [other] = parameters.plugins_of(cfg.plain())
        assert label != other
        assert {label[:5], other[:5]} == {"mine:"}
    assert parameters.plugins_of(cfg.plain()) == []
    sys.path.remove(str(folder))
    for name in {*sys.modules} - before:
        if name == "helper" or name.startswith("specbench_plugin"):
            del sys.modules[name]


def test_data_and_models_come_from_a_folder(folder: Path) -> None:
    for group, name, text in (
        ("data", "colours", "data: colours\n"),
        ("model", "toy", "model: toy\nweights: random\ndtype: float32\ncfg_scale: 1.0\n"),
    ):
        (folder / group).mkdir()
        (folder / f"{group}/{name}.yaml").write_text(f"# @package _global_\n# Mine.\n{text}")
    (folder / "data/colours.py").write_text(
        "from specbench.data import Item\n\n\n"
        "def items(wanted):\n    return [Item(i, c, None, c) for i, c in enumerate(['red', 'blue'][: wanted.n])]\n"
    )
    (folder / "weights.bin").write_bytes(b"1")
    with parameters.including([folder]):
        cfg = configuration.compose(["data=colours", "n=all"])
        assert [item.prompt for item in data.load(cfg.prompts)] == ["red", "blue"]
        assert cfg.n == 2
        settings = cfg.changed(model="toy", weights=str(folder), drafter="none")
        label = registry.weights_label(settings)  # covers every file in the folder
        (folder / "weights.bin").write_bytes(b"2")
        assert registry.weights_label(settings) != label
        assert label.startswith("folder:")


def test_a_model_of_a_folder_is_fetched_like_a_shipped_one(folder: Path, call: Call) -> None:
    (folder / "model").mkdir()
    (folder / "model/toy.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults: [base/llamagen_c2i]\nmodel: toy\nshape: {dim: 768, n_head: 12}\n"
        "files:\n  target: {repository: somebody/toy, files: [toy.pt], licence: MIT, sizes: {toy.pt: 1000}}\n"
        "  drafters: {eagle: {repository: somebody/eagle, licence: MIT}}\n"
    )
    code, out, _ = call("--include", str(folder), "fetch", "model=toy", "drafter=eagle2", "--dry-run")
    assert code == 0
    assert "  target/: somebody/toy, main (MIT)\n          1.0 kB  toy.pt\n" in out
    assert "  tokenizer/: FoundationVision/LlamaGen, " in out
    assert "  eagle/: somebody/eagle, main (MIT)\n" in out
    with parameters.including([folder]):
        cfg = configuration.compose(["model=toy", "method=eagle2", "n=1"])
        with pytest.raises(UsageError, match="model=toy"):
            missing_weights.check(cfg)
        assert {part.repository for part in registry.model_sources()["toy"].parts.values()} == {
            "somebody/toy",
            "FoundationVision/LlamaGen",
        }
        (folder / "model/toy.yaml").write_text(
            "# @package _global_\n# Mine.\nmodel: toy\nfiles: {target: {licence: MIT}}\n"
        )
        yaml_files.clear()
        with pytest.raises(UsageError, match="'repository'"):
            registry.model_sources()


def test_the_page_shows_what_works(example: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of docs/plugins.md are created and its commands run, with few sequences and a pipeline without a
    model."""
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    for file, text in re.findall(r"^```(?:python|yaml)\n# (mine/\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(example)])
    yaml_files.clear()
    smaller = {"run": ["n=2", "metrics=none"], "audit": ["audit.samples=1000", "audit.model=v3t5"]}
    outputs = []
    try:
        for line in re.findall(r"^specbench (?!suite)(.*)$", page, re.MULTILINE):  # suites need its column
            words = [word for word in shlex.split(line) if not word.startswith(("n=", "metrics="))]
            code, out, err = call(*words, *next((more for name, more in smaller.items() if name in words), []))
            assert code == (": not lossless (" in out), f"{line}: {err}"
            outputs.append(out)
    finally:
        monkeypatch.undo()
        yaml_files.clear()
    assert len(outputs) == 7
    assert "lazy " in outputs[0]
    assert "not lossless" in outputs[2]  # the audit of the rule
    assert "target/: OWNER/NAME, main (MIT)" in outputs[3]
    assert "specbench-example 0.1.0:" in outputs[4]
