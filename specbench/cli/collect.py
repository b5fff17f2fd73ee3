"""`specbench collect`: the rows of runs from any mixture of places, in one file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import UsageError, parse_arguments, values
from specbench.storage import home
from specbench.storage.files import writable

_HELP = """\
usage: specbench collect [FILE or FOLDER ...] out=FILE

Gathers rows of runs into one file: FILE.csv, FILE.parquet (needs pyarrow) or FILE.sqlite. The sources are CSV and
Parquet files, stores, and folders: of a run, a grid or a suite, or any with runs below it. The default is the store of
results, runs/results.sqlite, to which every run adds its row. A run has one row, its newest.

  specbench collect out=all.csv
  specbench collect runs/2026-11-21 other/results.sqlite more.csv out=all.parquet
"""
MOST_NOTES = 8


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status. UsageError for bad arguments, a source without rows, and a file that cannot be
    written."""
    line = parse_arguments("collect", arguments)
    if line.help:
        print(_HELP, end="")
        return 0
    own = [argument for argument in line.arguments if argument.startswith("out=")]
    given = values(own, ["out"])
    if "out" not in given:
        raise UsageError("name the file: specbench collect ... out=all.csv")
    from specbench.rows import sources

    out = writable(given["out"])
    rows, notes = sources.read(places([argument for argument in line.arguments if argument not in own]))
    say(notes)
    sources.write(out, rows)
    print(f"wrote {out}: {len(rows)} rows")
    return 0


def places(names: Sequence[str]) -> list[Path]:
    """The sources that a command line names; the store of results where it names none."""
    from specbench.rows import store

    if names:
        return [home.expanded(name) for name in names]
    default = store.default()
    if default is None or not default.is_file():
        raise UsageError(f"there is no store {default or store.DEFAULT} yet: name files or folders with rows")
    return [default]


def say(notes: Sequence[str]) -> None:
    """Prints what was left out, the first ones."""
    for note in notes[:MOST_NOTES]:
        print(f"specbench: {note}", file=sys.stderr)
    if (more := len(notes) - MOST_NOTES) > 0:
        print(f"specbench: {more} more of the same kind", file=sys.stderr)
