"""The store of results: a SQLite file to which every run adds its row when it is finished.

It lies beside the folders of runs, in runs/results.sqlite; $SPECBENCH_STORE names another file, `none` no file. A run
has one row there: a later one of the same folder or of the same run_id replaces it. Columns that a newer version adds
join the table. SQLite locks the file, and a kill leaves a row or none.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from specbench.errors import UsageError, decimal, plain
from specbench.rows.columns import _NUMBERS, COLUMNS, RENAMED_COLUMNS
from specbench.rows.csv_files import as_cells, as_read

#: The environment variable with the store's path.
PLACE = "SPECBENCH_STORE"
DEFAULT = Path("runs", "results.sqlite")
ENDINGS = (".sqlite", ".sqlite3", ".db")
_PATIENCE = 30.0  # seconds that a process waits for another one's row
_FOLDER = "folder"  # the column with a run's folder, before those of `COLUMNS`


def default() -> Path | None:
    """The store of runs that are started here; None where there is to be none."""
    given = os.environ.get(PLACE, "")
    return None if given == "none" else Path(given).expanduser() if given else DEFAULT


def add(path: Path, rows: Iterable[tuple[Path | str, Mapping[str, Any]]]) -> None:
    """Adds rows with the folders of their runs. Raises OSError or sqlite3.Error where the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None)) as file:
        file.execute("BEGIN IMMEDIATE")
        try:
            _prepare(file)
            for folder, row in rows:
                _replace(file, str(folder), row)
        except BaseException:
            file.execute("ROLLBACK")
            raise
        file.execute("COMMIT")


def _prepare(file: sqlite3.Connection) -> None:
    names = {name for _, name, *_ in file.execute("PRAGMA table_info(rows)")}
    if not names:
        columns = ", ".join(_quoted(name) for name in COLUMNS if name != "run_id")
        file.execute(f'CREATE TABLE rows ("run_id" PRIMARY KEY, {_quoted(_FOLDER)}, {columns})')
        return
    for name in COLUMNS:
        if name not in names:
            file.execute(f"ALTER TABLE rows ADD COLUMN {_quoted(name)}")


def _replace(file: sqlite3.Connection, folder: str, row: Mapping[str, Any]) -> None:
    cells = {_FOLDER: folder, **{name: text for name, text in as_cells(row).items() if text}}
    file.execute('DELETE FROM rows WHERE "folder" = ? AND run_id <> ?', (folder, row["run_id"]))
    names = ", ".join(map(_quoted, cells))  # of columns, which are ours
    marks = ", ".join("?" * len(cells))
    file.execute(f"INSERT OR REPLACE INTO rows ({names}) VALUES ({marks})", [_typed(*cell) for cell in cells.items()])  # noqa: S608


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _typed(name: str, text: str) -> Any:
    """A cell as SQLite compares it: a number in a column of numbers."""
    try:
        number = decimal(text)
    except ValueError:
        return text
    if name not in _NUMBERS:
        return text
    return int(text) if text.lstrip("-").isdecimal() and abs(number) < 2**63 else number


def read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The folders and the rows of a store, as `read_rows` returns rows. UsageError where the file is not one."""
    if not path.is_file():
        raise UsageError(f"there is no store {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_PATIENCE)) as file:
            file.row_factory = sqlite3.Row
            until = time.monotonic() + _PATIENCE
            file.set_progress_handler(lambda: time.monotonic() > until, 100)  # a generated column may never end
            kinds = [kind for (kind,) in file.execute("SELECT type FROM sqlite_master WHERE name = 'rows'")]
            if kinds and kinds != ["table"]:
                raise UsageError(f"{path} is not a store of rows ('rows' is a {plain(kinds[0])}); name another file")
            found = [dict(row) for row in file.execute("SELECT * FROM rows ORDER BY rowid")]
    except sqlite3.Error as e:
        raise UsageError(f"{path} is not a store of rows ({plain(e)}); name another file") from None
    rows = []
    for cells in found:
        folder = str(cells.pop(_FOLDER, "") or "")
        row = as_read({RENAMED_COLUMNS.get(name) or name: cell for name, cell in cells.items()})
        if row["run_id"] is None:
            raise UsageError(f"{path}: a row needs its run_id; remove it")
        rows.append((folder, {name: row[name] for name in COLUMNS}))
    return rows
