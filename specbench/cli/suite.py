"""`specbench suite`: several methods on several models, prompts and seeds, as one YAML names them, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from specbench.bench.devices import only_dry
from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.cli.commands import unmeasured
from specbench.cli.tables import draw, drawing, say
from specbench.config import parameters
from specbench.errors import UsageError, values
from specbench.storage import home
from specbench.storage.files import locked
from specbench.tables import render, suite_files, suite_sheet, suites
from specbench.tables.collect import Bench
from specbench.tables.suite_files import Source
from specbench.tables.suites import Suite

#: Keys of a suite that the command line may give.
_OWN = ("n", "models", "prompts", "seeds", "metrics", "batch", "timed")
STEM = "suite"


@command(
    "suite",
    lambda: {
        "NAME|FILE.yaml": Words("a suite that --list names, or a file of your own", most=1, offers=suite_files.names),
        "--list": Own("flag", "show every suite that is shipped, and stop"),
        **drawing("runs"),
    },
    others=["specbench.cli.suite:_OWN", "specbench.config.parameters:table"],
)
def main(line: CommandLine, bench: Bench | None = None) -> int:
    """Runs several methods on several models, prompts and seeds, as one YAML names them, and draws their table.
    name=value stands in the place of what the file says: n, models, prompts, seeds, metrics, batch, timed, a parameter
    of all runs such as device=cuda, and out=DIR, the suite's folder (default: runs/suites/NAME).
    """
    if line["--list"]:
        for name, told in parameters.choices(suite_files.GROUP).items():
            print(f"{name:22} {told}")
        return 0
    if not line.words:
        raise UsageError("name a suite: specbench suite NAME, or FILE.yaml (specbench suite --list)")
    formats = render.formats(line["--format"])
    suite, out = _read(line.words[0], line.others)
    only_dry(line["device_for"], line["--dry-run"])
    if line["--dry-run"]:
        from specbench.tables import forecast

        todo = suites.plan(suite, out)
        print(forecast.report(f"{todo.title} in {out}", todo.runs, todo.command, line["device_for"]))
        return 0
    return execute(suite, out, bench or Bench(), line["--jobs"], formats, line["--no-run"])


def execute(
    suite: Suite, out: Path, bench: Bench, jobs: int, formats: Sequence[str] = ("md", "latex"), no_run: bool = False
) -> int:
    """Runs a suite, or the rest of it, in its folder, and draws its table."""
    todo = suites.plan(suite, out)
    with locked(out, lambda: suites.check_folder(out)):
        suites.write_definition(suite, out)
        for text in todo.left_out:
            say(f"{todo.title}: {text}")
        count = len(todo.runs)
        say(f"{todo.title}: {count} runs in {out}, {count - len(todo.missing)} of them finished")
        failed: Exception | None = None
        try:
            if no_run:
                done = suites.gather(todo, bench)
            else:
                done, failed = suites.run(todo, bench, say, jobs)
        except KeyboardInterrupt as e:
            raise KeyboardInterrupt(f"{str(e) or 'stopped'}; to go on: {todo.command}") from None
        sheet, table, rows = suite_sheet.build(done)
        draw(sheet, render.files(sheet, table, rows, out, STEM, formats, cells=f"{STEM}_cells.csv"))
        if any(rows.values()):
            print(f"wrote {out / suites.ROWS}")
    code = 0 if no_run else unmeasured(done.runs)
    if failed is not None:
        raise failed
    return code


def _read(name: str, arguments: Sequence[str]) -> tuple[Suite, Path]:
    """The suite of a name or a file, changed by the arguments, and its folder."""
    path = home.expanded(name)
    is_file = path.suffix in (".yaml", ".yml")
    source = suite_files.of_file(path) if is_file else suite_files.named(name)
    held: dict[str, Any] = dict(source.held)
    given = _given(arguments)
    called = source.definition.name or (path.stem if is_file else name)
    out = home.expanded(given.pop("out", Path("runs", "suites", called)))
    held |= {key: given.pop(key) for key in _OWN if key in given}
    if given:
        held["with"] = {**source.mapping("with", held.get("with")), **given}
    return suites.read(Source(source.name, held), called), out


def _given(arguments: Sequence[str]) -> dict[str, Any]:
    texts = values(arguments, {argument.partition("=")[0] for argument in arguments})
    found: dict[str, Any] = {name: text if name == "out" else _scalar(text) for name, text in texts.items()}
    lists = texts.keys() & {"models", "prompts", "seeds"}
    return found | {name: [_scalar(one) for one in texts[name].split(",")] for name in lists}


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
