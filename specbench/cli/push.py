"""`specbench push`: rows of runs, or a drafter, into a repository of a hub."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specbench.errors import UsageError, parse_arguments, values
from specbench.storage import home
from specbench.storage.files import format_size

ARGUMENTS = {
    "repository": "OWNER/NAME; it is made if it is not there",
    "private": "true makes a new repository private (default: false)",
    "images": "true also sends the images of the runs (default: false)",
}
_HELP = """\
usage: specbench push PATH ... repository=OWNER/NAME [name=value ...] [--dry-run]

Sends rows or a drafter to a repository of the Hugging Face hub (or of HF_ENDPOINT), with a card. It uses the login of
`hf auth login`, or HF_TOKEN. Rows become a data set: rows.csv, and of every run its records, its configuration without
folders and addresses of this machine, and its contact sheet. A drafter becomes a model.

  specbench push first second repository=me/runs
  specbench push drafters/eagle repository=me/eagle-for-llamagen --dry-run

  PATH             a folder of runs, a CSV of rows, or the folder of a drafter that specbench train wrote
  --dry-run        print the card and the files, and send nothing

"""


def main(arguments: Sequence[str]) -> int:
    """`specbench push PATH ... repository=OWNER/NAME`. Returns the exit status.

    Raises UsageError for bad arguments, and where the hub refuses the user; RunError where it fails.
    """
    line = parse_arguments("push", arguments, ["--dry-run"])
    if line.help:
        print(_HELP + "\n".join(f"  {name + '=':<16} {told}" for name, told in ARGUMENTS.items()))
        return 0
    given = values([a for a in line.arguments if a.partition("=")[0] in ARGUMENTS], ARGUMENTS)
    paths = [home.expanded(a) for a in line.arguments if a.partition("=")[0] not in ARGUMENTS]
    repository = given.get("repository", "")
    if not paths or not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UsageError("push takes paths and repository=OWNER/NAME (see specbench push --help)")
    flags = {name: given.get(name, "false") for name in ("private", "images")}
    for name, value in flags.items():
        if value not in ("true", "false"):
            raise UsageError(f"{name} must be true or false (got {value[:40]})")
    from specbench.report import push

    upload = push.prepare(paths, flags["images"] == "true")
    print(f"{len(upload.files) + 1} files, {format_size(upload.size)}, for the {upload.kind} {repository}")
    if line.dry_run:
        print("\n".join(["README.md", *upload.files]), upload.card, sep="\n\n")
        return 0
    print(f"pushed to {push.send(upload, repository, flags['private'] == 'true')}")
    return 0
