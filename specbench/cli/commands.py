"""The sub-commands: their functions, one-line descriptions and exit codes.

Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.errors import plain, unknown
from specbench.rows.columns import Row

if TYPE_CHECKING:
    from specbench.harness.planned import PlannedRun

#: Sub-command -> its function, which takes the arguments and returns the exit code, and one line on its purpose. Its
#: arguments are declared with the function.
COMMANDS = {
    "run": ("run:main", "decode prompts, score the images, time them against vanilla AR, write one row"),
    "status": ("folders:status", "progress of the runs in a folder: done, left, speed, time left, failures"),
    "resume": ("folders:resume", "continue the run in a folder"),
    "merge": ("folders:merge", "make one run of its shards (shard=1/8 and so on)"),
    "list": ("choices:main", "models, methods, drafters, rules, data, metrics, and which weights are here"),
    "fetch": ("fetch:main", "download weights and data; shows sizes and licences first"),
    "evaluate": ("images:evaluate", "score existing images from any source"),
    "compare": ("show:compare", "compare two runs image by image: paired tests, intervals, effect sizes"),
    "breakdown": (
        "show:breakdown",
        "acceptance, steps and speed-up by category of prompt, caption length, depth, position",
    ),
    "reference": ("images:reference", "statistics of real images, for FID and similar metrics"),
    "audit": ("measurements:audit", "test whether a method is lossless, on models whose distribution is known"),
    "bench": ("measurements:bench", "milliseconds of each part of a step, next to the memory floor"),
    "probe": ("measurements:probe", "a target's confidence in its tokens, and the earlier tokens that it depends on"),
    "suite": ("tables:suite", "run several methods, models, prompts and seeds from one YAML file, and draw a table"),
    "tables": ("tables:main", "the papers' tables: measured values next to published ones"),
    "show": ("show:show", "rows of runs on the screen: filter, sort, group; seeds pooled"),
    "collect": ("show:collect", "rows from folders, CSV and Parquet files in one file"),
    "report": ("report:report", "one page of results to read and share: leaderboard, plots, images, audits"),
    "train": ("drafters:train", "train a drafter for a target"),
    "convert": ("drafters:convert", "convert an EAGLE drafter to and from LANTERN's layout"),
}

#: Exit codes: docs/long_runs.md describes them.
USAGE, FAILED, UNMEASURED, DEGENERATE, STOPPED = 2, 1, 3, 4, 130


def code_of(runs: Sequence[PlannedRun]) -> int:
    """Prints warnings on the rows of these runs and returns the exit code: for degenerate images, else for metrics
    without a value. A run without a row here has one in its folder, or none."""
    from specbench.rows.csv_files import read_rows
    from specbench.rows.degenerate import why_failed

    def row(run: PlannedRun) -> Row | None:
        path = run.folder / "row.csv"
        return run.row or (next(iter(read_rows(path)), None) if path.is_file() else None)

    rows = [(run, cells) for run in runs if (cells := row(run))]
    failed = [(run, why) for run, cells in rows if (why := why_failed(cells))]
    for run, why in failed:
        print(f"specbench: {plain(f'{run.name}: {why}' if len(runs) > 1 else why)}", file=sys.stderr)
    code = _unmeasured(rows, runs)
    return DEGENERATE if failed else code


def _unmeasured(rows: Sequence[tuple[PlannedRun, Mapping[str, Any]]], runs: Sequence[PlannedRun]) -> int:
    """Prints a line for every metric that has no value in some of these rows of the runs, and returns the exit code.
    For a single run only the metrics that were requested by name: its own report has the others."""
    from specbench.rows.remarks import unmeasured

    absent = [(run, unmeasured(run.config.metrics, row)) for run, row in rows]
    asked = any(run.asked and reasons for run, reasons in absent)
    names: dict[tuple[str, str], list[str]] = {}
    for run, reasons in absent if asked or len(runs) > 1 else ():
        for item in reasons.items():
            names.setdefault(item, []).append(run.name)
    lines = []
    for (metric, reason), labels in names.items():
        shown = ", ".join(labels[:3]) + (", ..." if labels[3:] else "")
        count = sum(metric in run.config.metrics for run in runs)
        where = f" in {len(labels)} of {count} runs ({shown})" if len(runs) > 1 else ""
        lines.append(f"{metric} has no value{where}: {reason}")
    return missing(lines, asked)


def missing(lines: Sequence[str], asked: bool = True) -> int:
    """Prints what has no value, and returns the exit code; asked: whether some of it was requested by name."""
    for text in lines:
        print(f"specbench: {plain(text)}", file=sys.stderr)
    return UNMEASURED if asked and lines else 0


def fail(what: object, code: int) -> int:
    if debug() and isinstance(what, BaseException):
        raise what
    print(f"specbench: {plain(what)}", file=sys.stderr)  # it may contain names and cells of untrusted files
    return code


def debug() -> bool:
    return os.environ.get("SPECBENCH_DEBUG", "") not in ("", "0")


def find(name: str) -> Any:
    """The function of a sub-command, an `arguments.Command`. UsageError for an unknown one."""
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    return pkgutil.resolve_name(f"specbench.cli.{COMMANDS[name][0]}")
