"""A guard of a run's Ray processes: it ends them when the process that started them is killed. Ray's own helpers notice
that after a minute. Runs as a script of its own, on Linux; elsewhere it has nothing to do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def guarded() -> Iterator[None]:
    """The guard of this process lives as long as the block, or until this process is killed."""
    with subprocess.Popen([sys.executable, "-IS", __file__, str(os.getpid())], stdin=subprocess.PIPE) as guard:
        try:
            yield
        finally:
            guard.kill()


def helpers(pid: int) -> dict[int, str]:
    """Ray's processes below a process -> when each started."""
    held: dict[int, tuple[int, str, bool]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            after = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
            held[int(folder.name)] = int(after[1]), after[19], b"/ray/" in command or command.startswith(b"ray::")
    found, below = {}, {pid}
    while more := {child for child, (parent, *_) in held.items() if parent in below} - below:
        below |= more
    for child in below - {pid}:
        _, start, is_ray = held[child]
        if is_ray:
            found[child] = start
    return found


def main(pid: int) -> None:
    """Waits until the process ends, which closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run finishes its images first
    known: dict[int, str] = {}
    while not select.select([sys.stdin], [], [], 0.5)[0]:
        known |= helpers(pid)
    for child, start in known.items():
        with suppress(OSError, IndexError):
            if Path(f"/proc/{child}/stat").read_text(errors="replace").rpartition(")")[2].split()[19] == start:
                os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
