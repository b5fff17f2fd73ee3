"""A command as a process: its time, and the most memory that it and its children held at once.

Anonymous memory (with shared memory) is what a machine must have. Mapped pages of files, such as weights that are read,
are dropped by the kernel where memory is short: they count in the resident memory only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.1  # seconds between two looks at the memory
_KIB = 1024


@dataclass(frozen=True)
class Measured:
    """code: the exit code; seconds; anonymous, resident: peaks in bytes over the tree of processes; stopped: whether it
    was stopped because it held too much."""

    code: int
    seconds: float
    anonymous: int
    resident: int
    stopped: bool = False


def run(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, most: float, longest: float
) -> Measured:
    """Runs a command in a folder, with its output in `log`. It is stopped when it holds more than `most` bytes of
    anonymous memory, or takes more than `longest` seconds."""
    anonymous = resident = 0
    stopped = False
    start = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(arguments), cwd=folder, env=dict(environment), stdout=out, stderr=out, start_new_session=True
        )
        try:
            while process.poll() is None:
                memory = [_memory(pid) for pid in _tree(process.pid)]
                anonymous = max(anonymous, sum(a for a, _ in memory))
                resident = max(resident, sum(r for _, r in memory))
                if anonymous > most or time.monotonic() - start > longest:
                    stopped = True
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                time.sleep(INTERVAL)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Measured(process.returncode, time.monotonic() - start, anonymous, resident, stopped)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _memory(pid: int) -> tuple[int, int]:
    """Anonymous and resident bytes of a process; zeros where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    sizes = {name: int(text.split()[0]) * _KIB for name, text in fields.items()}
    anonymous = sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)
    return anonymous, anonymous + sizes.get("RssFile", 0)
