"""`specbench evaluate` and `reference`: scores of existing images, and the statistics of real images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbench.cli.arguments import Argument, CommandLine, Words, command
from specbench.cli.commands import missing
from specbench.config import parameters
from specbench.errors import UsageError, plain, unknown
from specbench.rows import remark_text
from specbench.rows.remark import Remark, remarks_of
from specbench.storage import home

if TYPE_CHECKING:
    from specbench.harness.evaluation import Evaluation
    from specbench.metrics.compared import ComparedMetric


@command(
    "evaluate",
    {
        "DIR": Words("the folder of a run, or any folder of images (including its subfolders)", 1, 1),
        "prompts=FILE": Argument("text", ".txt, .tsv, .csv, .json or .jsonl with ids (or file_name) and prompts"),
        "data=NAME": Argument("text", "instead of a file, a data set: scenes, coco2017, ..."),
        **{
            name: Argument("text", "of the data set, see specbench run") for name in ("data_dir=", "split=", "caption=")
        },
        "n=": Argument(
            "text",
            "number of prompts of the data set (default, and n=all: every prompt; for scenes, textures,"
            " fashion, scenes_classes, scenes_geneval and imagenet: one for each image)",
        ),
        "seed=": Argument("text", "which prompts, see specbench run"),
        "partial=": Argument("flag", "true: score the images although some prompts have none", default="false"),
        "metrics=NAME|[..]": Argument(
            "text",
            "metrics, see specbench list metrics (default: the metrics of the run; otherwise the data set's, such as"
            " imagenet; otherwise coco)",
        ),
        "metrics_dir=DIR": Argument("text", "weights of the evaluators (default: where `specbench fetch` puts them)"),
        "reference=FILE|NAME": Argument(
            "text",
            "statistics of real images: a file, or the data set for which `specbench reference` made them (default:"
            " data=)",
        ),
        "device=": Argument("text", "where the networks run (default: auto)"),
        "batch=": Argument("text", "images per batch (default: 64)"),
        "out=DIR": Argument(
            "text", "a folder for the results (default: in runs/evaluate); an existing one continues where it stopped"
        ),
    },
)
def evaluate(line: CommandLine) -> int:
    """Scores existing images. For the folder of a run, its records pair images and prompts, and the scores go into its
    row.csv. Any other folder needs prompts, unless none of the metrics reads them: in a file prompts.*, captions.* or
    metadata.* in the folder, or by the arguments below. An image's file name, with or without its extension, is the id
    of its prompt (0007.png: 0007.png, 0007 or 7; for several images of a prompt 0007-1.png, or 0007/samples/0001.png as
    in GenEval's code). An image that a run decoded states its prompt itself. out= will hold the row, the scores of each
    image and the cached scorer outputs, by image and network: a further metric of the same network, or the same command
    after a stop, computes none again. Scores of earlier metrics stay as long as the images are the same; changes are
    printed.
    """
    from specbench.config import configuration
    from specbench.harness.evaluation import evaluate
    from specbench.rows.remarks import unmeasured

    folder = home.expanded(line.words[0])
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; name a folder of images, or of a run")
    names = [name for name in line.given if name != "partial"]
    checked = configuration.values([f"{name}={line[name]}" for name in names], names)
    evaluation = evaluate(folder, checked, line["partial"])
    print(_text(evaluation), flush=True)
    absent = unmeasured(checked.get("metrics", ()), evaluation.row)
    return missing([f"{name} has no value: {reason}" for name, reason in absent.items()])


def _text(evaluation: Evaluation) -> str:
    """The scores of a row, with standard errors and backends."""
    from specbench.rows import summary

    lines = []
    for name in evaluation.columns:
        value, error, backend = (evaluation.row[f"{name}{end}"] for end in ("", "_stderr", "_backend"))
        shown = "not measured" if value is None else summary.with_error(value, error, 4)
        lines.append((name, shown, f"[{backend}]" if backend else ""))
    wide = max((len(shown) for _, shown, _ in lines), default=0)
    text = [f"{evaluation.title} (± standard error)", *(f"  {a:<16} {b:<{wide}}  {c}".rstrip() for a, b, c in lines)]
    if remarks := remark_text.joined(remarks_of(evaluation.row)):
        text.append(f"  {'remarks':<16} {remarks}")
    text += [f"  {'written':<16} {path}" for path in evaluation.files]
    return "\n".join(map(plain, text))


@command(
    "reference",
    {
        "data=NAME": Argument("string", "the data set that the images belong to: its runs will use the statistics"),
        "images=DIR": Argument(
            "path", "folder of the real images, including sub-folders, or ADM's .npz", required=True
        ),
        "metrics=NAME,NAME": Argument(
            "string", "metrics that will use the statistics; one file for each network and resize", default="fid"
        ),
        "crop=SIDE": Argument(
            "string",
            "replaces the metrics' own crop: side of the centre square, by Lanczos, or null for whole images",
        ),
        "out=FILE.npz": Argument("path", "for reference=FILE of a run (default: where runs with data= look)"),
        "metrics_dir=DIR": Argument(
            "path", "folder of the evaluators' weights (default: where `specbench fetch` puts them)"
        ),
        "device=": Argument("string", "auto, cpu, cuda or cuda:N", pattern=r"auto|cpu|mps|cuda(:\d+)?", default="auto"),
        "batch=": Argument("integer", "images in a forward pass", low=1, high=4096, default="64"),
    },
)
def reference(line: CommandLine) -> int:
    """Computes the statistics of real images once. Generated images are compared with them by FID, KID, precision,
    recall, FD-DINOv2 and CMMD. After an interruption, the same command resumes.

      specbench reference data=coco2017 images=val2017
      specbench reference data=coco2017 images=val2017 metrics=fid_clean_256
      specbench reference data=coco2017 images=val2017 metrics=fd_dinov2,cmmd
      specbench reference data=imagenet images=VIRTUAL_imagenet256_labeled.npz
    """
    data, out = line["data"], line["out"]
    if data is None and out is None:
        raise UsageError("name the data set of these images (data=NAME), or a file to write (out=FILE.npz)")
    if data is not None and data not in parameters.choices("data"):
        raise unknown("data", data, parameters.choices("data"))
    if out is not None and out.suffix != ".npz":
        raise UsageError(f"out={out} must end with .npz")
    from specbench.harness.pipeline import resolve_device
    from specbench.metrics import ASSETS, ScoringContext, real_images

    weights = line["metrics_dir"] or home.metrics_folder()
    context = ScoringContext(ASSETS, weights, None, data or "", str(resolve_device(line["device"])), line["batch"])
    names = [name.strip() for name in line["metrics"].strip("[]").split(",")]
    chosen = real_images.extractors(names, context, _crop(line["crop"]))
    if out is not None and len(chosen) > 1:
        raise UsageError(f"out= is one file, but these metrics need {len(chosen)}: name only one of them")
    real = real_images.source(line["images"])
    try:
        for extractor in chosen:
            path = _destination(data, out, extractor)
            if existing := real_images.stored_statistics(path, extractor, real):
                print(f"{existing.label}: exists already, from these {existing.count} images: {path}")
            else:
                made = real_images.compute_statistics(extractor, real, data or "", path)
                print(f"{made.label}: {made.count} images by {made.cache_key} in {path}")
                for values in real.files_with:
                    print(f"note: {remark_text.text(Remark('files', values))}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command resumes") from None
    return 0


def _crop(text: str | None) -> int | str | None:
    """crop= as a metric's option, which checks it; "" if it is not given."""
    return "" if text is None else None if text == "null" else int(text) if text.isdecimal() else text


def _destination(data: str, out: Path | None, extractor: ComparedMetric) -> Path:
    from specbench.metrics import reference

    if out is None:
        return reference.default_path(data, extractor.cache_key)
    if out.exists():
        reference.read(out, extractor.width)  # refuses to overwrite any other file
    return out
