"""Rows of runs in CSV files. An empty cell means: not measured. `collected.frame` gives them to pandas.

A file has the columns of `MAIN` in which a row has a value. What remains is in the column "details", as a JSON object;
in a run's folder, row.csv has no such column, and the object is details.json next to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from specbench.config import parameters
from specbench.errors import UsageError, decimal
from specbench.rows.columns import COLUMNS, DETAILED, FLAGS, INTEGERS, LISTS, MAIN, NUMBERS, WORDS, Columns, Row
from specbench.storage.csv_text import csv_lines, csv_text, other_separator, read_header
from specbench.storage.files import content, write_atomically
from specbench.storage.package import __version__

KEYS = frozenset({"run_id", "config_hash"})  # columns by which a file of rows is recognised
ROW, DETAILS = "row.csv", "details.json"  # in a run's folder
_DETAILS = "details"  # the column


def to_csv(rows: Iterable[Row]) -> str:
    """Rows as CSV text. Raises ValueError for a key that is not a column."""
    cells = [as_cells(row) for row in rows]
    filled = _filled(cells)
    lines = [{name: row.get(name, "") for name in filled} | {_DETAILS: _json(_details(row))} for row in cells]
    return csv_text([*filled, _DETAILS], lines)


def _filled(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The columns of `MAIN` that rows of cells need. Raises ValueError for a key that is not a column."""
    if foreign := {name for row in rows for name in row} - COLUMNS.keys():
        raise ValueError(f"{min(foreign)} is not a column of a row")
    return [name for name in MAIN if name in KEYS or any(row.get(name) for row in rows)]


def _details(cells: Mapping[str, str]) -> Columns:
    """The cells of `DETAILED` that are not empty, as values of JSON."""
    values = {name: _value(name, cells.get(name, ""), "the row") for name in DETAILED}
    return {name: _of_text(name, value) for name, value in values.items() if value is not None}


def _of_text(name: str, value: Any) -> Any:
    """A list of its JSON text. A damaged one stays as it is."""
    if name in LISTS:
        with suppress(RecursionError, ValueError):
            return json.loads(value)
    return value


def write_run_row(folder: Path, row: Row) -> bool:
    """Writes row.csv and details.json. Returns whether one of them changed. Raises ValueError for a key that is not a
    column."""
    cells = as_cells(row)
    filled = _filled([cells])
    texts = {
        DETAILS: "{\n" + ",\n".join(f' "{name}": {_json(value)}' for name, value in _details(cells).items()) + "\n}\n",
        ROW: csv_text(filled, [{name: cells.get(name, "") for name in filled}]),
    }
    changed = False
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or content(path) != text.encode():
            write_atomically(path, text.encode())
            changed = True
    return changed


def as_cells(row: Row) -> dict[str, str]:
    """The cells of a row as text."""
    return {name: _cell(value) for name, value in row.items()}


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of cells as text in columns. The first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    return ["  ".join(pad(cell, width) for pad, cell, width in zip(sides, line, widths)).rstrip() for line in lines]


def as_read(row: Row) -> Columns:
    """The row that `read_rows` would return for this one."""
    return {name: _value(name, _cell(row.get(name)), "the row") for name in COLUMNS}


def _cell(value: Any) -> str:
    if type(value) is str:  # most are
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return _json(value)
    return str(value)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def read_rows(path: str | Path) -> list[Columns]:
    """The rows of a CSV file with their details, with numbers as numbers and empty cells as None. Columns that the file
    does not have are None.

    Raises UsageError for a file that cannot be read, columns unknown to this version, text in a cell that needs a
    number, and a row without run_id.
    """
    path = Path(path)
    columns, lines = csv_lines(path)
    beside = path.with_name(DETAILS)
    lone = content(beside).decode(errors="replace") if path.name == ROW and beside.is_file() else ""
    expanded = [(number, _expanded(line, lone, f"{path}, line {number}")) for number, line in lines]
    known = dict.fromkeys([*columns, *(name for _, line in expanded for name in line)])
    if foreign := [name for name in known if name not in COLUMNS and name != _DETAILS]:
        labels = (label for _, cells in lines for label in cells.get("plugins", "").split("; "))
        raise UsageError(
            f"{path} has columns unknown to specbench {__version__} ({', '.join(foreign[:3])})"
            + (parameters.missing_plugins(labels) or "; choose another file")
        )
    rows = []
    for number, line in expanded:
        row: Columns = dict.fromkeys(COLUMNS)
        row |= {name: _value(name, text, f"{path}, line {number}") for name, text in line.items() if name in COLUMNS}
        if row["run_id"] is None:
            raise UsageError(f"{path}, line {number}: the row has no run_id; remove or correct the line")
        rows.append(row)
    return rows


def _expanded(line: Mapping[str, str], beside: str, where: str) -> dict[str, str]:
    """A line with its details as cells. beside: the text of details.json."""
    cells = dict(line)
    text = cells.pop(_DETAILS, "") or beside
    if not text:
        return cells
    try:
        values = json.loads(text)
        return {**cells, **as_cells(values)}
    except (AttributeError, RecursionError, ValueError):
        raise UsageError(f"{where}: its details are not a JSON object; restore them") from None


def _value(name: str, text: str, where: str) -> Any:
    if not text:
        return None
    if name in FLAGS and text.lower() in ("true", "false"):
        return text.lower()  # spreadsheets and pandas write them in other cases
    if name not in NUMBERS or text in WORDS.get(name, ()):
        return text
    try:
        number = decimal(text)
        if text.lstrip("-").isdecimal():
            return int(text)
        if name in INTEGERS and not number.is_integer():
            raise ValueError(text)
        # pandas writes the integers of a column with an empty cell as 96.0
        return int(number) if name in INTEGERS else number
    except ValueError:
        wanted = "an integer" if name in INTEGERS else "a number"
        raise UsageError(
            f"{where}: {name} must be {wanted}, or empty if it was not measured (got {text[:40]!r}); correct the cell"
        ) from None


def has_runs(path: Path) -> bool:
    """Whether a CSV file contains rows of runs. Audits, benchmarks and probes have other columns. UsageError for rows
    of runs whose cells are not separated by commas."""
    header = read_header(path)
    if reason := other_separator(header, KEYS):
        raise UsageError(f"{path} has {reason}")
    return set(header) >= KEYS


def append_row(path: str | Path, row: Row) -> None:
    """Adds a row to a CSV file of rows, under a lock. A row of the same `run_id` is replaced.

    The file is replaced atomically, so that a kill leaves the old file or the new one. A file with
    fewer columns gets the others. Raises UsageError if the file has other columns.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        rows: list[Mapping[str, Any]] = list(read_rows(path)) if path.exists() and path.stat().st_size else []
        same = [i for i, other in enumerate(rows) if other["run_id"] == row["run_id"]]
        if same:
            rows[same[0]] = row
        else:
            rows.append(row)
        write_atomically(path, to_csv(rows).encode())
