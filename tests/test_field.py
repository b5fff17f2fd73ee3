"""The README's table, and that of its seconds."""

from __future__ import annotations

from specbench.rows.seconds import is_timed
from specbench.tables.catalog import TABLES
from specbench.tables.measure import Identity


def test_seconds_stand_in_a_table_of_their_own() -> None:
    steps, seconds = TABLES["field"], TABLES["field_seconds"]
    assert [line.key for line in steps.lines] == [line.key for line in seconds.lines]
    assert not any(is_timed(column.key) for column in steps.columns)
    assert any(is_timed(column.key) for column in seconds.columns)
    assert all(column.spread.endswith("_stderr") for table in (steps, seconds) for column in table.columns)
    assert "bound by arithmetic" in seconds.remarks[0]


def test_a_row_without_a_column_that_a_table_needs_is_measured_again() -> None:
    row = {"config_hash": "h", "weights": "w", "fid": "1.0", "kid": ""}
    assert Identity("h", "w").fits(row)
    assert Identity("h", "w", needs=("fid",)).fits(row)
    assert not Identity("h", "w", needs=("fid", "kid")).fits(row)
    assert not Identity("h", "w", needs=("emitted_tv",)).fits(row)
