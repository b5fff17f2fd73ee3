"""Rows of runs from any source: CSV and Parquet files, stores, and folders of runs, nested as in grids and suites.

A store is a SQLite file. Every finished run adds its row to the store of results: runs/results.sqlite next to the
folders of runs, another file that $SPECBENCH_STORE names, or no store for `none`. A run has one row there: a later row
of the same folder or of the same run_id replaces it. Columns of a newer version are added to the table. SQLite locks
the file, and a kill leaves a whole row or none.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import UsageError, decimal, install, plain
from specbench.rows import baseline
from specbench.rows.columns import COLUMNS, NUMBERS, RENAMED_COLUMNS
from specbench.rows.csv_files import as_cells, as_read, has_runs, read_rows, to_csv
from specbench.storage.files import atomic_path, write_atomically

if TYPE_CHECKING:
    import pandas as pd

ROW = "row.csv"  # in a run's folder
#: The environment variable with the path of the store of results.
PLACE = "SPECBENCH_STORE"
STORE = Path("runs", "results.sqlite")
_STORES = (".sqlite", ".sqlite3", ".db")
_PARQUET = ".parquet"
_PATIENCE = 30.0  # seconds that a process waits for another process's lock
_FOLDER = "folder"  # a store's column with a run's folder, before the columns of `COLUMNS`


def frame(*sources: str | Path) -> pd.DataFrame:
    """The rows of any mixture of files and folders as one table, chosen as by `read`: numbers in float64 or int64
    columns, empty cells as missing values. Raises UsageError as `read` does."""
    import pandas as pd

    return pd.DataFrame(read([Path(source) for source in sources])[0], columns=list(COLUMNS))


def read(sources: Sequence[Path], baselines: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of any mixture of files and folders, each run once, and sentences on skipped runs. If a run occurs
    several times, its newest row counts; in a tie, the first. baselines: also the baselines of runs whose folders
    exist, before all other rows (see `baseline.baselines`).

    Raises UsageError for a source that is missing, damaged or without rows.
    """
    by_id: dict[str, tuple[Path | None, dict[str, Any]]] = {}
    notes: list[str] = []
    for source in sources:
        before = len(notes)
        rows_of_source = list(_of_source(source, notes))
        if not rows_of_source:
            raise UsageError(notes[before] if len(notes) > before else f"{source} has no rows of runs")
        for folder, row in rows_of_source:
            other = by_id.get(row["run_id"])
            if other is None or (row["time"] or "") > (other[1]["time"] or ""):
                by_id[row["run_id"]] = folder, row
    rows = [row for _, row in by_id.values()]
    if baselines:
        runs = [(folder, row) for folder, row in by_id.values() if folder]
        rows = [*baseline.baselines(rows, runs), *rows]
    return rows, notes


