"""`specbench tables` and `suite`: execute the missing runs, then draw the tables from their rows."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from specbench.bench.devices import DEVICES, only_dry
from specbench.cli.arguments import Argument, Arguments, CommandLine, Words, command
from specbench.cli.commands import code_of
from specbench.config import parameters
from specbench.errors import RunError, UsageError, plain, unknown, values
from specbench.harness.planned import PlannedRun
from specbench.storage import home
from specbench.storage.files import locked
from specbench.tables import catalog, render, table_runs
from specbench.tables.catalog import TABLES, Source
from specbench.tables.collect import Bench, collect
from specbench.tables.definitions import DEFAULT_MODEL, Suite, Table
from specbench.tables.layout import TableSheet
from specbench.tables.table_runs import plan, plan_suite


def by_default() -> list[Table]:
    """The tables that are drawn by default: all of specbench's that do not take hours."""
    shipped = (table for name, table in TABLES.items() if parameters.plugin_of("suite", name) is None)
    return [table for table in shipped if not table.on_request]


def drawing(what: str) -> Arguments:
    """The arguments on executing and drawing the runs of a table or a suite (`what`: "lines" or "runs")."""
    return {
        "--jobs N": Argument(
            "integer",
            f"how many {what} at a time, each in a process of one thread (1: in this process); those whose seconds are"
            " measured run one after the other",
            low=1,
            default="1",
        ),
        "--no-run": Argument("flag", "draw from the existing rows; missing values are marked"),
        "--dry-run": Argument(
            "flag", "print what would run: images, time, GPU hours, disk, memory, downloads, commands"
        ),
        "device_for=NAME": Argument("string", f"GPU for --dry-run: {', '.join(DEVICES)}", offers=lambda: DEVICES),
        "--format NAME,NAME": Argument("string", f"any of {','.join(render.FORMATS)}", default="md,latex"),
    }


def _arguments() -> Arguments:
    return {
        "ID": Words("tables (default: all of specbench's that do not take hours)", offers=lambda: TABLES),
        "--list": Argument("flag", "show each table's state, rows and title, and which take hours, and exit"),
        "--model NAME": Argument("string", f"the target to measure (default: the table's own, mostly {DEFAULT_MODEL})"),
        "--n N": Argument("integer", "prompts per run (default: the table's own)", low=1),
        "--seeds N,N": Argument(
            "integers",
            "run every line with each of these seeds; values are means over them, ± the standard deviation between them"
            " (default: the table's own seed; for a paper's protocol its first)",
            low=0,
        ),
        **drawing("lines"),
    }


#: What the command line may change in a table, besides the parameters of all its runs.
TABLE_KEYS = ("batch", "timed", "seeds")
#: Options that are also taken as name=value, as `specbench run` and `suite` take them.
_OPTIONS = ("model", "n", "seeds")


