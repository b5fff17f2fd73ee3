"""The documents: links lead somewhere, the changelog knows the version, and what the guide tells you to write works."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specbench._version import __version__

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
GUIDE = (ROOT / "docs/contributing.md").read_text()
SMALL = {
    "run": ["n=2", "warmup=0", "baseline=false", "device=cpu"],
    "audit": ["audit.samples=20000", "audit.model=v3t5", "out=audit.csv"],
    "bench": ["device=cpu", "out=bench.csv"],
    "list": [],
}
#: Command lines, one after the other in one process.
TOGETHER = "import json, sys; from specbench import cli; sys.exit(any([cli.main(w) for w in json.loads(sys.argv[1])]))"


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", path.read_text()) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    assert f"docs/{path.name}" in (ROOT / "README.md").read_text()


def test_the_changelog_begins_with_this_version() -> None:
    assert re.findall(r"^## (\S+)", (ROOT / "docs/changelog.md").read_text(), re.MULTILINE)[0] == __version__


def test_the_guide_works(tmp_path: Path) -> None:
    """Every file, change and command of the guide, in a copy of the package and in their order."""
    for part in ("specbench", "conf"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    (tmp_path / "specbench/assets").symlink_to(ROOT / "specbench/assets")
    lines = []
    for kind, block in re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.DOTALL):
        if kind == "sh":
            lines += [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
            continue
        head, _, content = block.partition("\n")
        path = tmp_path / head.removeprefix("# ")
        if kind == "diff":
            old, new = (re.findall(rf"^\{sign}(.*)$", content, re.MULTILINE) for sign in "-+")
            text = path.read_text()
            assert text.count(old[0]) == 1, f"{head} has no single line {old[0]!r}"
            path.write_text(text.replace(old[0], new[0]))
        else:
            assert not path.exists()
            path.write_text(content)
    for i, words in enumerate(lines):
        words += [word for word in SMALL[words[0]] if word.split("=")[0] not in {w.split("=")[0] for w in words}]
        if words[0] == "run":
            words += [f"out=run{i}", *([] if any(w.startswith("metrics=") for w in words) else ["metrics=none"])]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, "-c", TOGETHER, json.dumps(lines)]
    ran = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert [words[0] for words in lines] == ["run", "audit", "run", "bench", "run", "list"]
    for run, mark in ((0, "sjd_uniform"), (2, "greys"), (4, "mean of the pixels")):
        assert mark in (tmp_path / f"run{run}/row.csv").read_text()
    assert "not lossless" in (tmp_path / "audit.csv").read_text()
    assert "brightness" in ran.stdout
