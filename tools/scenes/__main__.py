"""python -m tools.scenes [--option ...]: trains the models of an embedded world from scratch; resumes where it was
stopped."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specbench.config.registry import ASSETS
from specbench.data import worlds
from specbench.errors import UsageError, unknown
from tools.scenes import card
from tools.scenes.stages import BUDGETS, CONTINUOUS, STAGES, Stages


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stages_of, budgets = STAGES[given.world], BUDGETS[given.world]
    began = time.time()
    try:
        if given.budget == "gpu" and device.type == "cpu":
            raise UsageError("--budget gpu needs a CUDA device and none is visible; use --budget cpu")
        if given.budget not in budgets:
            raise unknown(f"budget of {given.world}", given.budget, budgets)
        budget = budgets[given.budget]
        chosen = _chosen(stages_of, given.only, given.until)
        possible = (*budget.recipes, *budget.measured)
        if absent := [stage for stage in chosen if stage not in possible]:
            known = ",".join(stage for stage in stages_of if stage in possible)
            raise UsageError(f"--budget {given.budget} has no recipe for {', '.join(absent)}: add --only, of {known}")
        stages = Stages(given.work, given.assets, budget, device, not given.no_distil, worlds.world(given.world))
        for stage in chosen:
            stages.make(stage)
    except UsageError as error:
        parser.error(str(error))
    reached = card.Card.read(given.card)
    origin = card.origin(device, given.budget, time.strftime("%Y-%m-%d", time.gmtime()))
    order = [card.named(world, stage) for world, every in STAGES.items() for stage in (*every, *card.DRAFTERS)]
    named = {card.named(given.world, stage): values for stage, values in stages.statistics.items()}
    reached.add(named, origin, order)
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
    parser.add_argument("--world", choices=tuple(STAGES), default="scenes", help="the world whose models are trained")
    parser.add_argument("--until", metavar="STAGE", help="stop after this stage")
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
        choices=("cpu", "gpu", "smoke"),
        default="gpu" if torch.cuda.is_available() else "cpu",
        help="recipes and amounts",
    )
    return parser


def _chosen(stages: Sequence[str], only: str | None, until: str | None) -> list[str]:
    """The requested ones of a world's stages, in their order."""
    names = only.split(",") if only else [until or stages[-1]]
    for name in names:
        if name not in stages:
            raise unknown("stage", name, stages)
    if not only:
        return list(stages[: stages.index(names[0]) + 1])
    return [stage for stage in stages if stage in names]


if __name__ == "__main__":
    sys.exit(main())
