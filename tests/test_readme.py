"""The README's commands do what they say."""

from __future__ import annotations

import csv
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specbench import cli, parameters
from specbench.audit import densities, models

ROOT = Path(__file__).resolve().parents[1]
LINES = [
    line.split("#")[0].strip() for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("    ")
]
SPECBENCH = [line for line in LINES if line.startswith(".venv/bin/specbench")]
MAKE = [line for line in LINES if line.startswith("make ")]


def test_the_readme_shows_commands():
    assert len(SPECBENCH) >= 5
    assert {"make run", "make test", "make tables"} <= set(MAKE)


@pytest.mark.parametrize("line", MAKE)
def test_every_make_target_exists(line):
    done = subprocess.run([*shlex.split(line), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", SPECBENCH)
def test_every_command_works(line, tmp_path, monkeypatch, capsys):
    """Each line as it stands, but for one picture and a folder of the test's own."""
    argv = shlex.split(line)[1:]
    if argv[0] == "run" and "--help" not in argv:
        argv = [a for a in argv if not re.match(r"(n|out)=", a)]
        argv += ["n=1", "warmup=0", "metrics=none", "baseline=false", f"out={tmp_path / 'run'}"]
    if argv[0] == "audit":
        argv = [a for a in argv if not a.startswith("audit.samples=")] + ["audit.samples=2000"]
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 0, capsys.readouterr().err
    if argv[0] == "run" and "--help" not in argv:
        assert list((tmp_path / "run").rglob("row.csv"))


def first_column(head: str) -> list[str]:
    """The names in backticks in the first column of the README's table with this head."""
    lines = (ROOT / "README.md").read_text().split(head)[1].splitlines()[1:]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [name for row in rows for name in re.findall(r"`([a-z]\w+)`", row.split("|")[1])]


def test_every_preset_stands_in_the_table_of_methods():
    """eagle3 did not."""
    assert sorted(first_column("| method | drafter | rule | lossless |")) == sorted(parameters.choices("method"))


def test_every_preset_has_been_audited():
    """Every preset of discrete tokens on every built-in model, and in the README's table; those of vectors are in
    audit_vectors.csv."""
    every = parameters.choices("method")
    discrete = {name for name in every if not parameters.of_vectors("rule", parameters.parts_of(name)["rule"])}
    for file, presets, built_in in (
        ("audit.csv", discrete, models.BUILT_IN),
        ("audit_vectors.csv", set(every) - discrete, densities.BUILT_IN),
    ):
        with (ROOT / "results" / file).open(newline="") as f:
            rows = {(row["method"], row["model"]) for row in csv.DictReader(f)}
        assert {(name, model) for name in presets for model in built_in} <= rows
    assert set(first_column("| method | total variation to the target's law")) == discrete


def test_every_linked_file_exists():
    text = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in link:
            assert (ROOT / link).exists(), link


def test_the_worked_example_works(tmp_path):
    """The README's new rule, written where it says, in a copy of the package: it runs and the audit sees through it."""
    text = (ROOT / "README.md").read_text()
    for part in ("specbench", "conf"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    (tmp_path / "specbench" / "assets").symlink_to(ROOT / "specbench" / "assets")
    files = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", text, re.DOTALL)
    assert [Path(name).suffix for name, _ in files] == [".py", ".yaml"]
    for name, content in files:
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(content)
    [script] = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in script.splitlines()]
    assert [words[:2] for words in commands] == [["specbench", "run"], ["specbench", "audit"]]
    small = {
        "run": ["n=1", "warmup=0", "metrics=none", "baseline=false", "out=run", "window=4"],
        "audit": ["audit.samples=20000", "audit.model=v8t4", "out=audit.csv"],
    }
    for words in commands:
        argv = [sys.executable, "-m", "specbench.cli", *words[1:], *small[words[1]]]
        done = subprocess.run(argv, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    assert "lazy" in (tmp_path / "run" / "row.csv").read_text()
    assert "not lossless" in (tmp_path / "audit.csv").read_text()
