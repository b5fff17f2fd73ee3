"""What `make test` spent its time on, and its slowest tests, from pytest's report in the format of JUnit.

python scripts/test_time.py build/tests.xml STARTED, in seconds since 1970
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

SLOWEST, TESTS = 5, 10  # test files and tests that are named


def summary(report: str, total: float) -> str:
    """Lines, of a report (XML) and the seconds since `make` started."""
    [suite] = ET.fromstring(report).iter("testsuite")  # noqa: S314 - pytest wrote it
    tests, files = float(suite.get("time", "0")), Counter[str]()
    for case in suite.iter("testcase"):
        files[case.get("classname", "").partition(".")[2] or "collection"] += float(case.get("time", "0"))
    named = ", ".join(f"{name} {spent:.0f}" for name, spent in files.most_common(SLOWEST))
    cases = sorted(suite.iter("testcase"), key=lambda case: -float(case.get("time", "0")))[:TESTS]
    slow = [f"{float(case.get('time', '0')):6.1f} s  {case.get('classname', '')}::{case.get('name')}" for case in cases]
    line = (
        f"time spent: {total:.0f} s: set-up and lint {max(0.0, total - tests):.0f}, tests {tests:.0f}; summed over"
        f" processes, tests took {sum(files.values()):.0f} s, the most in {named}"
    )
    return "\n".join([*slow, line])


def main(path: Path, started: float) -> None:
    """Prints the lines and the report's path; nothing where pytest wrote no report."""
    if path.is_file() and path.stat().st_mtime >= started:
        print(f"wrote {path}")
        print(summary(path.read_text(encoding="utf-8"), time.time() - started))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
