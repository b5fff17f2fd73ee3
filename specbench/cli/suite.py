"""`specbench suite`: several methods on several models, prompts and seeds, as one YAML names them, and their table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from specbench.cli.tables import add_drawing
from specbench.config import parameters
from specbench.errors import Parser, UsageError
from specbench.storage import home
from specbench.storage.files import locked, write_atomically
from specbench.tables import figures, render, suite_files, suite_runs, suite_sheet, suites
from specbench.tables.measure import LocalBench, SuiteBench
from specbench.tables.suite_files import Source
from specbench.tables.suite_runs import SuiteRows
from specbench.tables.suites import Suite

#: Keys of a suite that the command line may give.
_OWN = ("n", "models", "prompts", "seeds", "metrics", "batch", "timed")
STEM = "suite"


def _parser() -> Parser:
    p = Parser(prog="specbench suite", description=__doc__, allow_abbrev=False)
    p.add_argument(
        "suite", nargs="?", metavar="NAME|FILE.yaml", help="a suite that --list names, or a file of your own"
    )
    p.add_argument(
        "values",
        nargs="*",
        metavar="name=value",
        help=f"in the place of what the file says: {', '.join(_OWN)}, a parameter of all runs such as device=cuda, and"
        " out=DIR, the suite's folder (default: runs/suites/NAME)",
    )
    p.add_argument("--list", action="store_true", help="show every suite that is shipped, and stop")
    add_drawing(p, "runs")
    return p


def main(arguments: Sequence[str], bench: SuiteBench | None = None) -> int:
    """The sub-command. `bench` runs what is missing (a test gives its own). Returns the exit status.

    Raises UsageError for bad arguments and a bad file, UsageError or RunError where runs failed.
    """
    try:
        args = _parser().parse_intermixed_args(list(arguments))
    except SystemExit as e:  # --help
        return int(e.code or 0)
    if args.list:
        for name, line in parameters.choices(suite_files.GROUP).items():
            print(f"{name:22} {line}")
        return 0
    if args.suite is None:
        raise UsageError("name a suite: specbench suite NAME, or FILE.yaml (specbench suite --list)")
    if args.jobs < 1:
        raise UsageError(f"--jobs must be an integer of at least 1 (got {args.jobs})")
    formats = render.formats(args.format)
    suite, out = _read(args.suite, args.values)
    if args.dry_run:
        from specbench.cli import dry_run, plans

        todo = suites.plan(suite, out, bench or LocalBench())
        print(dry_run.report(f"{suite.table.id} in {out}", plans.of_suite(todo)))
        return 0
    return execute(suite, out, bench or LocalBench(), args.jobs, formats, args.no_run)


def execute(
    suite: Suite,
    out: Path,
    bench: SuiteBench,
    jobs: int,
    formats: Sequence[str] = ("md", "latex"),
    no_run: bool = False,
) -> int:
    """Runs a suite, or the rest of it, in its folder, and draws its table."""
    todo = suites.plan(suite, out, bench)
    with locked(out, lambda: _check(out)):
        suites.write_definition(suite, out)
        for text in todo.left_out:
            _say(f"{suite.table.id}: {text}")
        count = len(todo.runs)
        _say(f"{suite.table.id}: {count} runs in {out}, {count - len(todo.missing)} of them finished")
        failed: Exception | None = None
        try:
            if no_run:
                found = suite_runs.gather(todo, bench)
            else:
                found, failed = suite_runs.run(todo, bench, _say, jobs)
        except KeyboardInterrupt as e:
            raise KeyboardInterrupt(f"{str(e) or 'stopped'}; to go on: {todo.command}") from None
        _draw(found, out, formats)
    if failed is not None:
        raise failed
    return 0


def _check(out: Path) -> None:
    """UsageError for a folder that holds a run, or other things."""
    if (out / suites.FILE).is_file():
        return
    if any(path.name not in (".lock",) for path in out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no suite; choose another out=")


def _read(name: str, values: Sequence[str]) -> tuple[Suite, Path]:
    """The suite of a name or a file, changed by the arguments, and its folder."""
    path = home.expanded(name)
    is_file = path.suffix in (".yaml", ".yml")
    source = suite_files.of_file(path) if is_file else suite_files.named(name)
    held: dict[str, Any] = dict(source.held)
    given = _given(values)
    called = str(held.get("name", path.stem if is_file else name))
    out = home.expanded(given.pop("out", Path("runs", "suites", called)))
    held |= {key: given.pop(key) for key in _OWN if key in given}
    if given:
        held["with"] = {**source.mapping("with", held.get("with")), **given}
    return suites.read(Source(source.name, held), called), out


def _given(values: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for argument in values:
        name, equals, text = argument.partition("=")
        if not equals or not name or not text:
            raise UsageError(f"cannot read '{argument[:100]}': write name=value")
        if name in found:
            raise UsageError(f"'{name}' is given twice; give it once")
        several = name in ("models", "prompts", "seeds")
        found[name] = [_scalar(one) for one in text.split(",")] if several else text if name == "out" else _scalar(text)
    return found


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _draw(found: SuiteRows, out: Path, formats: Sequence[str]) -> None:
    """Prints the table and writes it, with its figure."""
    drawn = suite_sheet.build(found)
    print(render.markdown(drawn.sheet))
    for name in formats:
        ending, renderer = render.FORMATS[name]
        path = out / f"{STEM}.{ending}" if ending != "csv" else out / f"{STEM}_cells.csv"
        write_atomically(path, renderer(drawn.sheet).encode())
        print(f"wrote {path}")
    rows: Mapping[str, Any] = drawn.rows
    if drawn.table.figure and any(rows.values()):
        for path in figures.draw(drawn.table, rows, out, STEM):
            print(f"wrote {path}")
    if any(rows.values()):
        print(f"wrote {out / suite_runs.ROWS}")


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)  # next to a progress bar
