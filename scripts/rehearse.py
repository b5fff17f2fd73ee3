"""Rehearse a real model without its weights: files of the official names, formats and sizes, with random numbers, are
put where `specbench fetch` puts the published ones, and the README's commands for real models run on them.

    python scripts/rehearse.py llamagen_xl                      # needs 40 GB of disk, 20 GB of memory, a CPU
    python scripts/rehearse.py llamagen_xl --scale small        # the same with reduced networks, in a minute

Each command is a process of its own, whose time and memory are held against the budgets below. Exit code 1 where a
command fails or leaves its budget. Budgets are of anonymous memory, which a machine must have; mapped pages of files
are part of the resident memory only, since the kernel drops them where memory is short. At the full scale, LlamaGen-XL
draws an image with its EAGLE drafter, Flan-T5-XL and COCO's metrics; another model is loaded, and takes one step.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.config import parameters, registry
from specbench.rows import provenance
from specbench.storage import origin
from specbench.storage.csv_text import RowFile

ROOT = Path(__file__).resolve().parents[1]
GB = 1e9
#: Loading may hold this much besides the networks, once: libraries, the file that is read, buffers.
LOADING = 1.5 * GB
INTERVAL = 0.1  # seconds between two looks at the memory

ROWS = RowFile(
    {
        "time": "when it was measured, UTC",
        "commit": "of the code",
        "model": "the model",
        "scale": "full: official sizes; small: reduced networks",
        "stage": "the stage",
        "command": "its command; `load` loads the networks of a run and does nothing else",
        "seconds": "its time",
        "budget_s": "the budget of its time",
        "anonymous_gb": "peak anonymous memory of its processes, GB",
        "budget_gb": "the budget of it",
        "resident_gb": "peak resident memory, with mapped pages of files, GB",
        "networks_gb": "bytes of the networks that `load` loaded, GB",
        "ok": "whether it succeeded within its budgets",
        "processor": "the machine's processor",
        "cores": "its cores that the process may use",
        "torch": "version of PyTorch",
    },
    "rehearsals",
)


@dataclass(frozen=True)
class Stage:
    """A command of specbench, and its budget: GB of anonymous memory, and seconds."""

    name: str
    arguments: tuple[str, ...]
    memory: float
    seconds: float

    @property
    def command(self) -> str:
        return shlex.join(["specbench", *self.arguments])


@dataclass(frozen=True)
class Measured:
    """code: the exit code; anonymous, resident: peaks in bytes over the tree of processes; stopped: at its budget."""

    code: int
    seconds: float
    anonymous: int
    resident: int
    stopped: bool = False


Runner = Callable[[Stage, Path], Measured]
#: Folder of a published drafter -> a method with it.
_METHODS = {"eagle": "eagle1", "draft": "sd"}
#: Images of a run at the small scale: a distance of images needs two.
_FEW = 2


def stages(model: str, small: bool) -> Iterator[Stage]:
    """The commands of docs/models.md and docs/metrics.md for a model, in their order, with their budgets."""
    entry = registry.model_sources()[model]
    whole = "text" in entry.parts  # a CPU takes minutes for an image of LlamaGen, hours for one of a 7B model
    vectors = parameters.is_continuous("model", model)
    method = "cspd" if vectors else "cool_sd" if whole else next((_METHODS[p] for p in entry.drafters), "vanilla")
    named = (f"model={model}", f"method={method}")
    reduced = ("reduced=true", *(("diffusion_steps=5",) if vectors else ())) if small else ()
    data = parameters.preferred("model", model).get("data", "coco2017")
    if whole or small:
        images = ("images=home/data/coco2017/val2017", *(("metrics=fid",) if small else ()))
        yield Stage("reference", ("reference", f"data={data}", *images), 4, 7200)
    yield Stage("load", ("load", *named, *reduced), 20 if whole else 24, 600)
    if not (whole or small):
        bench = ("bench.images=0", "bench.steps=1", "bench.nodes=1", "bench.context=256")
        # The target's step alone: the drafter is loaded above, and a step with it has not been tried at this size.
        yield Stage("step", ("bench", f"model={model}", "method=vanilla", *bench), 24, 1800)
        return
    of_captions = "" if data == "imagenet" else ",clip_b32,image_reward,hpsv2"
    metrics = f"[fid,kid{of_captions}]" if small else "coco"
    scores = (f"metrics={metrics}",) if small else ()
    n = _FEW if small else 1
    run = ("protocol=coolsd_table1", *named, "delta=1.1") if whole else (f"data={data}", *named)
    yield Stage("run", ("run", *run, f"n={n}", "warmup=0", *reduced, *scores, "out=first"), 20, 7200)
    yield Stage("evaluate", ("evaluate", "first", f"metrics={metrics}"), 20, 1800)
    if vectors:
        table = ("tables", "cspd_table3", "--model", model, "--n", "1", "--no-run")
        yield Stage("tables", table, 20, 7200)
    if whole:
        table = ("tables", "coolsd_table3", "--model", model, "--n", "1", *(("--no-run",) if small else ()))
        yield Stage("tables", table, 20, 7200)


def make_files(model: str, small: bool, photographs: int, home: Path) -> None:
    """Makes the files of a model, and with stages that score images also the evaluators' and COCO's."""
    from rehearsal import command, files

    entry = registry.model_sources()[model]
    for part, build in files.of_model(model, small).items():
        if part in {**entry.parts, **entry.drafters}:
            build(home / "models" / model / part)
    if small or "text" in entry.parts:
        with command.evaluators(small):
            for part, build in files.EVALUATORS.items():
                build(home / "metrics" / part)
        files.coco2017(home / "data/coco2017", photographs)


# --- running ----------------------------------------------------------------------------------------------------------


def processes_of(work: Path, scale: str) -> Runner:
    """Runs each stage as a process in the work folder, with homes there."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "SPECBENCH_HOME": str(work / "home"),
        "HOME": str(work),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
    }
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # a user's commands use every core
        environment.pop(name, None)

    def run(stage: Stage, log: Path) -> Measured:
        line = [sys.executable, str(ROOT / "scripts/rehearsal/command.py"), scale, *stage.arguments]
        return measured(line, work, environment, log, stage.memory * GB, stage.seconds)

    return run


