"""`specbench audit`: is the method lossless? Measured on models whose distribution is known exactly, with the bound;
continuous tokens on models that can be sampled without limit."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.audit import audit, plan
from specbench.audit.printing import table
from specbench.errors import parse_arguments


def main(arguments: Sequence[str]) -> int:
    """`specbench audit [--all] [name=value ...]`. Returns the exit status: 0 whatever the verdicts.

    Raises:
        UsageError: bad arguments, a bad file of tables, a path that cannot be written to.
    """
    parsed = parse_arguments("audit", arguments, ["--all"], ["--variants"])
    if parsed.help:
        print(_help())
        return 0
    wanted = plan.planned(parsed.arguments, parsed.all, parsed.variants)
    rows = list(plan.measured(wanted))
    print(table(rows))
    if wanted.out is not None:
        print(f"wrote {wanted.out}")
    return 0


_HELP = """\
usage: specbench audit [--all] [--variants] [name=value ...]

Decodes many sequences of small models of known distribution, with the method's real loop, rule and drafter, and tests
whether the sequences have the target's distribution. Takes the parameters of specbench run that belong to the method,
its drafter, its rule and the sampling (temperature, top_k, top_p). Drafts have several sizes below the length of a
sequence, unless you give window=, tree=, nodes=, depth= or width=. The model's draft tables replace a drafter that
needs a network, in the shape of its drafts; with window= they draft a chain, with tree= a tree, whatever the preset's
shape. The models of real classes have random weights, caches, guidance (cfg_scale) and an image grammar, and drafters
with random networks. For continuous tokens (method=cspd) the models are small diffusion heads that can be sampled
without limit: the sequences are compared with as many of the target's own, and the sampling is temperature and
final_noise.

  specbench audit method=sjd window=3 temperature=0.7
  specbench audit method=cool_sd delta=1.1 window=3 audit.tables=mine.npz out=mine.csv
  specbench audit method=cspd criterion=paper gamma=4 audit.model=d1t5
  specbench audit --all out=all.csv

  --all          every preset; a parameter reaches those that have it and can take the value
  --variants     the same of every variant of the presets that have some
"""


def _help() -> str:
    arguments = [
        f"  {name + '=':<14} " + meaning.replace("\n", "\n" + " " * 17) for name, meaning in plan.ARGUMENTS.items()
    ]
    columns = [f"  {name:<24} " + meaning.replace("\n", "\n" + " " * 27) for name, meaning in audit.COLUMNS.items()]
    verdict = f"A method is refuted where p_value is below {audit.LEVEL:g}."
    return _HELP + "\n".join([*arguments, "", "columns:", *columns, "", verdict])
