"""`specbench report` and `push`: results for others."""

from __future__ import annotations

from pathlib import Path

from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.cli.rows import say
from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.files import format_size, split_paths, write_atomically

_GALLERY = Path("results/gallery")


@command(
    "report",
    {
        "SOURCE": Words(
            "FILE.csv, FILE.parquet or a store (runs/results.sqlite) gives its rows; a folder the rows of its CSV and"
            " Parquet files, and rows and images of every run at or below it, including those of a grid or suite"
            " (default: the rows in results/)"
        ),
        "out=FILE.html": Own("path", "file of the page", default="report.html"),
        "runs=DIR,DIR": Own(
            "string",
            "more folders whose runs are shown with their images: of one run, of several, of a grid (default:"
            f" {_GALLERY} if it exists, for images only)",
        ),
        "keep=DIR": Own("path", "a folder for the shown images, so that another report can show them without the runs"),
        "pictures=N": Own(
            "integer", "prompts whose images are shown, the first ones of every run", low=0, high=10_000, default="8"
        ),
    },
)
def report(line: CommandLine) -> int:
    """Draws one page from rows: a leaderboard, a trade-off plot, the images of the same prompt under several methods,
    maps of acceptance, audit verdicts, and the command for every number. The page is one file and fetches nothing.

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
    found = report.gather(sources, [home.expanded(part) for part in parts], line["pictures"], gallery)
    say(found.notes)
    if line["keep"]:
        report.keep(found, line["keep"])
    write_atomically(out, report.page(found).encode())
    shown = f"{len(found.rows)} runs, {sum(map(len, found.shots.values()))} images, {len(found.audits)} audits"
    print(f"wrote {out}: {shown}, {out.stat().st_size / 1e6:.1f} MB")
    return 0


@command(
    "push",
    {
        "PATH": Words("a folder of runs, a CSV of rows, or the folder of a drafter that specbench train wrote", 1),
        "repository=OWNER/NAME": Own(
            "string", "OWNER/NAME on the hub; it is made if it is not there", pattern=r"[\w.-]+/[\w.-]+"
        ),
        "to=DIR": Own("path", "a folder to write the files into, instead of a hub"),
        "private=": Own("flag", "a new repository is private", default="false"),
        "images=": Own("flag", "the images of the runs are sent, too", default="false"),
        "--dry-run": Own("flag", "print the card and the files, and send nothing"),
    },
)
def push(line: CommandLine) -> int:
    """Sends rows or a drafter to a repository of the Hugging Face hub (or of HF_ENDPOINT), with a card, or writes them
    into a folder. The hub's login is that of `hf auth login`, or HF_TOKEN. Rows become a data set: rows.csv, and of
    every run its records, its configuration without folders and addresses of this machine, and its contact sheet. A
    drafter becomes a model.

      specbench push first second repository=me/runs
      specbench push drafters/eagle repository=me/eagle-for-llamagen --dry-run
      specbench push first to=results/submitted/me-first
    """
    from specbench.tables import push

    repository, folder = line["repository"], line["to"]
    if (repository is None) == (folder is None):
        raise UsageError("name either repository=OWNER/NAME on the hub, or to=DIR")
    upload = push.prepare([home.expanded(word) for word in line.words], line["images"])
    print(
        f"{len(upload.files) + 1} files, {format_size(upload.size)}, for {folder or f'the {upload.kind} {repository}'}"
    )
    if line["--dry-run"]:
        print("\n".join(["README.md", *upload.files]), upload.card, sep="\n\n")
    elif folder:
        push.write(upload, folder)
    else:
        print(f"pushed to {push.send(upload, repository, line['private'])}")
    return 0
