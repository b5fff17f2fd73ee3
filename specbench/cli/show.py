"""`specbench show`: rows of runs on the screen, seeds pooled, filtered, sorted and grouped."""

from __future__ import annotations

import json

from specbench.cli.arguments import CommandLine, Own, command
from specbench.cli.collect import SOURCE, read, say
from specbench.errors import UsageError


@command(
    "show",
    {
        "SOURCE": SOURCE,
        "--where CONDITION": Own(
            "string", "column=a,b or column!=a or 'column>=4'; several must all hold", several=True
        ),
        "--columns NAME,NAME": Own("text", "the columns (default: those in which the rows differ)"),
        "--sort NAME,NAME": Own("text", "columns to sort by; --sort=-fid is descending"),
        "--group-by NAME,NAME": Own("text", "columns: the mean over the rows of each group"),
        "--limit N": Own("integer", "rows at most"),
        "--no-pool": Own("flag", "every seed is a row of its own"),
        "--format NAME": Own("string", "how", choices=("table", "md", "csv", "json"), default="table"),
    },
)
def main(line: CommandLine) -> int:
    """Shows rows of runs, a line for each configuration: seeds are pooled,
    and the columns are those in which the rows differ, and the results.
    The vanilla AR images that runs decoded for comparison have a line, too.

      specbench show                                                       # the store
      specbench show runs/grid more.csv --where method=sjd --where 'fid<5' --sort=-speedup_step
      specbench show --group-by method --columns method,seeds,speedup_step,image_reward --format md
    """
    from specbench.rows import selection
    from specbench.rows.csv_files import as_cells, csv_text
    from specbench.rows.shown import shown

    conditions = [selection.condition(text) for text in line["--where"] or ()]
    columns, order, groups = (
        [name.strip() for name in (line[flag] or "").split(",") if name.strip()]
        for flag in ("--columns", "--sort", "--group-by")
    )
    for name in [*columns, *groups, *(name.removeprefix("-") for name in order)]:
        selection.column(name)
    rows = [row for row in map(shown, read(line.words, baselines=True)) if all(test(row) for test in conditions)]
    if not rows:
        raise UsageError("no row meets the conditions")
    pooled, notes = selection.grouped(rows, groups, not line["--no-pool"])
    say(notes)
    found = selection.ordered(pooled, order)[: line["--limit"] or None]
    columns = columns or selection.telling(found, groups)
    if line["--format"] in ("json", "csv"):
        cells = [{name: row.get(name) for name in columns} for row in found]
        as_json = json.dumps(cells, indent=1, ensure_ascii=False) + "\n"
        print(as_json if line["--format"] == "json" else csv_text(columns, map(as_cells, cells)), end="")
    else:
        print(selection.as_table(found, columns, line["--format"] == "md"))
    return 0
