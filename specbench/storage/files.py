"""Files that survive a kill (written atomically, appended line by line, locked), and their SHA-256 digests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from specbench.errors import UsageError
from specbench.storage import home

#: Digests of files of at least this many bytes are cached.
LARGE = 1 << 26

_TEMPORARY = re.compile(r".+\.[0-9a-f]{8}\.tmp")


def content(path: Path) -> bytes:
    """The bytes of a file that a user names, or of a file in a run's folder. Does not block: a pipe, a device or a
    folder of that name is a UsageError. Other errors are OSErrors."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
        with open(descriptor, "rb", closefd=False) as f:
            return f.read()
    finally:
        os.close(descriptor)


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "pipe or a device"
        raise UsageError(f"{path} is a {kind}, not a file; remove it, or name another one")


def check_regular(folder: Path, names: Collection[str]) -> None:
    """UsageError if a run's folder contains anything but regular files and folders: a link, through which the run would
    read or write another place, a pipe, or a folder with one of the `names` of files. Also checks the images in its
    folders."""
    for entry in os.scandir(folder):
        mode = entry.stat(follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode) or entry.name in names:
            _check_regular(Path(entry.path), mode)
            continue
        for image in os.scandir(entry.path):
            if image.name.endswith(".png") and not image.is_file(follow_symlinks=False):
                _check_regular(Path(image.path), image.stat(follow_symlinks=False).st_mode)


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file and flush it to the disk. On an error, such as a full disk, the file is unchanged."""
    with path.open("ab", buffering=0) as f:
        size = f.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[f.write(line) :]
            os.fsync(f.fileno())
        except OSError:
            with suppress(OSError):
                f.truncate(size)
            raise


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """The path of a temporary file to write, which replaces `path` at the end of the block.

    At any time, even after a kill, readers see the old content or the new one, never a part. Each call has its own
    temporary file, so that several processes may write one path. An error removes it; after a kill, `remove_temporary`
    does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()  # frees its bytes on a full disk
        raise
    _fsync(path.parent)  # makes the new name durable


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of a file: see `atomic_path`."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def is_temporary(path: Path) -> bool:
    """Whether a path is a temporary file of `atomic_path`."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_temporary(folder: Path) -> None:
    """Remove the temporary files that a kill left in a locked folder and its subfolders."""
    for path in folder.rglob("*.tmp"):
        if is_temporary(path):
            path.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_parent(path: Path) -> None:
    """Raises OSError if a new file or folder of this name cannot be made. Folders above it may be missing."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory")
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, "Permission denied")


def writable(path: str) -> Path:
    """The path of a file that a command will write. UsageError if it cannot be written, before any work is done."""
    file = home.expanded(path)
    try:
        if file.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if file.exists() and not file.is_file():
            raise FileExistsError(0, "it is a pipe or a device")
        check_parent(file)
    except OSError as e:
        raise UsageError(f"cannot write {path} ({e.strerror}); choose another out=FILE.csv") from None
    return file


@contextmanager
def locked(folder: Path, check: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Create a folder, lock it against other processes, and remove temporary files that a kill left there. `check` runs
    after the folder is created and before the lock file is. UsageError if another process has the lock or nothing can
    be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check()
        lock = FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise UsageError(f"another process is working in {folder}; wait for it, or choose another out=") from None
    except OSError as e:
        raise UsageError(f"cannot write into {folder} ({e.strerror}); choose another out=") from None
    try:
        remove_temporary(folder)
        yield
    finally:
        lock.release()


def sha256(content: bytes | str, digits: int = 64) -> str:
    """The first hexadecimal digits of the SHA-256 of bytes, or of a text in UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:digits]


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_if_readable(path: Path) -> str | None:
    """`sha256_file`; None if the path cannot be read, or is not a regular file (opening a pipe would block)."""
    with suppress(OSError):
        if path.is_file():
            return sha256_file(path)
    return None


def state(path: Path) -> tuple[int, ...]:
    """Identity, size and time of change of a file. It differs after the file was changed. Raises OSError."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def cached_sha256(path: Path) -> str:
    """`sha256_file`, cached under `home` while size and time of change of the file stay the same."""
    file = path.stat()
    cache = home.home() / "digests" / f"{sha256(str(path.resolve()), 16)}.json"
    key = [file.st_size, file.st_mtime_ns]
    try:
        entry = json.loads(cache.read_text(encoding="utf-8"))
        if entry["of"] == key:
            return bytes.fromhex(entry["sha256"]).hex()
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing or damaged: hashed again
    digest = sha256_file(path)
    with suppress(OSError):  # a failure only costs time at the next start
        write_atomically(cache, json.dumps({"of": key, "sha256": digest}).encode())
    return digest


def split_paths(text: str) -> list[str]:
    """The paths in a list separated by commas. An existing path may contain commas, such as a cell of a grid, whose
    name lists its overrides; the longest existing path is used. The others may be empty."""
    parts, paths = text.split(","), []
    while parts:
        ends = range(len(parts), 0, -1)
        end = next((i for i in ends if (path := ",".join(parts[:i])) and home.expanded(path).exists()), 1)
        paths.append(",".join(parts[:end]))
        parts = parts[end:]
    return paths


_LONGEST_NAME = 80  # characters of the name of a folder; a file system allows 255 bytes


def bounded_name(name: str) -> str:
    """A name for a folder: a name of more than 80 characters is cut, and ends in a hash of the whole."""
    if len(name) <= _LONGEST_NAME and len(name.encode()) <= 2 * _LONGEST_NAME:
        return name
    cut = name[: _LONGEST_NAME - 9].encode()[: 2 * _LONGEST_NAME - 9].decode(errors="ignore")
    return f"{cut}-{sha256(name, 8)}"


def size(path: Path) -> int | None:
    """Bytes of a file; None if it does not exist."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


_UNITS = ("B", "kB", "MB", "GB")


def format_size(count: float) -> str:
    """Bytes with a unit, such as 1.5 MB."""
    for unit in _UNITS:
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def in_bytes(size: int | str) -> float:
    """The bytes of a size such as 1.5 MB, or of a number of bytes. ValueError for another text."""
    number, _, unit = str(size).partition(" ")
    return float(number) * 1000.0 ** _UNITS.index(unit or "B")
