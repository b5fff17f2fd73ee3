"""Figures from rows, drawn with matplotlib as SVG and PNG: curves, such as quality against speed, lists and maps."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.rows.columns import Cells
from specbench.storage import figure_files
from specbench.tables.definitions import AXES, Column, Maps, Series, Stack, Table, TableFigure
from specbench.tables.layout import comparable, half_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = tuple[str, str]  # colour, marker
Point = tuple[float, float, float, float]  # x, y and half their 95 % intervals

#: Ten colours, each with its own marker, then the first ones with other markers. Seven are from Okabe and Ito. Any two
#: of the ten are at least as different as the closest two of these seven, also for colour-blind readers.
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#E69F00", "D"),
    ("#009E73", "^"),
    ("#CC79A7", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
    ("#332288", "<"),
    ("#7A3D00", ">"),
    ("#882255", "p"),
    ("#0072B2", "h"),
    ("#D55E00", "*"),
    ("#E69F00", "d"),
    ("#009E73", "8"),
)
#: Hatches that distinguish filled areas in print.
_HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++")


def draw(table: Table, rows: Mapping[str, Cells | None], folder: Path, stem: str) -> list[Path]:
    """Draws the table's figure from its measured rows, without missing rows, panels without rows, and values in
    doubt. Returns the written files.

    Bars are 95 % intervals.
    """
    figure, rows = table.figure, comparable(table, rows)
    if isinstance(figure, TableFigure):
        measured = tuple(panel for panel in figure.panels if any(rows.get(key) for key in panel.keys))
        curves, kind = replace(figure, panels=measured or figure.panels), _log_curves if figure.log else _curves
        return figure_files.save(lambda: kind(curves, table, rows), folder, stem)
    if isinstance(figure, Series):
        return figure_files.save(lambda: _series(figure, table, rows), folder, stem)
    if isinstance(figure, Stack):
        return figure_files.save(lambda: _stack(figure, table, rows), folder, stem)
    assert isinstance(figure, Maps)
    return figure_files.save(lambda: _maps(figure, table, rows), folder, stem)


def new_axes(down: int, across: int, **shared: Any) -> tuple[Figure, Any]:
    """A figure and its axes (down, across)."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(4.1 * across, 3.4 * down), layout="constrained")
    return drawn, drawn.subplots(down, across, squeeze=False, **shared)


def finish(drawn: Figure, axes: Iterable[Axes], across: int) -> Figure:
    """Adds one legend for everything that these axes show."""
    handles_by_label: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        handles_by_label = dict(zip(labels, handles, strict=True)) | handles_by_label
    drawn.legend(
        handles_by_label.values(),
        handles_by_label.keys(),
        loc="outside lower center",
        ncols=min(4, across),
        frameon=False,
    )
    return drawn


def _curves(figure: TableFigure, table: Table, rows: Mapping[str, Cells | None]) -> Figure:
    columns = {c.key: c for c in table.columns}
    lines = {name for panel in figure.panels for name in panel.keys}
    shown = [key for key in figure.y if any((rows.get(name) or {}).get(key) for name in lines)] or figure.y
    rows_of_axes = [(panel, x) for panel in figure.panels for x in figure.x]
    drawn, axes = new_axes(len(rows_of_axes), len(shown), sharex="row")
    styles = styles_of(sorted(([curve.label for curve in panel.curves] for panel in figure.panels), key=len))
    for (panel, x), strip in zip(rows_of_axes, axes, strict=True):
        for key, axis in zip(shown, strip, strict=True):
            base = rows.get(panel.baseline or figure.baseline)
            if base is not None and base.get(key):
                _band(axis, base, columns[key])
            curves = {curve.label: points(rows, curve.lines, x, key) for curve in panel.curves}
            for label, curve_points in curves.items():
                draw_points(axis, curve_points, styles[label], ms=5, elinewidth=0.7, label=label)
            if not any(curves.values()):
                axis.set_axis_off()
                continue
            if x not in AXES:
                means = [p[:2] for curve_points in curves.values() for p in curve_points]
                front = zip(*pareto_front(means, down=columns[key].better == "lower"), strict=True)
                # as stairs: up to a point's x, its y is achievable
                axis.step(
                    *front, where="pre", color="black", lw=1.4, ls=":", zorder=3, label="Pareto front of the means"
                )
            axis.set_xlabel(AXES.get(x) or columns[x].label.lower())
            axis.set_ylabel(f"{wrapped(columns[key].label)}\n({columns[key].better} is better)")
            axis.set_title(panel.label, fontsize=10)
            axis.grid(alpha=0.25)
    return finish(drawn, axes.flat, len(shown))


