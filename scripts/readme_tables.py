"""The two tables of results in README.md, from the rows of the tables `field` and `field_seconds`.

python scripts/readme_tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from specbench.tables import catalog, measure
from specbench.tables.definitions import Table

RESULTS = Path(__file__).resolve().parents[1] / "results"
Row = Mapping[str, str]


def steps() -> Iterator[str]:
    yield "| method | step compression | accepted length | emitted KL, nats | reward |"
    yield "|---|---|---|---|---|"
    for label, row in _rows(catalog.TABLES["field"]):
        divergence, error = float(row["emitted_kl"]), float(row["emitted_kl_stderr"])
        cells = (
            _value(row, "step_compression", 2),
            _value(row, "accepted_length_mean", 2, "accepted_length_stderr"),
            # what float32 sums leave
            "0" if divergence < 1e-6 else f"{divergence:.5f} ± {error:.5f}",
            _value(row, "image_reward", 3),
        )
        yield f"| {label} | {' | '.join(cells)} |"


def seconds() -> Iterator[str]:
    yield "| method | latency, s | vanilla next to it, s | speed-up |"
    yield "|---|---|---|---|"
    for label, row in _rows(catalog.TABLES["field_seconds"]):
        drifted = row["timing_valid"] == "false"
        cells = (
            _value(row, "latency_s_mean", 2, "latency_s_stderr"),
            _value(row, "baseline_latency_s", 2),
            f"— (drift {float(row['drift']):+.0%})" if drifted else _value(row, "speedup_latency", 2),
        )
        yield f"| {label} | {' | '.join(cells)} |"


def _rows(table: Table) -> Iterator[tuple[str, Row]]:
    plan = measure.plan(table, table.model, None, RESULTS, measure.LocalBench())
    for need in plan.needs:
        if need.row:
            yield need.line.label, need.row


def _value(row: Row, name: str, digits: int, error: str = "") -> str:
    spread = float(row[error or f"{name}_stderr"] or 0)
    return f"{float(row[name]):.{digits}f}" + (f" ± {spread:.{digits}f}" if spread else "")


if __name__ == "__main__":
    print("\n".join((*steps(), "", *seconds())))
    sys.exit(0)
