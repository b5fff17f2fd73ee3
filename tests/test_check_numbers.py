"""scripts/check_numbers.py compares the numbers of pages with their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import check_numbers
import doc_tables
import pytest
import yaml
from check_numbers import Rows, as_printed, check

from specbench.config import configuration
from specbench.errors import UsageError
from specbench.harness.planned import PlannedRun
from specbench.tables import matched
from specbench.tables.catalog import TABLES
from specbench.tables.definitions import TableFigure, row_column
from specbench.tables.measure import TablePlan

SJD = "one('r', method='sjd').steps"


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    (tmp_path / "r.csv").write_text("method,steps,n\nsjd,31.26,24\nvanilla,105,500\n")
    (tmp_path / "few.csv").write_text("samples,commit\n1000,8306881032f92c\n")
    return Rows(tmp_path, defined={"vanilla": "one('r', method='vanilla')"})


def said(page: str, rows: Rows) -> list[str]:
    return [str(problem) for problem in check(page, rows, "d.md")[0]]


def test_every_number_of_this_repository_has_its_row() -> None:
    assert check_numbers.main([]) == 0


@pytest.mark.parametrize(
    "page",
    [
        f"SJD takes 31.3 steps, -0.5<!--= {SJD}, 1/-2 --> of\n  vanilla's. See `n=4`, [it](t1.md) of 2026-11-23 and 7.",
        f"# 3 findings\n\n1. SJD takes 31<!--= {SJD} --> steps, 95 % (EAGLE-2, Eqs. 3, 4).\n\n    make run n=7\n",
        f"Of 4 settings, 31 steps, 99 and 105<!--= {SJD}, ..., vanilla.steps,\n  vanilla.steps > {SJD} --> are seen.",
        "| 5 | 31.3 | 105 <!--= get(vanilla, 'steps') --> |\n| 6<!--= settings --> | 31 |\n",
        "From 31 to 105<!--= ends(rows('r').steps) -->,\n  or -105<!--= get(vanilla, '-steps') -->.\n",
        "Five.\n\n```\n7 <!--= not read -->\n```\n",
    ],
)
def test_a_page_that_states_what_rows_say_passes(rows: Rows, page: str) -> None:
    assert check(page, rows, "d.md") == ([], page)


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (f"SJD takes 31.2<!--= {SJD} --> steps.", f"d.md:1: 31.2 should be 31.3 ({SJD})"),
        (f"SJD takes 31.3<!--= {SJD} --> steps.\n\nAnd 12.", "d.md:3: 12 has no row: put a mark after it"),
        ("- 1 of\n- 31<!--= settings --> of 105", "d.md:1: 1 has no row: put a mark after it"),
        ("| 31 |\n| 105<!--= settings --> |", "d.md:1: 31 has no row: put a mark after it"),
        (f"SJD takes few<!--= {SJD} --> steps.", f"d.md:1: 1 values for 0 numbers: {SJD}"),
        (f"31.3<!--= {SJD} --> or less<!--= {SJD} -->", f"d.md:1: 1 values for 0 numbers: {SJD}"),
        (f"Fewer than 105<!--= {SJD} > 105, ... -->.", f"d.md:1: does not hold: {SJD} > 105, ..."),
        ("3<!--= rows('r').no_such.item() -->", "d.md:1: rows('r').no_such.item(): AttributeError: "),
        ("3<!--= one('r').steps -->", "d.md:1: results/r.csv has 2 rows with {}"),
        ("3<!--= rows('r', method='scd').steps -->", "d.md:1: results/r.csv has no row with {'method': 'scd'}"),
        ("1,000<!--= one('few').samples -->", "d.md:1: rests on samples=1000 of few, below 50000"),
    ],
)
def test_a_number_without_its_row_is_reported(rows: Rows, page: str, problem: str) -> None:
    [reported] = said(page, rows)
    assert reported.startswith(problem)


def test_a_file_may_be_of_few_samples_by_name(rows: Rows) -> None:
    rows.few = ["few"]
    assert (
        said("1,000 of 830688<!--= settings --> and 1,000, 8306881<!--= get(one('few'), 'samples', 'commit') -->", rows)
        == []
    )


def test_a_tables_file_has_rows_of_other_models_by_name(tmp_path: Path) -> None:
    (tmp_path / "field.csv").write_text("model,steps,n\nllamagen_scenes,31,24\nllamagen_textures,105,24\n")
    rows = Rows(tmp_path)
    assert said("31 and 105<!--= one('field').steps, one('field.llamagen_textures').steps -->.", rows) == []
    [reported] = said("31<!--= one('field.llamagen_xl').steps -->.", rows)
    assert "has no row" in reported


def test_statistics_of_the_model_card(tmp_path: Path) -> None:
    (tmp_path / "embedded_models.md").write_text("| target | loss 2.29, top1_probability 0.3349 |\n")
    rows = Rows(tmp_path)
    assert said("0.335<!--= card('target').top1_probability -->", rows) == []
    reported = said("2.3<!--= card('target').top1_probability --> or 0.3<!--= card('nothing').loss -->", rows)
    assert ["should be 0.3" in reported[0], "has no stage nothing" in reported[1]] == [True, True]


def test_the_interval_between_two_lines(rows: Rows) -> None:
    """By hand: 3 ± 0.3 and 3.5 ± 0.4 differ by 0.5, with a standard error of 0.5."""
    (rows.results / "pair.csv").write_text("x,x_stderr\n3,0.3\n3.5,0.4\n")
    says = "apart('x', one('pair', x=3), one('pair', x=3.5)), pm(one('pair', x=3), 'x')"
    assert said(f"From -0.48 to 1.48, and 3 ± 0.3<!--= {says} -->", rows) == []


def test_curves_are_printed_where_x_has_a_value(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the straight lines between rows; no value outside of them."""
    table = TABLES["relaxed"]
    assert isinstance(table.figure, TableFigure)
    panel = table.figure.panels[0]
    values = {
        key: {"step_compression": str(2 + i), "emitted_kl": str(0.1 * i * (1 + j)), "n": "24"}
        for j, curve in enumerate(panel.curves[:2])
        for i, key in enumerate(curve.lines[:3])
    }
    monkeypatch.setattr(TablePlan, "rows", values)
    monkeypatch.setattr(Rows, "_plan", lambda self, name: TablePlan(name, Path(), (), table, "m"))
    mark = "<!--= table_of_curves('relaxed', 'emitted_kl', 'EAGLE-1, chain of 5', 2.5, 9) -->\n"
    text = check(mark, rows, "d.md")[1]
    first, second, *others = [curve.label for curve in panel.curves]
    assert text.splitlines()[1] == f"| step compression (×) | {first} | {second} | {' | '.join(others)} |"
    missing = " | ".join("—" for _ in others)
    assert text.splitlines()[3:] == [f"| 2.5 | 0.0500 | 0.1000 | {missing} |", f"| 9 | — | — | {missing} |"]
    says = "curves('relaxed', 'EAGLE-1, chain of 5', 'emitted_kl', 2.25)['UniformRSD']"
    assert said(f"It emits 0.025<!--= {says} -->", rows) == []
    assert "has no panel chain" in said(mark.replace("EAGLE-1, chain of 5", "chain"), rows)[0]


