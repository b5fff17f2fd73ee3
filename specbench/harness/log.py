"""The log of a run, its messages on the screen, and Ctrl-C."""

from __future__ import annotations

import logging
import logging.handlers
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specbench.harness.worker import never
from specbench.storage.progress import tqdm

LOG_BYTES, LOG_FILES = 10 * 2**20, 3  # of run.log, and how many older ones stay

LOG = logging.getLogger("specbench")


class _File(logging.handlers.RotatingFileHandler):
    """A log handler that ignores a full disk: the operation that failed reports it once."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Writes the log into a file within the block."""
    handler = _File(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.setLevel(logging.INFO)
    LOG.propagate = False  # a traceback belongs in the log, not on the screen
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.propagate = True
        handler.close()


def say(text: str) -> None:
    """Prints a message on stderr."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Writes a warning into the log and on the screen, next to a progress bar."""
    LOG.warning("%s", text)
    tqdm.write(text, file=sys.stderr)


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns true after the first Ctrl-C; the second one interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield never
        return
    interrupts: list[int] = []

    def note(number: int, frame: Any) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)
        say("\nfinishing the images in progress; Ctrl-C again stops at once")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)
