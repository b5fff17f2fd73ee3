"""Kill a suite at random moments, continue each time, and compare its rows and images with undisturbed single runs.

    python scripts/check_suites.py [KILLS] [N] [name=value ...]   # 2 kills, 4 images a run

The suite runs six methods on each of the two embedded models with two seeds. In the end every image and every row,
except times and identifiers, must equal those of a single `specbench run`; vanilla AR must have been decoded once per
model and seed, and the report of the folder must show these runs and nothing else. Exit 1 where something differs.
Arguments such as seeds=0 or models=mar_scenes make the suite smaller.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from check_kills import ITS_OWN, PATIENCE, ROOT, outcome

from specbench.rows.csv_files import read_rows
from specbench.tables import suites

DISCRETE = {
    "sjd": {"method": "sjd"},
    "scd": {"method": "scd"},
    "eagle1": {"method": "eagle1"},
    "cool_sd": {"method": "cool_sd", "delta": 1.1},
    "lantern_pp": {"method": "lantern_pp"},
}
CONTINUOUS = {
    "cspd": {"method": "cspd", "gamma": 2},
    "cspd_block": {"method": "cspd", "gamma": 2, "verification": "block"},
    "cspd_tries": {"method": "cspd", "gamma": 2, "tries": 2},
    "cspd_paper": {"method": "cspd_paper"},
    "cspd_paper_4": {"method": "cspd_paper", "gamma": 4},
}
SUITE = {
    "models": ["llamagen_scenes", "mar_scenes"],
    "seeds": [0, 1],
    "metrics": "scenes_reward",
    "with": {"device": "cpu", "warmup": 0},
    "lines": {**DISCRETE, **CONTINUOUS},
}
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SPECBENCH_STORE": "none"}


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "specbench.cli", *arguments]
    with log.open("ab") as f:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=f, stderr=f, cwd=log.parent)


def main() -> int:
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    arguments = [argument for argument in sys.argv[1:] if not argument.isdigit()]
    kills, n = [*numbers, *(2, 4)[len(numbers) :]][:2]
    root = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    log, out, chance, started = root / "log", root / "suite", random.Random(0), time.monotonic()
    (root / "six.yaml").write_text(yaml.safe_dump(SUITE, sort_keys=False))
    command = ["suite", "six.yaml", f"out={out}", f"n={n}", *arguments]
    for number in range(kills):
        one = start(command, log)
        before = len(list(out.rglob("*.png")))
        while one.poll() is None and len(list(out.rglob("*.png"))) < before + chance.randint(1, 10 * n):
            time.sleep(0.2)
        if one.poll() is not None:
            print(f"the suite ended before kill {number + 1}: give a larger N")
            break
        one.send_signal(signal.SIGKILL)
        one.wait()
        print(f"killed with {len(list(out.rglob('records.jsonl')))} runs started", flush=True)
    if code := start(["resume", str(out)] if kills else command, log).wait(10 * PATIENCE):
        print(log.read_text()[-3000:], f"the suite ended with {code}", sep="\n")
        return 1
    faults = []
    plan = suites.plan(suites.in_folder(out), out)
    rows = {row["run_id"]: row for row in read_rows(out / "suite.csv")}
    if len(rows) != len(plan.runs) or plan.missing:
        faults.append(f"{len(rows)} rows of {len(plan.runs)} runs")
    if list(out.rglob("baseline.jsonl")):
        faults.append("a run decoded a baseline of its own")
    for cell in plan.suite.cells():
        if (count := sum(run.reference is None for run in plan.runs if run.cell == cell)) != 1:
            faults.append(f"{count} times vanilla AR in {cell}")
    for number, run in enumerate(plan.runs):
        single = root / f"single{number}"
        if start(["run", *run.overrides, f"out={single}"], log).wait(PATIENCE):
            print(log.read_text()[-3000:])
            return 1
        mine, theirs = outcome(run.folder), outcome(single)
        if mine != theirs:
            differing = sorted(name for name in mine[1] if mine[1][name] != theirs[1][name])
            faults.append(f"{run.folder} differs from its single run in {differing or 'its images'}")
        [own] = read_rows(run.folder / "row.csv")
        kept = rows[own["run_id"]]
        changed = {name for name in own if own[name] != kept[name]} - {"speedup_step", "speedup_step_stderr"} - ITS_OWN
        if changed or kept["speedup_step"] is None:
            faults.append(f"suite.csv has other values of {run.folder}: {sorted(changed)}")
        print(f"{number + 1} of {len(plan.runs)}: {run.folder}", flush=True)
    start(["report", str(out), f"out={root / 'report.html'}"], log).wait(PATIENCE)
    shown = re.findall(r"wrote .*report.html: (\d+) runs, (\d+) images", log.read_text())
    if shown != [(str(len(plan.runs)), str(len(plan.runs) * min(n, 8)))]:
        faults.append(f"the report shows {shown}")
    print(*faults, sep="\n")
    if faults:
        print(f"see {root}")
        return 1
    seconds = time.monotonic() - started
    print(
        f"{kills} kills, {len(plan.runs)} runs of {n} images, {seconds:.0f} s: rows, images and report as they must be"
    )
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
