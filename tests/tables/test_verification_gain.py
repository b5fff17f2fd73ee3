"""The tables of lossless verification: their comparisons, and the notes about them."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_tables import FakeBench

from specbench.cli import tables as cli
from specbench.decoding import trees
from specbench.errors import UsageError
from specbench.rows.columns import COLUMNS, WORDS
from specbench.rows.csv_files import as_read
from specbench.tables.catalog import TABLES
from specbench.tables.table_runs import plan

SHAPES, GAIN = TABLES["verification_shapes"], TABLES["verification_gain"]


def test_shapes_have_6_to_30_tokens_and_the_best_are_among_them() -> None:
    names = [o.removeprefix("tree=") for line in SHAPES.lines for o in line.overrides or () if o.startswith("tree=")]
    sizes = [trees.build(trees.parse(tree)).nodes - 1 for tree in names]
    assert (min(sizes), max(sizes)) == (6, 30)
    searched = {line.overrides for line in SHAPES.lines}
    compared = {line.overrides for line in GAIN.lines if line.key.startswith("default_")}
    assert len(compared) == 4
    assert compared <= searched
    assert len(searched) == len(SHAPES.lines)


def test_a_row_keeps_a_word_instead_of_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run with such a word used to end without its row."""
    monkeypatch.setitem(WORDS, "delta", ("auto",))
    row = dict.fromkeys(COLUMNS) | {"run_id": "a", "delta": "auto"}
    assert as_read(row) == row
    assert as_read({**row, "delta": 0.5})["delta"] == 0.5
    with pytest.raises(UsageError, match="delta"):
        as_read({**row, "delta": "best"})


def test_the_search_uses_other_samples_than_the_comparison() -> None:
    seeds = [next(p for p in table.protocol if p.startswith("seed=")) for table in (SHAPES, GAIN)]
    assert seeds == ["seed=1", "seed=0"]


def test_the_lines_are_runs() -> None:
    for run in plan(GAIN, GAIN.model, None, Path("absent")).runs:
        assert run.weights is not None, run.key
        assert not run.timed, run.key


@pytest.mark.usefixtures("drawn_once")
def test_the_figure_has_a_curve_for_each_verification(tmp_path: Path) -> None:
    bench = FakeBench(steps=120.0, step_compression=2.1, step_compression_stderr=0.02, draft_tokens=14.0, draft_tv=0.5)
    assert cli.main([GAIN.id], bench, tmp_path / "results", tmp_path / "runs") == 0
    text = (tmp_path / f"results/tables/{GAIN.id}.md").read_text()
    assert "2.10 ± 0.02" in text
    assert "Steps, default: chain, block, 14 minus default: chain, token, 14" in text
    picture = (tmp_path / f"results/tables/{GAIN.id}.svg").read_text()
    for scheme in ("chain, token", "chain, block", "tree, token", "tree, traversal"):
        assert scheme in picture


def test_the_lines_of_continuous_tokens_are_runs() -> None:
    table = TABLES["verification_gain_mar"]
    runs = plan(table, table.model, None, Path("absent")).runs
    assert len({run.config_hash for run in runs}) == len(table.lines) == 4
    assert {name for test in table.tests for name in (test.line, test.other)} == {line.key for line in table.lines}
