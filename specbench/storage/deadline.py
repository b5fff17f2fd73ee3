"""A time limit for work that may never end, such as a request to a server that sends one byte a second."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result or the exception of `work`, or TimeoutError after `seconds`.

    `work` runs in a separate thread, which continues after a TimeoutError until it ends by itself.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as e:  # raised again in the caller's thread
            results.put((None, e))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=max(0.0, seconds))
    except queue.Empty:
        raise TimeoutError(f"no result within {seconds:.3g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
