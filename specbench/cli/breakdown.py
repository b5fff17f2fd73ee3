"""`specbench breakdown RUN ...`: acceptance, steps and speed-up by category, caption length and position."""

from __future__ import annotations

from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.storage.files import write_atomically


@command(
    "breakdown",
    {
        "RUN": Words("the folder of a run; followed by /baseline, its vanilla images", 1),
        "out=FILE.csv": Own("path", "a file for the rows", written=True),
    },
    tables={"columns of out=:": "specbench.compare.breakdown:COLUMNS"},
)
def main(line: CommandLine) -> int:
    """Acceptance, step compression and speed-up of runs by category of prompt (where the data set has categories: those
    of PartiPrompts, tasks of GenEval, layouts of scenes, a column `category` of your own file), by caption length
    (thirds of the prompts) and by position in the image. Decodes nothing. Speed-ups are against the vanilla images of
    the same run.

      specbench breakdown first
      specbench breakdown first second out=groups.csv
    """
    from specbench.compare.breakdown import INTERVALS, ROWS, of_pass, table
    from specbench.compare.passes import read
    from specbench.rows.csv_files import csv_text

    rows = []
    for one in map(read, line.words):
        found = of_pass(one)
        print(f"{one.method}, {len(one.records)} images in {one.path}; {INTERVALS}")
        print("\n".join(table(found)) if found else "One category, one length, and no raster order: nothing to show.")
        rows += found
    if out := line["out"]:
        write_atomically(out, csv_text(ROWS.columns, rows).encode())
        print(f"wrote {out}")
    return 0
