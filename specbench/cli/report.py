"""`specbench report`: one HTML page of rows, images and audits, which works from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbench.cli.collect import say
from specbench.errors import UsageError, integer, parse_arguments, values
from specbench.report import gather
from specbench.report.page import page
from specbench.storage import home
from specbench.storage.files import split_paths, write_atomically

#: The arguments, with their meanings.
ARGUMENTS = {
    "out": "file of the page (default: report.html)",
    "runs": "more folders, separated by commas, whose runs are shown with their images: of one run, of several,\n"
    "of a grid (default: results/gallery if it exists, for images only)",
    "keep": "a folder for the shown images, so that another report can show them without the runs",
    "pictures": "prompts whose images are shown, the first ones of every run (default: 8)",
}
_GALLERY = Path("results/gallery")

_HELP = """\
usage: specbench report [FILE.csv or FOLDER ...] [name=value ...]

Draws one page from rows (default: those in results/): a leaderboard, a trade-off plot, the images of the same prompt
under several methods, maps of acceptance, audit verdicts, and the command for every number. The page is one file and
fetches nothing. A FILE.csv gives its rows, as do FILE.parquet and a store (runs/results.sqlite). A FOLDER gives the
rows of its CSV and Parquet files, and rows and images of every run at or below it, including those of a grid or suite.

  specbench report
  specbench report runs/2026-11-21
  specbench report mine.csv runs=runs/2026-11-21 out=mine.html

"""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status.

    Raises:
        UsageError: bad arguments, no rows, or a path that cannot be written.
    """
    line = parse_arguments("report", arguments)
    if line.help:
        lines = (f"  {name + '=':<10} " + told.replace("\n", "\n" + " " * 13) for name, told in ARGUMENTS.items())
        print(_HELP + "\n".join(lines))
        return 0
    given = values([argument for argument in line.arguments if argument.partition("=")[0] in ARGUMENTS], ARGUMENTS)
    sources = [home.expanded(argument) for argument in line.arguments if argument.partition("=")[0] not in ARGUMENTS]
    if wrong := [str(source) for source in sources if "=" in source.name and not source.exists()]:
        raise UsageError(f"report has no argument '{wrong[0]}'; it takes {', '.join(f'{name}=' for name in ARGUMENTS)}")
    out = home.expanded(given.get("out", "report.html"))
    if out.suffix != ".html":
        raise UsageError(f"out= must be a .html file (got {out})")
    pictures = integer("pictures", given.get("pictures", "8"), 0, 10_000)
    parts = split_paths(given["runs"]) if "runs" in given else []
    if not all(parts):
        raise UsageError(f"runs={given['runs']} has an empty folder name; remove the extra comma")
    gallery = [_GALLERY] if sources and "runs" not in given and _GALLERY.is_dir() else []
    found = gather.gather(sources or [Path("results")], [home.expanded(part) for part in parts], pictures, gallery)
    say(found.notes)
    if "keep" in given:
        gather.keep(found, home.expanded(given["keep"]))
    write_atomically(out, page(found).encode())
    shown = f"{len(found.rows)} runs, {sum(map(len, found.shots.values()))} images, {len(found.audits)} audits"
    print(f"wrote {out}: {shown}, {out.stat().st_size / 1e6:.1f} MB")
    return 0
