"""`specbench probe`: how concentrated a target's distributions are, and which earlier tokens it attends to."""

from __future__ import annotations

import json

from specbench.cli.arguments import CommandLine, Own, command
from specbench.config import command_line, configuration
from specbench.errors import UsageError

#: Parameters that affect a probe; the target draws alone, or with an exact rule and a drafter.
_ACCEPTED = frozenset(
    "method drafter drafter_weights window model weights size reduced device dtype data split caption prompts data_dir"
    " n seed temperature top_k top_p cfg_scale prompt_length instruction suffix negative".split()
)


@command(
    "probe",
    {
        "probe.strengths=": Own(
            "numbers",
            "with drafter=: strengths of the bands, as numbers with commas, or none",
            low=0,
            high=1000,
            also=("none",),
            default="0.15,0.25,0.45,0.8,1.2",
        ),
        "probe.offsets=": Own(
            "integer", "distances at which a token is hidden, 1 to this; 0: none", low=0, high=10_000, default="16"
        ),
        "out=FILE.csv": Own("path", "a file that the row is added to", written=True),
    },
    others=["specbench.cli.probe:_ACCEPTED"],
)
def main(line: CommandLine) -> int:
    """Draws images with the target alone and measures the distribution of each of their tokens: the mass of its most
    probable tokens, its entropy, and how far it moves where an earlier token is hidden from the position that gives it.
    Takes the parameters of specbench run that belong to the model, the prompts and the sampling. The last line is JSON.

    With a drafter of chains (drafter=eagle window=5) it decodes exactly instead, and replays the drafted chains under
    other rules: tokens per round of token-wise and of block verification by length; tokens per round and divergence of
    UniformRSD, Cool-SD and bands on the same nodes; and the decay of a band by depth.

      specbench probe n=16
      specbench probe n=32 drafter=eagle window=5
      specbench probe model=llamagen_xl data=coco2017 n=100 out=results/probe/mine.csv
    """
    given = command_line.read(line.others)
    for name, _, value in (argument.partition("=") for argument in given):
        if name not in _ACCEPTED:
            raise UsageError(f"a probe has no '{name}': it takes {', '.join(sorted(_ACCEPTED | set(main.own)))}")
        if name == "method" and value != "vanilla":
            raise UsageError("in a probe the target draws alone: leave method= out")
    replays = any(argument.startswith("drafter=") and argument != "drafter=none" for argument in given)
    if (unused := "probe.offsets" if replays else "probe.strengths") in line.given:
        raise UsageError(f"{unused}= is for a probe {'without' if replays else 'with'} drafter=: leave it out")
    from specbench.bench import rows

    file = rows.ROUNDS if replays else rows.PROBES
    out = line["out"]
    if out is not None:
        file.read(out)
    others = [argument for argument in given if argument != "method=vanilla"]
    cfg = configuration.compose([*others, "method=vanilla"])
    if replays:
        strengths = line["probe.strengths"]
        found = rows.rounds(cfg, [] if strengths == "none" else strengths)
    else:
        found = [rows.probe(cfg, line["probe.offsets"])]
    if out is not None:
        for one in found:
            file.append(out, one)
    print(rows.describe_rounds(found) if replays else rows.describe_probe(found[0]))
    print(json.dumps(found if replays else found[0]))
    return 0
