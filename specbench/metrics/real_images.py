"""Reads real images and computes the statistics of their features (see `reference` for the file).

Images are read one block at a time, so that memory does not grow with their number. The features are cached next to the
file until it is complete, so that `compute_statistics` continues after an interruption.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import IO

import numpy as np
import torch

from specbench import metrics
from specbench.config import parameters
from specbench.data.base import Item, key
from specbench.errors import UsageError, unknown
from specbench.metrics import reference as references
from specbench.metrics.base import Images, ScoringContext, Unavailable
from specbench.metrics.compared import ComparedMetric
from specbench.metrics.frechet import Moments
from specbench.metrics.reference import ReferenceStatistics
from specbench.storage import image_files
from specbench.storage.files import sha256, sha256_file, sha256_if_readable
from specbench.storage.origin import commit
from specbench.storage.package import __version__

BLOCK = 4096  # images whose outputs are in memory at once
_BYTES = 1 << 28  # of images that are read together from one file


class Folder:
    """The images of a folder and its sub-folders, by name. Hidden files and folders are skipped."""

    def __init__(self, folder: Path) -> None:
        self.name = _text(folder.resolve().name)
        self._paths: dict[str, Path] = {}
        for path in image_files.find(folder):
            self._paths[_text(path.relative_to(folder).as_posix())] = path
        self.names = sorted(self._paths)
        if len(self.names) < 2:
            what = f"are fewer than two images in {folder}" if folder.is_dir() else f"is no folder {folder}"
            raise UsageError(f"there {what}: give images= a folder with {', '.join(image_files.ENDINGS)} files")
        # Contents, because replaced images may have the same names, sizes and times. An unreadable one is reported when
        # its features are computed.
        lines = [f"{sha256_if_readable(self._paths[name])} {name}\n" for name in self.names]
        self.files = sha256("".join(lines))

    def blocks(self) -> Iterator[Images]:
        for start in range(0, len(self.names), BLOCK):
            yield image_files.ImageFiles([self._paths[name] for name in self.names[start : start + BLOCK]])

    def moments(self, metric: ComparedMetric) -> None:
        return None

    @cached_property
    def files_with(self) -> list[dict[str, str | int]]:
        return image_files.counted([image_files.traits(path) for path in self._paths.values()])


class Archive:
    """The images arr_0 (N, H, W, 3) uint8 of an .npz, such as ADM's VIRTUAL_imagenet256_labeled.npz. If it also has mu
    and sigma, these are used: ADM's are from all training images of ImageNet, while arr_0 has 10,000 images."""

    files_with: Sequence[Mapping[str, str | int]] = ()

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, _text(path.name)
        with references.opened(path) as arrays:
            shape, dtype = arrays.header("arr_0")
        is_image_array = len(shape) == 4 and dtype == np.uint8 and 1 < shape[0] <= 10**6 and shape[3] == 3
        if not is_image_array or not 1 <= min(shape[1:3]) <= max(shape[1:3]) <= 4096:
            raise UsageError(f"{path}: 'arr_0' is {dtype} {list(shape)}, not images uint8 [N, H, W, 3]")
        self.shape = shape
        self.names = [f"{i:09d}" for i in range(shape[0])]
        self.files = sha256_file(path)

    def blocks(self) -> Iterator[Images]:
        n, image_shape = self.shape[0], self.shape[1:]
        size = min(BLOCK, max(1, _BYTES // math.prod(image_shape)))
        with references.opened(self.path) as arrays, arrays.open("arr_0") as f:
            _, columns, _ = arrays.parsed("arr_0", references.header, f)
            if columns:
                raise UsageError(f"{self.path}: 'arr_0' is in Fortran order; save it in C order")
            for start in range(0, n, size):
                count = min(size, n - start)
                read = partial(_read_images, shape=(count, *image_shape))  # raises if the file ends early
                yield image_files.ImageArray(arrays.parsed("arr_0", read, f))

    def moments(self, metric: ComparedMetric) -> tuple[np.ndarray, np.ndarray] | None:
        with references.opened(self.path) as arrays:
            has_moments = "mu" in arrays and "sigma" in arrays
        side = metric.options.get("crop")
        if (
            not has_moments
            or metric.options.get("resize") != "tf"
            or not (side is None or self.shape[1:3] == (side, side))
        ):
            return None
        statistics = references.read(self.path, metric.width)
        return statistics.mean, statistics.covariance


def _read_images(f: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(f.read(math.prod(shape)), np.uint8).reshape(shape)


def _text(name: str) -> str:
    """A file's name as text, even if its bytes are not valid UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


#: Real images. name: of their folder or file; names: of the images; files: a hash of their names and contents;
#: blocks(): the images in the order of their names, in blocks; moments(metric): the mean (d,) and covariance (d, d)
#: that are stored with the images, if they fit the metric's features, else None; files_with: on the images' files, see
#: `image_files.counted`.
ReferenceSource = Folder | Archive


def source(path: Path) -> ReferenceSource:
    """The images of images=. Raises UsageError for fewer than two."""
    return Archive(path) if path.is_file() else Folder(path)


def extractors(names: Sequence[str], context: ScoringContext, crop: int | str | None = None) -> list[ComparedMetric]:
    """One metric per feature extractor of these metrics, with the crop `crop` (empty: the metric's default crop). In a
    set, metrics that do not use real images are skipped. Raises UsageError for missing weights, and for a single metric
    that does not use real images."""
    single = {name: metrics.metric(name, context) for name in parameters.single_metrics()}
    compared = {name: metric for name, metric in single.items() if isinstance(metric, ComparedMetric)}
    by_cache_key: dict[str, ComparedMetric] = {}
    for name in names:
        members = [name] if name in compared else parameters.declared("metrics", name)
        group = [metric for member, metric in compared.items() if member in members]
        if not group:
            raise unknown("metric that compares with real images", name, compared)
        for metric in group:
            if crop != "":
                metric = type(metric)(context, metric.options | {"crop": crop})
            try:
                by_cache_key.setdefault(metric.cache_key, metric)
            except Unavailable as e:
                raise UsageError(str(e)) from None
    return list(by_cache_key.values())


def compute_statistics(metric: ComparedMetric, real: ReferenceSource, data: str, path: Path) -> ReferenceStatistics:
    """The statistics of these images, by the metric's feature extractor, written to `path`.

    The file stores the features of the first `KEPT` images by a hash of their names.
    """
    n, stored_moments = len(real.names), real.moments(metric)
    chosen = sorted(range(n), key=lambda i: key("reference", real.names[i]))[: references.KEPT]
    row = {i: row for row, i in enumerate(sorted(chosen))}
    features = np.zeros((len(chosen), metric.width), np.float32)
    moments = Moments(metric.width)
    staging = path.with_name(f".{path.stem}.outputs")
    start = 0
    for block in real.blocks():
        stop = start + len(block)
        if len(block) < n:
            print(f"specbench: images {start + 1} to {stop} of {n}", file=sys.stderr)
        items = [Item(i, "", None, real.names[i]) for i in range(start, stop)]
        cached = metrics.Outputs(staging / f"{start}-{stop}")
        outputs = metrics.scorer_outputs(metric, block, items, cached)[:, : metric.width]
        moments.add(torch.from_numpy(outputs))
        stored = [i for i in range(start, stop) if i in row]
        features[[row[i] for i in stored]] = outputs[[i - start for i in stored]]
        start = stop
    mean, covariance = stored_moments or (moments.mean.numpy(), moments.covariance.numpy())
    origin = {
        "data": data,
        "folder": real.name,
        "images": n,
        "files": real.files,
        "files_with": [dict(count) for count in real.files_with],
        "moments": real.name if stored_moments else "",
        "cache_key": metric.cache_key,
        "crop": metric.options.get("crop"),
        "specbench": __version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    statistics = ReferenceStatistics(mean, covariance, data or path.stem, features, n, origin)
    references.write(path, statistics)
    shutil.rmtree(staging, ignore_errors=True)
    return statistics


def stored_statistics(path: Path, metric: ComparedMetric, real: ReferenceSource) -> ReferenceStatistics | None:
    """The statistics in `path`, if they are from these images and this feature extractor."""
    if not path.exists():
        return None
    try:
        stored = references.read(path, metric.width)
    except UsageError:
        return None  # damaged: computed again
    expected = (metric.cache_key, real.files)
    return stored if (stored.cache_key, stored.provenance.get("files")) == expected else None
