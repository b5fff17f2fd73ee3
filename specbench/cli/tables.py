"""`specbench tables`: run what the tables still need, then draw them from their rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from specbench.config import parameters
from specbench.errors import Parser, UsageError, unknown
from specbench.storage.files import write_atomically
from specbench.tables import figures, layout, literature, matched, render
from specbench.tables.catalog import TABLES
from specbench.tables.collect import collect
from specbench.tables.definitions import DEFAULT_MODEL, Table
from specbench.tables.measure import Bench, LocalBench, RunPlan, plan


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
    bench = bench or LocalBench()
    for table in tables:
        todo = plan(table, args.model or table.model, args.n, results, bench)
        if args.list:
            print(_state(table, todo, args))
            continue
        if args.dry_run:
            print(_foreseen(todo, runs))
            continue
        if not args.no_run:
            todo = collect(todo, results, runs, bench, _say, args.jobs)
        _draw(table, todo, args, formats, results)
    if args.list:
        print(f"\nRun what a table lacks, and draw it: {_command(None, args)}")
    return 0


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)  # next to a progress bar


def _command(table: Table | None, args: argparse.Namespace) -> str:
    """What fills a table; None: any of them."""
    arguments = ["specbench tables", table.id if table else "ID"]
    if args.model not in (None, table and table.model):
        arguments += ["--model", args.model]
    if args.n not in (None, table and table.n):
        arguments += ["--n", str(args.n)]
    return " ".join(arguments)


def _foreseen(todo: RunPlan, runs: Path) -> str:
    """What the lines without a row would do."""
    from specbench.cli import dry_run, plans
    from specbench.config import configuration

    if todo.table.rows_of != "run":
        return f"dry run of {todo.table.id}: {len(todo.missing)} lines by specbench {todo.table.rows_of}, no images"
    home = runs / "tables" / todo.table.id / todo.model
    planned = [plans.PlannedRun(home / one.folder, configuration.compose(one.overrides)) for one in todo.missing]
    return dry_run.report(f"{todo.table.id} in {home}", planned)


def _state(table: Table, todo: RunPlan, args: argparse.Namespace) -> str:
    have, need = len(todo.rows) - len(todo.missing), len(todo.rows)
    state = (
        "complete" if have == need and not todo.untested and not todo.unequalled else "partial" if have else "no rows"
    )
    if not need:  # no line has a run on this model
        state = (
            "published only"
            if table.id in literature.available()
            else "other models"
            if args.model
            else "needs --model"
        )
    return f"{table.id:20} {state:14} {f'{have}/{need}':>5} rows  {table.title}"


def _draw(table: Table, todo: RunPlan, args: argparse.Namespace, formats: Sequence[str], results: Path) -> None:
    printed = literature.load(table.id) if table.id in literature.available() else []
    if table.matched:
        drawn = matched.build(todo, _command(table, args))
    else:
        drawn = layout.build(table, todo.model, todo.rows, printed, todo.commands, _command(table, args), todo.compared)
    folder = results / "tables"
    stem = table.id if todo.model == table.model else f"{table.id}.{todo.model}"
    print(render.markdown(drawn))
    for name in formats:
        ending, renderer = render.FORMATS[name]
        path = folder / f"{stem}.{ending}"
        write_atomically(path, renderer(drawn).encode())
        print(f"wrote {path}")
    if table.figure and not table.matched and any(todo.rows.values()):
        for path in figures.draw(table, todo.rows, folder, stem):
            print(f"wrote {path}")