def _log_curves(figure: TableFigure, table: Table, rows: Mapping[str, Cells | None]) -> Figure:
    """Draws one pair of axes for each panel, one below the other with a common x, so that panels can be compared."""
    from matplotlib.figure import Figure

    [x], [y] = figure.x, (column for column in table.columns if column.key in figure.y)
    x_label = AXES.get(x) or next(column.label for column in table.columns if column.key == x).lower()
    count = len(figure.panels)
    drawn = Figure(figsize=(9.0, 0.7 + 1.65 * count))
    margins = {"left": 0.09, "right": 0.99, "bottom": 0.55 / drawn.get_figheight(), "top": 1 - 0.05 / count}
    grid = drawn.add_gridspec(2 * count, 1, height_ratios=(3.4, 1) * count, hspace=0, **margins)
    axes = [(drawn.add_subplot(grid[2 * i]), drawn.add_subplot(grid[2 * i + 1])) for i in range(count)]
    styles = styles_of([[curve.label for curve in panel.curves if len(curve.lines) > 2] for panel in figure.panels])
    measured = {line.key: p for line in table.lines if (p := point(rows.get(line.key), x, y.key))}
    above = [p for p in measured.values() if p[1] > y.rounding]
    if not above:
        return drawn
    low, most = min(p[1] for p in above) / 1.5, max(p[1] + p[3] for p in above)
    high = low * (most / low) ** 1.25  # the names of panels stand above all curves
    left, right = min(p[0] - p[2] for p in measured.values()), max(p[0] + p[2] for p in measured.values())
    for axis in itertools.chain(*axes):
        axis.set_xlim(left - 0.04 * (right - left), right + 0.16 * (right - left))
        axis.grid(alpha=0.25)
        axis.tick_params(labelbottom=False, bottom=False)
    for panel, (axis, zeros) in zip(figure.panels, axes, strict=True):
        axis.set_yscale("log")
        axis.set_ylim(low, high)
        axis.spines["bottom"].set_visible(False)
        axis.text(0.006, 0.94, panel.label, transform=axis.transAxes, va="top", fontweight="bold")
        zeros.set_ylim(-1, 0.7)
        zeros.set_yticks([0], ["0"])
        zeros.spines["top"].set(ls=(0, (2, 3)), color="0.6")  # the axis is broken here
        ends, edge = [], 0.0
        for curve in panel.curves:
            measured_points = [measured[key] for key in curve.lines if key in measured]
            over = [p for p in measured_points if p[1] > y.rounding]
            if not over:
                continue
            style = styles.get(curve.label, ("black", "o"))
            ends.append((curve.label, over[-1][:2], style[0]))
            edge = max(edge, *(px + dx for px, _, dx, _ in over))
            if len(over) < len(measured_points):  # the curve starts at zero
                axis.plot([measured_points[0][0], over[0][0]], [low, over[0][1]], color=style[0], lw=0.8, ls=":")
            draw_points(axis, over, style, ms=4.5, elinewidth=0.6)
        keys = dict.fromkeys([panel.baseline or figure.baseline, *panel.keys])
        exact = {key: measured[key] for key in keys if key in measured and measured[key][1] <= y.rounding}
        names = {line.key: line.label.removesuffix(f", {panel.label}") for line in table.lines}
        for px, _, dx, _ in exact.values():
            zeros.errorbar([px], [0], None, [dx], color="black", marker="o", mfc="white", ms=5, elinewidth=0.6)
        _name_below(zeros, [(names[key], point[0]) for key, point in exact.items()])
        _name_ends(axis, ends, edge)
    axes[-1][1].tick_params(labelbottom=True, bottom=True)
    axes[-1][1].set_xlabel(x_label)
    drawn.supylabel(f"{y.label}, 0 is lossless", fontsize="medium", x=0.005)
    return drawn


