"""`specbench audit`: is the method lossless? Measured on models whose distribution is known exactly, with the bound;
continuous tokens on models that can be sampled without limit."""

from __future__ import annotations

from specbench.cli.arguments import CommandLine, Own, command


@command(
    "audit",
    {
        "--all": Own("flag", "every preset; a parameter reaches those that have it and can take the value"),
        "--variants": Own("flag", "the same of every variant of the presets that have some"),
    },
    others=["specbench.audit.plan:ARGUMENTS", "specbench.config.parameters:table"],
    tables={"arguments, as name=value:": "specbench.audit.plan:ARGUMENTS", "columns:": "specbench.audit.audit:COLUMNS"},
)
def main(line: CommandLine) -> int:
    """Decodes many sequences of small models of known distribution, with the method's real loop, rule and drafter, and
    tests whether the sequences have the target's distribution. Takes the parameters of specbench run that belong to the
    method, its drafter, its rule and the sampling (temperature, top_k, top_p). Drafts have several sizes below the
    length of a sequence, unless you give window=, tree=, nodes=, depth= or width=. The model's draft tables replace a
    drafter that needs a network, in the shape of its drafts; with window= they draft a chain, with tree= a tree,
    whatever the preset's shape. The models of real classes have random weights, caches, guidance (cfg_scale) and an
    image grammar, and drafters with random networks. For continuous tokens (method=cspd) the models are small diffusion
    heads that can be sampled without limit: the sequences are compared with as many of the target's own, and the
    sampling is temperature and final_noise. A method is refuted where p_value is below 1e-05; below 0.001 ten times as
    many sequences decide. A method with a part that was never at work is undecided. The exit code is 0 whatever the
    verdicts.

      specbench audit method=sjd window=3 temperature=0.7
      specbench audit method=cool_sd delta=1.1 window=3 audit.tables=mine.npz out=mine.csv
      specbench audit method=cspd criterion=paper gamma=4 audit.model=d1t5
      specbench audit --all out=all.csv
    """
    from specbench.audit import plan
    from specbench.audit.printing import table

    wanted = plan.planned(line.others, line["--all"], line["--variants"])
    print(table(list(plan.measured(wanted))))
    if wanted.out is not None:
        print(f"wrote {wanted.out}")
    return 0
