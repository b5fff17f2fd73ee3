"""The cache of scorer outputs, so that no output is computed twice.

In a run's folder, `scores/<scorer>/` contains shards of outputs with the keys of their images. A shard is written
atomically as soon as its batch is scored. A key is a hash of the image and, if the scorer reads it, of the prompt. So a
changed image has no outputs in the cache. A damaged shard counts as missing and is written again.
`scores/metrics.json` maps the name of a metric to its scorer.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specbench.errors import UsageError
from specbench.storage.files import sha256, write_atomically

_DAMAGED = (OSError, ValueError, LookupError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)


def image_key(digest: str, prompt: str | None = None) -> str:
    """The key of an image in an `OutputCache`, from its digest and, if the scorer reads it, its prompt.

    digest: `Record.sha256` in a run, `image_files.digest` elsewhere.
    """
    return sha256(json.dumps([digest, prompt]))


class OutputCache:
    """The cached outputs of one scorer: key -> (width,) float32 or float64. folder = None: only in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._rows: dict[str, np.ndarray] = {}
        self._width: int | None = None
        self._damaged: list[Path] = []
        for path in sorted(folder.glob("*.npz")) if folder else ():
            try:
                self._put(*_read(path))
            except _DAMAGED:
                self._damaged.append(path)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def _put(self, keys: Sequence[str], outputs: np.ndarray) -> None:
        if outputs.dtype not in (np.float32, np.float64) or outputs.ndim != 2 or len(outputs) != len(keys):
            raise ValueError(f"a scorer must give ({len(keys)}, width) float32 or float64, not {_form(outputs)}")
        if self._width not in (None, outputs.shape[1]):
            raise ValueError(f"outputs of width {outputs.shape[1]} next to others of width {self._width}")
        self._width = outputs.shape[1]
        self._rows |= zip(keys, outputs)

    def add(self, keys: Sequence[str], outputs: np.ndarray) -> None:
        """Stores outputs (N, width); they are on disk when this returns."""
        self._put(keys, outputs)
        if self.folder is None:
            return
        content = io.BytesIO()
        np.savez(content, keys=np.array(keys, dtype="S"), outputs=outputs)
        name = sha256("".join(keys), 16)
        write_atomically(self.folder / f"{name}.npz", content.getvalue())
        for path in self._damaged:
            if path.stem != name:
                path.unlink(missing_ok=True)
        self._damaged = []

    def rows(self, keys: Sequence[str]) -> np.ndarray:
        """Outputs (N, width) of these keys. Raises KeyError for a missing key."""
        return np.stack([self._rows[key] for key in keys])


def _read(path: Path) -> tuple[list[str], np.ndarray]:
    """Keys and outputs (N, width) of a shard. Raises one of `_DAMAGED` for a damaged shard."""
    with zipfile.ZipFile(path) as archive:  # it verifies checksums when it reads
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("compressed")  # not written by specbench: it may expand to any size
    with np.load(path, allow_pickle=False) as arrays:
        keys, outputs = arrays["keys"], arrays["outputs"]
    if keys.dtype.kind != "S" or keys.ndim != 1:
        raise ValueError(f"keys are {_form(keys)}")
    return [key.decode("ascii") for key in keys.tolist()], outputs


def _form(array: np.ndarray) -> str:
    return f"{array.shape} {array.dtype}"


class Outputs:
    """The outputs of all scorers of one run, or of one folder of images."""

    def __init__(self, folder: Path | None) -> None:
        """folder: the run's folder; its `scores/` is created with the first output. None: only in memory."""
        self.folder = folder / "scores" if folder else None
        self._names: dict[str, str] = {}
        self._caches: dict[str, OutputCache] = {}
        if self.folder:
            try:
                names = json.loads((self.folder / "metrics.json").read_text(encoding="utf-8"))
                self._names = {str(name): str(scorer) for name, scorer in names.items()}
            except (OSError, ValueError, AttributeError, RecursionError):
                pass  # missing or damaged: written by the next scoring

    @property
    def scorers(self) -> dict[str, str]:
        """Metric -> its scorer, for all metrics that were scored here."""
        return dict(self._names)

    def cache(self, cache_key: str) -> OutputCache:
        """The outputs of one scorer (`Metric.cache_key`), read from disk."""
        if self.folder is None:
            return self._caches.setdefault(cache_key, OutputCache(None))
        slug = re.sub(r"[^\w.@-]+", "_", cache_key)[:60]
        return OutputCache(self.folder / f"{slug}-{sha256(cache_key, 8)}")

    def name(self, metric: str, cache_key: str) -> None:
        """Records the scorer of a metric."""
        if self._names.get(metric) == cache_key:
            return
        self._names[metric] = cache_key
        if self.folder:
            text = json.dumps(self._names, indent=1, sort_keys=True) + "\n"
            write_atomically(self.folder / "metrics.json", text.encode())

    def of(self, name: str, keys: Sequence[str]) -> np.ndarray:
        """Outputs (N, width) of the images with these keys (see `image_key`), by the scorer of the metric `name`, or by
        the scorer with this name (`Metric.cache_key`). Raises UsageError if an output is not cached."""
        cache = self.cache(self._names.get(name, name))
        if missing := sum(key not in cache for key in keys):
            where = self.folder.parent if self.folder else "memory"
            raise UsageError(
                f"{where} has no {name} for {missing} of {len(keys)} images: score them with `specbench evaluate`"
            )
        return cache.rows(keys)
