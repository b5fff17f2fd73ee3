"""Tables in documents, drawn from the rows of the tables of `specbench tables`.

A comment names the table, the columns and, if not all, the lines; the table follows it:

    <!-- table field: step_compression, emitted_kl; lines: vanilla, sjd -->

± is the standard error. `scripts/check_numbers.py` compares what stands there with the rows; `--write` draws it again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from specbench.errors import UsageError
from specbench.rows.columns import SHOWN, stderr_of
from specbench.tables.definitions import Column, Table, row_column
from specbench.tables.layout import printable

_MARK = re.compile(
    r"<!-- table (?P<table>\w+): (?P<columns>[\w, ]+?)(?:; lines: (?P<lines>[^>]+?))? -->\n(?P<drawn>(?:\|.*\n)*)"
)
Row = Mapping[str, str]


@dataclass(frozen=True)
class DocTable:
    """A table in a document. span: of the text that is drawn."""

    table: str
    columns: tuple[str, ...]
    lines: tuple[str, ...]
    span: tuple[int, int]
    drawn: str


def tables(document: str) -> Iterator[DocTable]:
    """The tables that comments of a document name."""
    for found in _MARK.finditer(document):
        columns, lines = (tuple(re.split(r",\s*", found[name] or "")) for name in ("columns", "lines"))
        yield DocTable(found["table"], columns, lines if found["lines"] else (), found.span("drawn"), found["drawn"])


def draw(one: DocTable, table: Table, rows: Mapping[str, Row | None]) -> str:
    """Its text in Markdown. UsageError for a line without a row, and for a column that tables do not show."""
    labels = {line.key: line.label for line in table.lines}
    chosen = one.lines or tuple(labels)
    if lacking := [key for key in chosen if rows.get(key) is None]:
        raise UsageError(f"table {table.id} has no row for its line {lacking[0]} (lines: {', '.join(labels)})")
    own = {column.key: column for column in table.columns}
    if unknown := [key for key in one.columns if key not in own and key not in SHOWN]:
        raise UsageError(f"tables show no column {unknown[0]} (table of {table.id} in a document)")
    columns = [own.get(key) or row_column(key) for key in one.columns]
    shown, _ = printable(replace(table, columns=tuple(columns)), rows)
    text = [["method", *(_named(column.label) for column in columns)]]
    text += [[labels[key], *(cell(column, shown[key] or {}) for column in columns)] for key in chosen]
    text.insert(1, ["---"] * len(text[0]))
    return "".join(f"|{'|'.join(row)}|\n" if row[0] == "---" else f"| {' | '.join(row)} |\n" for row in text)


def cell(column: Column, row: Row) -> str:
    """A value ± its standard error, which has a significant digit at least; a dash where there is none."""
    if not row.get(column.key):
        return "—"
    value, error = float(row[column.key]), float(row.get(stderr_of(column.key)) or 0)
    if abs(value) < column.rounding:
        return "0"
    decimals = column.decimals if not error else max(column.decimals, -math.floor(math.log10(error)))
    return f"{value:.{decimals}f}" + (f" ± {error:.{decimals}f}" if error else "")


def _named(label: str) -> str:
    """As a heading in a sentence: "Step compression" -> "step compression", "CLIP score" stays."""
    return label if label[1:2].isupper() else label[:1].lower() + label[1:]
