"""`specbench compare A B`: two runs, image by image, over the prompts that both decoded."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.compare import wording
from specbench.compare.comparison import compare
from specbench.compare.passes import read
from specbench.errors import UsageError, parse_arguments
from specbench.storage.files import writable, write_atomically

_HELP = """\
usage: specbench compare A B [out=FILE.csv]

Compares two runs over the prompts that both decoded, image by image: the difference of B from A, its 95 % interval, the
paired t-test (Cool-SD, C.4), the Wilcoxon signed-rank test, Holm's adjustment for several tests, Cohen's d_z, and a
sentence for each statistic. A pair has the same index, prompt and id; an image without a partner is left out and named.
Several images of a prompt count once, by their mean. The last lines say how many pairs tell A from B.
Metrics' scores per image are compared where both runs keep those of the same scorer; a Fréchet distance by the
influence of each pair on it. For a feature extractor, the energy distance between A's and B's features tests whether
the images have one distribution; give runs of different seeds for it, since images that share random numbers are alike.

  specbench compare runs/eagle runs/cool_sd
  specbench compare runs/cool_sd/baseline runs/cool_sd      # with the vanilla images of the same run
  specbench compare first second out=compared.csv

  A, B             the folder of a run; followed by /baseline, the vanilla images that it decoded for its speed-up
  out=             a .csv file for the statistics

columns of out=:
"""


def main(arguments: Sequence[str]) -> int:
    """`specbench compare A B [out=FILE.csv]`. Returns the exit status.

    Raises UsageError for bad arguments, folders that are not runs, damaged records and too few pairs.
    """
    line = parse_arguments("compare", arguments)
    if line.help:
        print(_HELP + "\n".join(f"  {k:<16} " + v.replace("\n", "\n" + " " * 19) for k, v in wording.COLUMNS.items()))
        return 0
    outs = [argument.removeprefix("out=") for argument in line.arguments if argument.startswith("out=")]
    runs = [
        argument for argument in line.arguments if not argument.startswith("out=")
    ]  # a folder may be called delta=1.1
    if len(runs) != 2 or len(outs) > 1 or "" in outs:
        raise UsageError("compare takes two runs and at most one out=FILE.csv (see specbench compare --help)")
    out = writable(outs[0]) if outs else None
    found = compare(read(runs[0]), read(runs[1]))
    print(wording.report(found))
    if out is not None:
        write_atomically(out, wording.to_csv(found).encode())
        print(f"wrote {out}")
    return 0
