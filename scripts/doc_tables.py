"""Tables in documents, drawn from the rows of the tables of `specbench tables`.

A comment names the table, the columns and, if not all, the lines; the table follows it:

    <!-- table field: step_compression, emitted_kl; lines: vanilla, sjd -->

± is the standard error. Another comment names a table whose pairs of curves are compared, and curves; there is a line
for each panel that has pairs of the first one, with the ratio of every other curve to it and its interval. Bold is what
differs from the first curve by Holm's adjustment over all pairs:

    <!-- pairs relaxed_equal: UniformRSD; Cool-SD, exponential; band -->

Where several columns are compared, it names one behind the table: `pairs relaxed_images image_reward: ...`. A third
comment names a table with a figure of curves, a column, a panel and values of the figure's x, at which the curves are
printed:

    <!-- curves relaxed emitted_kl: EAGLE-1, chain of 5; 2.0; 2.2 -->

`scripts/check_numbers.py` compares what stands there with the rows; `--write` draws it again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from specbench.errors import UsageError
from specbench.rows.columns import SHOWN, stderr_of
from specbench.rows.differences import LEVEL
from specbench.tables import matched
from specbench.tables.definitions import Column, TableFigure, row_column
from specbench.tables.figures import point
from specbench.tables.layout import printable
from specbench.tables.measure import TablePlan

_MARK = re.compile(
    r"<!-- (?P<kind>table|pairs|curves) (?P<table>\w+)(?: (?P<column>\w+))?: "
    r"(?P<names>[^>]+?)(?:; lines: (?P<lines>[^>]+?))? -->\n"
    r"(?P<drawn>(?:\|.*\n)*)"
)
Row = Mapping[str, str]
#: Relative errors below this are rounding: of statistics that are sums of float32.
_FLOAT32 = 1e-6
_PROPER = ("Fréchet", "Inception")


@dataclass(frozen=True)
class DocTable:
    """A table in a document. kind: "table", "pairs" or "curves". names: its columns, or the curves of which pairs are
    compared, or the panel of the curves and values of x. column: of pairs, where there are several, and of curves.
    span: of the text that is drawn."""

    table: str
    names: tuple[str, ...]
    lines: tuple[str, ...]
    kind: str
    column: str
    span: tuple[int, int]
    drawn: str


def tables(document: str) -> Iterator[DocTable]:
    """The tables that comments of a document name."""
    for found in _MARK.finditer(document):
        kind = found["kind"]
        names, lines = _listed(found["names"], "," if kind == "table" else ";"), _listed(found["lines"] or "", ",")
        yield DocTable(found["table"], names, lines, kind, found["column"] or "", found.span("drawn"), found["drawn"])


def draw(one: DocTable, plan: TablePlan) -> str:
    """Its text in Markdown. UsageError for a line or a pair without a row, and for a column that tables do not show."""
    head, *body = {"table": _lines, "pairs": _pairs, "curves": _curves}[one.kind](one, plan)
    ruled = [f"|{'---|' * len(head)}\n", *(f"| {' | '.join(row)} |\n" for row in body)]
    return "".join([f"| {' | '.join(head)} |\n", *ruled])


def _lines(one: DocTable, plan: TablePlan) -> Iterator[Sequence[str]]:
    table, rows = plan.table, plan.rows
    labels = {line.key: line.label for line in table.lines}
    chosen = one.lines or tuple(labels)
    if lacking := [key for key in chosen if rows.get(key) is None]:
        raise UsageError(f"table {table.id} has no row for its line {lacking[0]} (lines: {', '.join(labels)})")
    own = {column.key: column for column in table.columns}
    if unknown := [key for key in one.names if key not in own and key not in SHOWN]:
        raise UsageError(f"tables show no column {unknown[0]} (table of {table.id} in a document)")
    columns = [own.get(key) or row_column(key) for key in one.names]
    shown, _ = printable(replace(table, columns=tuple(columns)), rows)
    yield ["method", *(heading(column.label) for column in columns)]
    for key in chosen:
        yield [labels[key], *(cell(column, shown[key] or {}) for column in columns)]


def _pairs(one: DocTable, plan: TablePlan) -> Iterator[Sequence[str]]:
    groups = {key: some for key, some in matched.adjusted_pairs(plan).items() if one.column in ("", key[-1])}
    found = {row[end] for pairs in groups.values() for row, _ in pairs for end in ("a", "b")}
    if unknown := [name for name in one.names if name not in found]:
        raise UsageError(
            f"results/{plan.table.id}_pairs.csv has no pair with {unknown[0]} (curves: {', '.join(found)})"
        )
    if len(columns := {(x, y) for _, x, y in groups}) > 1:
        raise UsageError(f"{plan.table.id} compares {len(columns)} pairs of columns: name one behind the table")
    first, *others = one.names
    yield ["draft", "prompts", *others]
    for (panel, _, _), pairs in groups.items():
        cells = {}
        for row, p in pairs:
            if row["a"] == first:
                text = matched.ratio(row) or matched.signed(row, 2)
                cells[row["b"]] = f"**{text}**" if p < 1 - LEVEL else text
        if not cells.keys().isdisjoint(others):
            yield [panel, pairs[0][0]["prompts"], *(cells.get(name, "—") for name in others)]


def _curves(one: DocTable, plan: TablePlan) -> Iterator[Sequence[str]]:
    (panel, *values), decimals = one.names, row_column(one.column).decimals
    found = {value: curves_at(plan, panel, one.column, float(value)) for value in values}
    assert isinstance(plan.table.figure, TableFigure)
    yield [heading(row_column(plan.table.figure.x[0]).label), *next(iter(found.values()))]
    for value, curves in found.items():
        yield [value, *("—" if y is None else f"{y:.{decimals}f}" for y in curves.values())]


def curves_at(plan: TablePlan, panel: str, y: str, value: float) -> dict[str, float | None]:
    """By label, y of the curves of a panel where the figure's x has this value, on the straight lines between their
    rows; None where a curve does not reach it. UsageError without such a panel."""
    figure, rows = plan.table.figure, plan.rows
    panels = {one.label: one for one in figure.panels} if isinstance(figure, TableFigure) else {}
    if not isinstance(figure, TableFigure) or panel not in panels:
        raise UsageError(f"table {plan.table.id} has no panel {panel} (panels: {', '.join(panels)})")
    points = {c.label: [point(rows.get(key), figure.x[0], y) for key in c.lines] for c in panels[panel].curves}
    return {label: interpolated([p[:2] for p in some if p], value) for label, some in points.items()}


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at x on the straight lines between points (x, y); None outside of them."""
    for (x0, y0), (x1, y1) in pairwise(sorted(points)):
        if x0 <= x <= x1 and x1 > x0:
            return y0 + (x - x0) / (x1 - x0) * (y1 - y0)
    return None


def _listed(text: str, separator: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator) if part.strip())


def cell(column: Column, row: Row) -> str:
    """A value ± its standard error, which has a significant digit at least; a dash where there is none."""
    if not row.get(column.key):
        return "—"
    value, error = float(row[column.key]), float(row.get(stderr_of(column.key)) or 0)
    if abs(value) < column.rounding:
        return "0"
    if error < _FLOAT32 * abs(value):
        error = 0.0
    decimals = column.decimals if not error else max(column.decimals, -math.floor(math.log10(error)))
    return f"{value:.{decimals}f}" + (f" ± {error:.{decimals}f}" if error else "")


def heading(label: str) -> str:
    """As a heading in a sentence: "Step compression" -> "step compression"; "CLIP score" stays."""
    return label if label[1:2].isupper() or label.startswith(_PROPER) else label[:1].lower() + label[1:]