def measured(
    line: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, most: float, longest: float
) -> Measured:
    """Runs a command in a folder, with its output in `log`. It is stopped when it holds more than `most` bytes of
    anonymous memory, or takes more than `longest` seconds."""
    peaks, stopped, start = (0, 0), False, time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(line, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            while process.poll() is None and not stopped:
                now = map(sum, zip(*map(_memory, _tree(process.pid)), strict=True))
                peaks = max(peaks[0], next(now)), max(peaks[1], next(now))
                stopped = peaks[0] > most or time.monotonic() - start > longest
                time.sleep(INTERVAL)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Measured(process.returncode, time.monotonic() - start, *peaks, stopped)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _memory(pid: int) -> tuple[int, int]:
    """Anonymous and resident bytes of a process; zeros where the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    sizes = {name: int(kilobytes) << 10 for name, kilobytes in re.findall(r"^Rss(\w+):\s+(\d+)", text, re.MULTILINE)}
    anonymous = sizes.get("Anon", 0) + sizes.get("Shmem", 0)
    return anonymous, anonymous + sizes.get("File", 0)


def rehearse(
    todo: Sequence[Stage], run: Runner, logs: Path, more: Mapping[str, Any], out: Path | None
) -> list[dict[str, Any]]:
    """Runs stages until one fails, prints a line for each, and returns their rows; more: cells that all have."""
    rows = []
    for stage in todo:
        print(f"{stage.name}: {stage.command}", flush=True)
        log = logs / f"{stage.name}.log"
        seen = run(stage, log)
        text = log.read_text(encoding="utf-8", errors="replace")
        networks = int(m[1]) if (m := re.search(r"^loaded (\d+) bytes", text, re.MULTILINE)) else 0
        budget = networks + LOADING if networks else stage.memory * GB
        done = seen.code in (0, 3)  # 3: a distance of one image has no value
        ok = done and seen.anonymous <= budget and seen.seconds <= stage.seconds
        rows.append(
            {
                "time": provenance.utc(),
                "stage": stage.name,
                "command": stage.command,
                "seconds": f"{seen.seconds:.1f}",
                "budget_s": f"{stage.seconds:g}",
                "anonymous_gb": f"{seen.anonymous / GB:.2f}",
                "budget_gb": f"{budget / GB:.2f}",
                "resident_gb": f"{seen.resident / GB:.2f}",
                "networks_gb": f"{networks / GB:.2f}" if networks else "",
                "ok": str(ok).lower(),
                **more,
            }
        )
        if out is not None:
            ROWS.append(out, rows[-1])
        memory = f"{seen.anonymous / GB:.2f} of {budget / GB:.2f} GB, {seen.resident / GB:.2f} GB with mapped files"
        print(f"  {'ok' if ok else 'FAILED'}: {seen.seconds:.0f} of {stage.seconds:g} s, {memory}", flush=True)
        if not ok:
            why = f"exit code {seen.code}{', stopped at its budget' if seen.stopped else ''}"
            print(f"  {why}; the end of its output:\n{text[-3000:]}", flush=True)
        if not done:
            break
    return rows


def machine() -> dict[str, Any]:
    import torch

    where = origin.environment(torch.device("cpu"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"commit": where["commit"], "processor": where["device_name"], "cores": cores, "torch": where["torch"]}


def main(arguments: Sequence[str] | None = None, runner: Callable[[Path, str], Runner] = processes_of) -> int:
    """runner: a function of the work folder and the scale; tests replace it."""
    from rehearsal.files import FAMILIES

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", choices=list(FAMILIES))
    p.add_argument("--scale", choices=["full", "small"], default="full")
    p.add_argument("--photographs", type=int, default=0, help="of COCO; default: 5000, or 4 at the small scale")
    p.add_argument("--memory", type=float, default=1e3, help="GB at which a command is stopped, below its budget, too")
    p.add_argument("--work", type=Path, help="folder for all files, which stays (default: a temporary one)")
    p.add_argument("--out", type=Path, help="a .csv file for the rows, such as results/rehearsal.csv")
    args = p.parse_args(arguments)
    small = args.scale == "small"
    work = (args.work or Path(tempfile.mkdtemp(prefix="rehearsal-"))).resolve()
    todo = [replace(s, memory=min(s.memory, args.memory)) for s in stages(args.model, small)]
    try:
        print(f"making the files of {args.model} in {work}", flush=True)
        make_files(args.model, small, args.photographs or (4 if small else 5000), work / "home")
        more = {"model": args.model, "scale": args.scale, **machine()}
        rows = rehearse(todo, runner(work, args.scale), work, more, args.out)
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    good = len(rows) == len(todo) and all(row["ok"] == "true" for row in rows)
    print(f"{args.model}, {args.scale}: {'passed' if good else 'FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
