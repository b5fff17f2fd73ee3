"""CSV files: text, header, and cells as text. Every mistake in a file is a UsageError.

They are read and written with the csv module. pandas.read_csv accepts a row that is too short, uses the first cells of
a row that is too long as an index, and renames a column that occurs twice. All of these are mistakes of a user and
refused here. It also takes 0.3 s to import, as long as `specbench run --help`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from specbench.errors import UsageError
from specbench.storage.files import content, write_atomically
from specbench.storage.reading import read_text


def csv_text(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV text after a header; None or a missing key gives an empty cell. Raises ValueError for a key that is
    not a column."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def csv_lines(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The header of a CSV file, and its rows by column, each with its line number. UsageError for a file that is not
    valid CSV: not UTF-8, an unterminated cell, a row with more or fewer cells than the header, a column that occurs
    twice."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    lines: list[tuple[int, dict[str, str]]] = []
    try:
        columns = next(reader, [])
        if len(set(columns)) < len(columns):
            raise UsageError(f"{path} has a column twice; keep one of them")
        for cells in reader:
            if not cells:
                continue  # a blank line
            if len(cells) != len(columns):
                raise UsageError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells instead of {len(columns)}; fix the row"
                )
            lines.append((reader.line_num, dict(zip(columns, cells, strict=True))))
    except csv.Error as e:
        raise UsageError(f"{path}, line {reader.line_num}: cannot read this row ({e}); fix it") from None
    return columns, lines


@dataclass(frozen=True)
class RowFile:
    """CSV files of one kind, whose cells stay text. columns: their names and meanings; noun: a word for the rows."""

    columns: Mapping[str, str]
    noun: str

    def read(self, path: Path) -> list[dict[str, str]]:
        """The rows of a file; [] if it does not exist yet. UsageError if it has other content."""
        if not path.is_file() or not path.stat().st_size:
            return []
        columns, lines = csv_lines(path)
        if foreign := [name for name in columns if name not in self.columns]:
            raise UsageError(f"{path} is not a file of {self.noun} (it has a column {foreign[0]}); choose another out=")
        return [{name: row.get(name, "") for name in self.columns} for _, row in lines]

    def append(self, path: Path, row: Mapping[str, Any]) -> None:
        """Adds a row to a file, under a lock. The whole file is replaced atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            write_atomically(path, csv_text(self.columns, [*self.read(path), row]).encode())


def other_separator(header: Sequence[str], columns: Collection[str]) -> str:
    """That a header is separated by semicolons or tabs instead of commas, as a program may save a table; "" unless one
    of `columns` appears in this way."""
    for sign, name in ((";", "semicolons"), ("\t", "tabs")):
        cells = [cell.strip(' "') for cell in ",".join(header).split(sign)]
        if len(cells) > 1 and not set(columns).isdisjoint(cells):
            return f"cells that are separated by {name}; save the file with commas"
    return ""


def read_header(path: Path) -> list[str]:
    """The cells of the first line of a CSV file; [] if it cannot be read."""
    try:
        text = content(path).decode("utf-8-sig", errors="replace")
        return next(csv.reader(io.StringIO(text, newline="")), [])
    except (OSError, UsageError, csv.Error):
        return []
