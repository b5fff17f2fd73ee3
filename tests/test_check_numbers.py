"""scripts/check_numbers.py: documents state what rows say."""

from __future__ import annotations

import shutil
from pathlib import Path

import check_numbers
import pytest
from check_numbers import Rows, as_printed, check

from specbench.errors import UsageError

SENTENCE = {"says": "SJD takes {} steps, {} of vanilla's", "of": ["rows('r', method='sjd').steps.item()", "-0.5"]}


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    (tmp_path / "r.csv").write_text("method,steps\nsjd,31.26\nvanilla,105\n")
    return Rows(tmp_path)


def test_every_number_of_this_repository_has_its_row() -> None:
    assert check_numbers.main([]) == 0


@pytest.mark.parametrize(
    "document",
    [
        "SJD takes 31.3 steps, -0.5 of\n  vanilla's. See `n=4` and [a table](t1.md) of 2026-11-23.",
        "# 3 findings\n\n1. SJD takes 31 steps, -0.50 of vanilla's (EAGLE-2, Eqs. 3, 4).\n\n    make run n=7\n",
    ],
)
def test_a_document_that_states_what_rows_say_passes(rows: Rows, document: str) -> None:
    assert check(document, [SENTENCE], [], rows, "d.md") == ([], document)


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        ("SJD takes 31.2 steps, -0.5 of vanilla's.", "31.3"),  # another value
        ("SJD takes 31.3 steps, -0.5 of vanilla's, and 12 draws.", "12"),  # a number of no row
        ("SJD takes few steps.", "SJD takes {}"),  # the sentence is gone
        ("SJD takes 31.3 steps, -0.5 of vanilla's. SJD takes 31.3 steps, -0.5 of vanilla's", "2 times"),
    ],
)
def test_a_number_without_its_row_is_found(rows: Rows, document: str, shown: str) -> None:
    (problem,) = {str(p) for p in check(document, [SENTENCE], [], rows, "d.md")[0] if shown in str(p)}
    assert problem.startswith("d.md")


def test_a_sentence_that_no_longer_holds_is_found(rows: Rows) -> None:
    claim = {"says": "SJD takes fewer steps", "holds": ["rows('r', method='sjd').steps.item() > 105"]}
    assert len(check("SJD takes fewer steps.", [claim], [], rows, "d.md")[0]) == 1


def test_a_table_counts_as_a_whole_and_must_be_the_one_drawn(rows: Rows) -> None:
    assert check("| 1 | 2 |\n", [], ["| 1 | 2 |"], rows, "d.md")[0] == []
    assert len(check("| 1 | 2 |\n", [], ["| 1 | 3 |"], rows, "d.md")[0]) == 3  # the table, and two numbers


def test_values_of_today_are_written(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    shutil.copy(tmp_path / "r.csv", tmp_path / "results")
    (tmp_path / "results/numbers.yaml").write_text(f"d.md:\n  - {SENTENCE}\n")
    (tmp_path / "d.md").write_text("SJD takes 12.4 steps, +1 of vanilla's.\n")
    monkeypatch.setattr(check_numbers, "ROOT", tmp_path)
    assert check_numbers.main(["--write"]) == 1
    assert (tmp_path / "d.md").read_text() == "SJD takes 31.3 steps, -0 of vanilla's.\n"
    assert check_numbers.main([]) == 0


@pytest.mark.parametrize(
    ("value", "printed", "shown"),
    [
        (2.345, "1.11", "2.35"),  # 2.345 is a little above itself in binary
        (1234567.0, "1,000,000", "1,234,567"),
        (0.00012, "3e-5", "1e-4"),
        (0.04, "+0.1", "+0.0"),
        (-0.31, "−0.5", "−0.3"),
        ("8306881032f92c", "83eebcd", "8306881"),
    ],
)
def test_a_value_is_printed_as_the_document_does(value: float | str, printed: str, shown: str) -> None:
    assert as_printed(value, printed) == shown


def test_an_expression_that_does_not_work_names_itself(rows: Rows) -> None:
    with pytest.raises(UsageError, match="no_such"):
        check("3 steps", [{"says": "{} steps", "of": ["rows('r').no_such.item()"]}], [], rows, "d.md")
