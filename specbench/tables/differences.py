"""The figure of a table with `matched`: the curves of a panel, and how much each of the others differs from the first
one, with its simultaneous band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.rows.differences import LEVEL
from specbench.tables import figures
from specbench.tables.definitions import Column, Panel, TableFigure, row_column
from specbench.tables.layout import NORMAL95, Row, printable
from specbench.tables.matched import adjusted_pairs, numbers, signed
from specbench.tables.measure import TablePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS = 3  # axes in a row


def draw(todo: TablePlan, folder: Path, stem: str) -> list[Path]:
    """Draws every panel and column with pairs of its first curve, if there are any; returns the files written."""
    figure, groups = todo.table.figure, adjusted_pairs(todo)
    assert isinstance(figure, TableFigure)
    columns = {column.key: column for column in todo.table.columns}
    parts = []
    for panel in todo.tested_panels:
        for (label, x, y), some in groups.items():
            pairs = [(row, p) for row, p in some if row["a"] == panel.curves[0].label]
            if label == panel.label and pairs:
                parts.append((panel, x, columns[y], pairs))
    if not parts:
        return []
    return figures.save(lambda: _figure(parts, todo), folder, stem)


def _figure(parts: Sequence[tuple[Panel, str, Column, list[tuple[Row, float]]]], todo: TablePlan) -> Figure:
    rows, _ = printable(todo.table, todo.rows)
    styles = figures.styles_of([[curve.label for curve in panel.curves] for panel, *_ in parts])
    heights = [-(-(1 + len(pairs)) // _ACROSS) for *_, pairs in parts]
    drawn, axes = figures.new_axes(sum(heights), _ACROSS)
    top = 0
    for (panel, x, y, pairs), height in zip(parts, heights, strict=True):
        free = axes[top : top + height].ravel()
        top += height
        _curves(free[0], panel, x, y, rows, styles)
        for axis, (row, p) in zip(free[1:], pairs, strict=False):
            _difference(axis, panel, y, row, p, styles[row["b"]][0])
        for axis in free[: 1 + len(pairs)]:
            axis.set_xlabel(row_column(x).label.lower())
            axis.grid(alpha=0.25)
        for axis in free[1 + len(pairs) :]:
            axis.set_axis_off()
    return figures.finish(drawn, axes.flat, _ACROSS)


def _curves(
    axis: Axes, panel: Panel, x: str, y: Column, rows: Mapping[str, Row | None], styles: Mapping[str, tuple[str, str]]
) -> None:
    for curve in panel.curves:
        points = [p for key in curve.lines if (p := figures.point(rows.get(key), x, y.key, NORMAL95))]
        if points:
            colour, marker = styles[curve.label]
            across, up, dx, dy = zip(*points, strict=True)
            axis.errorbar(
                across, up, dy, dx, color=colour, marker=marker, ms=4, lw=1.2, elinewidth=0.6, label=curve.label
            )
    axis.set_ylabel(y.label)
    axis.set_title(panel.label, fontsize=10)


def _difference(axis: Axes, panel: Panel, y: Column, row: Row, p: float, colour: str) -> None:
    at, differences, margins = (numbers(row, name) for name in ("at", "differences", "margins"))
    low, high = ([d + sign * m for d, m in zip(differences, margins, strict=True)] for sign in (-1, 1))
    axis.fill_between(at, low, high, color=colour, alpha=0.25, lw=0)
    axis.plot(at, differences, color=colour, lw=1.4)
    axis.axhline(0, color="0.3", lw=0.8)
    axis.set_ylabel(f"{y.label}: difference")
    axis.set_title(f"{row['b']}\nless {row['a']}", fontsize=9)
    text = f"mean {signed(row, y.decimals)}, p = {p:.2g}" if row["p"] else f"mean {signed(row, y.decimals)}"
    axis.text(0.02, 0.97, text, transform=axis.transAxes, va="top", fontsize=8)
    axis.text(0.98, 0.02, f"band: {LEVEL:.0%}, simultaneous", transform=axis.transAxes, ha="right", fontsize=7)
