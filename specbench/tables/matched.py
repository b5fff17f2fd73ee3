"""Pairs of a figure's curves at equal x, such as rules at equal step compression: the distance between the two over
their common range, and where they differ. The figure shows the curves of a panel, and the difference of each from the
first one with its simultaneous band."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, groupby
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.rows.columns import Cells
from specbench.rows.paired import LEVEL, half_interval, holm, p_value
from specbench.storage import figure_files
from specbench.tables import figures
from specbench.tables.definitions import Column, Panel, row_column
from specbench.tables.layout import Header, Notes, TableCell, TableEntry, TableSheet, comparable, facts
from specbench.tables.table_runs import TablePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GroupKey = tuple[str, str, str]  # panel, x, y
Pair = tuple[Cells, float]  # its row and its adjusted p
PairGroups = dict[GroupKey, list[Pair]]
_MISSING = "Not compared: runs are missing or did not measure this, or the curves have no common range."
_NO_RATIO = "No ratio: a mean is not above 0 in every sample of the prompts."
_NO_TEST = "No test: every sample of the prompts has the same difference."
_ACROSS = 3  # axes in a row of the figure


def build(todo: TablePlan, command: str) -> TableSheet:
    """An entry for each pair of curves, with the same cells for each column of `table.matched`."""
    table, notes, groups = todo.table, Notes(), adjusted_pairs(todo)
    pairs = {(*key, row["a"], row["b"]): (row, p) for key, group in groups.items() for row, p in group}
    columns = {column.key: column for column in table.columns}
    compared = list(dict.fromkeys((x, y) for _, x, y in table.comparisons))
    headers = [header for x, y in compared for header in _headers(columns[y], x, notes)]
    entries = []
    for panel in table.compared_panels:
        for a, b in combinations(panel.curves, 2):
            cells: list[TableCell] = []
            for x, y in compared:
                pair = pairs.get((panel.label, x, y, a.label, b.label))
                cells += [notes.gap(_MISSING)] * 5 if pair is None else _cells(pair, columns[y].decimals, notes)
            label = f"{panel.label}: {b.label} against {a.label}"
            entries.append(TableEntry(label, "measured", todo.model, (), tuple(cells)))
    rows = comparable(table, todo.rows)
    about = (*facts([row for row in rows.values() if row is not None]), ("Command", command))
    lines_of = table.matched and table.matched.lines_of
    shared = [f"The curves have the lines and runs of the table {lines_of}."] if lines_of else []
    remarks = (*table.remarks, *shared, *_summary(todo, groups))
    return TableSheet(
        table.id, table.title, table.paper, about, tuple(headers), tuple(entries), notes.all(), remarks, ()
    )


def adjusted_pairs(todo: TablePlan) -> PairGroups:
    """By panel, x and y: the pairs of curves of exactly these runs, each with its p-value after Holm's adjustment over
    all pairs that the table plans (1 without a test). A pair that is not compared yet counts as p = 1: its real value
    can only make the other adjusted values smaller."""
    runs = todo.equal
    rows = [row for row in todo.pairs if row["runs"] in runs and row["at"]]  # with a common range
    tested = [p for row in rows if (p := p_of(row)) is not None]
    adjusted = iter(holm([*tested, *[1.0] * (planned_pairs(todo) - len(tested))]))
    groups: PairGroups = {}
    for row in rows:
        key = (row["panel"], row["x"], row["y"])
        groups.setdefault(key, []).append((row, 1.0 if p_of(row) is None else next(adjusted)))
    return groups


def p_of(row: Cells) -> float | None:
    """The p-value of a pair, without adjustment: of its ratio, by Student's t, whose interval is the ratio's. Without a
    ratio it is the p-value of the difference. None without a test."""
    if not row["p"] or not ratio(row):
        return float(row["p"]) if row["p"] else None
    n = int(row["prompts"])
    center, low, high = (math.log(float(row[name])) for name in ("ratio", "ratio_low", "ratio_high"))
    return p_value(n, center, (high - low) / 2 / half_interval(n, 1.0))


def planned_pairs(todo: TablePlan) -> int:
    """The number of pairs of curves that the table compares, over all of its columns."""
    return sum(comb(len(panel.curves), 2) for panel, _, _ in todo.table.comparisons)


def numbers(row: Cells, name: str) -> list[float]:
    """A list in a row: `at`, `values`, `differences` or `margins`."""
    return [float(value) for value in json.loads(row[name])]


def stretches(row: Cells) -> list[tuple[float, float, bool]]:
    """Where the simultaneous band excludes 0: the first and last of neighbouring values of x, and whether the second
    curve is above the first one."""
    at, differences, margins = (numbers(row, name) for name in ("at", "differences", "margins"))
    signs = [(abs(d) > m) * (1 if d > 0 else -1) for d, m in zip(differences, margins, strict=True)]
    spans = []
    for sign, group in groupby(zip(at, signs, strict=True), key=lambda pair: pair[1]):
        xs = [x for x, _ in group]
        if sign:
            spans.append((xs[0], xs[-1], sign > 0))
    return spans


def _headers(y: Column, x: str, notes: Notes) -> Iterator[Header]:
    name = row_column(x).label.partition(" (")[0].lower()
    mean = (
        f"{y.label} at equal {name}: mean over the range that both curves reach, from straight lines between the runs"
    )
    interval = f"in brackets the {LEVEL:.0%} interval, by paired resampling of the prompts"
    measured = f"; measured: {y.measured_as}" if y.measured_as else ""
    texts = {
        name.capitalize(): f"The range over which the two curves are compared: {x}.",
        f"{y.label}, ratio": f"{mean}, over the mean of the other curve; {interval}{measured}.",
        f"{y.label}, difference": f"{mean}, minus the mean of the other curve; {interval}.",
        "p": "Of the ratio, by Student's t with the width of its interval, or of the difference if it has none. After"
        " Holm's adjustment over all pairs of the table.",
        "Differs at": "Where the band around all differences of the pair, which has a coverage of"
        f" {LEVEL:.0%}, excludes 0. The band is for this pair alone, without adjustment for the other pairs.",
    }
    for label, text in texts.items():
        yield Header(label, y.better if label.endswith("difference") else "", (notes.mark(text),))


def _cells(pair: Pair, decimals: int, notes: Notes) -> list[TableCell]:
    row, p = pair
    spans = [f"{low:.2f} to {high:.2f} ({'above' if up else 'below'})" for low, high, up in stretches(row)]
    mean_ratio = ratio(row)
    return [
        TableCell(f"{float(row['from_x']):.2f} to {float(row['to_x']):.2f}"),
        TableCell(mean_ratio) if mean_ratio else notes.gap(_NO_RATIO),
        TableCell(signed(row, decimals)),
        TableCell(f"{p:.2g}") if row["p"] else notes.gap(_NO_TEST),
        TableCell("; ".join(spans) or "nowhere"),
    ]


def ratio(row: Cells) -> str:
    """The ratio of a pair and its interval: "1.94 (1.75 to 2.13)"; "" if a mean is not above 0."""
    ends = [row[name] for name in ("ratio", "ratio_low", "ratio_high")]
    return f"{float(ends[0]):.2f} ({float(ends[1]):.2f} to {float(ends[2]):.2f})" if all(ends) else ""


def signed(row: Cells, decimals: int) -> str:
    """The mean difference of a pair and its interval: "+0.021 (0.018 to 0.025)"."""
    value, low, high = (float(row[name]) for name in ("difference", "low", "high"))
    width = (high - low) / 2
    shown = max(decimals, 1 - math.floor(math.log10(width))) if width > 0 else decimals
    return f"{round(value, shown) + 0.0:+.{shown}f} ({low:.{shown}f} to {high:.{shown}f})"


def _summary(todo: TablePlan, groups: PairGroups) -> Iterator[str]:
    labels = {column.key: column.label for column in todo.table.columns}
    for (panel, _, y), group in groups.items():
        different = sum(p < 1 - LEVEL for _, p in group)
        prompts = group[0][0]["prompts"]
        counts = f"{different} of {len(group)} pairs of curves"
        yield f"{panel}, {labels[y]}: {counts} differ significantly on {prompts} prompts."
    absent = planned_pairs(todo) - sum(bool(row["p"]) for group in groups.values() for row, _ in group)
    missing = f". {absent} of them are not compared and count as p = 1" if absent else ""
    yield (
        f"Significant: p < {1 - LEVEL:.2g} after Holm's adjustment over all {planned_pairs(todo)} pairs of the"
        f" table{missing}. A pair without a significant difference is not shown to be equal: read its interval."
    )


# --- the figure -------------------------------------------------------------------------------------------------------

Part = tuple[Panel, str, Column, list[Pair]]  # part of the figure: a panel, x, y, and the pairs of the first curve


def draw(todo: TablePlan, folder: Path, stem: str) -> list[Path]:
    """Draws every panel and column with pairs of its first curve, if any. Returns the written files."""
    groups, columns = adjusted_pairs(todo), {column.key: column for column in todo.table.columns}
    parts: list[Part] = []
    for panel, x, y in todo.table.comparisons:
        first = panel.curves[0].label
        if pairs := [pair for pair in groups.get((panel.label, x, y), ()) if pair[0]["a"] == first]:
            parts.append((panel, x, columns[y], pairs))
    return figure_files.save(lambda: _figure(parts, todo), folder, stem) if parts else []


def _figure(parts: Sequence[Part], todo: TablePlan) -> Figure:
    rows = comparable(todo.table, todo.rows)
    styles = figures.styles_of([[curve.label for curve in panel.curves] for panel, *_ in parts])
    heights = [math.ceil((1 + len(pairs)) / _ACROSS) for *_, pairs in parts]
    drawn, axes = figures.new_axes(sum(heights), _ACROSS)
    top = 0
    for (panel, x, y, pairs), height in zip(parts, heights, strict=True):
        free = axes[top : top + height].ravel()
        top += height
        _curves(free[0], panel, x, y, rows, styles)
        for axis, pair in zip(free[1:], pairs, strict=False):
            _difference(axis, y, pair, styles[pair[0]["b"]][0])
        for axis in free[: 1 + len(pairs)]:
            axis.set_xlabel(row_column(x).label.lower())
            axis.grid(alpha=0.25)
        for axis in free[1 + len(pairs) :]:
            axis.set_axis_off()
    return figures.finish(drawn, axes.flat, _ACROSS)


def _curves(
    axis: Axes, panel: Panel, x: str, y: Column, rows: Mapping[str, Cells | None], styles: Mapping[str, figures.Style]
) -> None:
    for curve in panel.curves:
        points = figures.points(rows, curve.lines, x, y.key)
        figures.draw_points(axis, points, styles[curve.label], ms=4, elinewidth=0.6, label=curve.label)
    axis.set_ylabel(figures.wrapped(y.label))
    axis.set_title(panel.label, fontsize=10)


def _difference(axis: Axes, y: Column, pair: Pair, colour: str) -> None:
    row, p = pair
    at, differences, margins = (numbers(row, name) for name in ("at", "differences", "margins"))
    low, high = ([d + sign * m for d, m in zip(differences, margins, strict=True)] for sign in (-1, 1))
    axis.fill_between(at, low, high, color=colour, alpha=0.25, lw=0)
    axis.plot(at, differences, color=colour, lw=1.4)
    axis.axhline(0, color="0.3", lw=0.8)
    axis.set_ylabel(figures.wrapped(f"{y.label}: difference"))
    axis.set_title(f"{row['b']}\nminus {row['a']}", fontsize=9)
    mean = f"ratio {ratio(row)}" if ratio(row) else f"mean {signed(row, y.decimals)}"
    text = mean + (f", p = {p:.2g}" if row["p"] else "")
    axis.text(0.02, 0.97, text, transform=axis.transAxes, va="top", fontsize=8)
    axis.text(0.98, 0.02, f"band: {LEVEL:.0%}, simultaneous", transform=axis.transAxes, ha="right", fontsize=7)
