"""`specbench train` and `convert`: drafters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbench.cli.arguments import Argument, CommandLine, command
from specbench.config import command_line
from specbench.errors import UsageError


@command(
    "train",
    {"--dry-run": Argument("flag", "print examples, disk, steps, arithmetic and hours, and start nothing")},
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
    if line["--dry-run"]:
        print(_forecast(line.others))
        return 0
    from specbench.training import command

    return command.main(line.others)


#: Operations a second that a training is assumed to reach in print: 40 % of an H100's in bfloat16.
_RATE = 4e14


def _forecast(arguments: Sequence[str]) -> str:
    """What a training needs, from shapes alone."""
    import torch

    from specbench.bench.devices import DEVICES
    from specbench.config import registry
    from specbench.harness.pipeline import DTYPES
    from specbench.storage.files import format_size
    from specbench.tables.forecast import Planner, as_text
    from specbench.training.command import recipe_of
    from specbench.training.examples import bytes_each, held_out
    from specbench.training.recipes import plan

    todo = plan(arguments)
    cfg, kind, stored = todo.cfg, todo["drafter"], todo["features"] == "stored"
    n = todo["n"] if todo["images"] else registry.completed(cfg.plain()).n
    model = registry.find("model", cfg.model)(cfg.on_random_weights(), torch.device("meta"), DTYPES[cfg.dtype])
    with torch.device("meta"):
        network = model.untrained(kind, todo["heads"])
    target, layers = model.target, len(getattr(getattr(network, "cfg", None), "aux_hidden_layers", ()))
    without, each = (bytes_each(target, model.encode, "0", more) for more in (None, layers if stored else None))
    recipe = recipe_of(todo, n - held_out(n, todo["held_out"]))
    weights, trained = (sum(p.numel() for p in part.parameters()) for part in (target, network))
    operations = recipe.steps * recipe.batch * target.length * (6 * trained + (0 if stored else 2 * weights))
    disk = f"disk      {format_size(n * each)} in {todo.examples}"
    if stored:
        disk += f", {format_size(n * (each - without))} of them for hidden states, which features=live does not store"
    lines = [
        f"dry run of a training: {kind} for {cfg.model}, recipe {todo['recipe']}, into {todo.out}",
        f"examples  {n:,} of {target.length:,} tokens",
        disk,
        f"steps     {recipe.steps:,} of {recipe.batch} examples",
        f"compute   {operations:.2g} operations, {operations / _RATE / 3600:.3g} h at {_RATE:.0e} a second",
    ]
    if todo["source"] == "self":
        planner, batch = Planner(Path("results")), cfg.changed(batch=todo["decode_batch"])
        hours = {name: planner.hours(batch, (n, 0), name) for name in DEVICES}
        known = ", ".join(f"{name} {as_text(value)}" for name, value in hours.items() if value is not None)
        lines.append(f"images    the target draws {n:,}: {known or 'no step of it was measured'}")
    return "\n".join(lines)


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
