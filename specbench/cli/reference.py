"""`specbench reference`: the features of real images, as statistics that Fréchet and kernel distances, precision and
recall compare generated images with (see `metrics.reference` for the file)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbench.cli.arguments import CommandLine, Own, command
from specbench.config import parameters
from specbench.errors import UsageError, unknown
from specbench.storage import home

if TYPE_CHECKING:
    from specbench.metrics.compared import ComparedMetric


@command(
    "reference",
    {
        "data=NAME": Own(
            "string", "the data set that the images belong to: where runs with it look for the statistics"
        ),
        "images=DIR": Own("path", "folder of the real images, its sub-folders included, or ADM's .npz", required=True),
        "metrics=NAME,NAME": Own(
            "string", "metrics that will compare with them; one file for each network and resize", default="fid"
        ),
        "crop=SIDE": Own(
            "string",
            "instead of the metrics' own crop: side of the centre square, by Lanczos, or null for whole images",
        ),
        "out=FILE.npz": Own("path", "for reference=FILE of a run (default: where runs with data= look)"),
        "metrics_dir=DIR": Own(
            "path", "folder of the evaluators' weights (default: where `specbench fetch` puts them)"
        ),
        "device=": Own("string", "auto, cpu, cuda or cuda:N", pattern=r"auto|cpu|mps|cuda(:\d+)?", default="auto"),
        "batch=": Own("integer", "images in a forward pass", low=1, high=4096, default="64"),
    },
)
def main(line: CommandLine) -> int:
    """Computes the statistics of real images once. Generated images are compared with them by FID, KID, precision,
    recall, FD-DINOv2 and CMMD. After an interruption, the same command resumes.

      specbench reference data=coco2017 images=val2017
      specbench reference data=coco2017 images=val2017 metrics=fid_clean_256
      specbench reference data=coco2017 images=val2017 metrics=fd_dinov2,cmmd
      specbench reference data=imagenet images=VIRTUAL_imagenet256_labeled.npz
    """
    data, out = line["data"], line["out"]
    if data is None and out is None:
        raise UsageError("name the data set of these images, data=NAME, or a file to write, out=FILE.npz")
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
        raise UsageError(f"out= is one file, but these metrics need {len(chosen)}: name one of them")
    real = real_images.source(line["images"])
    try:
        for one in chosen:
            path = _destination(data, out, one)
            if there := real_images.kept(path, one, real):
                print(f"{there.label}: already there, of these {there.count} images: {path}")
            else:
                made = real_images.made(one, real, data or "", path)
                print(f"{made.label}: {made.count} images by {made.cache_key} in {path}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command resumes") from None
    return 0


def _crop(text: str | None) -> int | str | None:
    """crop= as a metric's option, which checks it; empty where it is not given."""
    return "" if text is None else None if text == "null" else int(text) if text.isdecimal() else text


def _destination(data: str, out: Path | None, one: ComparedMetric) -> Path:
    from specbench.metrics import reference

    if out is None:
        return reference.default_path(data, one.cache_key)
    if out.exists():
        reference.read(out, one.width)  # nothing else is written over
    return out
