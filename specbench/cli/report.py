"""`specbench report`: results as one page."""

from __future__ import annotations

from pathlib import Path

from specbench.cli.arguments import Argument, CommandLine, Words, command
from specbench.cli.show import say
from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.files import split_paths, write_atomically

_GALLERY = Path("results/gallery")


@command(
    "report",
    {
        "SOURCE": Words(
            "a file of rows (FILE.csv or FILE.parquet), or a folder: the rows of its CSV and Parquet files,"
            " and rows and images of every run in it, including runs of grids and suites"
            " (default: the rows in results/)"
        ),
        "out=FILE.html": Argument("path", "file of the page", default="report.html"),
        "runs=DIR,DIR": Argument(
            "string",
            "more folders whose runs are shown with their images: one run, several runs, or a grid (default:"
            f" {_GALLERY} if it exists, for images only)",
        ),
        "keep=DIR": Argument(
            "path", "a folder for the shown images, so that another report can show them without the runs"
        ),
        "pictures=N": Argument(
            "integer", "number of prompts whose images are shown, from the first on", low=0, high=10_000, default="8"
        ),
    },
)
def report(line: CommandLine) -> int:
    """Draws one page from rows: a trade-off plot, a leaderboard, the images of the same prompt from several methods,
    maps of acceptance, audit verdicts, and the command for every number. The page is one file and loads nothing else.

      specbench report
      specbench report runs/2026-11-21
      specbench report mine.csv runs=runs/2026-11-21 out=mine.html
    """
    from specbench.tables import report

    out: Path = line["out"]
    if out.suffix != ".html":
        raise UsageError(f"out= must be a .html file (got {out})")
    parts = split_paths(line["runs"]) if line["runs"] else []
    if not all(parts):
        raise UsageError(f"runs={line['runs']} has an empty folder name; remove the extra comma")
    gallery = [_GALLERY] if line.words and not parts and _GALLERY.is_dir() else []
    sources = [home.expanded(word) for word in line.words] or [Path("results")]
    content = report.gather(sources, [home.expanded(part) for part in parts], line["pictures"], gallery)
    say(content.notes)
    if line["keep"]:
        report.keep(content, line["keep"])
    write_atomically(out, report.page(content).encode())
    shown = f"{len(content.rows)} runs, {sum(map(len, content.shots.values()))} images, {len(content.audits)} audits"
    print(f"wrote {out}: {shown}, {out.stat().st_size / 1e6:.1f} MB")
    return 0
