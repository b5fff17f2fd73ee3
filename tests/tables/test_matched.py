"""Suites whose curves are compared at equal x: their keys, and the printed comparisons."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from scipy import stats

from specbench.cli import tables as cli
from specbench.errors import UsageError
from specbench.tables import catalog, matched, table_runs
from specbench.tables.catalog import TABLES, Source
from specbench.tables.definitions import Table, TableFigure

SUITE = """
title: Rules at equal values
n: 500
columns: [step_compression, emitted_kl, image_reward]
panels:
  EAGLE-1, chain of 5:
    with: {method: eagle_chain}
    first: {exact: {}}
    without_first: [typical]
    lines:
      UniformRSD: {rule: uniform, delta: [1.1, 2]}
      typical: {rule: typical, epsilon: [0.09, 0.03]}
figure: {x: [step_compression], y: [emitted_kl, image_reward]}
matched: {y: [emitted_kl, image_reward]}
"""


def table(**changes: object) -> Table:
    return catalog.table("rules", Source("rules", yaml.safe_load(SUITE) | changes))


def test_a_curve_without_an_exact_strength_does_not_start_at_exact_decoding() -> None:
    """Typical acceptance has no exact strength: a line from exact decoding would give it a divergence that none of its
    strengths has."""
    figure = table().figure
    assert isinstance(figure, TableFigure)
    uniform, typical = figure.panels[0].curves
    assert uniform.lines == ("exact_EAGLE-1_chain_of_5", *uniform.lines[1:])
    assert len(uniform.lines) == 3
    assert typical.lines == ("typical_0.09_EAGLE-1_chain_of_5", "typical_0.03_EAGLE-1_chain_of_5")


def test_in_the_shipped_suites_no_such_rule_starts_at_exact_decoding() -> None:
    figures = [TABLES[name].figure for name in ("relaxed", "relaxed_equal")]
    curves = [c for f in figures if isinstance(f, TableFigure) for panel in f.panels for c in panel.curves]
    apart = {curve.label for curve in curves if not curve.lines[0].startswith("exact")}
    assert apart == {"typical", "entropy", "GSD, released"}


def test_a_wrong_key_is_named() -> None:
    panels = {"P": {"without_first": ["other"], "lines": {"a": {"rule": "uniform"}}}}
    for changes, words in (
        ({"matched": {"y": ["emitted_kl"], "at": {}}}, "matched has no 'at'"),
        ({"matched": {"y": ["perplexity"]}}, "perplexity, which is not one of its columns"),
        ({"matched": {"lines_of": "relaxed"}}, "missing a required argument: 'y'"),
        ({"panels": panels}, "without_first has other"),
    ):
        with pytest.raises(UsageError, match=words):
            table(**changes)


def test_neighbouring_values_where_the_band_excludes_zero_are_one_range() -> None:
    row = {
        "at": "[1.0,1.1,1.2,1.3,1.4,1.5]",
        "differences": "[0.5,-0.5,-0.6,0.1,0.5,0.6]",
        "margins": "[0.1,0.2,0.2,0.2,0.2,0.2]",
    }
    assert matched.stretches(row) == [(1.0, 1.0, True), (1.1, 1.2, False), (1.4, 1.5, True)]


def test_numbers_of_a_pair_have_the_digits_of_their_interval() -> None:
    row = {"ratio": "1.5", "ratio_low": "1.25", "ratio_high": "1.75"}
    assert matched.ratio(row) == "1.50 (1.25 to 1.75)"
    assert matched.ratio({**row, "ratio_low": ""}) == ""
    row = {"difference": "0.0211", "low": "0.0171", "high": "0.0251"}
    assert matched.signed(row, 2) == "+0.0211 (0.0171 to 0.0251)"
    assert matched.signed({**row, "difference": "-0.00001"}, 2).startswith("+0.0000 ")  # no minus sign before zero
    assert matched.signed({"difference": "-2", "low": "-4", "high": "0"}, 1) == "-2.0 (-4.0 to 0.0)"


def test_the_p_of_a_pair_is_that_of_the_ratio_beside_it() -> None:
    """An interval that ends at 1 has p = 0.05, whatever the p of the difference is."""
    row = {"prompts": "24", "p": "0.0001", "ratio": "1.5", "ratio_low": "1.0", "ratio_high": "2.25"}
    assert matched.p_of(row) == pytest.approx(0.05)
    assert matched.p_of({**row, "ratio_low": "0.75", "ratio_high": "3.0"}) == pytest.approx(
        2 * stats.t.sf(stats.t.ppf(0.975, 23) * math.log(1.5) / math.log(2), 23)
    )
    assert matched.p_of({**row, "ratio_low": ""}) == 0.0001  # without a ratio, of the difference
    assert matched.p_of({**row, "p": "", "ratio_low": "1.5", "ratio_high": "1.5"}) is None


@pytest.mark.usefixtures("drawn_once")
def test_the_command_draws_pairs_and_no_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["relaxed_equal", "--no-run"], None, tmp_path, tmp_path) == 0
    text = capsys.readouterr().out
    [named] = [
        line for line in text.splitlines() if "EAGLE-1, chain of 5: Cool-SD, exponential against UniformRSD" in line
    ]
    assert not named.startswith("|")  # nothing is measured: it is left out and named
    assert "δ=1.1" not in text
    assert [path.name for path in sorted((tmp_path / "tables").iterdir())] == ["relaxed_equal.md", "relaxed_equal.tex"]


def test_a_comparison_has_the_rows_of_the_table_whose_lines_it_compares(tmp_path: Path) -> None:
    compared = TABLES["chain_rules_paper"]
    assert table_runs.store(compared, tmp_path) == tmp_path / "chain_rules.csv"
    assert table_runs.store(compared, tmp_path, "_pairs") == tmp_path / "chain_rules_paper_pairs.csv"
