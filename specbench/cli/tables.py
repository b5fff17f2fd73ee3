"""`specbench tables`: run what the tables still need, then draw them from their rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from specbench.bench.devices import DEVICES, only_dry
from specbench.cli.arguments import Arguments, CommandLine, Own, Words, command
from specbench.cli.commands import unmeasured
from specbench.config import parameters
from specbench.errors import integer, unknown
from specbench.harness.planned import PlannedRun
from specbench.tables import render
from specbench.tables.catalog import TABLES
from specbench.tables.collect import Bench, collect
from specbench.tables.definitions import DEFAULT_MODEL, Table
from specbench.tables.layout import TableSheet
from specbench.tables.measure import plan


def by_default() -> list[Table]:
    """The tables that are drawn where none is named: all but those that take hours, and those of plug-ins."""
    shipped = (table for name, table in TABLES.items() if parameters.plugin_of("suite", name) is None)
    return [table for table in shipped if not table.on_request]


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
        "--dry-run": Own("flag", "say what would run: images, time, GPU hours, disk, memory, downloads, commands"),
        "device_for=NAME": Own("string", f"GPU for --dry-run: {', '.join(DEVICES)}", offers=lambda: DEVICES),
        "--format NAME,NAME": Own("string", f"any of {','.join(render.FORMATS)}", default="md,latex"),
    }


def _arguments() -> Arguments:
    hours = sorted(set(TABLES) - {table.id for table in by_default()})
    return {
        "ID": Words(f"which tables, as --list names them (default: all but {', '.join(hours)})", offers=lambda: TABLES),
        "--list": Own("flag", "show each table's state, rows and title, and stop"),
        "--model NAME": Own("string", f"the target to measure (default: each table's own, mostly {DEFAULT_MODEL})"),
        "--n N": Own("integer", "prompts per run (default: each table's own)", low=1),
        "--seeds N,N": Own(
            "string",
            "run every line with each of these seeds; values are means over them, ± the standard deviation between them"
            " (default: each table's own seed; of a paper's protocol the first)",
        ),
        **drawing("lines"),
    }


@command("tables", _arguments)
def main(
    line: CommandLine, bench: Bench | None = None, results: Path = Path("results"), runs: Path = Path("runs")
) -> int:
    """Runs what the tables still need, then draws them from their rows."""
    for name in line.words:
        if name not in TABLES:
            raise unknown("table", name, TABLES)
    tables = [TABLES[name] for name in dict.fromkeys(line.words)]
    tables = tables or [table for table in TABLES.values() if line["--list"]] or by_default()
    if (model := line["--model"]) and not line.words:  # those whose methods the model can have
        continuous = parameters.is_continuous("model", model)
        tables = [table for table in tables if parameters.is_continuous("model", table.model) == continuous]
    formats = render.formats(line["--format"])
    seeds = tuple(dict.fromkeys(integer("--seeds", seed, 0) for seed in (line["--seeds"] or "").split(",") if seed))
    ran: list[PlannedRun] = []
    only_dry(line["device_for"], line["--dry-run"])
    for table in tables:
        todo = plan(table, line["--model"] or table.model, line["--n"], results, runs, seeds)
        if line["--list"]:
            print(todo.state(asked=bool(line["--model"])))
        elif line["--dry-run"]:
            from specbench.tables import forecast

            title, command = f"{table.id} in {todo.home}", _command(table, line)
            print(forecast.report(title, todo.missing, command, line["device_for"], results))
        else:
            if not line["--no-run"]:
                started = {run.folder for run in todo.missing if table.rows_of == "run"}
                todo = collect(todo, results, bench or Bench(), say, line["--jobs"])
                ran += [run for run in todo.runs if run.folder in started]
            draw(*render.of_table(todo, _command(table, line), results / "tables", formats))
    if line["--list"]:
        print(f"\nRun what a table lacks, and draw it: {_command(None, line)}")
    return unmeasured(ran)


def say(text: str) -> None:
    """Prints a message next to a progress bar."""
    tqdm.write(text, file=sys.stderr)


def _command(table: Table | None, line: CommandLine) -> str:
    """What fills a table; None: any of them."""
    arguments = ["specbench tables", table.id if table else "ID"]
    if line["--model"] not in (None, table and table.model):
        arguments += ["--model", line["--model"]]
    if line["--n"] not in (None, table and table.n):
        arguments += ["--n", str(line["--n"])]
    if line["--seeds"]:
        arguments += ["--seeds", line["--seeds"]]
    return " ".join(arguments)


def draw(sheet: TableSheet, files: Iterable[Path]) -> None:
    """Prints a sheet, and the paths of its files."""
    print(render.markdown(sheet))
    for path in files:
        print(f"wrote {path}")
