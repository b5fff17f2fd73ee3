"""Files that survive a kill: written atomically, appended line by line, locked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from specbench.errors import UsageError
from specbench.storage import home


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


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers, also after a kill, find the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()  # frees its bytes on a full disk
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)


def writable(path: str) -> Path:
    """The path of a file that a command will write. UsageError where it cannot be written, before any work is done."""
    file = home.expanded(path)
    try:
        if file.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if file.exists() and not file.is_file():
            raise FileExistsError(0, "it is a pipe or a device")
        if file.parent.exists() and not file.parent.is_dir():
            raise NotADirectoryError(0, "Not a directory")
        file.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(file.parent, os.W_OK):
            raise PermissionError(0, "Permission denied")
    except OSError as e:
        raise UsageError(f"cannot write {path} ({e.strerror}); choose another out=FILE.csv") from None
    return file


@contextmanager
def locked(folder: Path, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Create a folder and lock it against other processes. `check` runs after the folder is created and before the
    lock file is. UsageError where another process holds the lock or nothing can be written."""
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
        yield
    finally:
        lock.release()
