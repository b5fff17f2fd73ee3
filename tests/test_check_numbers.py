"""scripts/check_numbers.py: documents state what rows say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import check_numbers
import doc_tables
import pytest
from check_numbers import Rows, as_printed, check
from scipy.stats import norm

from specbench.config import configuration
from specbench.errors import UsageError
from specbench.harness.planned import PlannedRun
from specbench.tables.catalog import TABLES
from specbench.tables.definitions import TableFigure, row_column
from specbench.tables.measure import TablePlan

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
    assert check(document, [SENTENCE], rows, "d.md") == ([], document)


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
    (problem,) = {str(p) for p in check(document, [SENTENCE], rows, "d.md")[0] if shown in str(p)}
    assert problem.startswith("d.md")


@pytest.mark.parametrize(
    "text", ["README.md: [", "- says: a", "", "README.md: a", "README.md: [{of: ['1']}]", "rows: []"]
)
def test_a_file_that_has_no_claims_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "numbers.yaml").write_text(text)
    with pytest.raises(UsageError, match="numbers.yaml"):
        check_numbers.read_claims(tmp_path / "numbers.yaml")


def test_a_sentence_that_no_longer_holds_is_found(rows: Rows) -> None:
    claim = {"says": "SJD takes fewer steps", "holds": ["rows('r', method='sjd').steps.item() > 105"]}
    assert len(check("SJD takes fewer steps.", [claim], rows, "d.md")[0]) == 1


def test_one_expression_has_the_cells_of_a_table(rows: Rows) -> None:
    claim = {
        "says": "| sjd | {} | {} |\n| vanilla | {} | {} |",
        "of": "[x for m in ('sjd', 'vanilla') for x in (rows('r', method=m).steps.item(), 0.5)]",
    }
    table = "| sjd | 31 | 0.5 |\n| vanilla | 104 | 0.50 |\n"
    problems, text = check(table, [claim], rows, "d.md")
    assert [str(one).partition(" (")[0] for one in problems] == ["d.md: 104 should be 105"]
    assert check(text, [claim], rows, "d.md")[0] == []
    assert len(check(text, [claim | {"of": "[31]"}], rows, "d.md")[0]) == 5  # and four numbers have no row


@pytest.mark.usefixtures("field")
def test_a_value_between_two_lines(rows: Rows) -> None:
    claim = {
        "says": "At 1.98 it emits {}",
        "of": ["between('field', 'step_compression', {}, 'emitted_kl', 'vanilla', 'sjd')"],
    }
    halfway = {**claim, "of": [claim["of"][0].format(1.9805)]}
    assert check("At 1.98 it emits 0.000615", [halfway], rows, "d.md")[0] == []
    with pytest.raises(UsageError, match="not between"):
        check("At 1.98 it emits 0.1", [{**claim, "of": [claim["of"][0].format(3)]}], rows, "d.md")


MARK = "<!-- table field: step_compression, emitted_kl, speedup_latency; lines: vanilla, sjd -->\n"
DRAWN = "| method | step compression (×) | emitted KL (nats) | speed-up in latency (×) |\n|---|---|---|---|\n"
DRAWN += "| vanilla | 1.00 | 0 | — |\n| SJD | 2.96 ± 0.02 | 0.0012 ± 0.0003 | — |\n"


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> None:
    sjd = {"step_compression": "2.961", "step_compression_stderr": "0.0214"}
    sjd |= {"emitted_kl": "0.00123", "emitted_kl_stderr": "0.00032", "speedup_latency": "1.5", "timing": "false"}
    vanilla = {"step_compression": "1.0", "step_compression_stderr": "0.0", "emitted_kl": "3e-9"}
    measured = {"sjd": sjd, "vanilla": vanilla}

    def plan(self: Rows, name: str) -> TablePlan:
        config = configuration.compose([])
        runs = (PlannedRun(Path(), config, line.key, row=measured.get(line.key)) for line in TABLES[name].lines)
        return TablePlan(name, Path(), tuple(runs), TABLES[name], "m")

    monkeypatch.setattr(Rows, "_plan", plan)


def test_an_error_of_rounding_is_none() -> None:
    ratio = row_column("emitted_kl_ratio")
    for error, shown in (("3e-07", "1.000"), ("3e-06", "0.999999 ± 0.000003")):
        assert doc_tables.cell(ratio, {"emitted_kl_ratio": "0.9999994", "emitted_kl_ratio_stderr": error}) == shown


def test_a_heading_keeps_proper_names() -> None:
    titles = ("Step compression (×)", "CLIP score", "Fréchet distance", "Inception score", "Accepted length")
    kept = ["step compression (×)", "CLIP score", "Fréchet distance", "Inception score", "accepted length"]
    assert [doc_tables.heading(title) for title in titles] == kept


@pytest.mark.usefixtures("field")
def test_a_table_counts_as_a_whole_and_must_be_the_one_of_its_rows(rows: Rows) -> None:
    assert check(MARK + DRAWN, [], rows, "d.md") == ([], MARK + DRAWN)
    for wrong in (MARK, MARK + DRAWN.replace("2.96", "2.95"), MARK + DRAWN.replace("| SJD", "| 1 | 2 |\n| SJD")):
        found, _ = check(wrong, [], rows, "d.md")
        assert len(found) == 1
    with pytest.raises(UsageError, match="scd"):
        check(MARK.replace("sjd", "scd"), [], rows, "d.md")
    with pytest.raises(UsageError, match="baseline_latency_s"):
        check(MARK.replace("emitted_kl", "baseline_latency_s"), [], rows, "d.md")


def test_a_table_of_pairs_marks_what_differs_from_its_first_curve(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES["relaxed_equal"]
    assert isinstance(table.figure, TableFigure)
    assert table.matched is not None
    at = {"x": "step_compression", "y": "emitted_kl", "prompts": "24", "difference": "0", "z": "0"}
    chain = {**at, "panel": "EAGLE-1, chain of 5", "value": "2.0", "runs": "chain"}
    tree = {**at, "panel": "EAGLE-1, tree of 25", "value": "2.70", "runs": "tree"}
    pairs = (
        {**chain, "a": "uniform", "b": "cool", "y_a": "0.01", "y_b": "0.04", "p": "0.001"}
        | {"difference": "0.03", "z": "2"},
        # 0.09 by the adjustment: three tests are left
        {**chain, "a": "uniform", "b": "band", "y_a": "0.01", "y_b": "0.009", "p": "0.03"},
        {**chain, "a": "cool", "b": "band", "y_a": "0.04", "y_b": "0.009", "p": ""},
        {**tree, "a": "band", "b": "uniform", "y_a": "0.03", "y_b": "0.02", "p": "0.04"},
        {**tree, "a": "band", "b": "uniform", "y_a": "7", "y_b": "7", "p": "0", "runs": "earlier"},
        {**tree, "a": "printed", "b": "released", "y_a": "7", "y_b": "7", "p": "1", "panel": "of neither"},
    )
    monkeypatch.setattr(TablePlan, "equal", dict.fromkeys(("chain", "tree"), table.figure.panels[0]))
    monkeypatch.setattr(Rows, "_plan", lambda self, name: TablePlan(name, Path(), (), table, "m", pairs=pairs))
    mark = "<!-- pairs relaxed_equal: uniform; cool; band -->\n"
    drawn = "| draft | prompts | step compression (×) | uniform | cool | band |\n|---|---|---|---|---|---|\n"
    drawn += "| EAGLE-1, chain of 5 | 24 | 2 | 0.0100 | **0.0400** | 0.0090 |\n"
    drawn += "| EAGLE-1, tree of 25 | 24 | 2.7 | 0.0200 | — | 0.0300 |\n"
    assert check(mark, [], Rows(rows.results), "d.md")[1] == mark + drawn
    with pytest.raises(UsageError, match="typical"):
        check(mark.replace("band", "typical"), [], Rows(rows.results), "d.md")
    claim = {"says": "Cool emits {}", "of": ["pairs('relaxed_equal', b='cool')[0].y_b"]}
    # The strictest of four tests, and the spread of a pair with z = 2 and a difference of 0.03 around 0.025.
    share = (norm.ppf(1 - 0.05 / 8) + norm.ppf(0.95)) * (0.03 / 2) * 2 / 0.05
    assert Rows(rows.results).detectable("relaxed_equal", "emitted_kl")["EAGLE-1, chain of 5"] == pytest.approx(share)
    assert Rows(rows.results).detectable("relaxed_equal", "geneval") == {}
    few = [check("Cool emits 0.04", [claim], Rows(rows.results), "d.md", {"n": n})[0] for n in (24, 25)]
    assert [len(problems) for problems in few] == [0, 1]
    pairs += ({**tree, "y": "other", "a": "band", "b": "uniform", "y_a": "7", "y_b": "7", "p": "1"},)
    with pytest.raises(UsageError, match="2 pairs of columns"):
        check(mark, [], Rows(rows.results), "d.md")
    named = mark.replace("_equal:", "_equal emitted_kl:")
    assert check(named, [], Rows(rows.results), "d.md")[1] == named + drawn


@pytest.mark.usefixtures("field")
def test_tables_of_other_documents_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("results", "docs"):
        (tmp_path / name).mkdir()
    document = tmp_path / "docs/other.md"
    document.write_text(f"Five is 5.\n\n{MARK}| old |\n")
    (tmp_path / "results/numbers.yaml").write_text("rows: {}\n")
    monkeypatch.setattr(check_numbers, "ROOT", tmp_path)
    assert check_numbers.main([]) == 1
    assert check_numbers.main(["--write"]) == 1
    assert document.read_text() == f"Five is 5.\n\n{MARK}{DRAWN}"
    assert check_numbers.main([]) == 0
    (tmp_path / "results/numbers.yaml").write_text("rows: {}\ndocs/other.md: []\n")
    assert check_numbers.main([]) == 1  # 5 has no row
    (tmp_path / "results/numbers.yaml").write_text("rows: {partly: [docs/other.md]}\ndocs/other.md: []\n")
    assert check_numbers.main([]) == 0


@pytest.mark.usefixtures("field")
def test_tables_and_values_of_today_are_written_together(rows: Rows) -> None:
    document = f"SJD takes 12.4 steps, +1 of vanilla's.\n\n{MARK}| old |\n\nSJD takes 8 of them.\n"
    both = [SENTENCE, {"says": "SJD takes {} of them", "of": ["rows('r', method='vanilla').steps.item()"]}]
    text = check(document, both, rows, "d.md")[1]
    assert text == f"SJD takes 31.3 steps, -0 of vanilla's.\n\n{MARK}{DRAWN}\nSJD takes 105 of them.\n"


def test_values_of_today_are_written(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    shutil.copy(tmp_path / "r.csv", tmp_path / "results")
    (tmp_path / "results/numbers.yaml").write_text(f"d.md:\n  - {SENTENCE}\n")
    (tmp_path / "d.md").write_text("SJD takes 12.4 steps, +1 of vanilla's.\n")
    monkeypatch.setattr(check_numbers, "ROOT", tmp_path)
    assert check_numbers.main(["--write"]) == 1
    assert (tmp_path / "d.md").read_text() == "SJD takes 31.3 steps, -0 of vanilla's.\n"
    assert check_numbers.main([]) == 0


def test_a_sentence_that_rests_on_too_few_images_is_found(rows: Rows, tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("method,steps,n\nsjd,31.26,24\nvanilla,105,500\n")
    (tmp_path / "a.csv").write_text("samples\n1000\n")
    sjd = {"says": "SJD takes {} steps", "of": ["rows('r', method='sjd').steps.item()"]}

    def found(claim: dict[str, Any], least: dict[str, int]) -> list[str]:
        return [str(p) for p in check("SJD takes 31 steps", [claim], rows, "d.md", least)[0]]

    assert found(sjd, {"n": 24, "samples": 50000}) == []
    [problem] = found(sjd, {"n": 48})
    assert "n=24 of r, below 48" in problem
    assert found({**sjd, "least": {"n": 20}}, {"n": 48}) == []
    assert len(found({**sjd, "holds": ["len(rows('a')) == 1"]}, {"samples": 50000})) == 1


NAMED = "a" * 40


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Of one commit: rows in two folders, a test of two of them, a drawn table; and rows of another machine."""
    for name in ("results/probe", "results/tables"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "results/r.csv").write_text(f"run_id,commit\nr1,{NAMED}\nr2,{NAMED}\n")
    (tmp_path / "results/probe/p.csv").write_text(f"commit\n{NAMED}\n")
    (tmp_path / "results/r_test.csv").write_text("run_a,run_b\nr1,r2\n")
    (tmp_path / "results/tables/r.md").write_text(f"- Commit: {NAMED}\n")
    (tmp_path / "results/gpu.csv").write_text("commit\nbbbb\n")
    return tmp_path / "results"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("r.csv", f"run_id,commit\nr1,{NAMED}\nr2,{'b' * 40}\n"),
        ("probe/p.csv", f"commit\n{NAMED}-dirty\n"),
        ("probe/p.csv", "model,commit\nm,\n"),  # made outside of a checkout
        ("r_test.csv", "run_a,run_b\nr1,r0\n"),  # of a run that has left
        ("tables/r.md", f"- Commit: {NAMED} / {'b' * 40}\n"),
        ("other.csv", "x\n1\n"),
        ("relaxed_equal_pairs.csv", "runs\n0123\n"),
        ("field.yaml", ""),  # no rows
    ],
)
def test_rows_of_another_commit_than_the_named_one_are_found(results: Path, name: str, text: str) -> None:
    machine = {"gpu.csv": "no such GPU here"}
    rows = Rows(results)
    assert check_numbers.check_commit(rows, NAMED[:9], machine) == []
    assert [p.where for p in check_numbers.check_commit(rows, NAMED, {})] == ["results/gpu.csv"]
    (results / name).write_text(text)
    found = [p.where for p in check_numbers.check_commit(rows, NAMED[:9], {**machine, "absent/*.csv": "none"})]
    assert found == ["results/numbers.yaml"] + [f"results/{name}"] * (name != "field.yaml")


