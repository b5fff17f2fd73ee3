"""Work in several processes of one thread each, which end with the process that started them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process

from specbench.errors import RunError


@contextmanager
def pool(workers: int, died: str) -> Iterator[ProcessPoolExecutor]:
    """An executor of so many processes for the block. Whatever interrupts the block ends them at once. Raises RunError
    with the text `died` where one of them dies."""
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin) as executor:
        try:
            yield executor
        except BrokenProcessPool:
            raise RunError(died) from None
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
