#!/usr/bin/env python3
"""The first ten minutes on a GPU: five stages, each in a process of its own with a time limit.

1 compiles every fused kernel as the real sizes and the later stages start it: no spills, shared memory suffices.
2 compares the kernels in bfloat16 with float64 at the shapes of LlamaGen-XL, Lumina-mGPT 7B and Emu3.
3 compares recorded steps with plain ones, for each rule, drafter and engine.
4 measures the gates, from recorded replays, next to the floor of the measured bandwidth.
5 lists the most expensive kernels of some steps.
6 (only where it is asked for) measures a step of each method at the real sizes, next to one of vanilla AR.

Every check appends a line of JSON to a file at once; after a failure the next check runs; a table comes last. The exit
code is 1 if anything failed. Tuned tiles are written next to that file, and read by later runs. Runs from a checkout
with torch, triton and numpy. Without a CUDA device stage 1 compiles for Hopper, and the other stages do their work on
small shapes by Triton's interpreter, without recordings and gates.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from gpu_checks import results  # noqa: E402

#: By number: its name, the function in `gpu_checks` that yields its checks, and the seconds that it may take.
#: One that is slower than usual leaves less for the last one, see --seconds. The stages from `TIMED` on measure.
STAGES = {
    1: ("compiling", "compiling:checks", 130),
    2: ("parity", "parity:checks", 110),
    3: ("recording", "recording:checks", 130),
    4: ("gates", "gates:checks", 140),
    5: ("profiles", "gates:profiles", 60),
    6: ("speed", "speed:checks", 150),
}
TIMED = 4
#: Processes that a stage may lose to errors of the device.
LOSSES = 6
_LOST = 3  # exit code of a process that lost the device


def main() -> int:
    arguments = parser().parse_args()
    file = Path(arguments.out)
    if arguments.rows:
        results.write_rows(map(Path, arguments.lines), Path(arguments.rows))
        return 0
    if arguments.worker:
        return worker(int(arguments.stages), arguments.run, file, arguments.fast, arguments.again)
    run = uuid.uuid4().hex[:12]
    if arguments.tiles:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(arguments.tiles, file.with_name(results.TILES))
    began = time.monotonic()
    for stage in map(int, arguments.stages.split(",")):
        name, _, limit = STAGES[stage]
        print(f"-- stage {stage}: {name}", flush=True)
        remaining = began + arguments.seconds - time.monotonic()
        carry_out(stage, run, file, arguments.fast, max(1.0, min(limit, remaining)) * arguments.patience)
    lines = results.read(file, run)
    print(f"-- summary ({time.monotonic() - began:.0f} s, lines in {file})\n{results.summary(lines)}")
    return int(any(line["ok"] is False for line in lines) or not lines)


def parser() -> argparse.ArgumentParser:
    out = os.environ.get("OUT") or str(ROOT / "results" / "bench")
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--stages", default="1,2,3,4,5", help="which, in this order (default: %(default)s)")
    result.add_argument("--out", default=f"{out}/gpu_check.jsonl", help="file of the lines (default: %(default)s)")
    result.add_argument("--tiles", help=f"tuned tiles to begin with: {results.TILES} of an earlier run")
    result.add_argument("--seconds", type=float, default=570.0, help="for all stages (default: %(default).0f)")
    result.add_argument("--fast", action="store_true", help="a few checks of each stage")
    result.add_argument("--patience", type=float, default=1.0, help="factor of the stages' limits")
    result.add_argument("--rows", metavar="FILE", help="check nothing: write LINES as rows to this CSV")
    result.add_argument("lines", nargs="*", metavar="LINES", help="files of lines, for --rows")
    result.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    result.add_argument("--run", default="", help=argparse.SUPPRESS)
    result.add_argument("--again", default="", help=argparse.SUPPRESS)
    return result


def carry_out(stage: int, run: str, file: Path, fast: bool, limit: float) -> None:
    """Run a stage in separate processes. After a process that lost the device, another one starts. It first repeats the
    failed check with kernels started one by one, so that the error names the kernel."""
    end, again = time.monotonic() + limit, ""
    for _ in range(LOSSES):
        ended = _process(stage, run, file, fast, again, end)
        last = results.read(file, run)
        if ended == _LOST and last:
            again = "" if again else last[-1]["check"]
            continue
        if ended:
            note = f"stopped after {limit:.0f} s" if ended == "limit" else f"the process ended with exit code {ended}"
            line = {"run": run, "stage": stage, "check": f"stage {stage}", "ok": False, "note": note}
            results.append(file, line)
            print(results.described(line), flush=True)
        return
    note = f"gave up after {LOSSES} processes lost the device"
    results.append(file, {"run": run, "stage": stage, "check": f"stage {stage}", "ok": False, "note": note})


def _process(stage: int, run: str, file: Path, fast: bool, again: str, end: float) -> Any:
    """The exit code, or "limit" if the process took too long."""
    command = [sys.executable, __file__, "--worker", f"--stages={stage}", f"--run={run}", f"--out={file}"]
    command += ["--fast"] if fast else []
    command += [f"--again={again}"] if again else []
    env = os.environ | ({"CUDA_LAUNCH_BLOCKING": "1"} if again else {})
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        return process.wait(max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "limit"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own processes, too
            process.wait()


def worker(stage: int, run: str, file: Path, fast: bool, again: str) -> int:
    """Run the checks of a stage that no earlier process has done; again: the check that is repeated first."""
    import torch

    cuda = torch.cuda.is_available()
    os.environ["OUT"] = str(file.parent)
    if stage != 1 and not cuda:
        os.environ["TRITON_INTERPRET"] = "1"
    if stage == 1:
        os.environ.pop("TRITON_INTERPRET", None)
    results.describe_environment(file, run, cuda)
    done = {line["check"] for line in results.read(file, run) if line["stage"] == stage}
    module, _, name = STAGES[stage][1].partition(":")
    checks = getattr(import_module(f"gpu_checks.{module}"), name)(fast)
    if stage >= TIMED and not cuda:
        checks = ((name, partial(results.dry, check)) for name, check in checks)
    try:
        with torch.inference_mode(stage > 1):
            if again:
                only = [check for check in checks if check[0] == again]
                results.carry_out(only, stage, run, file, set(), again=True)
                return _LOST  # the other checks continue in a process that starts kernels as usual
            results.carry_out(checks, stage, run, file, done, again=False)
    except results.DeviceLostError:
        return _LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
