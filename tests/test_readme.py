"""The README's commands do what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from specbench import cli

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
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 0, capsys.readouterr().err
    if argv[0] == "run" and "--help" not in argv:
        assert list((tmp_path / "run").rglob("row.csv"))


def test_every_linked_file_exists():
    text = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in link:
            assert (ROOT / link).exists(), link
