"""Exit codes, and how a failure is reported.

0    done; a default metric may have no value, such as one whose weights were never fetched
1    failed: the disk, the memory, a server, or a test
2    a mistake in the arguments, or something that they need is missing
3    done, but a metric that was asked for has no value; see `rows.unmeasured`
130  stopped by Ctrl-C
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.errors import plain

if TYPE_CHECKING:
    from specbench.rows.unmeasured import Run

USAGE, FAILED, UNMEASURED, STOPPED = 2, 1, 3, 130


def unmeasured(runs: Sequence[Run]) -> int:
    """Prints which metrics have no value in these runs, and returns the exit code."""
    from specbench.rows.unmeasured import report

    return missing(*report(runs))


def missing(lines: Sequence[str], asked: bool = True) -> int:
    """Prints what has no value, and returns the exit code; asked: whether some of it was asked for by name."""
    for text in lines:
        print(f"specbench: {plain(text)}", file=sys.stderr)
    return UNMEASURED if asked and lines else 0


def fail(what: object, code: int) -> int:
    if debug() and isinstance(what, BaseException):
        raise what
    print(f"specbench: {plain(what)}", file=sys.stderr)  # names and cells of untrusted files
    return code


def debug() -> bool:
    return os.environ.get("SPECBENCH_DEBUG", "") not in ("", "0")
