"""Make the committed rows anew, all from the commit that is checked out.

    python scripts/evidence.py --list                 # the steps, what each costs, and which are done
    python scripts/evidence.py [STEP ...] [--jobs 2]  # these steps, or all; stopped, the same command goes on
    python scripts/evidence.py --print [STEP ...]     # the commands alone

Remove the old rows first, so that none of them serves a new table (`rehearsal.csv` stays):

    git rm -rq results/*.csv results/bench results/probe results/tables results/gallery
    git checkout HEAD results/rehearsal.csv

Work in a checkout of its own (`git worktree add --detach ../rows`), because a row names the commit, with -dirty where
specbench/ or conf/ differ from it. Copy results/ back when a step is done. Steps marked idle measure seconds: leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specbench.storage import origin
from specbench.storage.csv_text import csv_text
from specbench.storage.files import sha256, write_atomically
from specbench.tables.catalog import TABLES

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DONE = Path("results"), Path("runs/evidence")


@dataclass(frozen=True)
class Step:
    """minutes: core-minutes on two cores of 2026. tables: those it runs and draws. commands: of specbench, or of python
    where they begin with a script. joined: a file of rows, and the commands whose rows it has. copied: a picture or a
    row, and where it comes from."""

    name: str
    minutes: int
    tables: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    copied: tuple[tuple[str, str], ...] = ()
    idle: bool = False


def _named(*parts: str) -> tuple[str, ...]:
    """The tables whose names begin with one of these."""
    return tuple(name for name in TABLES if name.startswith(parts))


#: Of the C library: freed memory stays with the process. The divergence of GSD allocates so much, again and again, that
#: the kernel's new pages take three quarters of its time. Seconds are measured as users have them, without it.
_KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**28)}
_PROBE = "probe n=16 seed=1 drafter=eagle window=14 probe.strengths=none"
_MILLION = "audit.model=v4t8 audit.samples=1000000"
_TIMED = (
    *("field_seconds", "coolsd_table1", "coolsd_table2", "lantern_table3", "sjd_table3", "sjd_table4", "sjd_table5"),
    *("sjdpac_table1", "cspd_table1", "cspd_table4"),
    *_named("gsd_", "scd_", "pjd_", "vvs_", "zipar_", "sjdsv_", "entropy_"),
)
_CONTINUOUS = tuple(name for name in _named("cspd_") if name not in (*_TIMED, "cspd_distribution"))
STEPS = (
    Step("relaxed", 190, ("relaxed", "relaxed_equal", "glance", "coolsd_fig3", "coolsd_fig4", "coolsd_fig5")),
    Step("relaxed_images", 115, ("relaxed_images",)),
    Step("field", 50, ("field", "prompt_following", "coolsd_significance", "sjd_table11", "sjdpac_fig1")),
    Step("windows", 75, ("windows", "variants", "field_newer", "eagle3_gain", "drafter_strength")),
    Step(
        "papers",
        125,
        (
            *("coolsd_table3", "sjd_fig6", "sjd_fig8", "sjd_fig13", "sjd_table6", "sjd_table7", "sjd_table9"),
            *("sjd_table10", "sjdpac_fig4", "sjdpac_table2", "sjdpac_table3", "lantern_fig2a", "lantern_fig2c"),
            *("lantern_fig5", "lantern_table1", "lantern_table2", "lantern_table4"),
        ),
    ),
    Step(
        "training",
        50,
        commands=(
            "train drafter=eagle",
            "run method=eagle_chain drafter_weights=drafters/llamagen_scenes/eagle n=96 data=scenes_geneval batch=48"
            " baseline=false metrics=none out=runs/evidence/drafter",
        ),
        copied=(("drafters.csv", "runs/evidence/drafter/row.csv"),),
    ),
    Step("verification", 50, ("verification_shapes", "verification_gain", "verification_gain_mar")),
    Step("seconds", 95, _TIMED, idle=True),
    Step(
        "steps",
        5,
        ("sjdpac_table4",),
        joined=(
            (
                "bench/cpu.csv",
                (
                    "bench bench.steps=60 bench.images=2 method=cool_sd drafter=eagle window=5",
                    *(f"bench bench.steps=60 bench.images=2 method=vanilla batch={batch}" for batch in (1, 8)),
                ),
            ),
        ),
        idle=True,
    ),
    Step(
        "audit",
        200,
        joined=(
            ("audit.csv", ("audit --all",)),
            (
                "audit_variants.csv",
                (
                    "audit --variants",
                    f"audit method=sjd variant=printed {_MILLION}",
                    f"audit method=scd variant=exact {_MILLION}",
                    f"audit method=scd variant=released window=4 {_MILLION}",
                    f"audit method=sjd_pac variant=exact {_MILLION}",
                    f"audit method=sjd_pac variant=released tree=comb width=2 window=7 {_MILLION}",
                ),
            ),
            (
                "audit_printed.csv",
                tuple(
                    f"audit method=sjd_pac variant=printed audit.model={model}"
                    for model in ("v2t10", "v3t5", "v4t8", "v8t4")
                ),
            ),
            (
                "audit_continuous.csv",
                (
                    "audit method=cspd gamma=8 audit.samples=200000",
                    "audit method=cspd gamma=8 criterion=exact audit.samples=200000",
                    "audit method=cspd gamma=8 criterion=paper audit.samples=200000",
                    "audit method=cspd_paper gamma=8 prefill=0.05 audit.samples=200000",
                ),
            ),
            (
                "audit_continuous_block.csv",
                tuple(
                    f"audit method=cspd audit.samples=100000 {one}"
                    for one in ("verification=block", "tries=2", "tries=4")
                ),
            ),
            (
                "cspd_distribution_controls.csv",
                (
                    "audit method=cspd gamma=2 audit.samples=1000",
                    "audit method=cspd gamma=2 criterion=exact audit.samples=1000",
                    "audit method=cspd gamma=2 criterion=paper audit.samples=1000",
                    "audit method=cspd_paper gamma=2 prefill=0 audit.samples=1000",
                ),
            ),
        ),
    ),
    Step("mutants", 25, commands=("scripts/mutants.py",)),
    Step(
        "probes",
        4,
        joined=(
            (
                "probe/band_rounds.csv",
                ("probe n=12 seed=1 drafter=eagle window=5 probe.strengths=0.1,0.2,0.4,0.7,1.0,1.5",),
            ),
            (
                "probe/block_rounds.csv",
                (_PROBE, *(f"{_PROBE} drafter_weights=embedded:{one}" for one in ("guided", "steps1000", "steps300"))),
            ),
        ),
    ),
    Step(
        "pictures",
        5,
        commands=(
            "run method=cool_sd delta=1.1 n=16 out=runs/evidence/sheet",
            "run model=mar_scenes method=vanilla n=32 batch=32 baseline=false metrics=none out=runs/evidence/sheet_mar",
            "report keep=results/gallery runs=runs/tables/field_seconds",
            "report out=results/report.html",
        ),
        copied=(
            ("contact_sheet.png", "runs/evidence/sheet/contact_sheet.png"),
            ("contact_sheet_mar.png", "runs/evidence/sheet_mar/contact_sheet.png"),
        ),
    ),
    Step("continuous", 45, _CONTINUOUS),
    Step("continuous_images", 165, ("cspd_distribution",)),
    Step("frechet", 130, ("frechet",)),
)


def commands(step: Step, jobs: int) -> Iterator[tuple[list[str], Path | None]]:
    """The commands of a step, each with the file of its rows where they are to be joined with others."""
    if step.tables:
        yield ["specbench", "tables", *step.tables, "--jobs", str(1 if step.idle else jobs)], None
    for one in step.commands:
        yield ["python" if one.startswith("scripts/") else "specbench", *shlex.split(one)], None
    for _, parts in step.joined:
        for part in parts:
            yield ["specbench", *shlex.split(part), f"out={_part(part)}"], _part(part)


def _part(command: str) -> Path:
    return DONE / f"{sha256(command, 8)}.csv"


def finish(step: Step) -> None:
    """Join the rows of several commands in their file, and copy what stands in one."""
    for name, source in step.copied:
        shutil.copyfile(source, RESULTS / name)
    for name, parts in step.joined:
        rows = [row for part in parts for row in _rows(_part(part))]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        file = RESULTS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, csv_text(columns, rows).encode())


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def mark(words: list[str]) -> Path:
    """The file that says that a command is done at this commit."""
    return DONE / f"{sha256(f'{origin.commit()} {shlex.join(words)}', 12)}.done"


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
            if subprocess.run(program, env=env, check=False).returncode not in (0, 3):  # 3: a score has no value
                print(f"{step.name}: stopped; the same command goes on", file=sys.stderr)
                return 1
            mark(words).parent.mkdir(parents=True, exist_ok=True)
            mark(words).touch()
        if not args.print:
            finish(step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
