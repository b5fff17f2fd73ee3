"""Processes that end with the process that started them.

As a script of its own, which imports nothing but the standard library, it is the guard of a run's Ray processes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path


@contextmanager
def pool(workers: int, died: Exception) -> Iterator[ProcessPoolExecutor]:
    """An executor of so many processes for the block, of one thread each. Whatever interrupts the block ends them at
    once. Raises `died` where one of them dies."""
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin) as executor:
        try:
            yield executor
        except BrokenProcessPool:
            raise died from None
        except BaseException:  # they would complete what they have begun, and what is in their queue
            executor.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise


def _begin() -> None:
    """In a new process: one thread, and an end with the process that started it."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


@contextmanager
def guarded() -> Iterator[None]:
    """Within the block, a second process guards this one's Ray processes: it ends them when this one is killed. Ray's
    own helpers notice that after a minute. On Linux; elsewhere it has nothing to do."""
    with subprocess.Popen([sys.executable, "-IS", __file__, str(os.getpid())], stdin=subprocess.PIPE) as guard:
        try:
            yield
        finally:
            guard.kill()


def _ray_processes(pid: int) -> dict[int, str]:
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


def _guard(pid: int) -> None:
    """Waits until the process ends, which closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run finishes its images first
    known: dict[int, str] = {}
    while not select.select([sys.stdin], [], [], 0.5)[0]:
        known |= _ray_processes(pid)
    for child, start in known.items():
        with suppress(OSError, IndexError):
            if Path(f"/proc/{child}/stat").read_text(errors="replace").rpartition(")")[2].split()[19] == start:
                os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    _guard(int(sys.argv[1]))
