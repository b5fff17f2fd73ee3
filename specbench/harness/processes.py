"""Processes that end when the process that started them ends.

Run as a script, this file guards the Ray processes of a run. It imports only the standard library.
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
    """An executor with this many processes of one thread each, for the block. Any interruption of the block ends them
    at once. Raises `died` if one of them dies."""
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin) as executor:
        try:
            yield executor
        except BrokenProcessPool:
            raise died from None
        except BaseException:  # otherwise they would finish their tasks and the tasks in their queue
            executor.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise


def _begin() -> None:
    """Set up a new process: one thread, and it ends with the process that started it."""
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
    """Within the block, a second process guards the Ray processes of this process: it ends them if this one is killed.
    Ray's own helpers notice that after a minute. Has an effect only on Linux."""
    with subprocess.Popen([sys.executable, "-IS", __file__, str(os.getpid())], stdin=subprocess.PIPE) as guard:
        try:
            yield
        finally:
            guard.kill()


def _ray_processes(pid: int) -> dict[int, str]:
    """Maps the Ray processes below a process to their start times."""
    running: dict[int, tuple[int, str, bool]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            after = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
            running[int(folder.name)] = int(after[1]), after[19], b"/ray/" in command or command.startswith(b"ray::")
    below = {pid}
    while children := {child for child, (parent, *_) in running.items() if parent in below} - below:
        below |= children
    starts = {}
    for child in below - {pid}:
        _, start, is_ray = running[child]
        if is_ray:
            starts[child] = start
    return starts


def _guard(pid: int) -> None:
    """Waits until the process ends, which closes its end of the pipe. Then kills its Ray processes."""
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
