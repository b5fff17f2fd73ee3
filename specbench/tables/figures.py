"""Figures from rows: quality against speed, one curve a method. Drawn with matplotlib, as SVG and PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.records import stderr_of
from specbench.tables.definitions import Column, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, str]

#: Okabe and Ito's colours, told apart by colour-blind readers, each with a marker of its own for print.
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#E69F00", "D"),
    ("#009E73", "^"),
    ("#CC79A7", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)
_NORMAL95 = 1.96


def tradeoff(table: Table, rows: Mapping[str, Row | None], folder: Path, stem: str) -> list[Path]:
    """Draw the table's figure from its measured rows; points without a row are left out. Returns the files written.

    Bars are 95 % intervals: 1.96 standard errors of the quality, 1.96 standard errors of the mean accepted length.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {
        "svg.hashsalt": "specbench",
        "svg.fonttype": "none",
    }  # the same file from the same rows
    import matplotlib.pyplot as plt

    assert table.figure is not None
    figure, columns = table.figure, {c.key: c for c in table.columns}
    across, down = len(figure.y), len(figure.panels)
    drawn, axes = plt.subplots(
        down, across, figsize=(4.1 * across, 3.4 * down), sharex="row", squeeze=False, layout="constrained"
    )
    for panel, line in zip(figure.panels, axes, strict=True):
        for key, axis in zip(figure.y, line, strict=True):
            base = rows.get(figure.baseline)
            if base is not None and base.get(key):
                _band(axis, base, columns[key])
            for curve, (colour, marker) in zip(panel.curves, _STYLES, strict=False):
                points = [p for name in curve.lines if (p := _point(rows.get(name), columns[figure.x], columns[key]))]
                if points:
                    x, y, dx, dy = zip(*points, strict=True)
                    axis.errorbar(
                        x, y, dy, dx, color=colour, marker=marker, ms=5, lw=1.2, elinewidth=0.7, label=curve.label
                    )
            arrow = {"up": "higher is better", "down": "lower is better"}[columns[key].better]
            axis.set_xlabel(f"{columns[figure.x].label.lower()} (tokens per target pass)")
            axis.set_ylabel(f"{columns[key].label} ({arrow})")
            axis.set_title(panel.label, fontsize=10)
            axis.grid(alpha=0.25)
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    written = []
    for ending in ("svg", "png"):
        path = folder / f"{stem}.{ending}"
        metadata: dict[str, Any] = {"Date": None} if ending == "svg" else {"Software": None}
        drawn.savefig(path, dpi=150, metadata=metadata)
        written.append(path)
    plt.close(drawn)
    return written


def _band(axis: Axes, row: Row, column: Column) -> None:
    """The baseline as a line, its 95 % interval as a band."""
    value, spread = float(row[column.key]), _stderr(row, column)
    axis.axhline(value, color="0.45", lw=1, ls="--", label="vanilla")
    axis.axhspan(value - _NORMAL95 * spread, value + _NORMAL95 * spread, color="0.85", zorder=0)


def _point(row: Row | None, x: Column, y: Column) -> tuple[float, float, float, float] | None:
    """(x, y, half-width of x, half-width of y); None where the row does not have both."""
    if row is None or not row.get(x.key) or not row.get(y.key):
        return None
    return float(row[x.key]), float(row[y.key]), _NORMAL95 * _stderr(row, x), _NORMAL95 * _stderr(row, y)


def _stderr(row: Row, column: Column) -> float:
    """The standard error of a column; rows of older versions have the standard deviation over their pictures, or
    neither, which counts as 0."""
    if text := row.get(stderr_of(column.key)):
        return float(text)
    std = row.get(f"{column.key.removesuffix('_mean')}_std") or 0.0
    return float(std) / math.sqrt(float(row["n"]))
