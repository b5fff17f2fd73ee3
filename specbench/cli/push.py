"""`specbench push`: rows of runs, or a drafter, into a repository of a hub."""

from __future__ import annotations

from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.files import format_size


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
def main(line: CommandLine) -> int:
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
