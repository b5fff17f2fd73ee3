"""Kill a run's driver and workers at random moments, continue each time, and compare with an undisturbed run.

    python scripts/check_kills.py [KILLS] [N] [name=value ...]   # 50 kills, 64 images, two workers

Every run must end with N images and N records, none twice, and with the images and the row (except times) of an
undisturbed run in one process. Exit 1 where one differs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from specbench.rows.columns import TIMED_COLUMNS
from specbench.rows.csv_files import read_rows
from specbench.rows.journal import Journal

ROOT = Path(__file__).resolve().parent.parent
ITS_OWN = {*TIMED_COLUMNS, "timing", "run_id", "time", "note", "baseline_run_id", "threads", "peak_memory_mib"}
PATIENCE = 900  # seconds for a run that is not disturbed


def start(out: Path, n: int, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    base = {"method": "sjd", "n": n, "warmup": 0, "baseline": "false", "device": "cpu", "out": out}
    given = {argument.partition("=")[0] for argument in arguments}
    arguments = [*(f"{name}={value}" for name, value in base.items() if name not in given), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(log.parent / "r")}
    with log.open("ab") as f:
        return subprocess.Popen(
            [sys.executable, "-m", "specbench.cli", "run", *arguments], env=environment, stdout=f, stderr=f
        )


def workers_of(driver: int, method: str = "") -> list[psutil.Process]:
    """The workers of a driver, or those in a method: Ray names the process after it."""
    found = []
    with suppress(psutil.NoSuchProcess):  # the driver ended meanwhile
        for child in psutil.Process(driver).children(recursive=True):
            with suppress(psutil.Error):
                if " ".join(child.cmdline()).startswith(f"ray::WorkerActor{method}"):
                    found.append(child)
    return found


def outcome(out: Path) -> tuple[dict[int, str], dict[str, object]]:
    """Index -> hash of the pixels, and the row without times and identifiers."""
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    found = {line["index"]: line["sha256"] for line in lines}
    assert len(found) == len(lines), "an image is recorded twice"
    journal = Journal(out / "records.jsonl")
    for index in found:
        journal.image(index)  # compares with the recorded hash
    assert len(list((out / "images").glob("*.png"))) == len(found), "images without a record"
    assert not list(out.rglob("*.tmp")), "temporary files are left"
    [row] = read_rows(out / "row.csv")
    return found, {k: v for k, v in row.items() if k not in ITS_OWN}


def kill_one(driver: subprocess.Popen[bytes], chance: random.Random) -> str:
    """Wait for a random moment, then kill the driver or a worker. Returns which; empty if the run ended before."""
    if chance.random() < 0.7:  # else at any moment, most of which are in the start of Ray and of the workers
        while driver.poll() is None and not workers_of(driver.pid, ".decode"):
            time.sleep(0.2)
    try:
        driver.wait(chance.uniform(0, 10))
        return ""
    except subprocess.TimeoutExpired:
        pass
    workers = workers_of(driver.pid)
    if workers and chance.random() < 0.5:
        chance.choice(workers).kill()
        return "worker"
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive, f"workers outlived the driver: {alive}"
    return "driver" if workers else "driver while loading"


def main() -> int:
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    arguments = [argument for argument in sys.argv[1:] if not argument.isdigit()]
    kills, n = [*numbers, *(50, 64)[len(numbers) :]][:2]
    chance, started = random.Random(0), time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
    log = root / "log"
    if start(root / "undisturbed", n, [*arguments, "workers=1"], log).wait(PATIENCE):
        print(log.read_text())
        return 1
    wanted = outcome(root / "undisturbed")
    counts = dict.fromkeys(("driver", "worker", "driver while loading"), 0)
    runs = 0
    while sum(counts.values()) < kills or runs == 0:
        out = root / f"run{runs}"
        driver = start(out, n, [*arguments, "workers=2"], log)
        while driver.poll() != 0:
            if driver.returncode == -signal.SIGKILL:
                driver = start(out, n, [*arguments, "workers=2"], log)
            elif driver.returncode is not None:
                print(log.read_text()[-3000:], f"the driver ended by itself with {driver.returncode}", sep="\n")
                return 1
            if sum(counts.values()) >= kills:
                driver.wait(PATIENCE)
            elif killed := kill_one(driver, chance):
                counts[killed] += 1
                print(f"{sum(counts.values())}: {counts}", flush=True)
        found = outcome(out)
        if found != wanted:
            differing = sorted(k for k in wanted[1] if wanted[1][k] != found[1][k])
            print(f"run {runs} differs: {len(found[0])} images, columns {differing}; see {root}")
            return 1
        runs += 1
    print(f"{sum(counts.values())} kills ({counts}) in {runs} runs of {n} images, {time.monotonic() - started:.0f} s:")
    print("every image and every row equals that of the undisturbed run")
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
