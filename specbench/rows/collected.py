"""Rows of runs from any source: CSV and Parquet files, and folders of runs, nested as in grids and suites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import UsageError, install
from specbench.rows import baseline
from specbench.rows.columns import COLUMNS, NUMBERS, Columns
from specbench.rows.csv_files import KEYS, ROW, as_read, has_runs, read_rows, to_csv
from specbench.storage.csv_text import read_header
from specbench.storage.files import atomic_path, write_atomically

if TYPE_CHECKING:
    import pandas as pd

_PARQUET = ".parquet"


def frame(*sources: str | Path) -> pd.DataFrame:
    """The rows of any mixture of files and folders as one table, chosen as by `read`: numbers in float64 columns, whole
    numbers in Int64 ones, empty cells as missing values. Raises UsageError as `read` does."""
    return _frame(read([Path(source) for source in sources])[0])


def _frame(rows: Sequence[Columns]) -> pd.DataFrame:
    """Rows as a table. (pandas itself makes a float64 of a whole number that is missing elsewhere, so that a seed would
    be rounded.)"""
    import pandas as pd

    cells = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    for name in COLUMNS:
        kinds = {type(value) for value in cells[name] if value is not None}
        if name in NUMBERS and kinds <= {int, float}:
            cells[name] = cells[name].astype("Int64" if kinds == {int} else "float64")
    return cells


def read(sources: Sequence[Path], baselines: bool = False) -> tuple[list[Columns], list[str]]:
    """The rows of any mixture of files and folders, each run once, and sentences on skipped runs. If a run occurs
    several times, its newest row counts; in a tie, the one in the run's folder, or the first. baselines: also the
    baselines of runs whose folders exist, before all other rows (see `baseline.baselines`).

    Raises UsageError for a source that is missing, damaged or without rows.
    """
    by_id: dict[str, tuple[Path | None, Columns]] = {}
    notes: list[str] = []
    for source in sources:
        before = len(notes)
        rows_of_source = list(_of_source(source, notes))
        if not rows_of_source:
            absent = sorted(KEYS.difference(read_header(source))) if source.suffix == ".csv" else []
            why = f" (no column {' and '.join(absent)})" if absent else ""
            raise UsageError(notes[before] if len(notes) > before else f"{source} has no rows of runs{why}")
        for folder, row in rows_of_source:
            other = by_id.get(row["run_id"])
            if other is None or _rank(folder, row) > _rank(*other):
                by_id[row["run_id"]] = folder, row
    rows = [row for _, row in by_id.values()]
    if baselines:
        runs = [(folder, row) for folder, row in by_id.values() if folder]
        of_vanilla, unread = baseline.baselines(rows, runs)
        rows, notes = [*of_vanilla, *rows], [*notes, *unread]
    return rows, notes


def _rank(folder: Path | None, row: Columns) -> tuple[str, bool]:
    return row["time"] or "", folder is not None


def _of_source(source: Path, notes: list[str]) -> Iterator[tuple[Path | None, Columns]]:
    """Rows, with the folders of their runs if known."""
    if source.is_file():
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


def rows_of_table(path: Path) -> list[Columns] | None:
    """The rows of a CSV or Parquet file; None for a file with other content. UsageError if it is damaged."""
    if path.suffix == _PARQUET:
        return _read_parquet(path)
    return read_rows(path) if has_runs(path) else None


def tables_in(folder: Path) -> list[Path]:
    """The CSV and Parquet files of a folder that are not the row of a run."""
    paths = (*folder.glob("*.csv"), *folder.glob(f"*{_PARQUET}"))
    return [path for path in sorted(paths) if path.name != ROW and path.is_file()]


def runs_in(folder: Path) -> Iterator[tuple[Path, Columns | UsageError]]:
    """The row.csv of every run in a folder and its subfolders, with its row, or the error of reading it."""
    for path in sorted(folder.rglob(ROW)):
        try:
            yield path, _row_of_run(path)
        except UsageError as e:
            yield path, e


def _row_of_run(path: Path) -> Columns:
    if not has_runs(path):
        raise UsageError(f"{path} is not the row of a run; leave its folder out")
    rows = read_rows(path)
    if len(rows) != 1:
        raise UsageError(f"{path} has {len(rows)} rows, but a run has one; leave its folder out")
    return rows[0]


def write(path: Path, rows: Sequence[Columns]) -> None:
    """Writes rows to a file in the format of its ending. UsageError for an unknown ending, or if pyarrow is missing."""
    if path.suffix == ".csv":
        write_atomically(path, to_csv(rows).encode())
    elif path.suffix == _PARQUET:
        _write_parquet(path, rows)
    else:
        raise UsageError(f"out= must end in .csv or {_PARQUET} (got {path})")


def _read_parquet(path: Path) -> list[Columns]:
    import pandas as pd

    try:
        cells = pd.read_parquet(path, dtype_backend="numpy_nullable").astype(object)
    except ImportError:
        raise _needs_pyarrow() from None
    except Exception as e:  # for a damaged file, the library raises various errors
        raise UsageError(f"cannot read {path} ({type(e).__name__}); name another file") from None
    if not {*cells} >= KEYS:
        return []
    rows = cells.where(cells.notna(), None).to_dict("records")
    return [as_read({str(name): cell for name, cell in row.items()}) for row in rows]


def _write_parquet(path: Path, rows: Sequence[Columns]) -> None:
    """Numbers as int64 or float64, everything else as text; an empty cell is null. Columns without a value are left
    out."""
    cells = _frame([as_read(row) for row in rows]).dropna(axis="columns", how="all")
    cells = cells.astype({name: "string" for name in cells if cells[name].dtype == object})
    with atomic_path(path) as temporary:
        try:
            cells.to_parquet(temporary, index=False)
        except ImportError:
            raise _needs_pyarrow() from None


def _needs_pyarrow() -> UsageError:
    return UsageError(f"Parquet files need pyarrow: {install('parquet')}, or use a .csv file")