def test_a_draft_has_its_verifications_side_by_side(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that a draft was not run with has a dash."""
    table = TABLES["verification_shapes"]
    ways = {"chain": ("token", "block"), "tree": ("token", "traversal", "selected")}
    values = {line.key: {"step_compression": f"{i}.5"} for i, line in enumerate(table.lines)}
    monkeypatch.setattr(TablePlan, "rows", values)
    monkeypatch.setattr(Rows, "_plan", lambda self, name: TablePlan(name, Path(), (), table, "m"))
    text = check("<!--= table_of_verifications('verification_shapes', 'step_compression') -->\n", rows, "d.md")[1]
    _, head, _, *body = text.splitlines()
    assert head == "| draft | token-wise | block | traversal | selected |"
    assert len(body) == len(values) / sum(map(len, ways.values())) * len(ways)
    by_label = {line.label: values[line.key]["step_compression"] for line in table.lines}
    for row in body:
        draft, *cells = row[2:-2].split(" | ")
        form, shape = draft.split(" ")
        wanted = [
            by_label.get(f"default: {form}, {way}, {shape}", "—") for way in ("token", "block", "traversal", "selected")
        ]
        assert [cell if cell == "—" else f"{float(cell):.1f}" for cell in cells] == wanted
        assert cells.count("—") == 4 - len(ways[form])


MARK = "<!--= table('field', 'step_compression, emitted_kl, speedup_latency', lines='vanilla, sjd') -->\n"
DRAWN = "| method | step compression (×) | emitted KL (nats) | speed-up in latency (×) |\n|---|---|---|---|\n"
DRAWN += "| vanilla | 1.00 | 0 | — |\n| SJD | 2.96 ± 0.02 | 0.0012 ± 0.0003 | — |\n"


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> None:
    sjd = {"step_compression": "2.961", "step_compression_stderr": "0.0214", "n": "23"}
    sjd |= {"emitted_kl": "0.00123", "emitted_kl_stderr": "0.00032", "speedup_latency": "1.5", "timing": "false"}
    vanilla = {"step_compression": "1.0", "step_compression_stderr": "0.0", "emitted_kl": "3e-9"}
    measured = {"sjd": sjd, "vanilla": vanilla}

    def plan(self: Rows, name: str) -> TablePlan:
        config = configuration.compose([])
        runs = (PlannedRun(Path(), config, line.key, row=measured.get(line.key)) for line in TABLES[name].lines)
        return TablePlan(name, Path(), tuple(runs), TABLES[name], "m")

    monkeypatch.setattr(Rows, "_plan", plan)


def test_how_cells_and_headings_are_printed() -> None:
    """An error of rounding is printed as 0, and a heading keeps proper names."""
    ratio = row_column("emitted_kl_ratio")
    for error, shown in (("3e-07", "1.000"), ("3e-06", "0.999999 ± 0.000003")):
        assert doc_tables.cell(ratio, {"emitted_kl_ratio": "0.9999994", "emitted_kl_ratio_stderr": error}) == shown
    titles = ("Step compression (×)", "CLIP score", "Fréchet distance", "Inception score", "Accepted length")
    kept = ["step compression (×)", "CLIP score", "Fréchet distance", "Inception score", "accepted length"]
    assert [doc_tables.heading(title) for title in titles] == kept


def test_a_joined_table_has_a_dash_for_a_line_that_the_other_table_does_not_have() -> None:
    first = doc_tables.markdown([["method", "steps"], ["vanilla", "256"], ["SJD", "88.1 ± 0.6"]])
    other = doc_tables.markdown([["method", "latency", "speed-up (×)"], ["SJD", "0.63", "1.26 ± 0.08"]])
    joined = [["method", "steps", "on a CPU (×)"], ["vanilla", "256", "—"], ["SJD", "88.1 ± 0.6", "1.26 ± 0.08"]]
    assert doc_tables.joined_table(first, {"on a CPU (×)": other}) == doc_tables.markdown(joined)


def test_the_verdict_of_a_method_is_over_its_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row leaves out a part that another one has."""
    row = dict.fromkeys(("p_value", "tv_low", "tv_high"), "0.02") | {"method": "m", "margin": "0.05", "ks_high": ""}
    row |= {"T": "5", "V": "2", "dim": "", "verdict": "undecided", "model": "v2t10"}
    rows = [row | {"exercised": f"rejection_1=3 refill={i}"} for i in (0, 1)]
    assert doc_tables.verdict(rows) == "lossless"
    assert doc_tables.verdict(rows[:1]) == "undecided"
    assert doc_tables.verdict([row | {"tv_high": "0.06"}]) == "undecided"  # a file of an older version has no counts

    refuted = {"method": "n", "p_value": "0", "verdict": "not lossless"}
    real = row | {"method": "n", "model": "llamagen_tiny", "verdict": "lossless"}
    monkeypatch.setattr(doc_tables, "_read", lambda name: [*rows, row | refuted, real])
    cells = [line.split(" | ")[2:4] for line in doc_tables.table_of_audit().splitlines()[2:]]
    assert cells == [["not refuted: <= 0.020", ""], ["refuted: 0.020 to 0.020", "not refuted: <= 0.020"]]
    for other, shown in ((rows[0], "undecided"), (rows[1], "not refuted")):
        monkeypatch.setattr(
            doc_tables, "_read", lambda name, other=other: [rows[0], other | {"model": "llamagen_tiny"}]
        )
        cells = [line.split(" | ")[2:4] for line in doc_tables.table_of_audit().splitlines()[2:]]
        assert cells == [[f"{shown}: <= 0.020"] * 2]


def test_a_mistake_is_caught_by_an_audit_or_by_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    audited = {"mistake": "Norm(|p - q|)", "method": "sd", "samples": "40000", "model": "v2t10"}
    tested = {"mistake": "top-p", "method": "vanilla", "samples": "", "model": ""}
    monkeypatch.setattr(doc_tables, "_read", lambda name: [audited, tested])
    _, _, *lines = doc_tables.table_of_mistakes().splitlines()
    assert lines == [r"| Norm(\|p - q\|) | `sd` | 40,000 | `v2t10` |", "| top-p | `vanilla` | none: its test |  |"]


def test_claims_are_counted_by_their_first_status(tmp_path: Path) -> None:
    page = tmp_path / "claims.md"
    head = "# Claims\n\n- **confirmed**: what it means.\n\n## A (1; paper) and B (2)\n\n"
    first = "- It is fast.<br>\n  **confirmed in kind** (weak), but **refuted** for two.<br>\n  `-`\n"
    second = "- It is good.<br>\n  **not confirmed**.\n- It is new.<br>\n  **mixed**. Here it is, there it is not.\n"
    page.write_text(f"{head}{first}{second}\n## Others\n\nNone.\n")
    counts = ["3", "1 (1 weak)", "0", "1", "1", "0"]
    drawn = [["A and B", *counts], ["**all**", *counts]]
    columns = ["paper", "claims", "confirmed", "refuted", "mixed", "not confirmed", "untested"]
    assert doc_tables.table_of_claims(page) == doc_tables.markdown([columns, *drawn])
    page.write_text(f"{head}- It is **fast**.\n")
    with pytest.raises(UsageError, match="without a status: - It is"):
        doc_tables.table_of_claims(page)


def test_a_status_that_the_rows_no_longer_support_is_reported(rows: Rows) -> None:
    """31 ± 0.3 and 105 ± 0.4 differ clearly, 1 ± 0.3 and 2 ± 0.4 weakly, and 1 ± 0.3 and 1.5 ± 0.4 not."""
    (rows.results / "pair.csv").write_text("x,x_stderr\n31,0.3\n105,0.4\n1,0.3\n2,0.4\n1.5,0.4\n")
    names = ("z", "rises", "rises_weakly", "falls", "falls_weakly", "undecided")
    shared = yaml.safe_load((check_numbers.ROOT / "results/numbers.yaml").read_text(encoding="utf-8"))["names"]
    rows.defined = {name: shared[name] for name in names}
    pairs = {"rises": (31, 105), "falls": (105, 31), "rises_weakly": (1, 2), "falls_weakly": (2, 1)}
    pairs["undecided"] = (1, 1.5)
    for name in pairs:
        for holds, (left, right) in pairs.items():
            says = f"{name}('x', one('pair', x={left}), one('pair', x={right}))[2]"
            assert (said(f"It is so<!--= {says} -->.", rows) == []) == (name == holds)


@pytest.mark.usefixtures("field")
def test_a_table_counts_as_a_whole_and_must_be_the_one_of_its_rows(rows: Rows) -> None:
    assert check(MARK + DRAWN, rows, "d.md") == ([], MARK + DRAWN)
    for wrong in (MARK, MARK + DRAWN.replace("2.96", "2.95"), MARK + DRAWN.replace("| SJD", "| 1 | 2 |\n| SJD")):
        assert len(said(wrong, rows)) == 1
        assert check(wrong, rows, "d.md")[1] == MARK + DRAWN
    assert "has no row for its line scd" in said(MARK.replace("sjd", "scd"), rows)[0]
    assert "baseline_latency_s" in said(MARK.replace("emitted_kl", "baseline_latency_s"), rows)[0]
    assert said("3.0<!--= field['sjd'].step_compression -->", rows) == [
        "d.md:1: rests on n=23 of field, line sjd, below 24"
    ]
    assert "table field has no row for its line scd" in said("3<!--= field['scd'].steps -->", rows)[0]


def test_a_table_of_pairs_marks_what_differs_from_its_first_curve(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES["relaxed_equal"]
    assert isinstance(table.figure, TableFigure)
    assert table.matched is not None
    at = {"x": "step_compression", "y": "emitted_kl", "prompts": "24", "difference": "0.1", "low": "0", "high": "0.2"}
    at |= {"ratio_low": "0.5", "ratio_high": "4.5", "at": "[1,2,3]", "differences": "[1,-2,-2]", "margins": "[2,1,1]"}
    chain = {**at, "panel": "EAGLE-1, chain of 5", "runs": "chain", "a": "uniform"}
    tree = {**at, "panel": "EAGLE-1, tree of 25", "runs": "tree", "a": "uniform"}
    planned = matched.planned_pairs(TablePlan("relaxed_equal", Path(), (), table, "m"))
    assert planned > 80
    pairs = (
        {**chain, "b": "cool", "ratio": "4", "p": f"{0.04 / planned}"},
        {**chain, "b": "band", "ratio": "0.9", "p": f"{0.06 / planned}"},  # above 0.05 by the adjustment
        {**chain, "a": "cool", "b": "band", "ratio": "7", "p": ""},
        {**tree, "b": "band", "ratio": "", "p": "0.04"},
        {**tree, "b": "band", "ratio": "7", "p": "0", "runs": "earlier"},
        {**tree, "a": "printed", "b": "released", "ratio": "7", "p": "1", "panel": "of neither"},
    )
    monkeypatch.setattr(TablePlan, "equal", dict.fromkeys(("chain", "tree"), table.figure.panels[0]))
    monkeypatch.setattr(Rows, "_plan", lambda self, name: TablePlan(name, Path(), (), table, "m", pairs=pairs))
    mark = "<!--= table_of_pairs('relaxed_equal', 'uniform', 'cool', 'band') -->\n"
    drawn = "| draft | prompts | cool | band |\n|---|---|---|---|\n"
    drawn += "| EAGLE-1, chain of 5 | 24 | **4.00 (0.50 to 4.50)** | 0.90 (0.50 to 4.50) |\n"
    drawn += "| EAGLE-1, tree of 25 | 24 | — | +0.10 (0.00 to 0.20) |\n"
    assert check(mark, Rows(rows.results), "d.md")[1] == mark + drawn
    assert "no pair with typical" in said(mark.replace("band", "typical"), Rows(rows.results))[0]
    says = "[(r.ratio, *r.below[0], r.adjusted < 0.05, not r.above) for r in pairs('relaxed_equal', b='cool')]"
    assert said(f"Cool emits 4 times as much, and less from 2 to 3<!--= {says} -->", Rows(rows.results)) == []
    pairs += ({**tree, "y": "other", "b": "band", "ratio": "7", "p": "1", "prompts": "23"},)
    assert "2 pairs of columns" in said(mark, Rows(rows.results))[0]
    named = mark.replace("'band')", "'band', y='emitted_kl')")
    assert check(named, Rows(rows.results), "d.md")[1] == named + drawn
    assert "rests on n=23" in said("7<!--= pairs('relaxed_equal', y='other')[0].ratio -->", Rows(rows.results))[0]


@pytest.mark.usefixtures("field")
def test_values_and_tables_of_today_are_written(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every page of docs, and in the pages that the file names."""
    root, about = rows.results / "clone", "{names: {sjd: \"one('r', method='sjd')\"}, whole: [d.md]}"
    for name in ("results", "docs"):
        (root / name).mkdir(parents=True)
    (root / "results/r.csv").write_text((rows.results / "r.csv").read_text())
    (root / "results/numbers.yaml").write_text(about)
    (root / "d.md").write_text("SJD takes 12.4, +1, 5<!--= sjd.steps, -0.4, ... --> steps.\n")
    (root / "docs/other.md").write_text(f"Five is 5.\n\n{MARK}| old |\n\n8<!--= sjd.steps --> steps.\n")
    monkeypatch.setattr(check_numbers, "ROOT", root)
    assert [check_numbers.main(words) for words in ([], ["--write"], [])] == [1, 1, 0]
    assert (root / "d.md").read_text() == "SJD takes 31.3, -0, 5<!--= sjd.steps, -0.4, ... --> steps.\n"
    assert (root / "docs/other.md").read_text() == f"Five is 5.\n\n{MARK}{DRAWN}\n31<!--= sjd.steps --> steps.\n"
    (root / "results/numbers.yaml").write_text(about.replace("[d.md]", "[d.md, docs/other.md]"))
    assert check_numbers.main([]) == 1  # 5 has no row


NAMED = "a" * 40


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Files of one commit: rows in two folders, a test of two of the rows, a drawn table; and rows of another
    machine."""
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
    problems = [p.where for p in check_numbers.check_commit(rows, NAMED[:9], {**machine, "absent/*.csv": "none"})]
    assert problems == ["results/numbers.yaml"] + [f"results/{name}"] * (name != "field.yaml")


def test_a_file_may_have_rows_of_a_later_commit(results: Path) -> None:
    """Only rows of the commit that its exception names; its other rows, and every other file, have the common
    commit."""
    later, machine = "c" * 40, {"gpu.csv": "no such GPU here"}
    (results / "r.csv").write_text(f"run_id,commit\nr1,{NAMED}\nr2,{later}\n")
    (results / "tables/r.md").write_text(f"- Commit: {NAMED} / {later}\n")

    def wrong_files(**exceptions: Any) -> list[str]:
        named = {name.replace("_", "."): {"commit": commit, "reason": "new"} for name, commit in exceptions.items()}
        tables = {f"tables/{name}" if name.endswith(".md") else name: entry for name, entry in named.items()}
        return [p.where for p in check_numbers.check_commit(Rows(results), NAMED[:9], machine | tables)]

    assert wrong_files(r_csv=later[:7], r_md=later[:7]) == []
    assert wrong_files(r_csv=later[:7]) == ["results/tables/r.md"]
    assert wrong_files(r_csv="ddddddd", r_md=later[:7]) == ["results/r.csv"]
    (results / "r.csv").write_text(f"run_id,commit\nr1,{NAMED}\nr2,{NAMED}\n")
    assert wrong_files(r_csv=later[:7], r_md=later[:7]) == ["results/r.csv"]  # it needs no exception any more


def test_any_commit_is_allowed_until_one_is_named(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_numbers, "ROOT", results.parent)
    about = results / "numbers.yaml"
    about.write_text("{commit: '', except: {gpu.csv: far away}}\n")
    assert check_numbers.main([]) == 0
    about.write_text("{commit: bbbbbbb, except: {gpu.csv: far away}}\n")
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
