"""`specbench train` and `convert`: drafters."""

from __future__ import annotations

from specbench.cli.arguments import Argument, CommandLine, command
from specbench.config import command_line
from specbench.errors import UsageError


@command(
    "train",
    {},
    others=["specbench.training.recipes:TABLE", "specbench.config.parameters:table"],
    manual="specbench.cli.manual:training",
)
def train(line: CommandLine) -> int:
    """Trains a drafter for a target: makes its examples, trains, and writes weights with their card. After an
    interruption, the same command resumes. Several GPUs: accelerate launch --module specbench.cli train drafter=...
    Recipes: conf/recipes.yaml. It also takes a run's arguments: model, weights, data, seed, temperature, ...

      specbench train drafter=eagle                                                   the embedded target's, in minutes
      specbench train drafter=eagle model=llamagen_xl images=laion_coco               LANTERN's recipe
      specbench train drafter=eagle model=lumina_mgpt                                 Cool-SD's: images by the target
      specbench train drafter=eagle recipe=scenes_guided start=embedded               labels under guidance
      specbench run method=eagle1 drafter_weights=drafters/llamagen_scenes/eagle      use the result
    """
    if not line.others:
        print(train.help(line))
        return 0
    if line.others[0] == "scenes":
        raise UsageError("`make train-scenes` in a clone trains the embedded models; this command trains drafters")
    from specbench.training import command

    return command.main(line.others)


@command(
    "convert",
    {
        "drafter_weights=DIR": Argument(
            "path",
            "folder of the drafter: LANTERN's files, including config.json, or specbench.safetensors",
            required=True,
        ),
        "model=NAME": Argument("string", "the target that it was trained for", required=True),
        "out=DIR": Argument(
            "path",
            "folder of the other layout: config.json and pytorch_model.bin, or specbench.safetensors",
            required=True,
        ),
        "reduced=": Argument("flag", "true for the reduced model of that name", default="false"),
    },
)
def convert(line: CommandLine) -> int:
    """Converts an EAGLE drafter: from LANTERN's layout into this project's own format, or from this format into
    LANTERN's layout, which its code reads. (Runs read both.)

      specbench convert drafter_weights=drafters/llamagen_xl/eagle model=llamagen_xl out=for_lantern
    """
    from specbench.config import configuration
    from specbench.training import conversion

    arguments = [f"model={line['model']}", f"drafter_weights={command_line.quoted(str(line['drafter_weights']))}"]
    reduced = ["reduced=true"] if line["reduced"] else []
    out = line["out"]
    fixed = ["weights=random", "method=eagle_chain", "device=cpu"]
    files = conversion.converted(configuration.compose([*arguments, *reduced, *fixed]), out)
    if len(files) == 1:
        print(f"{files[0]}: for drafter_weights={out}")
    else:
        print(f"{out}: {' and '.join(conversion.LANTERN_FILES)}, for LANTERN's code")
    return 0
