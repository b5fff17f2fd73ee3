"""`specbench suite`: several methods on several models, prompts and seeds, as one YAML names them, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from specbench.cli.arguments import Line, Own, Words, command
from specbench.cli.tables import draw, drawing, say
from specbench.config import parameters
from specbench.errors import UsageError
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
    others=True,
)
def main(line: Line, bench: Bench | None = None) -> int:
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
    if line["--dry-run"]:
        from specbench.bench import forecast

        print(forecast.report(f"{suite.table.id} in {out}", suites.plan(suite, out).runs))
        return 0
    return execute(suite, out, bench or Bench(), line["--jobs"], formats, line["--no-run"])


def execute(
    suite: Suite,
    out: Path,
    bench: Bench,
    jobs: int,
    formats: Sequence[str] = ("md", "latex"),
    no_run: bool = False,
) -> int:
    """Runs a suite, or the rest of it, in its folder, and draws its table."""
    todo = suites.plan(suite, out)
    with locked(out, lambda: _check(out)):
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
        draw(sheet, table, rows, out, STEM, formats, cells=f"{STEM}_cells.csv")
        if any(rows.values()):
            print(f"wrote {out / suites.ROWS}")
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
