"""`specbench breakdown RUN ...`: acceptance, steps and speed-up by category, caption length and position."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.compare.grouping import interval, of_pass, table
from specbench.compare.passes import read
from specbench.errors import UsageError, parse_arguments
from specbench.rows.breakdown import COLUMNS, ROWS
from specbench.rows.csv_files import csv_text
from specbench.storage.files import writable, write_atomically

_HELP = """\
usage: specbench breakdown RUN ... [out=FILE.csv]

Acceptance, step compression and speed-up of runs by category of prompt (where the data set has categories: those of
PartiPrompts, tasks of GenEval, layouts of scenes, a column `category` of your own file), by caption length (thirds of
the prompts) and by position in the image. Decodes nothing. Speed-ups are against the vanilla images of the same run.

  specbench breakdown first
  specbench breakdown first second out=groups.csv

  RUN              the folder of a run; followed by /baseline, its vanilla images
  out=             a .csv file for the rows

columns of out=:
"""


def main(arguments: Sequence[str]) -> int:
    """`specbench breakdown RUN ... [out=FILE.csv]`. Returns the exit status.

    Raises UsageError for bad arguments, folders that are not runs, and damaged records.
    """
    line = parse_arguments("breakdown", arguments)
    if line.help:
        print(_HELP + "\n".join(f"  {k:<22} " + v.replace("\n", "\n" + " " * 25) for k, v in COLUMNS.items()))
        return 0
    outs = [argument.removeprefix("out=") for argument in line.arguments if argument.startswith("out=")]
    runs = [argument for argument in line.arguments if not argument.startswith("out=")]
    if not runs or len(outs) > 1 or "" in outs:
        raise UsageError("breakdown takes runs and at most one out=FILE.csv (see specbench breakdown --help)")
    out = writable(outs[0]) if outs else None
    rows = []
    for argument in runs:
        one = read(argument)
        found = of_pass(one)
        print(f"{one.method}, {len(one.records)} images in {one.path}; {interval()}")
        print("\n".join(table(found)) if found else "One category, one length, and no raster order: nothing to show.")
        rows += found
    if out is not None:
        write_atomically(out, csv_text(ROWS.columns, rows).encode())
        print(f"wrote {out}")
    return 0
