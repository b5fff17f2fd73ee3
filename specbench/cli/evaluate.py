"""`specbench evaluate DIR`: scores existing images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.cli.exits import missing
from specbench.errors import UsageError, plain
from specbench.storage import home

if TYPE_CHECKING:
    from specbench.harness.evaluation import Evaluation


@command(
    "evaluate",
    {
        "DIR": Words("the folder of a run, or any folder of images (including its subfolders)", 1, 1),
        "prompts=FILE": Own("text", ".txt, .tsv, .csv, .json or .jsonl with ids (or file_name) and prompts"),
        "data=NAME": Own("text", "instead of a file, a data set: scenes, coco2017, ..."),
        **{name: Own("text", "of the data set, as of specbench run") for name in ("data_dir=", "split=", "caption=")},
        "n=": Own(
            "text",
            "so many prompts of the data set (default, and n=all: every prompt; of scenes, scenes_classes,"
            " scenes_geneval and imagenet one for each image)",
        ),
        "seed=": Own("text", "which of them, as of specbench run"),
        "partial=": Own("flag", "true: score the existing images although other prompts have none", default="false"),
        "metrics=NAME|[..]": Own(
            "text",
            "what to measure, see specbench list metrics (default: for a run its metrics, else the data set's,"
            " such as imagenet, else coco)",
        ),
        "metrics_dir=DIR": Own("text", "weights of the evaluators (default: where `specbench fetch` puts them)"),
        "reference=FILE|NAME": Own(
            "text",
            "statistics of real images: a file, or the data set that `specbench reference` made them for (default:"
            " data=)",
        ),
        "device=": Own("text", "where the networks run (default: auto)"),
        "batch=": Own("text", "images per batch (default: 64)"),
        "out=DIR": Own(
            "text", "a folder for the results (default: in runs/evaluate); an existing one continues where it stopped"
        ),
    },
)
def main(line: CommandLine) -> int:
    """Scores existing images. Of the folder of a run, its records pair images and prompts, and the scores go into its
    row.csv. Any other folder needs prompts, unless no chosen metric reads them: in a file prompts.*, captions.* or
    metadata.* in it, or as below. An image's file name, with or without its extension, is the id of its prompt
    (0007.png: 0007.png, 0007 or 7; of several images 0007-1.png, or as GenEval's code 0007/samples/0001.png). out=
    holds its row, the scores of each image and the cached scorer outputs, by image and network: a further metric of the
    same network, or the same command after a stop, computes none again. Existing scores of other metrics stay while the
    images are the same; changes are printed.
    """
    from specbench.config import configuration
    from specbench.harness.evaluation import evaluate
    from specbench.rows.remarks import unmeasured

    folder = home.expanded(line.words[0])
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; name one with images, or the folder of a run")
    given = [name for name in line.given if name != "partial"]
    found = configuration.values([f"{name}={line[name]}" for name in given], given)
    evaluation = evaluate(folder, found, line["partial"])
    print(_text(evaluation), flush=True)
    absent = unmeasured(found.get("metrics", ()), evaluation.row)
    return missing([f"{name} has no value: {reason}" for name, reason in absent.items()])


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
