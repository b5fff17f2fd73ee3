"""A command that is refused changes nothing: every command that takes an existing folder or file, refused in the ways
that exist for it."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from commands import Call, case, refused
from fake_pipeline import FakePipeline, at, interrupt
from light_metrics import light_metrics as light_metrics  # a fixture

from specbench.harness import run

FAST = "metrics=none warmup=0 device=cpu"


def tree(folder: Path) -> dict[Path, bytes | None]:
    """Every path in a folder, and the content of the files."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def folders(call: Call, tmp_path: Path, light_metrics: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """One folder of every kind that a command can be given."""
    Path("my.txt").write_text("one\ntwo\nthree\nfour\n")
    Path("mine.yaml").write_text(yaml.safe_dump({"n": 2, "metrics": "none", "lines": {"sjd": {"method": "sjd"}}}))
    Path("other.yaml").write_text(Path("mine.yaml").read_text())
    for words in (
        f"run {FAST} prompts=my.txt method=sjd n=4 out=done",
        f"run {FAST} method=sjd n=4 out=scenes",
        f"run {FAST} prompts=my.txt method=sjd n=4 shard=1/2 out=A",
        f"run {FAST} prompts=my.txt method=sjd n=4 shard=2/2 out=B",
        f"run -m {FAST} n=2 delta=1,2 out=grid",
        "suite mine.yaml out=suite",
        "evaluate done/images metrics=fid out=scores",
    ):
        with case(words):
            assert call(*shlex.split(words))[0] == 0
    monkeypatch.setattr(run, "_load_pipeline", at(1, interrupt))
    assert call(*shlex.split(f"run {FAST} prompts=my.txt method=sjd n=4 shard=2/2 out=half"))[0] == 130
    monkeypatch.setattr(run, "_load_pipeline", FakePipeline)
    Path("foreign").mkdir()
    for name in ("x", "x.csv", "x.npz"):
        Path("foreign", name).write_text("a,b\n1,2\n")
    shutil.copytree("done", "torn")  # a kill left half a line, and an image is gone
    with Path("torn/records.jsonl").open("a") as file:
        file.write('{"index": 4, "pro')
    Path("torn/images/00002.png").unlink()
    shutil.copytree("B", "changed")
    shutil.copy("B/images/00001.png", "changed/images/00003.png")
    return tmp_path


REFUSED = """
run {fast} prompts=my.txt method=sjd n=4 window=5 out=done
run {fast} prompts=my.txt method=sjd n=5 out=done
run {fast} method=sjd n=4 out=done
run {fast} prompts=my.txt method=sjd n=4 shard=3/2 out=A
run {fast} method=sjd out=foreign
run {fast} method=sjd out=grid
run {fast} method=sjd out=suite
run {fast} method=sjd out=scores
run {fast} method=sjd out=foreign/x
run {fast} method=sjd prompts=none.txt out=new/folder
run -m {fast} n=2 delta=1,3 seed=0,1 out=done
run -m {fast} n=2 seed=0,1 delta=1 out=suite/suite.yaml
run -m {fast} prompts=my.txt n=2,9 out=new
resume done n=9
resume done delta=2
resume done metrics=nope
resume done reference=none.npz metrics=fid shard=7/9
resume grid n=3
resume suite n=3
resume foreign
resume torn n=9
run {fast} prompts=my.txt method=sjd n=4 seed=1 out=torn
evaluate torn metrics=fid
merge A changed out=new/folder
merge A B out=done
merge A A out=done
merge A A B out=done
merge A B out=A
merge A half out=new
merge A half out=grid
merge A B out=foreign
merge A B out=suite
merge A B out=new metrics=nope
merge A scenes out=new
suite mine.yaml out=done
suite mine.yaml out=foreign
suite other.yaml out=suite
suite mine.yaml out=suite n=0
evaluate done data=scenes
evaluate done metrics=nope
evaluate half metrics=fid
evaluate done/images metrics=nope out=scores
evaluate done/images metrics=fid out=foreign
evaluate done/images metrics=fid out=done
evaluate scenes/images metrics=fid out=scores
compare done done out=done
compare done foreign out=new/compared.csv
breakdown done out=foreign
breakdown foreign out=new/rows.csv
collect done out=foreign
collect foreign/none out=new/rows.csv
report done out=done
report foreign/none out=new.html
bench device=cpu out=foreign/x.csv
bench method=nope out=new/rows.csv
probe out=foreign/x.csv
audit method=sjd audit.samples=0 out=foreign/x.csv
train drafter=eagle out=foreign
convert model=llamagen_scenes drafter_weights=foreign out=foreign
"""


def test_a_refused_command_changes_nothing(call: Call, folders: Path) -> None:
    before = tree(folders)
    for line in REFUSED.strip().splitlines():
        words = line.format(fast=FAST)
        with case(words):
            refused(call, *shlex.split(words))
            assert tree(folders) == before
