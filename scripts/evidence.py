"""Makes all committed rows again, from the commit that is checked out.

    python scripts/evidence.py --list                 # the steps, what each costs, and which are done
    python scripts/evidence.py [STEP ...] [--jobs 2]  # these steps, or all; repeat a stopped command
    python scripts/evidence.py --print [STEP ...]     # the commands alone

Remove the old rows first, so that no new table uses them:

    git rm -rq results/*.csv results/bench results/probe results/tables results/gallery

Work in a checkout of its own (`git worktree add --detach ../rows`), because a row names the commit, with -dirty where
specbench/ or conf/ differ from it. Copy results/ back when a step is done. Steps marked idle measure seconds: leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specbench.audit.plan import planned
from specbench.storage import origin
from specbench.storage.csv_text import csv_lines, csv_text
from specbench.storage.files import sha256, write_atomically
from specbench.tables.catalog import TABLES

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DONE = Path("results"), Path("runs/evidence")


#: Of the C library: freed memory stays with the process. The divergence of GSD allocates so much, again and again, that
#: the kernel's new pages take three quarters of its time. Seconds are measured as users have them, without it.
_KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**28)}


@dataclass(frozen=True)
class Step:
    """An entry of evidence.yaml, which explains the fields."""

    name: str
    minutes: int
    tables: Sequence[str] = ()
    commands: Sequence[str] = ()
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)
    idle: bool = False


def _step(tables: str = "", **entry: Any) -> Step:
    """A step with all tables that match its patterns."""
    return Step(tables=[name for pattern in tables.split() for name in fnmatch.filter(TABLES, pattern)], **entry)


_ENTRIES = yaml.safe_load((ROOT / "scripts/evidence.yaml").read_text(encoding="utf-8"))
STEPS = [_step(**entry) for entry in _ENTRIES]


def commands(step: Step, jobs: int) -> Iterator[tuple[list[str], Path | None]]:
    """The commands of a step, each with the file of its rows if they are joined with others."""
    if step.tables:
        yield ["specbench", "tables", *step.tables, "--jobs", str(1 if step.idle else jobs)], None
    for command in step.commands:
        yield _words(command), None
    for parts in step.joined.values():
        for part in parts:
            yield [*_words(part), f"out={_part(part)}"], _part(part)


def _words(command: str) -> list[str]:
    program = "python" if command.startswith(("scripts/", "tools/")) else "specbench"
    return [program, *shlex.split(command)]


def _part(command: str) -> Path:
    return DONE / f"{sha256(command, 8)}.csv"


def finish(step: Step) -> None:
    """Write the rows of several commands into one file, and copy the files that a single command wrote."""
    for name, source in step.copied.items():
        shutil.copyfile(source, RESULTS / name)
    for name, parts in step.joined.items():
        rows = [row for part in parts for _, row in csv_lines(_part(part))[1]]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        file = RESULTS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, csv_text(columns, rows).encode())


def mark(words: list[str]) -> Path:
    """The file that says that a command is done at this commit."""
    return DONE / f"{sha256(f'{origin.commit()} {shlex.join(words)}', 12)}.done"


def refuted(words: Sequence[str], part: Path | None) -> bool:
    """Whether a command is an audit that measured all its rows, some of them of methods that are not lossless."""
    if words[1] != "audit" or part is None:
        return False
    overrides = [word for word in words[2:] if not word.startswith("--")]
    return len(csv_lines(part)[1]) == len(planned(overrides, "--all" in words, "--variants" in words).measurements)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="which steps (default: all)")
    parser.add_argument("--list", action="store_true", help="the steps, what each costs, and which are done")
    parser.add_argument("--print", action="store_true", help="the commands alone")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, where no seconds are measured")
    args = parser.parse_args()
    os.chdir(ROOT)
    if unknown := set(args.steps) - {step.name for step in STEPS}:
        parser.error(f"there is no step {min(unknown)} (choose from: {', '.join(step.name for step in STEPS)})")
    chosen = [step for step in STEPS if step.name in args.steps or not args.steps]
    if args.list:
        for step in chosen:
            done = all(mark(words).exists() for words, _ in commands(step, args.jobs))
            state = "done" if done else f"{step.minutes} core-minutes"
            print(f"{step.name:18} {state:18} {'idle ' if step.idle else ''}{' '.join(step.tables)}")
        print(f"{sum(step.minutes for step in chosen) / 60:.1f} core-hours in all")
        return 0
    if not args.print and origin.commit().endswith("-dirty"):
        parser.error("specbench/ or conf/ differ from the commit: work in a clean checkout")
    for step in chosen:
        for words, part in commands(step, args.jobs):
            print(shlex.join(words), flush=True)
            if args.print or mark(words).exists():
                continue
            if part is not None:
                part.parent.mkdir(parents=True, exist_ok=True)
                part.unlink(missing_ok=True)  # some commands add to a file
            program = [Path(sys.executable).with_name(words[0]), *words[1:]]
            env = dict(os.environ) if step.idle else {**_KEEPS_MEMORY, **os.environ}
            code = subprocess.run(program, env=env, check=False).returncode
            if code not in (0, 3) and not (code == 1 and refuted(words, part)):  # 3: a score has no value
                print(f"{step.name}: stopped; repeat the command to continue", file=sys.stderr)
                return 1
            mark(words).parent.mkdir(parents=True, exist_ok=True)
            mark(words).touch()
        if not args.print:
            finish(step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
