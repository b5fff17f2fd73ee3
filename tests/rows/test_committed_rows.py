"""The rows in results/, and the tables that show them."""

from __future__ import annotations

from commands import ROOT, overrides

from specbench.config import configuration
from specbench.rows.csv_files import has_runs, read_rows
from specbench.tables.catalog import TABLES

RESULTS = ROOT / "results"


def test_no_row_is_next_to_a_row_of_newer_weights() -> None:
    """coolsd_table1.csv used to have rows of weights that had been trained again, and no table showed them."""
    for path in sorted(RESULTS.glob("*.csv")):
        if path.stem not in TABLES or not has_runs(path):
            continue
        weights: dict[tuple[str, str], set[str]] = {}
        for row in read_rows(path):
            weights.setdefault((row["model"], row["config_hash"]), set()).add(row["weights"])
        assert not [labels for labels in weights.values() if len(labels) > 1], path.name


def test_lines_of_quality_end_the_diffusion_in_the_same_way() -> None:
    """The target alone used to sample its last step, while CSpD took its mean."""
    table = TABLES["cspd_table2"]
    lines = [configuration.compose(overrides(table, line, table.model) or []) for line in table.lines]
    assert {line.method for line in lines} == {"vanilla", "cspd_paper"}
    assert len({line.get("final_noise") for line in lines}) == 1


def test_the_report_shows_the_newest_row_of_every_configuration() -> None:
    page = (RESULTS / "report.html").read_text(encoding="utf-8")
    rows = [row for path in RESULTS.glob("*.csv") if has_runs(path) for row in read_rows(path)]
    newest = {row["config_hash"]: row["run_id"] for row in sorted(rows, key=lambda row: row["time"])}
    assert len(newest) > 400
    missing = sorted(run for run in newest.values() if run not in page)
    assert not missing, f"specbench report out=results/report.html; missing: {missing}"
