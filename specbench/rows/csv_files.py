"""Rows of runs in CSV files. An empty cell means: not measured. `sources.frame` gives them to pandas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from specbench.config import parameters
from specbench.errors import UsageError, decimal
from specbench.rows.columns import COLUMNS, FLAGS, NUMBERS, WORDS
from specbench.storage.csv_text import csv_lines, csv_text, other_separator, read_header
from specbench.storage.files import write_atomically
from specbench.storage.package import __version__

KEYS = frozenset({"run_id", "config_hash"})  # columns by which a file of rows is recognised


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV text with the header of `COLUMNS`. Raises ValueError for a key that is not a column."""
    return csv_text(COLUMNS, map(as_cells, rows))


def as_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a row as text."""
    return {name: _cell(value) for name, value in row.items()}


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of cells as text in columns. The first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    return ["  ".join(pad(cell, width) for pad, cell, width in zip(sides, line, widths)).rstrip() for line in lines]


def as_read(row: Mapping[str, Any]) -> dict[str, Any]:
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
        return json.dumps(value, separators=(",", ":"))
    return str(value)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a CSV file, with numbers as numbers and empty cells as None. Columns that the file does not have are
    None.

    Raises UsageError for a file that cannot be read, columns unknown to this version, text in a cell that needs a
    number, and a row without run_id.
    """
    columns, lines = csv_lines(Path(path))
    if foreign := [name for name in columns if name not in COLUMNS]:
        labels = (label for _, cells in lines for label in cells.get("plugins", "").split("; "))
        raise UsageError(
            f"{path} has columns unknown to specbench {__version__} ({', '.join(foreign[:3])})"
            + (parameters.missing_plugins(labels) or "; choose another file")
        )
    rows = []
    for number, line in lines:
        row = {name: _value(name, line.get(name, ""), f"{path}, line {number}") for name in COLUMNS}
        if row["run_id"] is None:
            raise UsageError(f"{path}, line {number}: the row has no run_id; remove or correct the line")
        rows.append(row)
    return rows


def _value(name: str, text: str, where: str) -> Any:
    if not text:
        return None
    if name in FLAGS and text.lower() in ("true", "false"):
        return text.lower()  # spreadsheets and pandas write them in other cases
    if name not in NUMBERS or text in WORDS.get(name, ()):
        return text
    try:
        number = decimal(text)
        return int(text) if text.lstrip("-").isdecimal() else number
    except ValueError:
        raise UsageError(
            f"{where}: {name} must be a number, or empty if it was not measured (got {text[:40]!r}); correct the cell"
        ) from None


def has_runs(path: Path) -> bool:
    """Whether a CSV file contains rows of runs. Audits, benchmarks and probes have other columns. UsageError for rows
    of runs whose cells are not separated by commas."""
    header = read_header(path)
    if reason := other_separator(header, KEYS):
        raise UsageError(f"{path} has {reason}")
    return set(header) >= KEYS


def append_row(path: str | Path, row: Mapping[str, Any]) -> None:
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
