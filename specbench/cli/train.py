"""`specbench train`: a drafter for a target."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.cli.arguments import CommandLine, command
from specbench.errors import UsageError


def main(arguments: Sequence[str]) -> int:
    """`specbench train drafter=... [name=value ...]`."""
    if arguments[:1] == ["scenes"]:
        raise UsageError("`make train-scenes` in a clone trains the embedded models; this command trains drafters")
    return drafter(arguments or ["--help"])


@command(
    "train",
    {},
    others=["specbench.training.recipes:TABLE", "specbench.config.parameters:table"],
    manual="specbench.cli.manual:training",
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
    """
    from specbench.training import command

    return command.main(line.others)
