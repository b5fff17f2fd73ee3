"""Quality of curves at equal values of a column: interpolated cells, which say so."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from specbench.cli import tables as cli
from specbench.config import configuration
from specbench.harness.planned import PlannedRun
from specbench.tables import matched, reading
from specbench.tables.definitions import TableFigure
from specbench.tables.measure import TablePlan
from specbench.tables.suite_files import Source

SUITE = """
title: Rules at equal values
n: 500
columns: [accepted_length_mean, step_compression, emitted_kl, perplexity, image_reward]
panels:
  EAGLE-1, chain of 5:
    suffix: chain of 5
    with: {method: eagle_chain}
    first: {exact: {}}
    lines: &rules
      UniformRSD: {rule: uniform, delta: [1.1, 1.25, 1.5, 2, 3]}
      Cool-SD: {rule: cool, delta: [1.1, 1.5, 2, 3, 5]}
      LANTERN++: {rule: lantern_pp, lam: [1.5, 2, 3, 5, 10]}
  EAGLE-1, tree of 25:
    suffix: tree of 25
    with: {method: eagle1}
    first: {exact: {}}
    lines: *rules
figure: {x: [accepted_length_mean, step_compression], y: [emitted_kl, image_reward]}
matched:
  y: [emitted_kl, perplexity, image_reward]
  at:
    EAGLE-1, chain of 5: {accepted_length_mean: 2.2, step_compression: 2.1}
    EAGLE-1, tree of 25: {accepted_length_mean: 2.65, step_compression: 2.57}
"""
TABLE = reading.table("rules_equal", Source("rules_equal", yaml.safe_load(SUITE)))


def test_a_value_between_two_lines() -> None:
    points = [(1.0, 8.0, 0.0, 0.3), (2.0, 10.0, 0.2, 0.4), (4.0, 20.0, 0.0, 0.0)]
    value, error = matched.interpolated(points, 1.25) or (0, 0)
    assert value == pytest.approx(8.5)
    # a quarter of the second line's error, of which its x has a share through the slope of 2
    assert error == pytest.approx(math.hypot(0.75 * 0.3, 0.25 * math.hypot(0.4, 2 * 0.2)))
    assert matched.interpolated(points, 2.0) == pytest.approx((10.0, math.hypot(0.4, 2 * 0.2)))
    assert matched.interpolated(points, 3.0) == pytest.approx((15.0, 0.5 * math.hypot(0.4, 5 * 0.2)))
    assert matched.interpolated(points, 4.5) is matched.interpolated(points, 0.9) is None
    assert matched.interpolated(points[:1], 1.0) is None


def _rows() -> dict[str, dict[str, str] | None]:
    """Of every curve: perplexity is 8 + (accepted length - 1.8), and a step compression is shorter by 0.1."""
    assert isinstance(TABLE.figure, TableFigure)
    rows: dict[str, dict[str, str] | None] = {}
    for panel in TABLE.figure.panels:
        for curve in panel.curves:
            for i, key in enumerate(curve.lines):
                x = 1.8 + 0.3 * i
                values = {"accepted_length_mean": x, "step_compression": x - 0.1, "perplexity": 8 + x - 1.8}
                rows[key] = {"n": "500", "perplexity_stderr": "0.1"} | {k: f"{v:.4f}" for k, v in values.items()}
    return rows


def plan(rows: dict[str, dict[str, str] | None], pairs: tuple[dict[str, str], ...] = ()) -> TablePlan:
    config = configuration.compose([])
    runs = (PlannedRun(Path(line.key), config, line.key, line.label, row=rows.get(line.key)) for line in TABLE.lines)
    return TablePlan(TABLE.id, Path(), tuple(runs), TABLE, "m", pairs=pairs)


def test_every_interpolated_cell_says_so() -> None:
    rows = _rows()
    rows["UniformRSD_1.1_chain_of_5"] = rows["UniformRSD_1.25_chain_of_5"] = (
        None  # the curve leads over 2.2 all the same
    )
    rows |= {f"LANTERNpp_{lam}_tree_of_25": None for lam in ("3", "5", "10")}  # up to 2.1
    sheet = matched.build(plan(rows), "specbench tables rules_equal")
    assert [h.label for h in sheet.headers] == [
        f"{y} at equal {x}"
        for x in ("accepted length", "step compression")
        for y in ("Emitted KL (nats)", "Perplexity", "Reward")
    ]
    notes = dict(sheet.notes)
    length = notes[sheet.headers[0].marks[0]]
    assert "2.2 with EAGLE-1, chain of 5, 2.65 with EAGLE-1, tree of 25" in length
    cells = {entry.method: entry.cells for entry in sheet.entries}
    assert len(cells) == 6
    for method, (divergence, perplexity, reward, _, compression, _) in cells.items():
        assert notes[reward.marks[0]] == notes[divergence.marks[0]] == "The runs did not measure this."
        if method == "EAGLE-1, tree of 25: LANTERN++":
            assert (perplexity.value, compression.value) == ("", "")
            assert "do not reach" in notes[perplexity.marks[0]]
            continue
        chain = "chain" in method
        assert (perplexity.value, compression.value) == (("8.40", "8.40") if chain else ("8.85", "8.87"))
        assert float(perplexity.spread) < 0.1  # two errors of 0.1, each with a part of the weight
        assert all(notes[cell.marks[0]].startswith("Interpolated linearly") for cell in (perplexity, compression))


def test_the_command_draws_the_curves_and_no_lines(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert cli.main(["relaxed_equal", "--no-run"], None, tmp_path, tmp_path) == 0
    text = capsys.readouterr().out
    assert "| EAGLE-1, chain of 5: UniformRSD | **measured, llamagen\\_scenes** | —" in text
    assert "δ=1.1" not in text
    assert [path.name for path in sorted((tmp_path / "tables").iterdir())] == ["relaxed_equal.md", "relaxed_equal.tex"]
