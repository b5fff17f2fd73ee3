"""The tables of docs/audit.md: what the audit of every preset found, from results/audit.csv, and that of every variant.

python scripts/audit_table.py [results/audit.csv]
python scripts/audit_table.py results/audit_variants.csv
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from specbench.audit import tiny

HEAD = "| method | rows | TV on tables | TV on real classes | KS of continuous tokens | smallest p-value |"
VARIANTS = "| method | variant | rows | verdict, TV over all rows | smallest p-value |"
#: From the worst verdict on.
_SHOWN = {"not lossless": "refuted", "undecided": "undecided", "lossless": "not refuted"}
Row = Mapping[str, str]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield HEAD
    yield "|---" * HEAD[1:].count("|") + "|"
    for method in sorted({row["method"] for row in rows}):
        mine = [row for row in rows if row["method"] == method]
        real = [row for row in mine if row["model"] in tiny.BUILT_IN]
        tables = [row for row in mine if row["V"] and row not in real]
        cells = [
            f"`{method}`",
            str(len(mine)),
            _distance(tables, "tv_low", "tv_high"),
            _distance(real, "tv_low", "tv_high"),
            _distance([row for row in mine if row["dim"]], "ks_high"),
            f"{min(float(row['p_value']) for row in mine):.2g}",
        ]
        yield f"| {' | '.join(cells)} |"


def of_variants(rows: Sequence[Row]) -> Iterator[str]:
    yield VARIANTS
    yield "|---" * VARIANTS[1:].count("|") + "|"
    for method, variant in dict.fromkeys((row["method"], row["variant"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["variant"]) == (method, variant)]
        least = min(float(row["p_value"]) for row in mine)
        cells = [f"`{method}`", f"`{variant}`", str(len(mine)), _distance(mine, "tv_low", "tv_high"), f"{least:.2g}"]
        yield f"| {' | '.join(cells)} |"


def _distance(rows: Sequence[Row], *columns: str) -> str:
    """What the rows show, and the largest limits of all, which hold for the largest distance."""
    if not rows:
        return ""
    verdicts = {row["verdict"] for row in rows}
    limits = [f"{max(float(row[column]) for row in rows):.3f}" for column in columns]
    shown = next(shown for verdict, shown in _SHOWN.items() if verdict in verdicts)
    return f"{shown}: {' to '.join(limits)}" if shown == "refuted" and limits[1:] else f"{shown}: <= {limits[-1]}"


def main(arguments: Sequence[str]) -> int:
    with Path(*arguments or ["results/audit.csv"]).open(newline="") as file:
        rows = list(csv.DictReader(file))
    print("\n".join(of_variants(rows) if "variants" in str(arguments) else lines(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
