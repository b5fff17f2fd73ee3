"""Records survive a kill at any byte, and rows keep their format."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from specbench.config import configuration, parameters
from specbench.errors import UsageError
from specbench.rows import provenance
from specbench.rows.collected import frame
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import append_row, read_rows, to_csv
from specbench.rows.journal import Journal, Record, TimingJournal, pixel_digest, read_records
from specbench.rows.remark import as_json, free, remarks_of
from specbench.storage import origin


def picture(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def record(index: int) -> Record:
    return Record(
        index=index, prompt=f"prompt {index}: café", seed=0, image=f"images/{index:05d}.png", session="s",
        sha256=pixel_digest(picture(index)), tokens=16, steps=5, drafted=20, accepted=11, accepted_length=3.2,
        latency_s=0.1, decode_s=0.1, text_s=0.001, pixels_s=0.002, batch=1, peak_memory_mib=100.0,
        accepted_per_step=[5, 3, 2, 1, 0], accepted_by_depth=[4, 3, 2, 1, 1], verified_by_depth=[5, 4, 3, 2, 1],
        log_prob_mean=-2.34567, log_prob_std=1.5, first_accept=0.5, draft_top1=0.2, draft_top3=0.4,
        draft_passes=25, id=str(index), done=1e9, config="c", timed=1,
    )  # fmt: skip


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal(tmp_path / "records.jsonl")
    for index in (0, 2, 1):
        made.add(record(index), picture(index))
    return made


def test_records_and_pictures_come_back(journal: Journal) -> None:
    again = Journal(journal.path)
    assert again.records == journal.records
    assert again.missing(range(5)) == [3, 4]
    assert 2 in again
    assert 3 not in again
    assert [r.index for r in again.records_of(range(3))] == [0, 1, 2]
    for index in range(3):
        assert (again.image(index) == picture(index)).all()
    assert read_records(journal.path) == [record(0), record(1), record(2)]


def test_a_cut_at_any_byte_loses_only_the_last_record(journal: Journal) -> None:
    whole = journal.path.read_bytes()
    end_of_second = len(b"\n".join(whole.split(b"\n")[:2])) + 1
    for cut in [*range(end_of_second, len(whole), 9), len(whole) - 2, len(whole) - 1, len(whole)]:
        journal.path.write_bytes(whole[:cut])
        again = Journal(journal.path)
        assert set(again.records) == ({0, 2, 1} if cut >= len(whole) - 1 else {0, 2})
        assert journal.path.read_bytes() == whole[:cut]  # reading changes nothing
        again.add(record(3), picture(3))  # which starts on a new line
        assert all(json.loads(line) for line in journal.path.read_bytes().splitlines())
        assert set(Journal(journal.path).records) == {*again.records}


def test_a_record_after_a_half_written_line_has_its_own_line(tmp_path: Path) -> None:
    """In a journal that is only appended to, the half line is removed when the next one is written, not before."""
    path = tmp_path / "timings.jsonl"
    for index in range(2):
        TimingJournal(path).add(record(index))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    again = TimingJournal(path)
    assert (again.lines, path.read_bytes()) == ([record(0)], whole[:-9])
    for index in (1, 2):
        again.add(record(index))
    assert TimingJournal(path).lines == [record(0), record(1), record(2)]
    assert path.read_bytes().startswith(whole)


def test_a_damaged_journal(journal: Journal, tmp_path: Path) -> None:
    lines = journal.path.read_text().splitlines()
    journal.path.write_text("\n".join([lines[0], "{", lines[2], ""]))
    with pytest.raises(UsageError, match="line 2"):
        Journal(journal.path)
    journal.path.write_text("\n".join([*lines, ""]))
    (journal.path.parent / "images/00002.png").unlink()  # so its record is dropped
    assert Journal(journal.path).missing(range(3)) == [2]
    again = Journal(journal.path)
    again.add(record(2), picture(2))
    assert sorted(r.index for r in read_records(journal.path)) == [0, 1, 2]
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UsageError, match="file"):
        Journal(tmp_path / "folder.jsonl")
    made = Journal(tmp_path / "new.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        made.add(replace(record(5), log_prob_mean=float("nan")), picture(5))
    assert not (tmp_path / "new.jsonl").exists()


def test_no_index_is_recorded_twice(journal: Journal) -> None:
    with pytest.raises(ValueError, match="already"):
        journal.add(record(1), picture(1))
    journal.path.write_text(journal.path.read_text() * 2)
    again = Journal(journal.path)
    assert set(again.records) == {0, 1, 2}
    again.add(record(3), picture(3))
    assert len(journal.path.read_text().splitlines()) == 4


def test_the_picture_is_there_before_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    replace_file = os.replace

    def spy(source: Path, target: Path) -> None:
        seen.append([p.name for p in tmp_path.glob("*.jsonl")])
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", spy)
    Journal(tmp_path / "records.jsonl").add(record(0), picture(0))
    assert seen == [[]]  # the picture got its name before the record existed
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_changed_picture_is_noticed(journal: Journal) -> None:
    Image.fromarray(picture(9)).save(journal.path.parent / "images/00001.png")
    with pytest.raises(UsageError, match="00001.png"):
        journal.image(1)
    (journal.path.parent / "images/00001.png").write_bytes(b"no PNG")
    with pytest.raises(UsageError, match="00001.png"):
        journal.image(1)


def row(run_id: str, **values: object) -> dict[str, object]:
    return dict.fromkeys(COLUMNS) | {"run_id": run_id} | values


def test_every_parameter_that_describes_a_measurement_is_a_column() -> None:
    hidden = "out data_dir metrics metrics_dir reference baseline workers ray_address log log_project log_dir".split()
    assert {name for name in parameters.table() if name not in COLUMNS} == set(hidden)
    assert all(COLUMNS.values())
    assert list(parameters.table()).index("weights") < list(parameters.table()).index("window")


def test_rows_come_back_with_their_types(tmp_path: Path) -> None:
    numbers = {"delta": 1.1, "n": 16, "fid": None, "latency_s_mean": 1e-05, "perplexity": 41.5, "draft_passes": 25}
    lists = {"tree": [[0], [1, 0]], "acceptance_by_depth": [0.5, 0.25]}
    written = row("a", commit="1234567", remarks=as_json([free('a, "b"\nc')]), **numbers, **lists)
    append_row(tmp_path / "rows.csv", written)
    texts = {"tree": "[[0],[1,0]]", "acceptance_by_depth": "[0.5,0.25]"}
    [read] = read_rows(tmp_path / "rows.csv")
    assert remarks_of(read) == remarks_of(written)
    assert read | {"remarks": None} == written | texts | {"remarks": None}
    assert ",," in (tmp_path / "rows.csv").read_text()  # a value that was not measured is empty, not 0 or None
    [header, line] = csv.reader((tmp_path / "rows.csv").open())
    assert set(header) == {"run_id", "commit", "config_hash", *numbers, "tree", "details"} - {"fid", "draft_passes"}
    assert json.loads(line[-1]).keys() == {"draft_passes", "acceptance_by_depth", "remarks"}
    append_row(tmp_path / "more.csv", row("b", delta=2.2))
    table = frame(tmp_path / "rows.csv", tmp_path / "more.csv", tmp_path)
    assert list(table) == list(COLUMNS)
    assert table["delta"].tolist() == [1.1, 2.2]
    assert table["fid"].isna().all()


def test_whole_numbers_stay_whole_numbers_in_a_table(tmp_path: Path) -> None:
    """A column with an empty cell became float64, which rounds a seed."""
    whole = {"seed": 2**63 - 1, "n": 2**53 + 1, "top_k": 2**31 - 1}
    append_row(tmp_path / "rows.csv", row("a", **whole, fid=3))
    append_row(tmp_path / "rows.csv", row("b", fid=2.5))
    append_row(tmp_path / "rows.csv", row("c", seed=-(2**63) + 1))
    table = frame(tmp_path / "rows.csv")
    assert table["seed"].dropna().tolist() == [2**63 - 1, -(2**63) + 1]
    assert {name: table[name][0] for name in whole} == whole
    assert (str(table["seed"].dtype), str(table["fid"].dtype)) == ("Int64", "float64")
    assert read_rows(tmp_path / "rows.csv")[0]["seed"] == 2**63 - 1


def test_rows_are_added_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.csv"
    for r in (row("a", n=1), row("b", n=2), row("a", n=3)):
        append_row(path, r)
    assert [(r["run_id"], r["n"]) for r in read_rows(path)] == [("a", 3), ("b", 2)]
    # a file with fewer columns is widened
    path.write_text('run_id,n,drafted_by_position\nold,4,"[0,1]"\n')
    append_row(path, row("new", n=5))
    names = ("run_id", "n", "fid", "drafted_by_position")
    assert [tuple(r[name] for name in names) for r in read_rows(path)] == [
        ("old", 4, None, "[0,1]"),
        ("new", 5, None, None),
    ]
    path.write_text("run_id,colour\nold,4\n")
    with pytest.raises(UsageError, match="colour"):
        append_row(path, row("new"))
    assert path.read_text() == "run_id,colour\nold,4\n"
    with pytest.raises(ValueError, match="colour"):
        to_csv([{"colour": 1}])


def _append(path: Path, name: str) -> None:
    for i in range(5):
        append_row(path, row(f"{name}{i}"))


def test_rows_of_several_processes_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(path, name)) for name in "ab"]
    for w in writers:
        w.start()
    for w in writers:
        w.join()
    assert {r["run_id"] for r in read_rows(path)} == {f"{name}{i}" for name in "ab" for i in range(5)}


def test_the_config_hash_is_over_the_measurement() -> None:
    base = provenance.config_hash(configuration.compose())
    assert base == provenance.config_hash(
        configuration.compose(["delta=1.10", "out=elsewhere", "metrics_dir=there", "workers=8"])
    )
    for word in "delta=1.2 n=17 seed=1 batch=2 metrics=none baseline=false rule=exact reference=a.npz".split():
        assert base != provenance.config_hash(configuration.compose([word])), word


def test_the_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "specbench" / "storage"
    package.mkdir(parents=True)
    (package / "origin.py").write_text("")
    monkeypatch.setattr(origin, "__file__", str(package / "origin.py"))
    commit = origin.commit.__wrapped__  # a process reads it once
    assert commit() == ""  # not a checkout
    monkeypatch.setenv("SPECBENCH_COMMIT", "abc")
    assert commit() == "abc"  # a copy without its repository

    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    assert commit() == ""  # no commit yet; the repository takes precedence over a variable
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD").strip()
    assert commit() == head
    (tmp_path / "results.csv").write_text("")
    assert commit() == head  # a new result does not change the code
    (package / "records.py").write_text("changed")
    assert commit() == f"{head}-dirty"
