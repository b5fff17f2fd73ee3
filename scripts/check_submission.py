"""Checks submitted rows: python scripts/check_submission.py results/submitted/*

Computes every row again from its records and scores, and checks its protocol and its provenance (see
docs/submit.md). Exit code 1 where something is wrong, 2 without a folder.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from specbench.errors import plain
from specbench.tables import submission

ROOT = Path(__file__).resolve().parent.parent


def known_commits() -> Callable[[str], bool] | None:
    """Whether the history of this checkout has a commit; None where the history is not complete."""
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        return None

    def knows(commit: str) -> bool:
        command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0

    return knows


def main(arguments: list[str]) -> int:
    folders = [Path(argument) for argument in arguments]
    if not folders or any(argument.startswith("-") for argument in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    if (knows_commit := known_commits()) is None:
        print("the history is not here: commits are not looked up", file=sys.stderr)
    wrong = 0
    for folder in folders:
        problems = submission.faults(folder, knows_commit)
        print(f"{plain(str(folder))}: {'ok' if not problems else f'{len(problems)} faults'}")
        print("".join(f"  {plain(problem)}\n" for problem in problems), end="")
        wrong += bool(problems)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
