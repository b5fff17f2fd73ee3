"""Rows of runs wherever they are: CSV and Parquet files, stores, folders of runs, nested as in grids and suites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specbench.errors import UsageError, install
from specbench.rows import baseline, store
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import as_read, has_runs, read_rows, to_csv
from specbench.storage.files import atomic_path, write_atomically

ROW = "row.csv"  # in a run's folder
PARQUET = ".parquet"


def rows_of_table(path: Path) -> list[dict[str, Any]] | None:
    """The rows of a CSV or Parquet file or of a store; None for a file of other things. UsageError where it is
    damaged."""
    if path.suffix == PARQUET:
        return _read_parquet(path)
    if path.suffix in store.ENDINGS:
        return [row for _, row in store.read(path)]
    return read_rows(path) if has_runs(path) else None


def tables_in(folder: Path) -> list[Path]:
    """The CSV and Parquet files of a folder that are not the row of a run."""
    found = (*folder.glob("*.csv"), *folder.glob(f"*{PARQUET}"))
    return [path for path in sorted(found) if path.name != ROW and path.is_file()]


def row_of_run(path: Path) -> dict[str, Any]:
    """The one row of a run's folder, from its row.csv. UsageError for any other file."""
    if not has_runs(path):
        raise UsageError(f"{path} is not the row of a run; leave its folder out")
    rows = read_rows(path)
    if len(rows) != 1:
        raise UsageError(f"{path} has {len(rows)} rows, where a run has one; leave its folder out")
    return rows[0]


def runs_in(folder: Path) -> Iterator[tuple[Path, dict[str, Any] | UsageError]]:
    """The row.csv of every run at or below a folder, with its row or what is wrong with it."""
    for path in sorted(folder.rglob(ROW)):
        try:
            yield path, row_of_run(path)
        except UsageError as e:
            yield path, e


def read(sources: Sequence[Path], baselines: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of any mixture of files and folders, each run once, and sentences on what was left out. Of one run the
    newest row counts, of equally new ones the first. baselines: also the baselines of runs whose folders exist, before
    all other rows (see `baseline.baselines`).

    Raises UsageError for a source that is absent, damaged or without rows.
    """
    by_id: dict[str, tuple[Path | None, dict[str, Any]]] = {}
    notes: list[str] = []
    for source in sources:
        before = len(notes)
        found = list(_of_source(source, notes))
        if not found:
            raise UsageError(notes[before] if len(notes) > before else f"{source} has no rows of runs")
        for folder, row in found:
            other = by_id.get(row["run_id"])
            if other is None or (row["time"] or "") > (other[1]["time"] or ""):
                by_id[row["run_id"]] = folder, row
    rows = [row for _, row in by_id.values()]
    if baselines:
        runs = [(folder, row) for folder, row in by_id.values() if folder]
        rows = [*baseline.baselines(rows, runs), *rows]
    return rows, notes


def _of_source(source: Path, notes: list[str]) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Rows, with the folders of their runs where these are known."""
    if source.is_file() and source.suffix in store.ENDINGS:
        yield from ((Path(folder) if folder else None, row) for folder, row in store.read(source))
    elif source.is_file():
        yield from ((None, row) for row in rows_of_table(source) or ())
    elif source.is_dir():
        for path in tables_in(source):
            yield from ((None, row) for row in rows_of_table(path) or ())
        for path, found in runs_in(source):
            if isinstance(found, UsageError):
                notes.append(f"left out: {found}")
            else:
                yield path.parent, found
    else:
        raise UsageError(f"there is no file or folder {source}")


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows to a file, as its ending says. UsageError for an unknown one, or for Parquet without pyarrow."""
    if path.suffix == ".csv":
        write_atomically(path, to_csv(rows).encode())
    elif path.suffix in store.ENDINGS:
        store.add(path, ((row.get("folder", row["run_id"]), row) for row in rows))
    elif path.suffix == PARQUET:
        _write_parquet(path, rows)
    else:
        raise UsageError(f"out= must end in .csv, {PARQUET} or {store.ENDINGS[0]} (got {path})")


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"Parquet files need pyarrow: {install('parquet')}, or use a .csv file") from None
    return pyarrow


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    pyarrow = _pyarrow()
    try:
        found = pyarrow.parquet.read_table(path).to_pylist()
    except Exception as e:  # of a damaged file, whatever the library raises
        raise UsageError(f"cannot read {path} ({type(e).__name__}); name another file") from None
    if found and not {"run_id", "config_hash"} <= found[0].keys():
        return []
    return [as_read(row) for row in found]


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Numbers as int64 or float64, everything else as text; an empty cell is null."""
    from specbench.rows.columns import _NUMBERS

    pyarrow = _pyarrow()
    columns = {}
    for name in COLUMNS:
        cells = [row.get(name) for row in rows]
        known = [cell for cell in cells if cell is not None]
        read: type = str
        kind = pyarrow.string()
        if name in _NUMBERS and not any(isinstance(cell, str) for cell in known):
            whole = all(isinstance(cell, int) and abs(cell) < 2**63 for cell in known)
            read, kind = (int, pyarrow.int64()) if whole else (float, pyarrow.float64())
        columns[name] = pyarrow.array([None if cell is None else read(cell) for cell in cells], type=kind)
    with atomic_path(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
