"""Kills a run's driver and workers at random moments, goes on each time, and compares what comes of it.

    python scripts/check_kills.py [KILLS] [N] [name=value ...]      # 50 kills, 64 images, 2 workers

Every run must end with N images and N records, none twice, the images and the row (but for its times) of an
undisturbed run in one process. A run that is done before the last kill is checked, and the next one begins. Exit 1
where one differs.
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
from pathlib import Path

from specbench.rows.csv_files import read_rows
from specbench.rows.journal import Journal

ROOT = Path(__file__).resolve().parent.parent
TIMED = ("latency", "_s_", "text_s", "pixels_s", "per_s", "peak_memory", "throughput", "speedup_latency", "draft_cost")
ITS_OWN = ("run_id", "time", "note", "baseline_run_id", "speedup_expected", "threads")
PATIENCE = 900  # seconds for a run that is left alone


def command(out: Path, n: int, arguments: list[str]) -> list[str]:
    base = ["method=sjd", f"n={n}", "warmup=0", "baseline=false", "device=cpu", f"out={out}"]
    given = {argument.partition("=")[0] for argument in arguments}
    return [
        sys.executable,
        "-m",
        "specbench.cli",
        "run",
        *(w for w in base if w.partition("=")[0] not in given),
        *arguments,
    ]


def start(out: Path, n: int, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(log.parent / "r")}
    with log.open("ab") as f:
        return subprocess.Popen(command(out, n, arguments), env=environment, stdout=f, stderr=f)


def hands(pid: int, doing: bytes = b"") -> list[int]:
    """The workers that descend from a driver, or those that are at something (Ray names a process by it)."""
    parents: dict[int, int] = {}
    titles: dict[int, bytes] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(place.name)] = (place / "cmdline").read_bytes()
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return [child for child in found if titles.get(child, b"").startswith(b"ray::WorkerActor" + doing)]


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    """Whether processes end by themselves. (Two agents of Ray's take a minute; they know nothing of a run.)"""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def outcome(out: Path) -> tuple[dict[int, str], dict[str, object]]:
    """Index -> hash of the pixels, and the row without what is a time or the run's own."""
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    found = {line["index"]: line["sha256"] for line in lines}
    assert len(found) == len(lines), "an image is recorded twice"
    journal = Journal(out / "records.jsonl")
    for index in found:
        journal.image(index)  # is the one that was recorded
    assert len(list((out / "images").glob("*.png"))) == len(found), "images without a record"
    assert not list(out.rglob("*.tmp")), "half-written files are left"
    [row] = read_rows(out / "row.csv")
    return found, {k: v for k, v in row.items() if k not in ITS_OWN and not any(part in k for part in TIMED)}


def main() -> int:
    arguments = sys.argv[1:]
    numbers = [int(argument) for argument in arguments if argument.isdigit()]
    arguments = [argument for argument in arguments if not argument.isdigit()]
    kills, n = [*numbers, *(50, 64)[len(numbers) :]][:2]
    chance = random.Random(0)
    root = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
    calm = root / "calm"
    if start(calm, n, [*arguments, "workers=1"], root / "log").wait(PATIENCE):
        print((root / "log").read_text())
        return 1
    wanted = outcome(calm)
    counts = {"driver": 0, "worker": 0, "driver while loading": 0}
    runs, starts, started = 0, 0, time.monotonic()
    while sum(counts.values()) < kills or runs == 0:
        out, driver = root / f"run{runs}", None
        while True:
            if driver is None or driver.poll() is not None:
                if driver is not None and driver.returncode == 0:
                    break
                if driver is not None and driver.returncode != -signal.SIGKILL:
                    print((root / "log").read_text()[-3000:])
                    print(f"the driver ended by itself with {driver.returncode}")
                    return 1
                driver, starts = start(out, n, [*arguments, "workers=2"], root / "log"), starts + 1
                since = time.monotonic()
            if sum(counts.values()) >= kills:
                driver.wait(PATIENCE)
                continue
            if chance.random() < 0.7:  # else at any moment, most of which are Ray's and the workers' start
                while driver.poll() is None and not hands(driver.pid, b".decode"):
                    time.sleep(0.2)
            try:
                driver.wait(chance.uniform(0, 10))
                continue
            except subprocess.TimeoutExpired:
                pass
            workers = hands(driver.pid)
            if workers and chance.random() < 0.5:
                os.kill(chance.choice(workers), signal.SIGKILL)
                counts["worker"] += 1
            else:
                driver.kill()
                driver.wait()
                counts["driver" if workers else "driver while loading"] += 1
                if not gone(workers):
                    print(f"workers outlived the driver: {workers}")
                    return 1
            there = (out / "records.jsonl").read_bytes().count(b"\n") if (out / "records.jsonl").exists() else 0
            print(f"{sum(counts.values())}: {counts}, {time.monotonic() - since:.0f} s, {there} records", flush=True)
        found = outcome(out)
        if found != wanted:
            differing = {k for k in wanted[1] if wanted[1][k] != found[1][k]}
            print(f"run {runs} differs: {len(found[0])} images, columns {sorted(differing)}; see {root}")
            return 1
        runs += 1
        print(f"run {runs}: {n} images, {n} records, images and row as undisturbed", flush=True)
    print(f"{sum(counts.values())} kills ({counts}) in {runs} runs of {n} images, {starts} starts,", end=" ")
    print(f"{time.monotonic() - started:.0f} s: every image and every row is that of the undisturbed run")
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
