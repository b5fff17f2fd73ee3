"""The form of files of rows: columns that a person reads, and details."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ROOT

from specbench.errors import UsageError
from specbench.rows.columns import COLUMNS, MAIN
from specbench.rows.csv_files import as_cells, has_runs, read_rows, to_csv, write_run_row
from specbench.storage.csv_text import read_header


def test_a_committed_row_has_at_most_100_columns_and_no_empty_one() -> None:
    for path in (ROOT / "results").rglob("*.csv"):
        if has_runs(path):
            rows = read_rows(path)
            header = read_header(path)
            assert header[-1] == "details" or path.name == "row.csv"
            assert not [name for name in {*header} - {"details"} if all(row[name] is None for row in rows)]
            assert max(sum(row[name] is not None for name in MAIN) for row in rows) <= 100
            assert path.name == "row.csv" or path.read_text("utf-8") == to_csv(rows)


def test_a_run_s_details_are_next_to_its_row(tmp_path: Path) -> None:
    row = dict.fromkeys(COLUMNS) | {"run_id": "a", "config_hash": "c", "drift": 0.25, "accepted_histogram": [0.5, 0.5]}
    assert write_run_row(tmp_path, row)
    assert not write_run_row(tmp_path, row)
    assert json.loads((tmp_path / "details.json").read_text()) == {"accepted_histogram": [0.5, 0.5], "drift": 0.25}
    assert (tmp_path / "row.csv").read_text() == "run_id,config_hash\na,c\n"
    [read] = read_rows(tmp_path / "row.csv")
    assert as_cells(read) == as_cells(row)
    (tmp_path / "row.csv").rename(tmp_path / "alone.csv")
    [alone] = read_rows(tmp_path / "alone.csv")
    assert (alone["run_id"], alone["drift"]) == ("a", None)


@pytest.mark.parametrize("details", ["{", "[1]", "7", '"a"', "[" * 10_000])
def test_damaged_details_are_refused(tmp_path: Path, details: str) -> None:
    (tmp_path / "row.csv").write_text("run_id,config_hash\na,c\n")
    (tmp_path / "details.json").write_text(details)
    with pytest.raises(UsageError, match="details"):
        read_rows(tmp_path / "row.csv")


def test_integers_that_pandas_wrote_as_floats_are_integers(tmp_path: Path) -> None:
    """`specbench tables` ended with an internal error if one row had no n."""
    path = tmp_path / "rows.csv"
    path.write_text("run_id,config_hash,n,seed,steps,timed_pairs\na,c,96.0,9007199254740993,8.0,24.0\nb,c,,,8,\n")
    first, second = read_rows(path)
    assert [repr(first[name]) for name in ("n", "seed", "steps", "timed_pairs")] == [
        "96",
        "9007199254740993",
        "8.0",
        "24",
    ]
    assert (second["n"], second["timed_pairs"]) == (None, None)
    path.write_text("run_id,config_hash,n\na,c,96.5\n")
    with pytest.raises(UsageError, match=r"line 2: n must be an integer.*96\.5"):
        read_rows(path)


def test_details_of_another_version_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('run_id,config_hash,details\na,c,"{""colour"":1}"\n')
    with pytest.raises(UsageError, match="colour"):
        read_rows(tmp_path / "rows.csv")
