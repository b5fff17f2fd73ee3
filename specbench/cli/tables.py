"""`specbench tables`: run what the tables still need, then draw them from their rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from specbench.config import parameters
from specbench.errors import Parser, UsageError, unknown
from specbench.harness.planned import Row
from specbench.storage.files import write_atomically
from specbench.tables import figures, layout, literature, matched, render
from specbench.tables.catalog import TABLES
from specbench.tables.collect import Bench, collect
from specbench.tables.definitions import DEFAULT_MODEL, Table
from specbench.tables.measure import TablePlan, plan


def by_default() -> list[Table]:
    """The tables that are drawn where none is named: all but those that take hours, and those of plug-ins."""
    shipped = (table for name, table in TABLES.items() if parameters.plugin_of("suite", name) is None)
    return [table for table in shipped if not table.on_request]


def _of_kind(tables: Iterable[Table], model: str | None) -> list[Table]:
    """The tables whose methods a model can have: those of discrete or those of continuous tokens. None: all."""
    continuous = model and parameters.is_continuous("model", model)
    return [table for table in tables if model is None or parameters.is_continuous("model", table.model) == continuous]


def _parser() -> argparse.ArgumentParser:
    hours = set(TABLES) - {table.id for table in by_default()}
    p = Parser(prog="specbench tables", description=__doc__)
    p.add_argument(
        "tables",
        nargs="*",
        metavar="ID",
        help=f"which tables, as --list names them (default: all but {', '.join(sorted(hours))})",
    )
    p.add_argument("--list", action="store_true", help="show each table's state, rows and title, and stop")
    p.add_argument("--model", help=f"the target model to measure (default: each table's own, mostly {DEFAULT_MODEL})")
    p.add_argument("--n", type=int, help="prompts per run (default: each table's own)")
    add_drawing(p, "lines")
    return p


def add_drawing(p: argparse.ArgumentParser, what: str) -> None:
    """How the runs of a table or a suite (`what`: its lines, or runs) are made and drawn."""
    p.add_argument(
        "--jobs",
        type=int,
        default=1,
        help=f"how many {what} at a time, each in a process of one thread; those whose seconds are measured run one"
        " after the other (default: %(default)s, in this process)",
    )
    p.add_argument("--no-run", action="store_true", help="draw from the rows there are; what is missing stays marked")
    p.add_argument("--dry-run", action="store_true", help="say what would run: images, time, disk, memory, downloads")
    p.add_argument("--format", default="md,latex", help=f"any of {','.join(render.FORMATS)} (default: %(default)s)")


def main(
    argv: Sequence[str], bench: Bench | None = None, results: Path = Path("results"), runs: Path = Path("runs")
) -> int:
    """The sub-command. `bench` runs what is missing (a test gives its own). Returns the exit status.

    Raises:
        UsageError: an unknown table, model or format, a bad `--n`, or a row that cannot be read.
    """
    args = _parser().parse_args(list(argv))
    for name in args.tables:
        if name not in TABLES:
            raise unknown("table", name, TABLES)
    tables = [TABLES[name] for name in dict.fromkeys(args.tables)]
    tables = tables or _of_kind(TABLES.values() if args.list else by_default(), args.model)
    formats = render.formats(args.format)
    for name, value in (("n", args.n), ("jobs", args.jobs)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be an integer of at least 1 (got {value})")
    for table in tables:
        todo = plan(table, args.model or table.model, args.n, results, runs)
        if args.list:
            print(_state(todo, args))
        elif args.dry_run:
            print(_foreseen(todo))
        else:
            if not args.no_run:
                todo = collect(todo, results, bench or Bench(), say, args.jobs)
            _draw(todo, _command(table, args), formats, results / "tables")
    if args.list:
        print(f"\nRun what a table lacks, and draw it: {_command(None, args)}")
    return 0


def say(text: str) -> None:
    """Prints a message next to a progress bar."""
    tqdm.write(text, file=sys.stderr)


def _command(table: Table | None, args: argparse.Namespace) -> str:
    """What fills a table; None: any of them."""
    arguments = ["specbench tables", table.id if table else "ID"]
    if args.model not in (None, table and table.model):
        arguments += ["--model", args.model]
    if args.n not in (None, table and table.n):
        arguments += ["--n", str(args.n)]
    return " ".join(arguments)


def _foreseen(todo: TablePlan) -> str:
    """What the lines without a row would do."""
    from specbench.cli import dry_run

    if todo.table.rows_of != "run":
        return f"dry run of {todo.table.id}: {len(todo.missing)} lines by specbench {todo.table.rows_of}, no images"
    return dry_run.report(f"{todo.table.id} in {todo.home}", todo.missing)


def _state(todo: TablePlan, args: argparse.Namespace) -> str:
    table, need = todo.table, len(todo.runs)
    have = need - len(todo.missing)
    whole = have == need and not todo.untested and not todo.unequalled
    state = "complete" if whole else "partial" if have else "no rows"
    if not need:  # no line has a run on this model
        others = "other models" if args.model else "needs --model"
        state = "published only" if table.id in literature.available() else others
    return f"{table.id:20} {state:14} {f'{have}/{need}':>5} rows  {table.title}"


def _draw(todo: TablePlan, command: str, formats: Sequence[str], folder: Path) -> None:
    table = todo.table
    printed = literature.load(table.id) if table.id in literature.available() else []
    if table.matched:
        sheet = matched.build(todo, command)
    else:
        commands = {run.key: run.command for run in todo.runs}
        sheet = layout.build(table, todo.model, todo.rows, printed, commands, command, todo.compared)
    stem = table.id if todo.model == table.model else f"{table.id}.{todo.model}"
    draw(sheet, table, {} if table.matched else todo.rows, folder, stem, formats)


def draw(
    sheet: layout.TableSheet,
    table: Table,
    rows: Mapping[str, Row | None],
    folder: Path,
    stem: str,
    formats: Sequence[str],
    cells: str = "",
) -> None:
    """Prints a sheet, and writes it in these formats, with the figure of its rows. cells: the name of its CSV file."""
    print(render.markdown(sheet))
    for name in formats:
        ending, renderer = render.FORMATS[name]
        path = folder / (cells if cells and name == "csv" else f"{stem}.{ending}")
        write_atomically(path, renderer(sheet).encode())
        print(f"wrote {path}")
    if table.figure and any(rows.values()):
        for path in figures.draw(table, rows, folder, stem):
            print(f"wrote {path}")
