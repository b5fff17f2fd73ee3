"""The curves of a figure at equal values of a column, such as rules at equal accepted length: a table of interpolated
cells, all of which say so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

from specbench.compare.paired import LEVEL, POWER, holm
from specbench.tables.definitions import Column, Curve, Matched, Panel, TableFigure
from specbench.tables.figures import stderr
from specbench.tables.layout import Header, Notes, Row, TableCell, TableEntry, TableSheet, facts, number, printable
from specbench.tables.measure import TablePlan

GroupKey = tuple[str, str, str, str]  # panel, x, its value, y
PairGroups = dict[GroupKey, list[tuple[Row, float]]]
HOW = (
    "Interpolated linearly between the two lines of the curve on either side; ± its standard error, from those of both "
    "lines as if they were independent."
)


def build(todo: TablePlan, command: str) -> TableSheet:
    """A cell for each curve, each column of `table.matched` and each value at which the curves are compared."""
    table, model, measured = todo.table, todo.model, todo.rows
    figure, matched = table.figure, table.matched
    assert isinstance(figure, TableFigure)
    assert matched is not None
    panels = [panel for panel in figure.panels if panel.label in matched.at]
    notes, columns = Notes(), {column.key: column for column in table.columns}
    rows, _ = printable(table, {line.key: measured.get(line.key) for line in table.lines})
    headers = [
        _header(columns[y], columns[x], [(panel, dict(matched.at[panel.label])[x]) for panel in panels], notes)
        for x in _against(matched)
        for y in matched.y
    ]
    entries = [
        TableEntry(
            f"{panel.label}: {curve.label}", "measured", model, (), _cells(panel, curve, matched, columns, rows, notes)
        )
        for panel in panels
        for curve in panel.curves
    ]
    present = [row for row in rows.values() if row is not None]
    about = (*facts(present), ("Command", command))
    shared = [f"The lines of the curves, and their runs, are those of the table {matched.lines_of}."]
    remarks = (*table.remarks, *(shared if matched.lines_of else ()), *_tested(todo, columns))
    return TableSheet(
        table.id, table.title, table.paper, about, tuple(headers), tuple(entries), notes.all(), remarks, ()
    )


def adjusted_pairs(todo: TablePlan) -> PairGroups:
    """By panel, x, its value and y: the pairs of curves of these very runs, each with its p by Holm's adjustment over
    all of them (without a test 1)."""
    runs = todo.equal
    rows = [row for row in todo.pairs if row["runs"] in runs]
    adjusted = iter(holm([float(row["p"]) for row in rows if row["p"]]))
    groups: PairGroups = {}
    for row in rows:
        key = (row["panel"], row["x"], row["value"], row["y"])
        groups.setdefault(key, []).append((row, next(adjusted) if row["p"] else 1.0))
    return groups


def _tested(todo: TablePlan, columns: Mapping[str, Column]) -> Iterator[str]:
    """For every panel and column a sentence with the pairs of curves that differ, and one on the adjustment."""
    groups = adjusted_pairs(todo)
    tests, finds = _tests(groups), detectable(groups)
    for (panel, x, value, y), some in groups.items():
        different = [(row, p) for row, p in some if p < 1 - LEVEL]
        listed = "; ".join(_ordered(row, p, columns[y]) for row, p in different)
        where = f"{panel}, {columns[y].label} at {columns[x].label.partition(' (')[0].lower()} {float(value):g}"
        count = f"{len(different)} of {len(some)} pairs of curves differ over {some[0][0]['prompts']} prompts"
        least = finds.get((panel, x, value, y))
        found = f", which find {least:.0%} with a probability of {POWER:.0%}" if least else ""
        yield f"{where}: {count}{found}{': ' if listed else ''}{listed}."
    if tests:
        yield (
            f"Pairs are tested prompt by prompt, and differ where p < {1 - LEVEL:.2g} by Holm's adjustment over all"
            f" {tests} tests; in brackets the interval of {LEVEL:.0%} and the adjusted p. What prompts find"
            " is the relative difference of a typical pair that passes the strictest of these tests."
        )


def detectable(groups: PairGroups) -> dict[GroupKey, float]:
    """By group of `adjusted_pairs`, the relative difference that the first of Holm's tests finds with the probability
    `POWER`: the median over its pairs, from the standard errors of their differences. A group without any has none."""
    from scipy import stats

    tests = _tests(groups)
    both = float(stats.norm.ppf(1 - (1 - LEVEL) / (2 * tests)) + stats.norm.ppf(POWER)) if tests else 0.0
    found = {
        key: [
            both * abs(float(row["difference"]) / float(row["z"])) * 2 / (float(row["y_a"]) + float(row["y_b"]))
            for row, _ in some
            if row["p"] and float(row["z"])
        ]
        for key, some in groups.items()
    }
    return {key: median(shares) for key, shares in found.items() if shares}


def _tests(groups: PairGroups) -> int:
    return sum(bool(row["p"]) for some in groups.values() for row, _ in some)


def _ordered(row: Row, p: float, column: Column) -> str:
    """A pair with the smaller value first."""
    a, b, sign = (row["a"], row["b"], 1) if float(row["difference"]) > 0 else (row["b"], row["a"], -1)
    low, high = sorted(sign * float(row[end]) for end in ("low", "high"))
    decimals = max(column.decimals, 1 - math.floor(math.log10(abs(float(row["difference"])))))
    by = f"{abs(float(row['difference'])):.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f}, p = {p:.2g})"
    return f"{a} below {b} by {by}"


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
