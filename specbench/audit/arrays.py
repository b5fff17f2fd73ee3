"""Arrays of an .npz file that a user names. Pickled objects are not read."""

from __future__ import annotations

import re
import zipfile
import zlib

import numpy as np

from specbench.errors import UsageError
from specbench.storage import home


def of_file(path: str, argument: str, names: str, most_bytes: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of numbers, all finite, whose names match the regular expression `names`, of at most `most_bytes`
    unfolded. argument: the argument that names the file, for messages.

    Raises UsageError, which names the fault of the file."""
    file = home.expanded(path)
    if not file.is_file():
        raise UsageError(f"{argument}: there is no file '{path}'")
    try:
        archive = np.load(file, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError):
        raise UsageError(f"{argument}: {path} is not an .npz file of plain arrays") from None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise UsageError(f"{argument}: {path} holds a single array; save several by name with numpy.savez")
    with archive:
        chosen = [name for name in archive.files if re.fullmatch(names, name)]
        return {name: checked(_loaded(archive, name, path, argument, most_bytes), name, path, argument)
                for name in chosen}  # fmt: skip


def _loaded(archive: np.lib.npyio.NpzFile, name: str, path: str, argument: str, most_bytes: int | None) -> np.ndarray:
    try:
        size = None if archive.zip is None else archive.zip.getinfo(f"{name}.npy").file_size
        if size is None or (most_bytes is not None and size > most_bytes):
            raise ValueError("it unfolds to too much")
        array: np.ndarray = archive[name]
        return array
    except (OSError, ValueError, LookupError, AttributeError, MemoryError, zipfile.BadZipFile, zlib.error, EOFError):
        raise UsageError(f"{argument}: {name} of {path} is damaged or not an array of numbers") from None


def checked(array: np.ndarray, name: str, path: str, argument: str) -> np.ndarray:
    """The array. UsageError for values that are not finite numbers."""
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{argument}: {name} of {path} is not an array of numbers (its type is {array.dtype})")
    if not np.isfinite(array).all():
        raise UsageError(f"{argument}: {name} of {path} holds NaN or infinite values")
    return array
