"""Pages are filled from templates and rows."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import doc_tables
import pages
import pytest
from commands import case
from scipy import stats

from specbench.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def problems(template: str, rows: pages.Rows, whole: bool = True) -> list[str]:
    return [problem.what for problem in pages.filled(template, rows, "page", whole)[0]]


@pytest.fixture(scope="module")
def rows() -> pages.Rows:
    return pages.Rows(ROOT / "results", defined={"three": "[3, 2.5]"})


def test_a_slot_has_the_values_in_the_format_of_its_text(rows: pages.Rows) -> None:
    for template, page in (
        ("It takes {{ 88.1 ± 0.6 | three }} steps.", "It takes 3.0 ± 2.5 steps."),
        ("{{ 1,000 of +2.00 and 7 | 2000, 1, ... }}", "2,000 of +1.00 and 7"),
        ("{{ -0.1 to 4e-5 | -0.25, 0.00012 }}", "-0.2 to 1e-4"),
        ("{{ of commit 0123456 | 'f489c8f0e95d' }}", "of commit f489c8f"),
        ("As stated{{ | 1 < 2 }}.", "As stated."),
        ("With 16 images{{ settings }}.", "With 16 images."),
    ):
        with case(template):
            assert pages.filled(template, rows, "page") == ([], page)


def test_what_does_not_hold_is_a_problem(rows: pages.Rows) -> None:
    for template, name in (
        ("{{ 1 | 1, 2 }}", "2 values for the 1 numbers"),
        ("{{ 1 | 1, 2 > 3 }}", "2 > 3"),
        ("{{ 1 | field['nobody'].steps }}", "nobody"),
        ("{{ 1 | no_such_name }}", "no_such_name"),
        ("Of 16 images.", "16"),
    ):
        with case(template):
            [problem] = problems(template, rows)
            assert name in problem
    assert problems("Of 16 images.", rows, whole=False) == []
    assert problems("In `n=16`, [a page](a#3), 2026-11-28, Table 3.", rows) == []


def test_a_difference_of_lines_is_tested_by_student_t() -> None:
    """As scipy's Welch test of samples with these means, standard deviations and sizes."""
    left, right = (
        SimpleNamespace(steps=mean, steps_stderr=error, n=n)
        for mean, error, n in ((3.18, 0.20, 24.0), (2.6, 0.16, 12.0))
    )
    sides = [(side.steps, side.steps_stderr * side.n**0.5, side.n) for side in (right, left)]
    welch = stats.ttest_ind_from_stats(*sides[0], *sides[1], equal_var=False)
    degrees = (0.2**2 + 0.16**2) ** 2 / (0.2**4 / 23 + 0.16**4 / 11)
    half = stats.t.ppf(0.975, degrees) * (0.2**2 + 0.16**2) ** 0.5
    assert pages.apart("steps", left, right) == pytest.approx((-0.58 - half, -0.58 + half))
    deviate = pages.z(pages.pm(left, "steps"), pages.pm(right, "steps"))
    assert deviate < 0
    assert 2 * stats.norm.sf(-deviate) == pytest.approx(welch.pvalue)
    # one sample against a constant has its own degrees of freedom, and an error that is known has none
    assert 2 * stats.norm.sf(pages.z((0.0, 0.0), pages.estimate(0.5, 0.2, 16))) == pytest.approx(
        2 * stats.t.sf(2.5, 15)
    )
    assert pages.z((1.0, 0.3), (2.0, 0.4)) == pytest.approx(2.0)


def test_a_rank_correlation_has_an_interval() -> None:
    """Ranks of y are 1, 3, 2, 5, 4: 1 - 6 * 4 / (5 * 24) = 0.8, and Fisher's z of 1.0986 ± 1.96 * sqrt(1.32 / 2)."""
    rank, low, high = pages.rank_correlation([1, 2, 3, 4, 50], [0.1, 0.3, 0.2, 0.9, 0.8])
    assert rank == pytest.approx(0.8)
    assert [math.atanh(end) for end in (low, high)] == pytest.approx([1.0986 - 1.5923, 1.0986 + 1.5923], abs=1e-3)


def test_tables_of_the_same_lines_are_joined(rows: pages.Rows) -> None:
    drawn = rows.names["table_of_panel"]("windows", "Jacobi windows", "step_compression", 16, 32)
    scenes = {line[0]: line[1:] for line in doc_tables._cells(drawn)}
    assert scenes["method"] == ["16", "32"]
    assert scenes["SJD-PAC, tree"][0] == "—"
    assert scenes["SCD"][1].startswith(f"{rows.lines('windows')['SCD_32'].step_compression:.2f} ± ")
    other = "| method | 8 |\n|---|---|\n" + "".join(f"| {name} | x |\n" for name in [*scenes][1:])
    head, *_ = doc_tables._cells(doc_tables.side_by_side({"a": drawn, "b": other}))
    assert head == ["method", "16, a", "32, a", "8, b"]
    lines = {name: f"| m | 8 |\n|---|---|\n| x | {value} |" for name, value in (("a", 1), ("b", 2))}
    stacked = doc_tables._cells(doc_tables.stacked_table("of", lines))
    assert stacked == [["of", "8"], ["a", "1"], ["b", "2"]]
    with pytest.raises(UsageError, match="columns"):
        doc_tables.stacked_table("of", {"a": drawn})
    with pytest.raises(UsageError, match="lines"):
        doc_tables.side_by_side({"a": drawn, "b": "| method | 8 |\n|---|---|\n| SJD | x |\n"})


def test_lines_are_wrapped_again_and_tables_and_commands_are_not(rows: pages.Rows) -> None:
    long = "word " * 40
    filled = pages.wrapped(f"- {long}\n- short\n\n    {long}\n\n| {long} |\n\n{long}\n")
    lines = filled.splitlines()
    assert [line[:4] for line in lines[:3]] == ["- wo", "  wo", "- sh"]
    assert f"    {long}" in lines
    assert f"| {long} |" in lines
    assert max(len(line) for line in lines if line[:1] not in ("|", " ")) <= 120


def test_every_page_is_what_its_template_and_the_rows_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main([]) == 0, capsys.readouterr().out


def test_no_page_has_code_in_comments() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "results").glob("*.md")]:
        with case(path.name):
            assert "<!--" not in path.read_text(encoding="utf-8")


def test_another_value_in_a_row_is_another_page(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=shutil.ignore_patterns("*.png", "*.html", "tables"))
    file = tmp_path / "results/field.csv"
    before = pages.Rows(ROOT / "results").lines("field")["sjd"].step_compression
    text = file.read_text(encoding="utf-8")
    assert str(before) in text
    file.write_text(text.replace(str(before), "7.25"), encoding="utf-8")
    template = "SJD saves {{ 2.91 | field['sjd'].step_compression }} steps."
    assert pages.filled(template, pages.Rows(tmp_path / "results"), "page") == ([], "SJD saves 7.25 steps.")
