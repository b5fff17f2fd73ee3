"""Statistics of real images, which generated images are compared with: an .npz that is computed once.

Arrays of a file that `specbench reference` writes:

    mu          (d,) float64          mean of the features, d per image
    sigma       (d, d) float64        their unbiased covariance
    count       () int64              images
    features    (m, d) float32        of at most 10,000 of the images, for KID, CMMD, precision and recall
    provenance  () text               JSON: data, folder, images, files (a hash of their names and contents),
                                      files_with (see image_files.counted), moments (the file that mu and
                                      sigma come from if not from the images), cache_key (of the
                                      feature extractor), crop, specbench, commit,
                                      date

Files with only mu and sigma can be read, too: ADM's VIRTUAL_imagenet256_labeled.npz (its other arrays are ignored) and
MAR's adm_in256_stats.npz. Nothing in a file is executed, and an array is read only after its header is checked.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.files import atomic_path

KEPT = 10_000  # a file stores the features of at most this many images
_TEXT = 1 << 16  # maximal number of characters of a provenance
_KINDS = {"f": "floating-point", "iu": "an integer", "U": "a text"}


@dataclass(frozen=True, eq=False)
class ReferenceStatistics:
    """Statistics of the features of real images.

    mean (d,) and covariance (d, d) float64; features (m, d) float32, or None; count: number of images, None if the file
    does not state it; name: the data set, or the file's name.
    """

    mean: np.ndarray
    covariance: np.ndarray
    name: str
    features: np.ndarray | None = None
    count: int | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def label(self) -> str:
        """The label in a row: the name, and the first eight digits of the SHA-256 of the numbers."""
        digest = hashlib.sha256(self.mean.tobytes() + self.covariance.tobytes())
        digest.update(b"" if self.features is None else self.features.tobytes())
        return f"{self.name}@{digest.hexdigest()[:8]}"

    @property
    def cache_key(self) -> str:
        """The `Metric.cache_key` of the feature extractor; empty if the file does not name one."""
        return str(self.provenance.get("cache_key", ""))


def default_path(data: str, cache_key: str) -> Path:
    """The path where `specbench reference` stores the statistics of a data set for a feature extractor."""
    folder, file = (re.sub(r"[^\w.@+-]+", "-", text) for text in (data, cache_key))
    return home.home() / "references" / folder / f"{file}.npz"


def write(path: Path, reference: ReferenceStatistics) -> None:
    """Writes the statistics to a file, atomically. Their number of images must be known."""
    assert reference.count is not None
    arrays: dict[str, Any] = {"mu": reference.mean, "sigma": reference.covariance, "count": np.int64(reference.count)}
    arrays["provenance"] = np.array(json.dumps(reference.provenance, sort_keys=True))
    if reference.features is not None:
        arrays["features"] = reference.features
    with atomic_path(path) as temporary, temporary.open("wb") as f:
        np.savez(f, **arrays)


def read(path: Path, width: int) -> ReferenceStatistics:
    """A file's statistics of `width` features. Raises a UsageError that names the file and its fault."""
    if not path.is_file():
        raise UsageError(f"there is no file {path} with statistics of real images; check its name and folder")
    with opened(path) as arrays:
        return _read(arrays, path, width)


@contextmanager
def opened(path: Path) -> Iterator[Arrays]:
    """The arrays of an .npz. Raises UsageError for a file of another format."""
    try:
        archive = zipfile.ZipFile(path)
    except Exception as e:  # zipfile raises many types for damaged files
        raise UsageError(f"{path} is no .npz file, or it is damaged ({_line(e)}); fetch or make it again") from None
    with archive:
        yield Arrays(archive, path)


