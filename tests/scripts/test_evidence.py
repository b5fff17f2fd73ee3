"""scripts/evidence.py: one command makes every committed row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import evidence
import pytest

from specbench.tables.catalog import TABLES

OTHER_MODELS = {"sjd_table8"}  # without rows of `llamagen_scenes`


def test_every_table_is_made_by_one_step() -> None:
    steps_by_table = Counter(name for step in evidence.STEPS for name in step.tables)
    assert set(steps_by_table) == set(TABLES) - OTHER_MODELS
    assert set(steps_by_table.values()) == {1}


def test_tables_of_seconds_have_the_machine_alone() -> None:
    for step in evidence.STEPS:
        for name in step.tables:
            table = TABLES[name]
            timed = not {"batch=1", "timing=true"}.isdisjoint(table.protocol) or (table.batch and table.in_seconds)
            assert step.idle == (bool(timed) or name == "sjdpac_table4"), name
    assert all(
        "--jobs 1" in " ".join(words)
        for step in evidence.STEPS
        if step.idle and step.tables
        for words, _ in [next(iter(evidence.commands(step, 2)))]
    )


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The commands that run in a separate folder, and whether each keeps its freed memory. "two" fails the first
    time."""
    calls: list[tuple[str, bool]] = []

    class Done:
        def __init__(self, words: list[str], check: bool, env: dict[str, str]) -> None:
            calls.append((str(words[2]), env.get("MALLOC_MMAP_MAX_") == "0"))
            self.returncode = int([name for name, _ in calls] == ["one", "two"])
            out = Path(str(words[-1]).removeprefix("out="))
            content = out.read_text() if out.exists() else f"method,{words[2]}\n"
            out.write_text(f"{content}{words[2]},1\n")

    joined = evidence.Step("audit", 1, joined={"a/b.csv": ["probe one", "probe two"]})
    timed = evidence.Step("steps", 1, commands=("bench seconds out=seconds.csv",), idle=True)
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "STEPS", (joined, timed))
    monkeypatch.setattr(evidence.subprocess, "run", Done)
    monkeypatch.setattr(evidence.origin, "commit", lambda: "abc")
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    monkeypatch.chdir(tmp_path)
    return calls


def test_a_stopped_step_continues_and_rows_of_parts_are_joined(
    ran: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two commands fails at first; the first command is not run again. Seconds are measured with the
    memory settings of users."""
    monkeypatch.setattr("sys.argv", ["evidence.py"])
    assert [evidence.main() for _ in range(3)] == [1, 0, 0]
    assert ran == [("one", True), ("two", True), ("two", True), ("seconds", False)]
    assert (tmp_path / "results/a/b.csv").read_text() == "method,one,two\none,1,\ntwo,,1\n"
    monkeypatch.setattr(evidence.origin, "commit", lambda: "abd")  # rows of another commit are made again
    assert evidence.main() == 0
    assert len(ran) == 7


@pytest.mark.usefixtures("ran")
def test_rows_of_changed_code_are_not_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(evidence.origin, "commit", lambda: "abc-dirty")
    for words, sentence in ((["audit"], "clean checkout"), (["windows"], "there is no step windows")):
        monkeypatch.setattr("sys.argv", ["evidence.py", *words])
        with pytest.raises(SystemExit) as stopped:
            evidence.main()
        assert stopped.value.code == 2
        assert sentence in capsys.readouterr().err