def styles_of(panels: Sequence[Sequence[str]]) -> dict[str, Style]:
    """Label -> style. A curve has the same style in all panels, and its own colour as long as there are enough. After
    that, two curves of one panel differ in colour, and any two in colour or marker."""
    styles: dict[str, Style] = {}
    for labels in panels:
        for label in labels:
            near = {styles[other][0] for other in labels if other in styles}
            used = set(styles.values())
            colours = {colour for colour, _ in used}
            free = sorted(_STYLES, key=lambda style: (style[0] in near, style[0] in colours, style in used))
            styles.setdefault(label, free[0])
    return styles


def _name_ends(axis: Axes, ends: Sequence[tuple[str, tuple[float, float], str]], edge: float) -> None:
    """Writes the name of every curve to the right of `edge`, where all curves end, without overlap."""
    ends = sorted(ends, key=lambda end: end[1][1])
    point_size = axis.figure.dpi / 72
    to_data = axis.transData.inverted()
    right = axis.transData.transform((edge, 1))[0] + 14 * point_size
    heights = [axis.transData.transform(point)[1] for _, point, _ in ends]
    top = axis.transAxes.transform((0, 1))[1] - 7 * point_size
    spread = apart(heights, [11.5 * point_size] * len(ends), top)
    for (label, point, colour), height in zip(ends, spread, strict=True):
        line = {"arrowstyle": "-", "color": colour, "lw": 0.9, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
        x, y = to_data.transform((right, height))
        axis.annotate(label, point, (x, y), va="center", fontsize=9, arrowprops=line)


def _name_below(axis: Axes, points: Sequence[tuple[str, float]]) -> None:
    """Writes the name of every point at zero below it, without overlap."""
    points = sorted(points, key=lambda point: point[1])
    texts = [axis.text(x, -0.62, label, ha="center", va="center", fontsize=9) for label, x in points]
    widths = [text.get_window_extent().width + 8 for text in texts]
    middles = [axis.transData.transform((x, 0))[0] for _, x in points]
    gaps = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(widths))]
    for text, (_, x), middle in zip(texts, points, apart(middles, gaps), strict=True):
        moved = axis.transData.inverted().transform((middle, 0))[0]
        text.set_x(moved)
        axis.plot([x, moved], [-0.1, -0.4], color="0.5", lw=0.5)


def apart(wanted: Sequence[float], gaps: Sequence[float], most: float = math.inf) -> list[float]:
    """Positions in the order of `wanted`, each at least its gap after the one before, and at most `most`. Positions
    that would be closer are moved as a group, which keeps its mean."""
    import numpy as np
    from scipy.optimize import isotonic_regression

    if not len(wanted):
        return []
    offsets = np.cumsum(gaps)
    moved = isotonic_regression(np.subtract(wanted, offsets)).x + offsets
    return list(np.minimum(moved, most - (offsets[-1] - offsets)))


def wrapped(label: str) -> str:
    """The label of a vertical axis, in lines that are no longer than a small panel is high."""
    return textwrap.fill(label, 32)


