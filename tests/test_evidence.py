"""scripts/evidence.py: one command makes every committed row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import evidence
import pytest

from specbench.tables.catalog import TABLES

OTHER_MODELS = {"sjd_table8"}  # has no line of an embedded model


def test_every_table_is_made_by_one_step() -> None:
    made = Counter(name for step in evidence.STEPS for name in step.tables)
    assert set(made) == set(TABLES) - OTHER_MODELS
    assert set(made.values()) == {1}


def test_tables_of_seconds_have_the_machine_alone() -> None:
    for step in evidence.STEPS:
        for name in step.tables:
            timed = not {"batch=1", "timing=true"}.isdisjoint(TABLES[name].protocol)
            assert step.idle == (timed or name == "sjdpac_table4"), name
    assert all(
        "--jobs 1" in " ".join(words)
        for step in evidence.STEPS
        if step.idle
        for words, _ in [next(iter(evidence.commands(step, 2)))]
    )


def test_a_stopped_step_goes_on_and_rows_of_parts_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two commands fails first; the first is not run again."""
    step = evidence.Step("audit", 1, joined=(("a/b.csv", ("audit one", "audit two")),))
    ran: list[str] = []

    class Done:
        def __init__(self, words: list[str], check: bool, env: dict[str, str]) -> None:
            assert env["MALLOC_MMAP_MAX_"] == "0"  # no seconds are measured
            ran.append(str(words[2]))
            self.returncode = int(ran == ["one", "two"])
            out = Path(str(words[-1]).removeprefix("out="))
            held = out.read_text() if out.exists() else f"method,{words[2]}\n"
            out.write_text(f"{held}{words[2]},1\n")

    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "STEPS", (step,))
    monkeypatch.setattr(evidence.subprocess, "run", Done)
    monkeypatch.setattr(evidence.provenance, "commit", lambda: "abc")
    monkeypatch.setattr("sys.argv", ["evidence.py", "audit"])
    monkeypatch.chdir(tmp_path)
    assert evidence.main() == 1
    assert evidence.main() == 0
    assert ran == ["one", "two", "two"]
    assert (tmp_path / "results/a/b.csv").read_text() == "method,one,two\none,1,\ntwo,,1\n"
    assert evidence.main() == 0
    assert len(ran) == 3
    monkeypatch.setattr(evidence.provenance, "commit", lambda: "abd")  # rows of another commit are made again
    assert evidence.main() == 0
    assert len(ran) == 5


def test_seconds_are_measured_with_the_memory_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    class Done:
        returncode = 0

        def __init__(self, words: list[str], check: bool, env: dict[str, str]) -> None:
            given.append(env)

    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "STEPS", (evidence.Step("steps", 1, commands=("bench",), idle=True),))
    monkeypatch.setattr(evidence.subprocess, "run", Done)
    monkeypatch.setattr(evidence.provenance, "commit", lambda: "abc")
    monkeypatch.setattr("sys.argv", ["evidence.py"])
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    monkeypatch.chdir(tmp_path)
    assert evidence.main() == 0
    assert [env.get("MALLOC_MMAP_MAX_") for env in given] == [None]


def test_rows_of_changed_code_are_not_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(Path.cwd())  # main goes elsewhere
    monkeypatch.setattr(evidence.provenance, "commit", lambda: "abc-dirty")
    monkeypatch.setattr("sys.argv", ["evidence.py", "relaxed"])
    with pytest.raises(SystemExit) as stopped:
        evidence.main()
    assert stopped.value.code == 2
    assert "clean checkout" in capsys.readouterr().err
