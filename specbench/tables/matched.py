"""Pairs of a figure's curves at equal x, such as rules at equal step compression: how far one is below the other over
their common range, and where."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import combinations, groupby
from math import comb

from specbench.compare.paired import holm
from specbench.rows.differences import LEVEL
from specbench.tables.definitions import Column, TableFigure, row_column
from specbench.tables.layout import Header, Notes, Row, TableCell, TableEntry, TableSheet, facts, printable
from specbench.tables.measure import TablePlan

GroupKey = tuple[str, str, str]  # panel, x, y
PairGroups = dict[GroupKey, list[tuple[Row, float]]]
_MISSING = "Not compared: runs are missing or did not measure this, or the curves have no range in common."


def build(todo: TablePlan, command: str) -> TableSheet:
    """An entry for each pair of curves, the same cells for each column of `table.matched`."""
    table, matched, figure = todo.table, todo.table.matched, todo.table.figure
    assert isinstance(figure, TableFigure)
    assert matched is not None
    notes, columns, groups = Notes(), {column.key: column for column in table.columns}, adjusted_pairs(todo)
    found: dict[tuple[str, ...], tuple[Row, float]] = {
        (*key, row["a"], row["b"]): (row, p) for key, some in groups.items() for row, p in some
    }
    headers = [header for x in figure.x for y in matched.y for header in _headers(columns[y], x, notes)]
    entries = [
        TableEntry(f"{panel.label}: {b.label} against {a.label}", "measured", todo.model, (), cells)
        for panel in todo.tested_panels
        for a, b in combinations(panel.curves, 2)
        if (cells := _cells(panel.label, a.label, b.label, todo, columns, found, notes))
    ]
    rows, _ = printable(table, todo.rows)
    about = (*facts([row for row in rows.values() if row is not None]), ("Command", command))
    shared = [f"The lines of the curves, and their runs, are those of the table {matched.lines_of}."]
    remarks = (*table.remarks, *(shared if matched.lines_of else ()), *_summary(todo, groups))
    return TableSheet(
        table.id, table.title, table.paper, about, tuple(headers), tuple(entries), notes.all(), remarks, ()
    )


def adjusted_pairs(todo: TablePlan) -> PairGroups:
    """By panel, x and y: the pairs of curves of these very runs, each with its p by Holm's adjustment over all pairs
    that the table plans (without a test 1). A pair that is not compared yet counts as p = 1: with it, no other adjusted
    p becomes larger."""
    runs = todo.equal
    rows = [row for row in todo.pairs if row["runs"] in runs]
    tested = [float(row["p"]) for row in rows if row["p"]]
    adjusted = iter(holm([*tested, *[1.0] * (planned_pairs(todo) - len(tested))]))
    groups: PairGroups = {}
    for row in rows:
        key = (row["panel"], row["x"], row["y"])
        groups.setdefault(key, []).append((row, next(adjusted) if row["p"] else 1.0))
    return groups


def planned_pairs(todo: TablePlan) -> int:
    """How many pairs of curves the table compares, by all of its columns."""
    figure, matched = todo.table.figure, todo.table.matched
    if not isinstance(figure, TableFigure) or matched is None:
        return 0
    return len(figure.x) * len(matched.y) * sum(comb(len(panel.curves), 2) for panel in todo.tested_panels)


def numbers(row: Row, name: str) -> list[float]:
    """A list of a row: `at`, `values`, `differences` or `margins`."""
    return [float(value) for value in json.loads(row[name])]


def stretches(row: Row) -> list[tuple[float, float, bool]]:
    """Where the simultaneous band excludes 0: the first and last of neighbouring values of x, and whether the second
    curve is above the first one."""
    at, differences, margins = (numbers(row, name) for name in ("at", "differences", "margins"))
    signs = [(abs(d) > m) * (1 if d > 0 else -1) for d, m in zip(differences, margins, strict=True)]
    runs = [
        [x for x, _ in some] + [sign] for sign, some in groupby(zip(at, signs, strict=True), key=lambda one: one[1])
    ]
    return [(xs[0], xs[-2], xs[-1] > 0) for xs in runs if xs[-1]]


def _headers(y: Column, x: str, notes: Notes) -> Iterator[Header]:
    name = row_column(x).label.partition(" (")[0].lower()
    text = (
        f"{y.label} at equal {name}: mean over the range that both curves reach, from straight lines between the runs"
    )
    measured = f"; measured: {y.measured_as}" if y.measured_as else ""
    yield Header(f"{name.capitalize()}", "", (notes.mark(f"The range over which the two curves are compared: {x}."),))
    interval = f"in brackets the interval of {LEVEL:.0%}, by paired resampling of the prompts"
    yield Header(f"{y.label}, ratio", "", (notes.mark(f"{text}, over that of the other curve; {interval}{measured}."),))
    yield Header(
        f"{y.label}, difference", y.better, (notes.mark(f"{text}, less that of the other curve; {interval}."),)
    )
    yield Header(
        "p",
        "",
        (
            notes.mark(
                "Of the mean difference, at least 0.0001, then by Holm's adjustment over all pairs of the table."
            ),
        ),
    )
    where = (
        f"Where the band around all differences of the pair, which has a coverage of {LEVEL:.0%}, excludes 0. The"
        " band is of this pair alone, not adjusted for the other ones."
    )
    yield Header("Differs at", "", (notes.mark(where),))


def _cells(
    panel: str,
    a: str,
    b: str,
    todo: TablePlan,
    columns: Mapping[str, Column],
    found: Mapping[tuple[str, ...], tuple[Row, float]],
    notes: Notes,
) -> tuple[TableCell, ...]:
    cells: list[TableCell] = []
    figure, matched = todo.table.figure, todo.table.matched
    assert isinstance(figure, TableFigure)
    assert matched is not None
    for x in figure.x:
        for y in matched.y:
            if (panel, x, y, a, b) not in found:
                cells += [notes.gap(_MISSING)] * 5
                continue
            row, p = found[panel, x, y, a, b]
            spans = [f"{low:.2f} to {high:.2f} ({'above' if up else 'below'})" for low, high, up in stretches(row)]
            cells += [
                TableCell(f"{float(row['from_x']):.2f} to {float(row['to_x']):.2f}"),
                TableCell(ratio(row) or "—"),
                TableCell(signed(row, columns[y].decimals)),
                TableCell(f"{p:.2g}" if row["p"] else "—"),
                TableCell("; ".join(spans) or "nowhere"),
            ]
    return tuple(cells)


def ratio(row: Row) -> str:
    """The ratio of a pair and its interval: "1.94 (1.75 to 2.13)"; empty where a mean is not above 0."""
    ends = [row[name] for name in ("ratio", "ratio_low", "ratio_high")]
    return f"{float(ends[0]):.2f} ({float(ends[1]):.2f} to {float(ends[2]):.2f})" if all(ends) else ""


def signed(row: Row, decimals: int) -> str:
    """The mean difference of a pair and its interval: "+0.021 (0.018 to 0.025)"."""
    value, low, high = (float(row[name]) for name in ("difference", "low", "high"))
    width = (high - low) / 2
    shown = max(decimals, 1 - math.floor(math.log10(width))) if width > 0 else decimals
    return f"{round(value, shown) + 0.0:+.{shown}f} ({low:.{shown}f} to {high:.{shown}f})"


def _summary(todo: TablePlan, groups: PairGroups) -> Iterator[str]:
    for (panel, _, y), some in groups.items():
        different = sum(p < 1 - LEVEL for _, p in some)
        label = next(column.label for column in todo.table.columns if column.key == y)
        prompts = some[0][0]["prompts"]
        yield f"{panel}, {label}: {different} of {len(some)} pairs of curves differ over {prompts} prompts."
    waiting = planned_pairs(todo) - sum(bool(row["p"]) for some in groups.values() for row, _ in some)
    missing = f", {waiting} of which are not compared and count as p = 1" if waiting else ""
    yield (
        f"Pairs differ where p < {1 - LEVEL:.2g} by Holm's adjustment over all {planned_pairs(todo)} pairs of the"
        f" table{missing}. A pair that does not differ significantly is not shown to be equal: read its interval."
    )
