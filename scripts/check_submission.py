"""Checks submitted rows: python scripts/check_submission.py results/submitted/*

A submitted folder is one that `specbench push to=DIR` wrote. A row is a pure function of a run's configuration, records
and scores, so it is computed again from these, without the machine that measured it; its protocol and its provenance
are checked, too (see docs/submit.md). Only files are read: this cannot show that a machine was idle, or that the named
weights made the images, whose digests are in the records for whoever decodes them again. Exit code 1 where something is
wrong, 2 without a folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specbench.errors import UsageError, plain
from specbench.harness import run
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import read_rows

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 20 * 2**20  # bytes of a submitted folder
#: Columns that name where and with what a row was measured.
REQUIRED = ("specbench", "commit", "time", "device_name", "torch", "model", "weights", "data", "prompts_hash")
#: Columns that cannot be computed again where a location was removed from the configuration.
_OF_LOCATIONS = ("config_hash", "drafter_weights", "reference")


def faults(folder: Path, knows_commit: Callable[[str], bool] | None = None) -> list[str]:
    """Everything that is wrong with a submitted folder, one sentence each. knows_commit: whether the project's history
    has a commit; None without a history."""
    if not (folder / "rows.csv").is_file():
        return [f"{folder} has no rows.csv: make it with `specbench push RUN to={folder}`"]
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    problems = [f"{path} is not a regular file" for path in files if path.is_symlink() or not path.is_file()]
    if problems:
        return problems
    if (size := sum(path.stat().st_size for path in files)) > LARGEST:
        problems.append(f"{folder} has {size / 2**20:.0f} MiB, more than {LARGEST // 2**20}: leave out images")
    try:
        rows = read_rows(folder / "rows.csv")
    except UsageError as e:
        return [*problems, str(e)]
    runs: dict[str, Path] = {}
    for path in sorted((folder / "runs").glob("*/run.json")):
        try:
            row = run.stored_outcome(path.parent).row  # its configuration and protocol are checked
        except UsageError as e:
            problems.append(str(e))
            continue
        runs[str(row["run_id"])] = path.parent
        stated = next((other for other in rows if other["run_id"] == row["run_id"]), None)
        if stated is None:
            problems.append(f"{path.parent}: rows.csv has no row of this run")
            continue
        problems += [f"{path.parent}: {text}" for text in _differences(stated, row)]
        problems += [f"{path.parent}: {text}" for text in _provenance(row, knows_commit)]
    missing = [str(row["run_id"]) for row in rows if str(row["run_id"]) not in runs]
    return problems + [f"{folder}/runs has no folder of run {name}, whose row cannot be checked" for name in missing]


def _differences(stated: Mapping[str, Any], computed: Mapping[str, Any]) -> Iterator[str]:
    """The columns in which a row differs from the values of its records and scores."""
    for name in COLUMNS:
        if name not in _OF_LOCATIONS and stated.get(name) != computed.get(name):
            yield f"rows.csv has {name}={stated.get(name)}, and its records and scores give {computed.get(name)}"


def _provenance(row: Mapping[str, Any], knows_commit: Callable[[str], bool] | None) -> Iterator[str]:
    for name in REQUIRED:
        if row.get(name) in (None, ""):
            yield f"the row does not say its {name.replace('_', ' ')}"
    commit = str(row.get("commit") or "")
    if commit.endswith("-dirty"):
        yield "it was measured with changed code (commit ends in -dirty): commit the change, and measure again"
    elif commit and not re.fullmatch("[0-9a-f]{40}", commit):
        yield f"commit {commit:.40} is not a full hash"
    elif commit and knows_commit and not knows_commit(commit):
        yield f"commit {commit} is not in the history of this repository: measure with a published commit"
    if row.get("plugins"):
        yield f"it used plug-ins ({row['plugins']}): submit their code first, as a rule, drafter, model or metric"


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
        problems = faults(folder, knows_commit)
        print(f"{plain(str(folder))}: {'ok' if not problems else f'{len(problems)} faults'}")
        print("".join(f"  {plain(problem)}\n" for problem in problems), end="")
        wrong += bool(problems)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
