"""Exit codes, and how a failure is reported."""

from __future__ import annotations

import os
import sys

from specbench.errors import plain

USAGE, FAILED, STOPPED = 2, 1, 130  # exit codes next to 0


def fail(what: object, code: int) -> int:
    if debug() and isinstance(what, BaseException):
        raise what
    print(f"specbench: {plain(what)}", file=sys.stderr)  # names and cells of untrusted files
    return code


def debug() -> bool:
    return os.environ.get("SPECBENCH_DEBUG", "") not in ("", "0")