def pareto_front(points: Sequence[tuple[float, float]], down: bool) -> list[tuple[float, float]]:
    """The points (x, y) for which no other point has a larger x without a worse y (less is better if `down`); sorted by
    x."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda p: (p[0], -p[1] if down else p[1]), reverse=True):
        if not kept or (y < kept[-1][1] if down else y > kept[-1][1]):
            kept.append((x, y))
    return kept[::-1]


def _series(figure: Series, table: Table, rows: Mapping[str, Cells | None]) -> Figure:
    lists = {line.label: _list(rows.get(line.key), figure.key) for line in table.lines}
    lists = {label: values for label, values in lists.items() if values}
    drawn, axes = new_axes(1, 2 if figure.shares else 1)
    for axis, gains in zip(axes[0], (False, True), strict=False):
        for i, ((label, values), (colour, marker)) in enumerate(zip(lists.items(), _STYLES, strict=False)):
            positions = [figure.first + n for n in range(len(values))]
            heights = values
            if gains:  # beyond the first token of a step
                gained = [(position - 1) * share for position, share in zip(positions, values, strict=True)]
                heights = [value / sum(gained) for value in gained] if sum(gained) else gained
            if figure.bars:
                width = 0.8 / len(lists)
                axis.bar([p + (i + 0.5) * width - 0.4 for p in positions], heights, width, color=colour, label=label)
            else:
                axis.plot(positions, heights, color=colour, marker=marker, ms=3, lw=1, label=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel(figure.x)
        axis.set_ylabel("share of the tokens gained\nover one per step" if gains else figure.y)
        axis.grid(alpha=0.25)
    return finish(drawn, axes.flat, 2 if figure.shares else 1)


def _stack(figure: Stack, table: Table, rows: Mapping[str, Cells | None]) -> Figure:
    labels = {c.key: c.label.partition(" (")[0] for c in table.columns}
    measured = [(line.label, row) for line in table.lines if (row := rows.get(line.key)) is not None][::-1]
    drawn, axes = new_axes(1, 1)
    axis = axes[0][0]
    drawn.set_size_inches(7, 1.6 + 0.4 * len(measured))
    ends = [0.0] * len(measured)
    for key, (colour, _), hatch in zip(figure.keys, _STYLES, _HATCHES, strict=False):
        pieces = [float(row.get(key) or 0) for _, row in measured]
        axis.barh(
            [label for label, _ in measured],
            pieces,
            0.6,
            ends,
            color=colour,
            hatch=hatch,
            ec="white",
            label=labels[key],
        )
        ends = [end + piece for end, piece in zip(ends, pieces, strict=True)]
    axis.set_xlabel(figure.label)
    axis.grid(axis="x", alpha=0.25)
    return finish(drawn, [axis], 3)


def _maps(figure: Maps, table: Table, rows: Mapping[str, Cells | None]) -> Figure:
    import numpy as np

    lists = {line.label: _list(rows.get(line.key), figure.key) for line in table.lines}
    squares = {
        label: np.reshape(values, (side, side))
        for label, values in lists.items()
        if values and (side := math.isqrt(len(values))) ** 2 == len(values)
    }
    drawn, axes = new_axes(1, max(1, len(squares)))
    for axis, (label, square) in zip(axes[0], squares.items(), strict=False):
        shown = axis.imshow(square, vmin=0, vmax=1, cmap="cividis")
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("column (tokens)")
        axis.set_ylabel("row (tokens)")
    if squares:
        drawn.colorbar(shown, ax=axes[0].tolist(), label=figure.label)
    return drawn


def _list(row: Cells | None, key: str) -> list[float]:
    """The list in a row's cell; null becomes NaN."""
    if row is None or not row.get(key):
        return []
    return [math.nan if value is None else float(value) for value in json.loads(row[key])]


def _band(axis: Axes, row: Cells, column: Column) -> None:
    """Draws the baseline as a line, and its 95 % interval as a band."""
    value, half = float(row[column.key]), half_width(row, column.key)
    axis.axhline(value, color="0.45", lw=1, ls="--", label="vanilla")
    axis.axhspan(value - half, value + half, color="0.85", zorder=0)


def point(row: Cells | None, x: str, y: str) -> Point | None:
    """The point of a row; None if the row does not have both values."""
    if row is None or not row.get(x) or not row.get(y):
        return None
    return float(row[x]), float(row[y]), half_width(row, x), half_width(row, y)


def points(rows: Mapping[str, Cells | None], lines: Sequence[str], x: str, y: str) -> list[Point]:
    """The points of a curve."""
    return [p for key in lines if (p := point(rows.get(key), x, y))]


def draw_points(axis: Axes, points: Sequence[Point], style: Style, **more: Any) -> None:
    """Draws a curve with the intervals of its points, if it has any."""
    if points:
        x, y, dx, dy = zip(*points, strict=True)
        axis.errorbar(x, y, dy, dx, color=style[0], marker=style[1], lw=1.2, **more)
