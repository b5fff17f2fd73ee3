"""`specbench train`: a drafter for a target, or the embedded models."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.cli.arguments import Arguments, CommandLine, Own, command


def main(arguments: Sequence[str]) -> int:
    """`specbench train drafter=... [name=value ...]` and `specbench train scenes [--option ...]`."""
    return scenes(arguments[1:]) if arguments[:1] == ["scenes"] else drafter(arguments or ["--help"])


@command(
    "train",
    {},
    others=["specbench.training.recipes:TABLE", "specbench.config.parameters:table"],
    tables={"": "specbench.cli.manual:training"},
)
def drafter(line: CommandLine) -> int:
    """Trains a drafter for a target: makes its examples, trains, and writes weights with their card. After an
    interruption, the same command resumes. Several GPUs: accelerate launch --module specbench.cli train drafter=...
    Recipes: conf/recipes.yaml; further arguments are a run's: model, weights, data, seed, temperature, ...

      specbench train drafter=eagle                                                   the embedded target's, in minutes
      specbench train drafter=eagle model=llamagen_xl images=laion_coco               LANTERN's recipe
      specbench train drafter=eagle model=lumina_mgpt                                 Cool-SD's: images by the target
      specbench train drafter=eagle recipe=scenes_guided start=embedded               labels under guidance
      specbench train drafter=cspd model=mar_scenes objective=path_kl                 of continuous tokens
      specbench run method=eagle1 drafter_weights=drafters/llamagen_scenes/eagle      use the result
      specbench train scenes --help                                                   the embedded models, from scratch
    """
    from specbench.training import command

    return command.main(line.others)


def _of_scenes() -> Arguments:
    import torch

    from specbench.config.registry import ASSETS
    from specbench.training.embedded import BUDGETS, CONTINUOUS, STAGES

    budget = "gpu" if torch.cuda.is_available() else "cpu"
    return {
        "--work DIR": Own("path", "checkpoints, rendered scenes, loss curves (resumed from)", default=".train"),
        "--assets DIR": Own("path", "folder of the finished weights", default=str(ASSETS)),
        "--until STAGE": Own("string", "stop after this stage", choices=STAGES, default=STAGES[-1]),
        "--only STAGE,STAGE": Own(
            "string", f"these stages, and the stages they need; {','.join(CONTINUOUS)} are those of mar_scenes"
        ),
        "--no-distil": Own("flag", "the smaller MAR learns from the data alone, not from the target too"),
        "--card FILE": Own("path", "file of the model card", default="results/embedded_models.md"),
        "--budget NAME": Own("string", "recipes and amounts", choices=tuple(BUDGETS), default=budget),
    }


@command("train scenes", _of_scenes)
def scenes(line: CommandLine) -> int:
    """Trains the embedded models from scratch; resumes where it was stopped."""
    from specbench.training import embedded

    names = ("work", "assets", "until", "only", "no-distil", "card", "budget")
    return embedded.main(*(line[f"--{name}"] for name in names))
