"""Real images, and how the statistics of their features are made (see `reference` for the file).

Images are read one block at a time, so that memory does not grow with their number. The features are cached next to the
file until it is complete: after an interruption, `made` goes on.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
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
from specbench.storage.files import sha256
from specbench.storage.origin import commit
from specbench.storage.package import __version__

BLOCK = 4096  # images whose outputs are in memory at once
_BYTES = 1 << 28  # of images that are read together from one file


class Folder:
    """The images of a folder and its sub-folders, by name; hidden ones are skipped."""

    def __init__(self, folder: Path) -> None:
        self.name = _text(folder.resolve().name)
        self._paths: dict[str, Path] = {}
        for path in image_files.find(folder):
            self._paths[_text(path.relative_to(folder).as_posix())] = path
        self.names = sorted(self._paths)
        if len(self.names) < 2:
            what = f"are fewer than two images in {folder}" if folder.is_dir() else f"is no folder {folder}"
            raise UsageError(f"there {what}: give images= a folder with {', '.join(image_files.ENDINGS)} files")
        lines = [f"{self._paths[name].stat().st_size} {name}\n" for name in self.names]
        self.files = sha256("".join(lines))

    def blocks(self) -> Iterator[Images]:
        for start in range(0, len(self.names), BLOCK):
            yield image_files.ImageFiles([self._paths[name] for name in self.names[start : start + BLOCK]])

    def moments(self, one: ComparedMetric) -> None:
        return None


class Archive:
    """The images arr_0 (N, H, W, 3) uint8 of an .npz, such as ADM's VIRTUAL_imagenet256_labeled.npz. Where it has mu
    and sigma, too, they are kept: ADM's are of all of ImageNet's training images, of which it shows 10,000."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, _text(path.name)
        with references.opened(path) as arrays:
            shape, dtype = arrays.header("arr_0")
        right = len(shape) == 4 and dtype == np.uint8 and 1 < shape[0] <= 10**6 and shape[3] == 3
        if not right or not 1 <= min(shape[1:3]) <= max(shape[1:3]) <= 4096:
            raise UsageError(f"{path}: 'arr_0' is {dtype} {list(shape)}, not images uint8 [N, H, W, 3]")
        self.shape = shape
        self.names = [f"{i:09d}" for i in range(shape[0])]
        self.files = sha256(f"{path.stat().st_size} {self.name}\n")

    def blocks(self) -> Iterator[Images]:
        n, one = self.shape[0], self.shape[1:]
        size = min(BLOCK, max(1, _BYTES // math.prod(one)))
        with references.opened(self.path) as arrays, arrays.open("arr_0") as f:
            _, columns, _ = arrays.parsed("arr_0", references.header, f)
            if columns:
                raise UsageError(f"{self.path}: 'arr_0' is in Fortran order; save it in C order")
            for start in range(0, n, size):
                count = min(size, n - start)
                read = partial(_read_images, shape=(count, *one))  # raises where the file ends early
                yield image_files.ImageArray(arrays.parsed("arr_0", read, f))

    def moments(self, one: ComparedMetric) -> tuple[np.ndarray, np.ndarray] | None:
        with references.opened(self.path) as arrays:
            there = "mu" in arrays and "sigma" in arrays
        side = one.options.get("crop")
        if not there or one.options.get("resize") != "tf" or not (side is None or self.shape[1:3] == (side, side)):
            return None
        found = references.read(self.path, one.width)
        return found.mean, found.covariance


def _read_images(f: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(f.read(math.prod(shape)), np.uint8).reshape(shape)


def _text(name: str) -> str:
    """A file's name as text, whatever its bytes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


#: Real images. name: of their folder or file; names: of each image; files: a hash that identifies them; blocks(): the
#: images in the order of their names, some at a time; moments(one): mean (d,) and covariance (d, d) that come with the
#: images, where the features of the metric `one` fit them, else None.
ReferenceSource = Folder | Archive


def source(path: Path) -> ReferenceSource:
    """The images of images=; UsageError for fewer than two."""
    return Archive(path) if path.is_file() else Folder(path)


def extractors(names: Sequence[str], context: ScoringContext, crop: int | str | None = None) -> list[ComparedMetric]:
    """A metric for each feature extractor of these metrics, in the place of whose own crop stands `crop` (empty: their
    own). Metrics of a set that compare with nothing are left out. UsageError for absent weights and a metric alone that
    compares with nothing."""
    every = {name: metrics.metric(name, context) for name in parameters.single_metrics()}
    compared = {name: one for name, one in every.items() if isinstance(one, ComparedMetric)}
    found: dict[str, ComparedMetric] = {}
    for name in names:
        members = [name] if name in compared else parameters.declared("metrics", name)
        group = [one for member, one in compared.items() if member in members]
        if not group:
            raise unknown("metric that compares with real images", name, compared)
        for one in group:
            if crop != "":
                one = type(one)(context, one.options | {"crop": crop})
            try:
                found.setdefault(one.cache_key, one)
            except Unavailable as e:
                raise UsageError(str(e)) from None
    return list(found.values())


def made(one: ComparedMetric, real: ReferenceSource, data: str, path: Path) -> ReferenceStatistics:
    """The statistics of these images, by the feature extractor of `one`, written to `path`.

    The features that are kept are those of the `KEPT` images that come first by a hash of their names.
    """
    n, given = len(real.names), real.moments(one)
    chosen = sorted(range(n), key=lambda i: key("reference", real.names[i]))[: references.KEPT]
    row = {i: row for row, i in enumerate(sorted(chosen))}
    features = np.zeros((len(chosen), one.width), np.float32)
    moments = Moments(one.width)
    staging = path.with_name(f".{path.stem}.outputs")
    start = 0
    for block in real.blocks():
        stop = start + len(block)
        if len(block) < n:
            print(f"specbench: images {start + 1} to {stop} of {n}", file=sys.stderr)
        items = [Item(i, "", None, real.names[i]) for i in range(start, stop)]
        cached = metrics.Outputs(staging / f"{start}-{stop}")
        outputs = metrics.scorer_outputs(one, block, items, cached)[:, : one.width]
        moments.add(torch.from_numpy(outputs))
        mine = [i for i in range(start, stop) if i in row]
        features[[row[i] for i in mine]] = outputs[[i - start for i in mine]]
        start = stop
    mean, covariance = given or (moments.mean.numpy(), moments.covariance.numpy())
    origin = {
        "data": data,
        "folder": real.name,
        "images": n,
        "files": real.files,
        "moments": real.name if given else "",
        "cache_key": one.cache_key,
        "crop": one.options.get("crop"),
        "specbench": __version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    found = ReferenceStatistics(mean, covariance, data or path.stem, features, n, origin)
    references.write(path, found)
    shutil.rmtree(staging, ignore_errors=True)
    return found


def kept(path: Path, one: ComparedMetric, real: ReferenceSource) -> ReferenceStatistics | None:
    """The statistics in `path` where they are of these images and this feature extractor."""
    if not path.exists():
        return None
    try:
        found = references.read(path, one.width)
    except UsageError:
        return None  # damaged: made again
    mine = (one.cache_key, real.files)
    return found if (found.cache_key, found.provenance.get("files")) == mine else None
