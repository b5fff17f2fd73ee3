#!/usr/bin/env python3
"""What a GPU tells in minutes, besides `pytest -m gpu` and `specbench bench`: `python scripts/check_gpu.py [PART...]`.

compile  every fused kernel as the real sizes and the other parts start it: no spills, shared memory suffices; later
         processes find the kernels in Triton's cache
gates    times of recorded steps and passes against limits, next to the floor of the measured bandwidth
speed    a recorded step of each method at the real sizes, next to one of vanilla AR

Each part is a process of its own. Every check appends a row to a CSV file at once; after a failure the next check runs.
The exit code is 1 if anything failed. Runs from a checkout with torch, triton, numpy and hydra. Without a CUDA device,
one step's kernels are compiled for Hopper, and the other parts do their work on small shapes by Triton's interpreter,
without recordings and times.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from specbench.storage.csv_text import RowFile  # noqa: E402

#: Its number in a row, and the function in `gpu_checks` that yields pairs of a name and a function, which returns cells
#: of a row, or raises. "ok" among them: whether a gate is reached.
PARTS = {
    "compile": (1, "compiling:checks"),
    "gates": (4, "speed:gates"),
    "speed": (6, "speed:methods"),
}
ROWS = RowFile(
    {
        "stage": "1: compile, 4: gates, 6: speed; 2, 3: tests of tests/engine/test_gpu.py",
        "check": "its name",
        "result": "PASS, FAIL, or SKIP for a time without a device",
        "measured": "the value",
        "unit": "its unit",
        "gate": "the largest value that passes",
        "floor": "least time at the measured bandwidth",
        "share_of_bandwidth": "floor / measured",
        "vanilla_ms": "a step of vanilla AR, measured in alternation",
        "of_vanilla": "measured / vanilla_ms",
        "note": "what else is to be said",
        "seconds": "time of the check",
        "device_name": "the device",
        "driver": "its driver",
        "torch": "version",
        "triton": "version",
        "python": "version",
        "commit": "of the code",
        "time": "when it began, UTC",
    },
    "checks of a GPU",
)


def carry_out(part: str, out: Path) -> int:
    """Do the checks of a part, print a line for each and append its row. Returns the exit code."""
    import torch

    cuda = torch.cuda.is_available()
    if part == "compile":
        os.environ.pop("TRITON_INTERPRET", None)
    elif not cuda:
        os.environ["TRITON_INTERPRET"] = "1"
    number, where = PARTS[part]
    module, _, name = where.partition(":")
    here, code = environment(cuda), 0
    print("  ".join(f"{key} {value}" for key, value in here.items()), flush=True)
    with torch.inference_mode(part == "speed"):
        for check, function in getattr(import_module(f"gpu_checks.{module}"), name)():
            began = time.perf_counter()
            try:
                cells = function()
            except Exception as e:  # whatever it is, the next check can say more
                cells = {"ok": False, "note": f"{type(e).__name__}: {e}".partition("\n")[0]}
            result = "PASS" if cells.pop("ok", True) else "FAIL"
            if result == "PASS" and part != "compile" and not cuda:
                result, cells = "SKIP", {"note": "there is no CUDA device; done on small shapes, and not timed"}
            code |= result == "FAIL"
            cells = {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in cells.items()}
            cells |= {
                "stage": number,
                "check": check,
                "result": result,
                "seconds": round(time.perf_counter() - began, 3),
            }
            ROWS.append(out, {**here, **cells})
            said = [f"{key} {cells[key]}" for key in ("measured", "unit", "gate", "floor", "note") if cells.get(key)]
            print(f"{result}  {part}  {check:44s}  {'  '.join(said)}".rstrip(), flush=True)
    return int(code)


def environment(cuda: bool) -> dict[str, Any]:
    import torch
    import triton

    from specbench.storage import origin

    here = origin.environment(torch.device("cuda" if cuda else "cpu"))
    here |= {"triton": triton.__version__, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return {name: here[name] for name in ("device_name", "driver", "torch", "triton", "python", "commit", "time")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    folder = os.environ.get("OUT") or str(ROOT / "results/bench")
    parser.add_argument("--out", type=Path, default=Path(folder, "checks.csv"), help="default: %(default)s")
    args = parser.parse_args(arguments)
    parts = args.parts or [*PARTS]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if len(parts) == 1:
        return carry_out(parts[0], args.out)
    return max([subprocess.run([sys.executable, __file__, part, f"--out={args.out}"]).returncode for part in parts])


if __name__ == "__main__":
    sys.exit(main())
