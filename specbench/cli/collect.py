"""`specbench collect`: the rows of runs from any mixture of places, in one file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.errors import UsageError
from specbench.storage import home

#: Where commands read rows from.
SOURCE = Words(
    "a CSV or Parquet file, a store, or a folder: of a run, a grid or a suite, or any with runs below it (default: the"
    " store of results, runs/results.sqlite, to which every run adds its row)"
)
_MOST_NOTES = 8


@command("collect", {"SOURCE": SOURCE, "out=FILE": Own("path", "the file of the rows", required=True, written=True)})
def main(line: CommandLine) -> int:
    """Gathers rows of runs into one file: FILE.csv, FILE.parquet (needs pyarrow) or FILE.sqlite. A run has one row, its
    newest.

      specbench collect out=all.csv
      specbench collect runs/2026-11-21 other/results.sqlite more.csv out=all.parquet
    """
    from specbench.rows import sources

    rows = read(line.words)
    sources.write(line["out"], rows)
    print(f"wrote {line['out']}: {len(rows)} rows")
    return 0


def read(names: Sequence[str], baselines: bool = False) -> list[dict[str, Any]]:
    """The rows of the sources that a command line names; of the store of results where it names none. Prints what was
    left out."""
    from specbench.rows import sources

    places = [home.expanded(name) for name in names]
    if not places:
        default = sources.default_store()
        if default is None or not default.is_file():
            raise UsageError(f"there is no store {default or sources.STORE} yet: name files or folders with rows")
        places = [default]
    rows, notes = sources.read(places, baselines)
    say(notes)
    return rows


def say(notes: Sequence[str]) -> None:
    """Prints what was left out, the first ones."""
    for note in notes[:_MOST_NOTES]:
        print(f"specbench: {note}", file=sys.stderr)
    if (more := len(notes) - _MOST_NOTES) > 0:
        print(f"specbench: {more} more of the same kind", file=sys.stderr)