@command("tables", _arguments, others=["specbench.cli.tables:TABLE_KEYS", "specbench.config.parameters:table"])
def main(
    line: CommandLine, bench: Bench | None = None, results: Path = Path("results"), runs: Path = Path("runs")
) -> int:
    """Executes the runs that the tables still need, then draws the tables from their rows. batch=N timed=M measures
    quality in batches of N images, and seconds by further runs of M prompts. Another name=value is a parameter of all
    runs that have it, such as device=cuda or drafter_weights=DIR. model=, n= and seeds= mean the same as the options. A
    line that fails is named; the others run.
    """
    line = _with_options(line)
    for name in line.words:
        if name not in TABLES:
            raise unknown("table", name, TABLES)
    tables = [TABLES[name] for name in dict.fromkeys(line.words)]
    tables = tables or [table for table in TABLES.values() if line["--list"]] or by_default()
    if (model := line["--model"]) and not line.words:  # only tables whose methods the model supports
        kind = parameters.kind("model", model)
        tables = [table for table in tables if parameters.kind("model", table.model) == kind]
    formats = render.formats(line["--format"])
    seeds = tuple(line["--seeds"] or ())
    changes = _changes(line.others)
    ran: list[PlannedRun] = []
    failed: list[Exception] = []
    only_dry(line["device_for"], line["--dry-run"])
    for table in tables:
        todo = plan(table, line["--model"] or table.model, line["--n"], results, runs, seeds, changes)
        if line["--list"]:
            print(todo.state(asked=bool(line["--model"])))
        elif line["--dry-run"]:
            from specbench.tables import forecast

            title, command = f"{table.id} in {todo.home}", _command(table, line)
            text, mistake = forecast.report(title, todo.missing, command, line["device_for"], results)
            print(text)
            failed += [] if mistake is None else [mistake]
        else:
            if not line["--no-run"]:
                started = {run.folder for run in todo.missing if table.rows_of == "run"}
                todo = collect(todo, bench or Bench(), say, line["--jobs"])
                ran += [run for run in todo.runs if run.folder in started]
                failed += [] if todo.failed is None else [todo.failed]
            draw(*render.files(todo, _command(table, line), results / "tables", formats))
    if line["--list"]:
        print(f"\nTo run the missing lines of a table and draw it: {_command(None, line)}")
    if failed:
        bad_input = all(isinstance(error, UsageError) for error in failed)
        raise (UsageError if bad_input else RunError)("; ".join(map(str, failed)))
    return code_of(ran)


def _with_options(line: CommandLine) -> CommandLine:
    """The line with n=5 read as --n 5. UsageError if both are given."""
    named = [argument for argument in line.others if argument.partition("=")[0] in _OPTIONS]
    read = {}
    for name, text in values(named, _OPTIONS).items():
        if (option := f"--{name}") in line.given:
            raise UsageError(f"{option} and {name}= mean the same; give only one of them")
        read[option] = main.by_name[option].from_text(name, text)
    others = [argument for argument in line.others if argument not in named]
    return replace(line, others=others, values={**line.values, **read})


def _changes(arguments: Sequence[str]) -> dict[str, str]:
    """The changes of a table. UsageError for a name that is no parameter. (Composing the runs checks the values.)"""
    texts = values(arguments, [*TABLE_KEYS, *parameters.table()], "parameter")
    if "out" in texts:
        raise UsageError("out: a table writes to results/; run a line by its own command to choose its folder")
    if "seed" in texts:
        raise UsageError(f"seed={texts['seed']}: write seeds={texts['seed']}, the seeds of every line")
    if "timed" in texts and not (texts["timed"].isascii() and texts["timed"].isdigit()):
        raise UsageError(f"timed must be an integer of at least 0 (got {plain(texts['timed'])!r})")
    return texts


def say(text: str) -> None:
    """Prints a message next to a progress bar."""
    tqdm.write(text, file=sys.stderr)


def _command(table: Table | None, line: CommandLine) -> str:
    """The command that completes a table; None: any table."""
    arguments = ["specbench tables", table.id if table else "ID"]
    if line["--model"] not in (None, table and table.model):
        arguments += ["--model", line["--model"]]
    if line["--n"] not in (None, table and table.n):
        arguments += ["--n", str(line["--n"])]
    if line["--seeds"]:
        arguments += ["--seeds", ",".join(map(str, line["--seeds"]))]
    return " ".join([*arguments, *map(shlex.quote, line.others)]) + parameters.including_flags()


def draw(sheet: TableSheet, files: Iterable[Path]) -> None:
    """Prints a sheet and the paths of its files."""
    print(render.markdown(sheet))
    for path in files:
        print(f"wrote {path}")


#: Keys of a suite that the command line may change.
KEYS = ("n", "models", "prompts", "seeds", "metrics", "batch", "timed")
STEM = "suite"


