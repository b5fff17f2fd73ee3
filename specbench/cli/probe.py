"""`specbench probe`: how concentrated a target's distributions are, and which earlier tokens it attends to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.config import command_line, configuration, parameters
from specbench.errors import UsageError, integer, parse_arguments, split_own
from specbench.probe.rows import OFFSETS, ROUNDS, ROWS, rounds, row
from specbench.rows.summary import with_error
from specbench.storage.files import writable

_FURTHEST = 10_000
STRENGTHS = "0.15,0.25,0.45,0.8,1.2"
#: Columns of a replayed rule that are printed, with labels and decimals.
_SHOWN = (
    ("tokens_per_round", "tokens per round", 3),
    ("tokens_over_token", "over token-wise", 3),
    ("kl", "KL", 4),
    ("kl_over_uniform", "over UniformRSD's", 3),
)
#: The arguments of a probe's own, with their meanings.
ARGUMENTS = {
    "probe.strengths": f"with drafter=: strengths of the bands, as numbers with commas, or none (default: {STRENGTHS})",
    "probe.offsets": f"distances at which a token is hidden, 1 to this (default: {OFFSETS}; 0: none)",
    "out": "a .csv file that the row is added to",
}
#: Parameters that affect a probe; the target draws alone, or with an exact rule and a drafter.
_ACCEPTED = frozenset(
    "method drafter drafter_weights window model weights size reduced device dtype data split caption prompts data_dir"
    " n seed temperature top_k top_p cfg_scale prompt_length instruction suffix negative".split()
)

_HELP = """\
usage: specbench probe [name=value ...]

Draws images with the target alone and measures the distribution of each of their tokens: the mass of its most probable
tokens, its entropy, and how far it moves where an earlier token is hidden from the position that gives it. Takes the
parameters of specbench run that belong to the model, the prompts and the sampling. The last line is JSON.

With a drafter of chains (drafter=eagle window=5) it decodes exactly instead, and replays the drafted chains under other
rules: tokens per round of token-wise and of block verification by length; tokens per round and divergence of
UniformRSD, Cool-SD and bands on the same nodes; and the decay of a band by depth.

  specbench probe n=16
  specbench probe n=32 drafter=eagle window=5
  specbench probe model=llamagen_xl data=coco2017 n=100 out=results/probe/mine.csv

"""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status.

    Raises:
        UsageError: bad arguments, a model of continuous tokens, or a path that cannot be written to.
    """
    line = parse_arguments("probe", arguments)
    if line.help:
        print(_HELP + "\n".join(f"  {name + '=':<15} {meaning}" for name, meaning in ARGUMENTS.items()))
        return 0
    given = command_line.normalized(command_line.quote_paths(line.arguments, own=ARGUMENTS))
    own, rest = split_own(given, ARGUMENTS, "probe.")
    for argument in rest:
        if argument.partition("=")[0] not in _ACCEPTED:
            name = argument.partition("=")[0]
            raise UsageError(f"a probe has no '{name}': it takes {', '.join(sorted(_ACCEPTED | set(ARGUMENTS)))}")
    out = writable(own["out"]) if "out" in own else None
    replays = any(argument.startswith("drafter=") and argument != "drafter=none" for argument in rest)
    if (unused := "probe.offsets" if replays else "probe.strengths") in own:
        raise UsageError(f"{unused}= is for a probe {'without' if replays else 'with'} drafter=: leave it out")
    if out is not None:
        (ROUNDS if replays else ROWS).read(out)
    offsets = integer("probe.offsets", own.get("probe.offsets", str(OFFSETS)), 0, _FURTHEST)
    if any(argument.partition("=")[0] == "method" and argument != "method=vanilla" for argument in rest):
        raise UsageError("in a probe the target draws alone: leave method= out")
    arguments = [argument for argument in rest if argument != "method=vanilla"]
    cfg = configuration.compose([*arguments, "method=vanilla"])
    if replays:
        return _rounds(cfg, own.get("probe.strengths", STRENGTHS), out)
    found = row(cfg, offsets)
    if out is not None:
        ROWS.append(out, found)
    top, moved = json.loads(found["top_probabilities"]), json.loads(found["tv_by_distance"])
    print(f"{found['model']}, {found['images']} images: the most probable token has {top[0]:.3f} on average,")
    print(f"the ten most probable {top[min(9, len(top) - 1)]:.3f}; entropy {found['entropy']:.2f} nats")
    if moved:
        print("total variation by distance: " + ", ".join(f"{i}: {tv:.3f}" for i, tv in enumerate(moved, 1)))
    print(json.dumps(found))
    return 0


def _rounds(cfg: Mapping[str, Any], strengths: str, out: Path | None) -> int:
    try:
        strength = parameters.declarations("rule", "band")["strength"]
        numbers = [strength.checked("strength", float(x)) for x in strengths.split(",") if strengths != "none"]
    except ValueError:
        raise UsageError(
            f"probe.strengths must be numbers with commas, such as {STRENGTHS}, or none (got {strengths})"
        ) from None
    found = rounds(cfg, numbers)
    print(f"{cfg['model']}, {cfg['drafter']}, chains of {found[0]['window']}, {found[0]['images']} images")
    for one in found:
        if out is not None:
            ROUNDS.append(out, one)
        cells = [
            f"{label} {with_error(one[name], one[f'{name}_stderr'], digits)}"
            for name, label, digits in _SHOWN
            if one[name] is not None and not (name == "kl" and one["rule"] == "exact")
        ]
        decay = [f"decay={one['decay']}"] if one["decay"] else []
        print(f"{one['rule']} {one['parameters']:27}", ", ".join([*cells, *decay]))
    print(json.dumps(found))
    return 0
