"""The README's table, and its table of seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench.config import configuration, registry
from specbench.harness.planned import EMITTED, PlannedRun
from specbench.rows import provenance
from specbench.rows.columns import COLUMNS, TIMED_COLUMNS
from specbench.rows.csv_files import append_row
from specbench.rows.remark import as_json, remark
from specbench.tables import figures, layout, table_runs
from specbench.tables.catalog import TABLES
from specbench.tables.definitions import TableFigure


def test_seconds_have_their_own_table() -> None:
    steps, seconds = TABLES["field"], TABLES["field_seconds"]
    assert [line.key for line in steps.lines] == [line.key for line in seconds.lines]
    assert not any(column.key in TIMED_COLUMNS for column in steps.columns)
    assert any(column.key in TIMED_COLUMNS for column in seconds.columns)
    assert all(column.spread.endswith("_stderr") for table in (steps, seconds) for column in table.columns)


def test_a_row_without_a_column_that_a_table_needs_is_measured_again() -> None:
    """Two tables share the hash of a run, and one of them decodes it with `emitted_draws=0`."""
    needed, without = (
        PlannedRun(Path(), configuration.compose(["method=sjd", f"emitted_draws={n}"]), weights="w", needs=(EMITTED,))
        for n in (2, 0)
    )
    row = {"config_hash": needed.config_hash, "weights": "w", "fid": "1.0", "kid": "", "emitted_kl": "", "remarks": ""}
    assert replace(needed, needs=()).fits(row)
    assert not needed.fits(row)
    assert needed.fits(row | {"emitted_kl": "0.0"})
    assert needed.fits(row | {"remarks": as_json([remark("emitted_order", "emitted_kl", drafter="zipar")])})
    assert without.fits(row)  # it would not measure it either


def test_a_table_that_shows_nothing_of_it_takes_such_a_row(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(provenance, "config_hash", lambda cfg: "h")
    monkeypatch.setattr(registry, "weights_label", lambda cfg: "w")
    append_row(tmp_path / "some.csv", dict.fromkeys(COLUMNS) | {"run_id": "1", "config_hash": "h", "weights": "w"})
    for name, missing in (("field", 8), ("field_seconds", 0)):
        table = TABLES[name]
        table = replace(table, protocol=tuple(o for o in table.protocol if not o.startswith("emitted_draws=")))
        assert len(table_runs.plan(table, table.model, None, tmp_path).missing) == missing


def test_a_curve_looks_the_same_in_all_panels() -> None:
    """Panels have different curves, and one legend serves all. A figure once left out all curves after the seventh."""
    panels = [
        panel for shown in TABLES.values() if isinstance(shown.figure, TableFigure) for panel in shown.figure.panels
    ]
    assert 7 < max(len(panel.curves) for panel in panels) <= len(set(figures._STYLES))
    table, rows = TABLES["relaxed"], {}
    assert isinstance(table.figure, TableFigure)
    for i, line in enumerate(table.lines):
        rows[line.key] = {"step_compression": str(1 + i), "emitted_kl": str(0.1 * i), "n": "16"}
    drawn = figures._curves(table.figure, table, rows)
    colours: dict[str, set[object]] = {}
    for axis in drawn.axes:
        for container, label in zip(*axis.get_legend_handles_labels(), strict=True):
            line = getattr(container, "lines", [container])[0]
            colours.setdefault(label, set()).add((line.get_color(), line.get_marker()))
    assert len(colours) > 7
    assert all(len(styles) == 1 for styles in colours.values())
    assert {text.get_text() for text in drawn.legends[0].get_texts()} == set(colours)


def test_errors_of_floating_point_print_as_zero() -> None:
    """The output of an exact method has a KL divergence of 1e-14 from the target, which used to become eight
    decimals."""
    table = TABLES["field"]
    cells = {"n": "500", "emitted_kl": "1.023868e-14", "emitted_kl_stderr": "7.7e-16", "emitted_tv": "4e-08"}
    rows = {"eagle1": cells, "cool_sd": {**cells, "emitted_kl": "0.0423491", "emitted_kl_stderr": "0.00252"}}
    sheet = layout.build(table, table.model, rows, [], {}, "")
    kl = [column.key for column in table.columns].index("emitted_kl")
    shown = {entry.method: (entry.cells[kl].value, entry.cells[kl].spread) for entry in sheet.entries}
    assert shown["EAGLE-1"] == ("0.0000", "0.0000")
    assert shown["Cool-SD (δ=1.1)"] == ("0.0423", "0.0025")
