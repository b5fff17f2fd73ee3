"""`specbench convert`: an EAGLE drafter from LANTERN's layout to this project's own format, or back."""

from __future__ import annotations

from specbench.cli.arguments import CommandLine, Own, command
from specbench.config import command_line, configuration


@command(
    "convert",
    {
        "drafter_weights=DIR": Own(
            "path",
            "folder of the drafter: LANTERN's files, config.json among them, or specbench.safetensors",
            required=True,
        ),
        "model=NAME": Own("string", "the target that it was trained for", required=True),
        "out=DIR": Own(
            "path",
            "folder of the other layout: config.json and pytorch_model.bin, or specbench.safetensors",
            required=True,
        ),
        "reduced=": Own("flag", "true for the reduced model of that name", default="false"),
    },
)
def main(line: CommandLine) -> int:
    """Writes an EAGLE drafter that is in LANTERN's layout in this project's own format, and one that is in this format
    in LANTERN's layout, which its code reads. (Runs read both.)

      specbench convert drafter_weights=drafters/llamagen_xl/eagle model=llamagen_xl out=for_lantern
    """
    from specbench.models.loading import drafters

    arguments = [f"model={line['model']}", f"drafter_weights={command_line.quoted(str(line['drafter_weights']))}"]
    reduced = ["reduced=true"] if line["reduced"] else []
    out = line["out"]
    fixed = ["weights=random", "method=eagle_chain", "device=cpu"]
    files = drafters.converted(configuration.compose([*arguments, *reduced, *fixed]), out)
    if len(files) == 1:
        print(f"{files[0]}: for drafter_weights={out}")
    else:
        print(f"{out}: {' and '.join(drafters.LANTERN_FILES)}, as LANTERN's code reads them")
    return 0
