"""`specbench tables`: run what the tables still need, then draw them from their rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from specbench.cli.arguments import Arguments, Line, Own, Words, command
from specbench.config import parameters
from specbench.errors import unknown
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


def drawing(what: str) -> Arguments:
    """How the runs of a table or a suite (`what`: its lines, or runs) are made and drawn."""
    return {
        "--jobs N": Own(
            "integer",
            f"how many {what} at a time, each in a process of one thread, or 1, in this process; those whose seconds"
            " are measured run one after the other",
            low=1,
            default="1",
        ),
        "--no-run": Own("flag", "draw from the rows there are; what is missing stays marked"),
        "--dry-run": Own("flag", "say what would run: images, time, disk, memory, downloads"),
        "--format NAME,NAME": Own("string", f"any of {','.join(render.FORMATS)}", default="md,latex"),
    }


def _arguments() -> Arguments:
    hours = sorted(set(TABLES) - {table.id for table in by_default()})
    return {
        "ID": Words(f"which tables, as --list names them (default: all but {', '.join(hours)})", offers=lambda: TABLES),
        "--list": Own("flag", "show each table's state, rows and title, and stop"),
        "--model NAME": Own("string", f"the target to measure (default: each table's own, mostly {DEFAULT_MODEL})"),
        "--n N": Own("integer", "prompts per run (default: each table's own)", low=1),
        **drawing("lines"),
    }


@command("tables", _arguments)
def main(line: Line, bench: Bench | None = None, results: Path = Path("results"), runs: Path = Path("runs")) -> int:
    """Runs what the tables still need, then draws them from their rows."""
    for name in line.words:
        if name not in TABLES:
            raise unknown("table", name, TABLES)
    tables = [TABLES[name] for name in dict.fromkeys(line.words)]
    tables = tables or _of_kind(TABLES.values() if line["--list"] else by_default(), line["--model"])
    formats = render.formats(line["--format"])
    for table in tables:
        todo = plan(table, line["--model"] or table.model, line["--n"], results, runs)
        if line["--list"]:
            print(_state(todo, line))
        elif line["--dry-run"]:
            print(_foreseen(todo))
        else:
            if not line["--no-run"]:
                todo = collect(todo, results, bench or Bench(), say, line["--jobs"])
            _draw(todo, _command(table, line), formats, results / "tables")
    if line["--list"]:
        print(f"\nRun what a table lacks, and draw it: {_command(None, line)}")
    return 0


def say(text: str) -> None:
    """Prints a message next to a progress bar."""
    tqdm.write(text, file=sys.stderr)


def _command(table: Table | None, line: Line) -> str:
    """What fills a table; None: any of them."""
    arguments = ["specbench tables", table.id if table else "ID"]
    if line["--model"] not in (None, table and table.model):
        arguments += ["--model", line["--model"]]
    if line["--n"] not in (None, table and table.n):
        arguments += ["--n", str(line["--n"])]
    return " ".join(arguments)


def _foreseen(todo: TablePlan) -> str:
    """What the lines without a row would do."""
    from specbench.bench import forecast

    if todo.table.rows_of != "run":
        return f"dry run of {todo.table.id}: {len(todo.missing)} lines by specbench {todo.table.rows_of}, no images"
    return forecast.report(f"{todo.table.id} in {todo.home}", todo.missing)


def _state(todo: TablePlan, line: Line) -> str:
    table, need = todo.table, len(todo.runs)
    have = need - len(todo.missing)
    whole = have == need and not todo.untested and not todo.unequalled
    state = "complete" if whole else "partial" if have else "no rows"
    if not need:  # no line has a run on this model
        others = "other models" if line["--model"] else "needs --model"
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
