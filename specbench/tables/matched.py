"""The curves of a figure at equal values of a column, such as rules at equal accepted length: a table of interpolated
cells, all of which say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from specbench.tables.definitions import Column, Curve, Matched, Panel, Table, TableFigure
from specbench.tables.figures import stderr
from specbench.tables.layout import Header, Notes, Row, TableCell, TableEntry, TableSheet, facts, number, printable

HOW = (
    "Interpolated linearly between the two lines of the curve on either side; ± its standard error, from those of both "
    "lines as if they were independent."
)


def build(table: Table, model: str, measured: Mapping[str, Row | None], command: str) -> TableSheet:
    """A cell for each curve, each column of `table.matched` and each value at which the curves are compared."""
    figure, matched = table.figure, table.matched
    assert isinstance(figure, TableFigure)
    assert matched is not None
    notes, columns = Notes(), {column.key: column for column in table.columns}
    rows, _ = printable(table, {line.key: measured.get(line.key) for line in table.lines})
    headers = [
        _header(columns[y], columns[x], [(panel, dict(matched.at[panel.label])[x]) for panel in figure.panels], notes)
        for x in _against(matched)
        for y in matched.y
    ]
    entries = [
        TableEntry(
            f"{panel.label}: {curve.label}", "measured", model, (), _cells(panel, curve, matched, columns, rows, notes)
        )
        for panel in figure.panels
        for curve in panel.curves
    ]
    present = [row for row in rows.values() if row is not None]
    about = (*facts(present), ("Command", command))
    remarks = (*table.remarks, "The lines of the curves, and their runs, are those of the table rules_tradeoff.")
    return TableSheet(
        table.id, table.title, table.paper, about, tuple(headers), tuple(entries), notes.all(), remarks, ()
    )


def _against(matched: Matched) -> list[str]:
    return [x for x, _ in next(iter(matched.at.values()))]


def _header(y: Column, x: Column, values: Sequence[tuple[Panel, float]], notes: Notes) -> Header:
    where = ", ".join(f"{value:g} with {panel.label}" for panel, value in values)
    name = x.label.partition(" (")[0].lower()
    text = f"{y.label} at equal {name}: {where}"
    if y.measured_as:
        text += f"; measured: {y.measured_as}"
    return Header(f"{y.label} at equal {name}", y.better, (notes.mark(f"{text}."),))


def _cells(
    panel: Panel,
    curve: Curve,
    matched: Matched,
    columns: Mapping[str, Column],
    rows: Mapping[str, Row | None],
    notes: Notes,
) -> tuple[TableCell, ...]:
    lines = [row for name in curve.lines if (row := rows.get(name)) is not None]
    cells = []
    for x, value in matched.at[panel.label]:
        for y in matched.y:
            points = sorted(point for row in lines if (point := _point(row, x, y)))
            found = interpolated(points, value)
            if found is None:
                reach = "The measured lines of the curve do not reach this value."
                why = reach if points else "The runs did not measure this." if lines else "Not measured yet."
                cells.append(TableCell(marks=(notes.mark(why),)))
            else:
                decimals = max(columns[y].decimals, -math.floor(math.log10(found[1])) if found[1] > 0 else 0)
                cells.append(TableCell(number(str(found[0]), decimals), f"{found[1]:.{decimals}f}", (notes.mark(HOW),)))
    return tuple(cells)


def _point(row: Row, x: str, y: str) -> tuple[float, float, float, float] | None:
    """(x, y, standard error of x, of y) of a row; None where it lacks a value."""
    if not row.get(x) or not row.get(y):
        return None
    return float(row[x]), float(row[y]), stderr(row, x), stderr(row, y)


def interpolated(points: Sequence[tuple[float, float, float, float]], x: float) -> tuple[float, float] | None:
    """y at x, and its standard error to first order, on the line between the two neighbours of x among points (x, y,
    standard error of x, of y) in the order of x. None outside of them."""
    for (x0, y0, dx0, dy0), (x1, y1, dx1, dy1) in pairwise(points):
        if x0 <= x <= x1 and x1 > x0:
            share, slope = (x - x0) / (x1 - x0), (y1 - y0) / (x1 - x0)
            left, right = math.hypot(dy0, slope * dx0), math.hypot(dy1, slope * dx1)
            return y0 + share * (y1 - y0), math.hypot((1 - share) * left, share * right)
    return None