def test_some_rows_of_a_file_may_have_a_commit_of_their_own(results: Path) -> None:
    """So many of them, no more and no fewer; the others are checked."""
    (results / "gpu.csv").unlink()
    rows, later = Rows(results), "b" * 40
    for others, expected in ((1, []), (2, ["results/r.csv"]), (0, ["results/r.csv"])):
        commits = [later] * others + [NAMED] * (3 - others)
        (results / "r.csv").write_text("run_id,commit\n" + "".join(f"r{i + 1},{c}\n" for i, c in enumerate(commits)))
        exception = {"r.csv": {"commit": later[:9], "rows": 1, "because": "measured again"}}
        if not others:
            (results / "r.csv").write_text(f"run_id,commit\nr1,{NAMED}\nr2,{'c' * 40}\n")
        assert [p.where for p in check_numbers.check_commit(rows, NAMED, exception)] == expected


def test_any_commit_will_do_while_none_is_named(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_numbers, "ROOT", results.parent)
    about = results / "numbers.yaml"
    about.write_text("rows: {commit: '', except: {gpu.csv: far away}}\n")
    assert check_numbers.main([]) == 0
    about.write_text("rows: {commit: bbbbbbb, except: {gpu.csv: far away}}\n")
    assert check_numbers.main([]) == 1
    assert "results/r.csv" in capsys.readouterr().out


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
        check("3 steps", [{"says": "{} steps", "of": ["rows('r').no_such.item()"]}], rows, "d.md")
