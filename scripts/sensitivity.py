"""How many images tell a relaxed method from exact decoding, by each quality metric of the embedded world.

    python scripts/sensitivity.py [n] [folder] [overrides of the relaxed method]

Decodes n (1,056) captions of `data=scenes_geneval` by EAGLE-1 and by UniformRSD with delta 3 (or the given method), on
the same prompts, and prints for each metric the difference, its interval, and the pairs with which a test at the 5 %
level finds a difference of this size with a probability of 95 %. The runs lie in the folder (sensitivity); the same
command goes on where it was stopped. About 1.3 s an image on one core: 45 minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specbench.compare import comparison, passes
from specbench.compare.paired import pairs_needed
from specbench.config import configuration
from specbench.harness import run
from specbench.rows.shown import IMAGES_PER_FEATURE

METRICS = ("scenes_geneval", "scenes_reward", "scenes_clip", "scenes_fid")
SHARED = ("data=scenes_geneval", "batch=48", "baseline=false", "emitted_draws=0", "metrics=scenes_all")
LEAST = {"scenes_fid": 64 * IMAGES_PER_FEATURE}  # images without which there is no value


def main(n: int, folder: Path, relaxed: list[str]) -> None:
    """Prints a line for each metric."""
    runs = []
    for name, own in (("exact", ["method=eagle1"]), ("relaxed", relaxed)):
        run.run(configuration.compose([*own, f"n={n}", *SHARED]), folder / name)
        runs.append(passes.read(str(folder / name)))
    found = comparison.compare(*runs)
    print(f"n={n}: {found.names[1]} against {found.names[0]}")
    for result in found.results:
        p, needed = result.paired, pairs_needed(result.paired)
        if result.statistic.name in METRICS and p.test is not None and needed is not None:
            count, low = (max(one, LEAST.get(result.statistic.name, 0)) for one in needed)
            between = f"{p.test.low:+.4f} to {p.test.high:+.4f}, p = {p.test.p:.2g}"
            print(f"  {result.statistic.name}: {p.mean_a:.4f}, {p.difference:+.4f} ({between}); {count:,} pairs")
            print(f"    (at least {low:,}, by the far end of the interval)")
    for left_out in found.untested:
        print(f"  not compared: {left_out}")


if __name__ == "__main__":
    given = sys.argv[1:]
    n, folder = int(given[0]) if given else 1056, Path(given[1] if len(given) > 1 else "sensitivity")
    main(n, folder, given[2:] or ["method=uniform_rsd", "delta=3"])
