"""`specbench evaluate DIR`: scores existing images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import UsageError, plain
from specbench.storage import home

if TYPE_CHECKING:
    from specbench.evaluate.images import Evaluation

_HELP = """\
usage: specbench evaluate DIR [name=value ...]

Scores existing images. DIR is the folder of a run, or any folder of images (including its subfolders).

For the folder of a run, its records pair images and prompts, and the scores go into its row.csv.
Any other folder needs prompts, unless no chosen metric reads them: in a file prompts.*, captions.* or metadata.* in
it, or as below. An image's file name, with or without its extension, is the id of its prompt (0007.png: 0007.png, 0007
or 7; of several images 0007-1.png, or as GenEval's code 0007/samples/0001.png). out= holds its row, the scores of each
image and the cached scorer outputs, by image and network: a further metric of the same network, or the same command
after a stop, computes none again.
Existing scores of other metrics stay while the images are the same; changes are printed.

  prompts=FILE        .txt, .tsv, .csv, .json or .jsonl with ids (or file_name) and prompts (see the README); or
  data=NAME           a data set: scenes, coco2017, ... with data_dir=, split=, caption=; n= and seed= choose n of it
                      (default, and n=all: every prompt; of scenes, scenes_classes, scenes_geneval and imagenet one for
                      each image)
  partial=true        score the existing images although other prompts have none
  metrics=NAME|[..]   what to measure (specbench list metrics); default: for a run its metrics, for scenes scenes,
                      for scenes_geneval and imagenet those of their name, else coco
  metrics_dir=DIR     weights of the evaluators (default: where `specbench fetch` puts them)
  reference=FILE|NAME statistics of real images: a file, or the data set that `specbench reference` made them for
                      (default: data=)
  device=, batch=     where the networks run (auto), and the number of images per batch (64)
  out=DIR             a folder for the results (runs/evaluate/...); an existing one continues where it stopped
"""


def main(arguments: Sequence[str]) -> int:
    """`specbench evaluate DIR [name=value ...]`; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(_HELP, end="")
        return 0
    from specbench.config import configuration
    from specbench.evaluate.images import OF_IMAGES, evaluate

    folder, given = _parse(arguments, (*OF_IMAGES, "partial"))
    partial = given.pop("partial", "false")
    if partial not in ("true", "false"):
        raise UsageError(f"partial must be true or false (got {partial!r})")
    values = configuration.values([f"{name}={value}" for name, value in given.items()], OF_IMAGES)
    print(_text(evaluate(folder, values, partial == "true")), flush=True)
    return 0


def _parse(arguments: Sequence[str], known: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """The folder, and the text of the other arguments by name."""
    folders = []
    given: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in known and equals:
            if name in given:
                raise UsageError(f"'{name}' is given twice; give it once")
            given[name] = value
        elif home.expanded(argument).is_dir() or not equals:
            folders.append(argument)
        else:
            raise UsageError(f"evaluate has no '{name}'; after the folder it takes {', '.join(f'{w}=' for w in known)}")
    if len(folders) != 1:
        raise UsageError("name one folder: specbench evaluate DIR [name=value ...] (see specbench evaluate --help)")
    folder = home.expanded(folders[0])
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; name one with images, or the folder of a run")
    return folder, given


def _text(found: Evaluation) -> str:
    """The scores of a row, with standard errors and backends."""
    from specbench.rows import summary

    lines = []
    for name in found.columns:
        value, error, backend = (found.row[f"{name}{end}"] for end in ("", "_stderr", "_backend"))
        shown = "not measured" if value is None else summary.with_error(value, error, 4)
        lines.append((name, shown, f"[{backend}]" if backend else ""))
    wide = max((len(shown) for _, shown, _ in lines), default=0)
    text = [f"{found.title} (± standard error)", *(f"  {a:<16} {b:<{wide}}  {c}".rstrip() for a, b, c in lines)]
    if found.row["note"]:
        text.append(f"  {'note':<16} {found.row['note']}")
    text += [f"  {'written':<16} {path}" for path in found.files]
    return "\n".join(map(plain, text))