@command(
    "suite",
    lambda: {
        "NAME|FILE.yaml": Words("a suite that --list names, or your own file", most=1, offers=catalog.names),
        "--list": Argument("flag", "show every suite that is included, and exit"),
        **drawing("runs"),
    },
    others=["specbench.cli.tables:KEYS", "specbench.config.parameters:table"],
)
def suite(line: CommandLine, bench: Bench | None = None) -> int:
    """Runs several methods on several models, prompts and seeds, as one YAML file names them, and draws their table.
    name=value replaces a value of the file: n, models, prompts, seeds, metrics, batch, timed, a parameter of all runs
    such as device=cuda, and out=DIR, the suite's folder (default: runs/suites/NAME).
    """
    if line["--list"]:
        for name, meaning in parameters.choices(catalog.GROUP).items():
            print(f"{name:22} {meaning}")
        return 0
    if not line.words:
        raise UsageError("name a suite: specbench suite NAME or FILE.yaml (specbench suite --list shows the names)")
    formats = render.formats(line["--format"])
    chosen, out = _read(line.words[0], line.others)
    only_dry(line["device_for"], line["--dry-run"])
    if line["--dry-run"]:
        from specbench.tables import forecast

        todo = plan_suite(chosen, out)
        table_runs.check_folder(chosen, out)
        words = [line.words[0], *line.others]
        command = f"specbench suite{parameters.including_flags()} {shlex.join(words)}"
        text, mistake = forecast.report(f"{todo.title} in {out}", todo.runs, command, line["device_for"])
        print(text)
        for why in todo.left_out:
            print(f"left out: {why}")
        if mistake is not None:
            raise mistake
        return 0
    return execute(chosen, out, bench or Bench(), line["--jobs"], formats, line["--no-run"])


def execute(
    suite: Suite, out: Path, bench: Bench, jobs: int, formats: Sequence[str] = ("md", "latex"), no_run: bool = False
) -> int:
    """Executes the missing runs of a suite in its folder, and draws its table."""
    todo = plan_suite(suite, out)
    with locked(out, lambda: table_runs.check_folder(suite, out)):
        table_runs.write_definition(suite, out)
        for text in todo.left_out:
            say(f"{todo.title}: {text}")
        count = len(todo.runs)
        say(f"{todo.title}: {count} runs in {out}, {count - len(todo.missing)} of them finished")
        try:
            done = collect(todo, bench, say, jobs, no_run)
        except KeyboardInterrupt as e:
            raise KeyboardInterrupt(f"{str(e) or 'stopped'}; to continue: {todo.command}") from None
        draw(*render.files(done, todo.command, out, formats, STEM, f"{STEM}_cells.csv"))
        if len(done.missing) < count:
            print(f"wrote {out / table_runs.SUITE_ROWS}")
    code = 0 if no_run else code_of(done.runs)
    if done.failed is not None:
        raise done.failed
    return code


def _read(name: str, arguments: Sequence[str]) -> tuple[Suite, Path]:
    """The suite with a name or in a file, changed by the arguments, and its folder."""
    path = home.expanded(name)
    is_file = path.suffix in (".yaml", ".yml")
    source = catalog.of_file(path) if is_file else catalog.shipped(name)
    content: dict[str, Any] = dict(source.content)
    overrides = _values(arguments)
    called = str(source.content.get("name") or (path.stem if is_file else name))
    out = home.expanded(overrides.pop("out", Path("runs", "suites", called)))
    content |= {key: overrides.pop(key) for key in KEYS if key in overrides}
    if overrides:
        content["with"] = {**source.mapping("with", content.get("with")), **overrides}
    return catalog.suite(called, Source(source.name, content)), out


def _values(arguments: Sequence[str]) -> dict[str, Any]:
    texts = values(arguments, {argument.partition("=")[0] for argument in arguments})
    parsed: dict[str, Any] = {name: text if name == "out" else _scalar(text) for name, text in texts.items()}
    lists = texts.keys() & {"models", "prompts", "seeds"}
    return parsed | {name: [_scalar(part) for part in texts[name].split(",")] for name in lists}


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
