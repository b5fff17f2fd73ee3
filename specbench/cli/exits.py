"""Exit codes (docs/long_runs.md describes them), and how a failure is reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.errors import plain

if TYPE_CHECKING:
    from specbench.rows.remarks import MeasuredRun

USAGE, FAILED, UNMEASURED, STOPPED = 2, 1, 3, 130


def unmeasured(runs: Sequence[MeasuredRun]) -> int:
    """Prints which metrics have no value in these runs, and returns the exit code."""
    from specbench.rows.remarks import missing_metrics

    return missing(*missing_metrics(runs))


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
