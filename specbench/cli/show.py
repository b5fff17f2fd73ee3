"""`specbench collect`, `show`, `compare` and `breakdown`: rows of runs, and runs prompt by prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbench.cli.arguments import Argument, CommandLine, Words, command
from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.files import write_atomically

#: The sources of rows.
SOURCE = Words(
    "a CSV or Parquet file, or a folder: of a run, a grid or a suite, or any folder that contains runs (default: runs/)"
)
_MOST_NOTES = 8


@command(
    "collect", {"SOURCE": SOURCE, "out=FILE": Argument("path", "the file of the rows", required=True, written=True)}
)
def collect(line: CommandLine) -> int:
    """Gathers rows of runs into one file: FILE.csv, or FILE.parquet (needs pyarrow). Of each run, the newest row is
    taken.

      specbench collect out=all.csv
      specbench collect runs/2026-11-21 other more.csv out=all.parquet
    """
    from specbench.rows import collected

    rows = read(line.words)
    collected.write(line["out"], rows)
    print(f"wrote {line['out']}: {len(rows)} rows")
    return 0


def read(names: Sequence[str], baselines: bool = False) -> list[dict[str, Any]]:
    """The rows of the sources in a command line; without sources, of runs/. Prints which runs were skipped."""
    from specbench.rows import collected

    rows, notes = collected.read([home.expanded(name) for name in names] or [Path("runs")], baselines)
    say(notes)
    return rows


def say(notes: Sequence[str]) -> None:
    """Prints notes, at most `_MOST_NOTES` of them."""
    for note in notes[:_MOST_NOTES]:
        print(f"specbench: {note}", file=sys.stderr)
    if (more := len(notes) - _MOST_NOTES) > 0:
        print(f"specbench: {more} more notes like these", file=sys.stderr)


@command(
    "show",
    {
        "SOURCE": SOURCE,
        "--where CONDITION": Argument(
            "string", "column=a,b or column!=a or 'column>=4'; several must all hold", several=True
        ),
        "--columns NAME,NAME": Argument(
            "text", "the columns (default: the columns in which the rows differ, and results)"
        ),
        "--sort NAME,NAME": Argument("text", "columns to sort by; --sort=-fid is descending"),
        "--group-by NAME,NAME": Argument("text", "columns: rows that agree in them become one, with means"),
        "--limit N": Argument("integer", "maximum number of rows", low=1),
        "--no-pool": Argument("flag", "show every seed as a row of its own"),
        "--format NAME": Argument("string", "output format", choices=("table", "md", "csv", "json"), default="table"),
    },
)
def show(line: CommandLine) -> int:
    """Shows rows of runs, one line for each configuration. Seeds are pooled. The default columns are the results, and
    the columns in which the rows differ. The vanilla AR images that runs decoded for comparison have a line, too. It
    draws nothing: specbench report SOURCE makes a page with a plot of any two statistics of these rows.

      specbench show                                                       # all runs in runs/
      specbench show runs/grid more.csv --where method=sjd --where 'fid<5' --sort=-speedup_step
      specbench show --group-by method --columns method,seeds,speedup_step,image_reward --format md
    """
    from specbench.rows import selection
    from specbench.rows.csv_files import as_cells
    from specbench.rows.shown import shown, unsteady
    from specbench.storage.csv_text import csv_text

    conditions = [selection.condition(text) for text in line["--where"] or ()]
    columns, order, groups = (
        [name.strip() for name in (line[flag] or "").split(",") if name.strip()]
        for flag in ("--columns", "--sort", "--group-by")
    )
    for name in [*columns, *groups, *(name.removeprefix("-") for name in order)]:
        selection.column(name)
    # a condition on a mean is about the mean, not about the seeds that it is of
    early = [test for test in conditions if not selection.is_pooled(test.name)]
    late = [test for test in conditions if selection.is_pooled(test.name)]
    rows = [row for row in map(shown, read(line.words, baselines=True)) if all(test(row) for test in early)]
    pooled, notes = selection.grouped(rows, groups, not line["--no-pool"])
    pooled = [row for row in pooled if all(test(row) for test in late)]
    if not pooled:
        raise UsageError("no row meets the conditions")
    if doubtful := sum(bool(unsteady(row)) for row in rows):
        notes.append(f"{doubtful} of {len(rows)} rows have seconds of a timing that was not steady: see timing_valid")
    say(notes)
    chosen = selection.ordered(pooled, order)[: line["--limit"] or None]
    columns = columns or selection.telling(chosen, groups)
    if line["--format"] in ("json", "csv"):
        cells = [{name: row.get(name) for name in columns} for row in chosen]
        as_json = json.dumps(cells, indent=1, ensure_ascii=False) + "\n"
        print(as_json if line["--format"] == "json" else csv_text(columns, map(as_cells, cells)), end="")
    else:
        print(selection.as_table(chosen, columns, line["--format"] == "md"))
        if any(row["seeds"] > 1 for row in chosen):
            say(["± is a standard error in a row of one seed, the standard deviation between rows in one of several"])
    return 0


@command(
    "compare",
    {
        "A B": Words("the folder of a run, or RUN/baseline for the vanilla images decoded for its speed-up", 2, 2),
        "out=FILE.csv": Argument("path", "a file for the statistics", written=True),
    },
    tables={"columns of out=:": "specbench.compare.wording:COLUMNS"},
)
def compare(line: CommandLine) -> int:
    """Compares two runs image by image, over the prompts that both decoded: the difference of B from A, its 95 %
    interval, the paired t-test (Cool-SD, C.4), the Wilcoxon signed-rank test, Holm's adjustment for several tests,
    Cohen's d_z, a sentence for each significant difference and one line for the rest. A pair has the same index, prompt
    and id; an image without a partner is ignored and named. Several images of a prompt count once, by their mean. The
    last lines say how many pairs a significant difference would need.
    Scores per image are compared if both runs have them from the same scorer; a Fréchet distance by the influence of
    each pair on it. For a feature extractor, the energy distance between A's and B's features tests whether the images
    have the same distribution. Use runs with different seeds for this test, since images that share random numbers are
    alike.

      specbench compare runs/eagle runs/cool_sd
      specbench compare runs/cool_sd/baseline runs/cool_sd      # with the vanilla images of the same run
      specbench compare first second out=compared.csv
    """
    from specbench.compare import comparison, passes, wording

    result = comparison.compare(*map(passes.read, line.words))
    print(wording.report(result))
    if out := line["out"]:
        write_atomically(out, wording.to_csv(result).encode())
        print(f"wrote {out}")
    return 0


@command(
    "breakdown",
    {
        "RUN": Words("the folder of a run, or RUN/baseline for its vanilla images", 1),
        "out=FILE.csv": Argument("path", "a file for the rows", written=True),
    },
    tables={"columns of out=:": "specbench.compare.breakdown:COLUMNS"},
)
def breakdown(line: CommandLine) -> int:
    """Acceptance, step compression and speed-up of runs by category of prompt (if the data set has them: categories of
    PartiPrompts, tasks of GenEval, layouts of scenes, a column `category` in your own file), by caption length (thirds
    of the prompts), by depth in a draft (conditional on the depths above, and joint over all drafts) and by position in
    the image. Decodes nothing. Speed-ups are against the vanilla images of the same run.

      specbench breakdown first
      specbench breakdown first second out=groups.csv
    """
    from specbench.compare.breakdown import INTERVALS, ROWS, lines_of, of_pass, table
    from specbench.compare.passes import read
    from specbench.storage.csv_text import csv_text

    rows = []
    for decoded in map(read, line.words):
        if not decoded.records:
            raise UsageError(f"{decoded.path} has no images yet: finish the run with specbench resume {decoded.path}")
        groups = of_pass(decoded)
        print(f"{decoded.method}, {len(decoded.records)} images in {decoded.path}; {INTERVALS}")
        print("\n".join(table(groups)) if groups else "One category, one length, and no raster order: nothing to show.")
        rows += lines_of(decoded, groups)
    if out := line["out"]:
        write_atomically(out, csv_text(ROWS.columns, rows).encode())
        print(f"wrote {out}")
    return 0
