"""`specbench show`: rows of runs on the screen, seeds pooled, filtered, sorted and grouped."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from specbench.cli.collect import places, say
from specbench.errors import Parser, UsageError

_FORMATS = ("table", "md", "csv", "json")
#: Columns that are shown where none are named and some row has them, after those in which the rows differ.
_RESULTS = (
    "accepted_length_mean",
    "speedup_step",
    "speedup_latency",
    "latency_s_mean",
    "emitted_kl",
    "perplexity",
)
#: Parameters that every configuration has and that tell no two methods apart.
_QUIET = ("seed", "warmup", "protocol", "timing", "drafter", "rule", "verification")
_WHERE = ("device_name", "dtype", "engine", "torch", "commit")


def _parser() -> Parser:
    p = Parser(prog="specbench show", description=__doc__, allow_abbrev=False)
    p.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="CSV and Parquet files, stores, folders with runs (default: the store of results, runs/results.sqlite)",
    )
    p.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="column=a,b or column!=a or 'column>=4'; several must all hold",
    )
    p.add_argument("--columns", help="names of columns, separated by commas (default: those in which the rows differ)")
    p.add_argument("--sort", default="", help="columns, separated by commas; --sort=-fid is descending")
    p.add_argument("--group-by", default="", help="columns, separated by commas: the mean over the rows of each group")
    p.add_argument("--limit", type=int, default=0, help="rows at most")
    p.add_argument("--no-pool", action="store_true", help="every seed is a row of its own")
    p.add_argument("--format", choices=_FORMATS, default="table", help="(default: %(default)s)")
    return p


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status. UsageError for bad arguments and for sources without rows."""
    try:
        args = _parser().parse_intermixed_args(list(arguments))
    except SystemExit as e:  # --help
        return int(e.code or 0)
    from specbench.rows import selection, sources

    conditions = [selection.condition(text) for text in args.where]
    order, groups = (_names(text) for text in (args.sort, args.group_by))
    rows, notes = sources.read(places(args.sources))
    say(notes)
    rows = [row for row in rows if all(test(row) for test in conditions)]
    if not rows:
        raise UsageError("no row meets the conditions")
    for name in order:
        selection.column(name.removeprefix("-"))
    found = selection.ordered(_pooled(rows, groups, not args.no_pool), order)[: args.limit or None]
    columns = _names(args.columns or "") or _columns(found, groups)
    for name in columns:
        selection.column(name)
    if args.format == "json":
        print(json.dumps([{name: row.get(name) for name in columns} for row in found], indent=1, ensure_ascii=False))
    elif args.format == "csv":
        from specbench.rows.csv_files import as_cells, csv_text

        cells = [as_cells({name: row.get(name) for name in columns}) for row in found]
        print(csv_text(columns, cells), end="")
    else:
        lines = [[selection.shown(row, name) for name in columns] for row in found]
        print(_table(columns, lines, args.format == "md"))
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _pooled(rows: Sequence[Mapping[str, Any]], groups: Sequence[str], pool_seeds: bool) -> list[dict[str, Any]]:
    """One row for the seeds of a configuration, or for a group."""
    from specbench.rows import pool, selection

    if not groups:
        some = pool.groups(rows) if pool_seeds else [[row] for row in rows]
        return [{**pool.pooled(one), "seeds": len(one)} for one in some]
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(str(row.get(selection.column(name)) or "") for name in groups)
        found.setdefault(key, []).append(row)
    for key, members in found.items():
        if mixed := [name for name in _WHERE if len({row.get(name) for row in members}) > 1]:
            print(f"specbench: the group {' '.join(key)} mixes rows that differ in {', '.join(mixed)}", file=sys.stderr)
    return [{**pool.pooled(members), "seeds": len(members)} for members in found.values()]


def _columns(rows: Sequence[Mapping[str, Any]], groups: Sequence[str]) -> list[str]:
    """What tells the rows apart, and the results that there are."""
    from specbench.config import parameters
    from specbench.rows.columns import COLUMNS, METRICS

    def differs(name: str) -> bool:
        return len({str(row.get(name)) for row in rows}) > 1

    mine = [name for name in parameters.table() if name in COLUMNS and name not in (*_QUIET, "model", "method", "n")]
    named = list(groups) or ["model", "method", *(name for name in (*mine, *_WHERE) if differs(name))]
    results = [name for name in (*_RESULTS, *METRICS) if any(row.get(name) is not None for row in rows)]
    return list(dict.fromkeys([*named, *([] if groups else ["n"]), "seeds", *results]))


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]], markdown: bool) -> str:
    if markdown:
        rows = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)
    cut = [[cell if len(cell) <= 40 else f"{cell[:37]}..." for cell in line] for line in lines]
    widths = [max(map(len, cells)) for cells in zip(columns, *cut, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *cut))
