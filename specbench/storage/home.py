"""The folder of fetched files and of what is derived from them: $SPECBENCH_HOME, else ~/.cache/specbench."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

#: Digests of files of at least this many bytes are cached.
LARGE = 1 << 26


def home() -> Path:
    return expanded(os.environ.get("SPECBENCH_HOME") or Path.home() / ".cache" / "specbench")


def expanded(path: str | Path) -> Path:
    """A path with ~ expanded; a ~ that names no user is part of the name, as in a shell."""
    return Path(os.path.expanduser(path))


def model_folder(name: str) -> Path:
    """The folder that `weights=official` of a model selects."""
    return home() / "models" / name


def metrics_folder() -> Path:
    """The default folder of the weights of real evaluators (`metrics_dir`)."""
    return home() / "metrics"


def data_folder(name: str) -> Path:
    """The default folder of a data set (`data_dir`)."""
    return home() / "data" / name


def state(path: Path) -> tuple[int, ...]:
    """Identity, size and time of change of a file; differs after the file was changed. Raises OSError."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def digest(path: Path) -> bytes:
    """The SHA-256 of a large file; kept under home, for as long as its size and time of change stay."""
    stat = path.stat()
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    note = home() / "digests" / f"{name}.json"
    mine = [stat.st_size, stat.st_mtime_ns]
    try:
        kept = json.loads(note.read_text(encoding="utf-8"))
        if kept["of"] == mine:
            return bytes.fromhex(kept["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged: hashed again
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"of": mine, "sha256": found.hexdigest()}), encoding="utf-8")
        temporary.replace(note)
    except OSError:
        pass  # costs time at the next start, nothing else
    return found.digest()


def size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