def _read(arrays: Arrays, path: Path, width: int) -> ReferenceStatistics:
    mean = arrays.read("mu", "f", (width,)).astype(np.float64)
    covariance = arrays.read("sigma", "f", (width, width)).astype(np.float64)
    scale = np.abs(covariance.diagonal()).max()
    if covariance.diagonal().min() < 0 or np.abs(covariance - covariance.T).max() > 1e-5 * scale:
        raise UsageError(f"{path}: 'sigma' is no covariance; fetch or make the file again")
    if "provenance" not in arrays:  # not written by specbench: the meaning of its other arrays is unknown
        return ReferenceStatistics(mean, covariance, path.stem)
    provenance = _provenance(str(arrays.read("provenance", "U")), path)
    count = int(arrays.read("count", "iu"))
    features = arrays.read("features", "f", (None, width)).astype(np.float32) if "features" in arrays else None
    if count < 2 or (features is not None and not 1 <= len(features) <= count):
        raise UsageError(f"{path}: {count} images cannot have these statistics; make the file again")
    return ReferenceStatistics(mean, covariance, provenance["data"] or path.stem, features, count, provenance)


class Arrays:
    """The arrays of an .npz. An array is read after its header is checked. Raises UsageError for a wrong header."""

    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self.archive, self.path = archive, path

    def __contains__(self, name: str) -> bool:
        return f"{name}.npy" in self.archive.namelist()

    def read(self, name: str, kinds: str, shape: tuple[int | None, ...] = ()) -> np.ndarray:
        """A finite array of one of these NumPy kinds and of this shape; None in a shape means at most `KEPT` rows."""
        stored, dtype = self.header(name)
        fits = len(stored) == len(shape) and all(a == b or (b is None and a <= KEPT) for a, b in zip(stored, shape))
        if not fits or dtype.kind not in kinds or dtype.itemsize > 4 * _TEXT:
            expected = ", ".join(f"up to {KEPT}" if size is None else str(size) for size in shape)
            raise UsageError(
                f"{self.path}: '{name}' is {dtype} {list(stored)}, not {_KINDS[kinds]} [{expected}]; it has no"
                " statistics of this metric's features"
            )
        with self.open(name) as f:
            array: np.ndarray = self.parsed(name, _read_array, f)
        if dtype.kind == "f" and not np.isfinite(array).all():
            raise UsageError(f"{self.path}: '{name}' contains NaN or infinity; fetch or make the file again")
        return array

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and type of an array."""
        with self.open(name) as f:
            shape, _, dtype = self.parsed(name, header, f)
        if dtype.hasobject:
            raise UsageError(f"{self.path}: '{name}' is an array of objects, which is not allowed; make the file again")
        return shape, dtype

    def open(self, name: str) -> IO[bytes]:
        """An array as the bytes of a .npy file."""
        if name not in self:
            raise UsageError(f"{self.path} has no array '{name}'; give another file")
        return self.parsed(name, self.archive.open, f"{name}.npy")

    def parsed(self, name: str, parse: Callable[[Any], Any], source: Any) -> Any:
        """The result of `parse` on the bytes of array `name`."""
        try:
            return parse(source)
        except Exception as e:  # see `opened`
            raise UsageError(f"{self.path}: '{name}' is damaged ({_line(e)}); fetch or make the file again") from None


def header(f: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran order and type of the array in a .npy file. Leaves the file at the array's first number."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(f)
    if version not in readers:
        raise ValueError(f"version {version} of the format")
    return readers[version](f)


def _read_array(f: IO[bytes]) -> np.ndarray:
    array: np.ndarray = np.lib.format.read_array(f, allow_pickle=False)
    if f.read(1):  # reading to the end verifies the archive's checksum
        raise ValueError("there is more than one array")
    return array


def _provenance(text: str, path: Path) -> dict[str, Any]:
    try:
        provenance = json.loads(text)
    except (ValueError, RecursionError):
        provenance = None
    texts = [provenance.get(name) for name in ("data", "cache_key")] if isinstance(provenance, dict) else []
    if not texts or not all(isinstance(text, str) and text.isprintable() and len(text) <= 200 for text in texts):
        raise UsageError(f"{path}: its 'provenance' is not one of specbench's; make the file again")
    assert isinstance(provenance, dict)
    return provenance


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)
