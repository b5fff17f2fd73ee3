"""python -m tools.scenes [--option ...]: trains the embedded models from scratch; resumes where it was stopped."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specbench.config.registry import ASSETS
from specbench.errors import UsageError, unknown
from tools.scenes import card
from tools.scenes.stages import BUDGETS, CONTINUOUS, STAGES, Stages


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = BUDGETS[given.budget]
    began = time.time()
    try:
        if given.budget == "gpu" and device.type == "cpu":
            raise UsageError("--budget gpu needs a CUDA device and none is visible; use --budget cpu")
        chosen = _chosen(given.only, given.until)
        possible = (*budget.recipes, *budget.measured)
        if absent := [stage for stage in chosen if stage not in possible]:
            known = ",".join(stage for stage in STAGES if stage in possible)
            raise UsageError(f"--budget {given.budget} has no recipe for {', '.join(absent)}: add --only, of {known}")
        stages = Stages(given.work, given.assets, budget, device, not given.no_distil)
        for stage in chosen:
            stages.make(stage)
    except UsageError as error:
        parser.error(str(error))
    reached = card.Card.read(given.card)
    origin = card.origin(device, given.budget, time.strftime("%Y-%m-%d", time.gmtime()))
    reached.add(stages.statistics, origin, [*STAGES, *card.DRAFTERS])
    given.card.parent.mkdir(parents=True, exist_ok=True)
    given.card.write_text(reached.render())
    for stage, statistics in stages.statistics.items():
        print(f"{stage:10s} " + "  ".join(f"{k} {v:.4g}" for k, v in statistics.items()))
    print(f"weights in {given.assets}, model card in {given.card}, {time.time() - began:.0f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tools.scenes", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--work", type=Path, default=".train", help="checkpoints, rendered scenes, loss curves (resumed from)"
    )
    parser.add_argument("--assets", type=Path, default=ASSETS, help="folder of the finished weights")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], metavar="STAGE", help="stop after this stage")
    parser.add_argument(
        "--only",
        metavar="STAGE,STAGE",
        help=f"these stages, and the stages they need; {','.join(CONTINUOUS)} are those of mar_scenes",
    )
    parser.add_argument(
        "--no-distil", action="store_true", help="the smaller MAR learns from the data alone, not from the target too"
    )
    parser.add_argument("--card", type=Path, default="results/embedded_models.md", help="file of the model card")
    parser.add_argument(
        "--budget",
        choices=tuple(BUDGETS),
        default="gpu" if torch.cuda.is_available() else "cpu",
        help="recipes and amounts",
    )
    return parser


def _chosen(only: str | None, until: str) -> list[str]:
    """The requested stages, in their order."""
    if not only:
        return list(STAGES[: STAGES.index(until) + 1])
    names = only.split(",")
    for name in names:
        if name not in STAGES:
            raise unknown("stage", name, STAGES)
    return [stage for stage in STAGES if stage in names]


if __name__ == "__main__":
    sys.exit(main())
