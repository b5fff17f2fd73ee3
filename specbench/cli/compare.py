"""`specbench compare A B`: two runs, image by image, over the prompts that both decoded."""

from __future__ import annotations

from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.storage.files import write_atomically


@command(
    "compare",
    {
        "A B": Words("the folder of a run; followed by /baseline, the vanilla images decoded for its speed-up", 2, 2),
        "out=FILE.csv": Own("path", "a file for the statistics", written=True),
    },
    tables={"columns of out=:": "specbench.compare.wording:COLUMNS"},
)
def main(line: CommandLine) -> int:
    """Compares two runs over the prompts that both decoded, image by image: the difference of B from A, its 95 %
    interval, the paired t-test (Cool-SD, C.4), the Wilcoxon signed-rank test, Holm's adjustment for several tests,
    Cohen's d_z, and a sentence for each statistic. A pair has the same index, prompt and id; an image without a partner
    is left out and named. Several images of a prompt count once, by their mean. The last lines say how many pairs tell
    A from B.
    Metrics' scores per image are compared where both runs keep those of the same scorer; a Fréchet distance by the
    influence of each pair on it. For a feature extractor, the energy distance between A's and B's features tests
    whether the images have one distribution; give runs of different seeds for it, since images that share random
    numbers are alike.

      specbench compare runs/eagle runs/cool_sd
      specbench compare runs/cool_sd/baseline runs/cool_sd      # with the vanilla images of the same run
      specbench compare first second out=compared.csv
    """
    from specbench.compare import comparison, passes, wording

    found = comparison.compare(*map(passes.read, line.words))
    print(wording.report(found))
    if out := line["out"]:
        write_atomically(out, wording.to_csv(found).encode())
        print(f"wrote {out}")
    return 0
