"""Does a long run grow? Decodes N images with the embedded model, and compares resident memory at both ends.

    python scripts/measure_memory.py [N] [name=value ...]      # 1000 images of sjd at batch 10, on the CPU

Prints the mean resident memory of the process over the first and the last 100 images; exit 1 where they differ by more
than 5 %.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from specbench.config import configuration
from specbench.harness import run
from specbench.rows.journal import Journal, Record

ENDS, LEEWAY = 100, 0.05


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    arguments = sys.argv[1:]
    n = next((int(argument) for argument in arguments if argument.isdigit()), 1000)
    given = [argument for argument in arguments if not argument.isdigit()]
    usual = ["method=sjd", "batch=10", "baseline=false", "metrics=none", "device=cpu"]
    named = {argument.partition("=")[0] for argument in given}
    cfg = configuration.compose([*(w for w in usual if w.partition("=")[0] not in named), *given, f"n={n}"])
    seen: list[float] = []
    add = Journal.add

    def watched(self: Journal, record: Record, picture: np.ndarray) -> None:
        add(self, record, picture)
        seen.append(resident_mib())

    Journal.add = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        run.execute(cfg, folder)
    first, last = statistics.mean(seen[:ENDS]), statistics.mean(seen[-ENDS:])
    print(f"{len(seen)} images, MiB: {first:.1f} over the first {ENDS}, {last:.1f} over the last,", end=" ")
    print(f"{last / first - 1:+.2%}")
    return int(abs(last / first - 1) > LEEWAY)


if __name__ == "__main__":
    sys.exit(main())
