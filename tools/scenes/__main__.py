"""python -m tools.scenes [--option ...]: trains the models of an embedded world from scratch. An interrupted training
resumes."""

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
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stages_of, budgets = STAGES[args.world], BUDGETS[args.world]
    began = time.time()
    origin = card.origin(device, args.budget, time.strftime("%Y-%m-%d", time.gmtime()))  # of the code that is loaded
    try:
        if args.budget == "gpu" and device.type == "cpu":
            raise UsageError("--budget gpu needs a CUDA device, but no CUDA device is visible: use --budget cpu")
        if args.budget not in budgets:
            raise unknown(f"budget of {args.world}", args.budget, budgets)
        budget = budgets[args.budget]
        selected = _chosen(stages_of, args.only, args.until)
        possible = (*budget.recipes, *budget.measured)
        if missing := [stage for stage in selected if stage not in possible]:
            available = ",".join(stage for stage in stages_of if stage in possible)
            raise UsageError(
                f"--budget {args.budget} has no recipe for {', '.join(missing)}: add --only, of {available}"
            )
        of = worlds.world(args.world)
        stages = Stages(args.work, args.assets, budget, device, not args.no_distil, of, selected)
        for stage in selected:
            stages.make(stage)
    except UsageError as error:
        parser.error(str(error))
    model_card = card.Card.read(args.card)
    card_order = [card.named(world, stage) for world, every in STAGES.items() for stage in (*every, *card.DRAFTERS)]
    card_statistics = {card.named(args.world, stage): values for stage, values in stages.statistics.items()}
    model_card.add(card_statistics, origin, card_order)
    args.card.parent.mkdir(parents=True, exist_ok=True)
    args.card.write_text(model_card.render())
    for stage, statistics in stages.statistics.items():
        print(f"{stage:10s} " + "  ".join(f"{k} {v:.4g}" for k, v in statistics.items()))
    print(f"weights in {args.assets}, model card in {args.card}, {time.time() - began:.0f} s")
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
        help="train these stages, from the files of the others; stages without a file are trained, too."
        f" {','.join(CONTINUOUS)} belong to mar_scenes",
    )
    parser.add_argument(
        "--no-distil", action="store_true", help="train the smaller MAR on the data only, without the target"
    )
    parser.add_argument("--card", type=Path, default="results/embedded_models.md", help="file of the model card")
    parser.add_argument(
        "--budget",
        choices=("cpu", "gpu", "smoke"),
        default="gpu" if torch.cuda.is_available() else "cpu",
        help="the recipes, and the amount of data",
    )
    return parser


def _chosen(stages: Sequence[str], only: str | None, until: str | None) -> list[str]:
    """The requested stages, in the order of `stages`."""
    names = only.split(",") if only else [until or stages[-1]]
    for name in names:
        if name not in stages:
            raise unknown("stage", name, stages)
    if not only:
        return list(stages[: stages.index(names[0]) + 1])
    return [stage for stage in stages if stage in names]


if __name__ == "__main__":
    sys.exit(main())