def _of_source(source: Path, notes: list[str]) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Rows, with the folders of their runs if known."""
    if source.is_file() and source.suffix in _STORES:
        yield from ((Path(folder) if folder else None, row) for folder, row in read_store(source))
    elif source.is_file():
        yield from ((None, row) for row in rows_of_table(source) or ())
    elif source.is_dir():
        for path in tables_in(source):
            yield from ((None, row) for row in rows_of_table(path) or ())
        for path, row in runs_in(source):
            if isinstance(row, UsageError):
                notes.append(f"left out: {row}")
            else:
                yield path.parent, row
    else:
        raise UsageError(f"there is no file or folder {source}")


def rows_of_table(path: Path) -> list[dict[str, Any]] | None:
    """The rows of a CSV or Parquet file or of a store; None for a file with other content. UsageError if it is
    damaged."""
    if path.suffix == _PARQUET:
        return _read_parquet(path)
    if path.suffix in _STORES:
        return [row for _, row in read_store(path)]
    return read_rows(path) if has_runs(path) else None


def tables_in(folder: Path) -> list[Path]:
    """The CSV and Parquet files of a folder that are not the row of a run."""
    paths = (*folder.glob("*.csv"), *folder.glob(f"*{_PARQUET}"))
    return [path for path in sorted(paths) if path.name != ROW and path.is_file()]


def runs_in(folder: Path) -> Iterator[tuple[Path, dict[str, Any] | UsageError]]:
    """The row.csv of every run in a folder and its subfolders, with its row, or the error of reading it."""
    for path in sorted(folder.rglob(ROW)):
        try:
            yield path, _row_of_run(path)
        except UsageError as e:
            yield path, e


def _row_of_run(path: Path) -> dict[str, Any]:
    if not has_runs(path):
        raise UsageError(f"{path} is not the row of a run; leave its folder out")
    rows = read_rows(path)
    if len(rows) != 1:
        raise UsageError(f"{path} has {len(rows)} rows, but a run has one; leave its folder out")
    return rows[0]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows to a file in the format of its ending. UsageError for an unknown ending, or if pyarrow is missing."""
    if path.suffix == ".csv":
        write_atomically(path, to_csv(rows).encode())
    elif path.suffix in _STORES:
        add_to_store(path, ((row["run_id"], row) for row in rows))
    elif path.suffix == _PARQUET:
        _write_parquet(path, rows)
    else:
        raise UsageError(f"out= must end in .csv, {_PARQUET} or {_STORES[0]} (got {path})")


# Stores


def default_store() -> Path | None:
    """The store of results of runs that are started here; None if the user wants none."""
    path = os.environ.get(PLACE, "")
    return None if path == "none" else Path(path).expanduser() if path else STORE


def add_to_store(path: Path, rows: Iterable[tuple[Path | str, Mapping[str, Any]]]) -> None:
    """Adds rows with the folders of their runs. Raises OSError or sqlite3.Error if the file cannot be written."""
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
    names = ", ".join(map(_quoted, cells))  # names of our own columns: no SQL injection
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
    if name not in NUMBERS:
        return text
    return int(text) if text.lstrip("-").isdecimal() and abs(number) < 2**63 else number


def read_store(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The folders and the rows of a store, with the rows as in `read_rows`. UsageError if the file is not a store."""
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
            table = [dict(row) for row in file.execute("SELECT * FROM rows ORDER BY rowid")]
    except sqlite3.Error as e:
        raise UsageError(f"{path} is not a store of rows ({plain(e)}); name another file") from None
    rows = []
    for cells in table:
        folder = str(cells.pop(_FOLDER, "") or "")
        row = as_read({RENAMED_COLUMNS.get(name) or name: cell for name, cell in cells.items()})
        if row["run_id"] is None:
            raise UsageError(f"{path}: a row has no run_id; remove it")
        rows.append((folder, row))
    return rows


# Parquet


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"Parquet files need pyarrow: {install('parquet')}, or use a .csv file") from None
    return pyarrow


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    pyarrow = _pyarrow()
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except Exception as e:  # for a damaged file, the library raises various errors
        raise UsageError(f"cannot read {path} ({type(e).__name__}); name another file") from None
    if rows and not {"run_id", "config_hash"} <= rows[0].keys():
        return []
    return [as_read(row) for row in rows]


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Numbers as int64 or float64, everything else as text; an empty cell is null."""
    pyarrow = _pyarrow()
    columns = {}
    for name in COLUMNS:
        cells = [row.get(name) for row in rows]
        known = [cell for cell in cells if cell is not None]
        read: type = str
        kind = pyarrow.string()
        if name in NUMBERS and not any(isinstance(cell, str) for cell in known):
            whole = all(isinstance(cell, int) and abs(cell) < 2**63 for cell in known)
            read, kind = (int, pyarrow.int64()) if whole else (float, pyarrow.float64())
        columns[name] = pyarrow.array([None if cell is None else read(cell) for cell in cells], type=kind)
    with atomic_path(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
