"""Several lines of a table at once: the rows are the same as with one job, whatever stops or fails."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specbench.cli import tables as cli
from specbench.compare import wording
from specbench.errors import RunError, UsageError
from specbench.harness import processes
from specbench.harness.planned import PlannedRun
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import append_row, read_rows
from specbench.storage.files import sha256
from specbench.tables import collect, table_runs
from specbench.tables.catalog import TABLES

TABLE, TESTED = TABLES["lantern_table4"], TABLES["coolsd_significance"]


class Bench(collect.Bench):
    """Decodes nothing. A row depends only on its overrides, and a folder lists the processes that ran it."""

    def __init__(self, fails: str = "", error: Callable[[], Exception] | None = None) -> None:
        self.fails, self.error = fails, error

    def row(self, run: PlannedRun) -> Mapping[str, Any]:
        key, out = " ".join(run.overrides), run.folder
        if self.fails and self.fails in key:
            if self.error is None:
                os._exit(1)
            raise self.error()
        out.mkdir(parents=True, exist_ok=True)
        with (out / "ran").open("a") as file:
            file.write(f"{os.getpid()}\n")
        number = int(sha256(key, 4), 16)
        values = {
            "accepted_length_mean": number / 1000,
            "clip_score": 0.5,
            "fid": 1.0,
            "image_reward": 0.1,
            "geneval": 0.5,
        }
        identity = {"run_id": f"run{number}", "config_hash": run.config_hash, "weights": run.weights, "n": 64}
        return (
            dict.fromkeys(COLUMNS) | {"model": "llamagen_scenes", "timing": str(run.timed).lower()} | identity | values
        )

    def compare(self, a: Path, b: Path) -> Sequence[Mapping[str, Any]]:
        ids = {"run_a": next(a.glob("ran")).parent.name, "run_b": b.name}
        return [dict.fromkeys(wording.ROWS.columns) | ids | {"statistic": "steps"}]


class TwoParts(Exception):
    """Another process cannot unpickle it: pickle gives its constructor one argument."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`specbench tables` with processes started by `fork`, which is faster than `spawn`."""
    monkeypatch.setattr(processes, "get_context", lambda method: multiprocessing.get_context("fork"))

    def call(bench: Bench, *words: str, folder: str = "") -> int:
        home = tmp_path / folder
        return cli.main([TABLE.id, *words], bench, home / "results", home / "runs")

    return call


def processes_of(folder: Path) -> list[str]:
    """The processes that ran the runs in a folder."""
    return [pid for path in sorted(folder.rglob("ran")) for pid in path.read_text().split()]


def rows(folder: Path) -> list[Mapping[str, Any]]:
    return sorted(read_rows(folder / f"results/{TABLE.id}.csv"), key=lambda row: row["run_id"])


def test_the_rows_do_not_depend_on_the_jobs(tables: Callable[..., int], tmp_path: Path) -> None:
    for jobs in ("1", "3"):
        assert tables(Bench(), "--jobs", jobs, folder=jobs) == 0
    assert rows(tmp_path / "1") == rows(tmp_path / "3")
    text = [(tmp_path / jobs / f"results/tables/{TABLE.id}.md").read_text() for jobs in ("1", "3")]
    assert text[0] == text[1]
    assert set(processes_of(tmp_path / "1")) == {str(os.getpid())}
    assert str(os.getpid()) not in processes_of(tmp_path / "3")
    assert len(processes_of(tmp_path / "3")) == len(TABLE.lines)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (partial(UsageError, "no such delta"), UsageError, ": no such delta"),
        (partial(RunError, "the disk is full"), RunError, ": the disk is full"),
        (partial(TwoParts, "a", "\x1b[31m"), RunError, ": TwoParts: a?[31m"),
    ],
)
def test_a_line_that_fails_does_not_stop_the_others(
    tables: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: Callable[[], Exception],
    kind: type[Exception],
    text: str,
) -> None:
    bad = TABLE.lines[4]
    assert bad.overrides
    with pytest.raises(kind, match=f"1 of {len(TABLE.lines)} runs of {TABLE.id} failed") as raised:
        tables(Bench(" ".join(bad.overrides), error), "--jobs", "2")
    assert bad.label in str(raised.value)
    assert f"{TABLE.id}: run 5 of {len(TABLE.lines)}, {bad.label}{text}" in capsys.readouterr().err
    assert len(rows(tmp_path)) == len(TABLE.lines) - 1
    tables(Bench(), "--jobs", "2")
    assert len(processes_of(tmp_path)) == len(rows(tmp_path)) == len(TABLE.lines)  # nothing ran twice


def test_the_death_of_a_process_is_a_short_error(tables: Callable[..., int]) -> None:
    assert TABLE.lines[1].overrides
    with pytest.raises(RunError, match="--jobs"):
        tables(Bench(" ".join(TABLE.lines[1].overrides)), "--jobs", "2")
    with pytest.raises(UsageError, match="--jobs.*at least 1.*0"):
        tables(Bench(), "--jobs", "0")


def test_finished_lines_stay_after_an_interruption(
    tables: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(path: Path, row: Mapping[str, Any]) -> None:
        if path.exists() and len(read_rows(path)) == 2:
            raise KeyboardInterrupt
        append_row(path, row)

    with monkeypatch.context() as patch:
        patch.setattr(table_runs, "append_row", stopped)
        with pytest.raises(KeyboardInterrupt, match="command"):
            tables(Bench(), "--jobs", "2")
    for process in multiprocessing.active_children():  # they have been stopped
        process.join(10)
    assert len(rows(tmp_path)) == 2
    assert tables(Bench(), "--jobs", "2") == 0
    assert len(rows(tmp_path)) == len(TABLE.lines)


def test_lines_whose_seconds_are_measured_run_alone(
    tables: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a table that shows no seconds: another table may take them from its rows."""
    timed = replace(TABLE, protocol=(*TABLE.protocol[:1], "timing=true"))
    monkeypatch.setattr(cli, "TABLES", {**TABLES, TABLE.id: timed})
    assert tables(Bench(), "--jobs", "3") == 0
    assert processes_of(tmp_path) == [str(os.getpid())] * len(TABLE.lines)


def test_images_for_a_test_are_decoded_side_by_side(tables: Callable[..., int], tmp_path: Path) -> None:
    results = tmp_path / "results"
    for runs in (1, 2):  # the second time, the rows exist and their images do not
        todo = table_runs.plan(TESTED, TESTED.model, None, results, tmp_path / "runs")
        collect.collect(todo, Bench(), print, 2)
        assert len(processes_of(tmp_path)) == runs * len(todo.runs)
        assert str(os.getpid()) not in processes_of(tmp_path)
