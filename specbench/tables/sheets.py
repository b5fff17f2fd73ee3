"""The sheet of a table, and the files of a sheet: one a format, and the figures of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from specbench.harness.planned import Row
from specbench.storage.files import write_atomically
from specbench.tables import differences, figures, layout, literature, matched, render
from specbench.tables.definitions import Table
from specbench.tables.measure import TablePlan


def of_table(
    todo: TablePlan, command: str, folder: Path, formats: Sequence[str]
) -> tuple[layout.TableSheet, Iterator[Path]]:
    """The sheet of a table, and its `files`. command: what fills the table."""
    table = todo.table
    rows = {} if table.matched else todo.rows
    if table.matched:
        sheet = matched.build(todo, command)
    else:
        printed = literature.load(table.id) if table.id in literature.available() else []
        commands = {run.key: run.command for run in todo.runs}
        sheet = layout.build(table, todo.model, rows, printed, commands, command, todo.compared)
    stem = table.id if todo.model == table.model else f"{table.id}.{todo.model}"
    written = files(sheet, table, rows, folder, stem, formats)
    return sheet, chain(written, differences.draw(todo, folder, stem)) if table.matched else written


def files(
    sheet: layout.TableSheet,
    table: Table,
    rows: Mapping[str, Row | None],
    folder: Path,
    stem: str,
    formats: Sequence[str],
    cells: str = "",
) -> Iterator[Path]:
    """Writes a sheet in these formats, and the figures of its rows; gives each file once it is written. cells: the name
    of its CSV file."""
    for name in formats:
        ending, renderer = render.FORMATS[name]
        path = folder / (cells if cells and name == "csv" else f"{stem}.{ending}")
        write_atomically(path, renderer(sheet).encode())
        yield path
    if table.figure and any(rows.values()):
        yield from figures.draw(table, rows, folder, stem)
