"""How much faster are two workers than one? By wall time from the first to the last image, one thread each.

    python scripts/measure_workers.py [N] [name=value ...]      # 48 images of sjd; PAIRS=3 alternating pairs of runs

For comparison: two independent processes, relative to one alone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from specbench.rows.journal import read_records

ROOT = Path(__file__).resolve().parent.parent
PAIRS = int(os.environ.get("PAIRS", "3"))


def start(out: Path, n: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    default = ["method=sjd", f"n={n}", "baseline=false", "metrics=none", "device=cpu", f"out={out}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "specbench.cli", "run", *default, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rate(out: Path) -> float:
    """Images a second, behind those that were first done."""
    done = sorted(r.done for r in read_records(out / "records.jsonl") if r.done is not None)
    return (len(done) - 2) / (done[-1] - done[1])


def main() -> int:
    arguments = sys.argv[1:]
    n = next((int(argument) for argument in arguments if argument.isdigit()), 48)
    arguments = [argument for argument in arguments if not argument.isdigit()]
    found: dict[str, list[float]] = {"one": [], "two": [], "apart": []}
    with tempfile.TemporaryDirectory() as name:
        for i in range(PAIRS):
            for kind, count in (("one", 1), ("two", 2)):
                out = Path(name, f"{kind}{i}")
                if start(out, n, [*arguments, f"workers={count}"]).wait():
                    return 1
                found[kind].append(rate(out))
            both = [Path(name, f"apart{i}{j}") for j in range(2)]
            if any(one.wait() for one in [start(out, n // 2, arguments) for out in both]):
                return 1
            found["apart"].append(sum(map(rate, both)))
            print(", ".join(f"{kind} {rates[-1]:.3f} images/s" for kind, rates in found.items()), flush=True)
    one = statistics.median(found["one"])
    for kind, what in (("two", "two workers"), ("apart", "two processes apart")):
        print(f"{what}: {statistics.median(found[kind]) / one:.2f}x of one (medians of {PAIRS})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
