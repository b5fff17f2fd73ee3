"""The sub-commands."""

from __future__ import annotations

#: Sub-command -> what it is for, in one line. Its arguments are declared in its module.
COMMANDS = {
    "run": "decode prompts, score the images, time them against vanilla AR, write one row",
    "status": "how far the runs in a folder are: done, left, speed, time left, failures",
    "resume": "go on with the run in a folder",
    "merge": "one run of the shards of a run (shard=1/8 and so on)",
    "list": "models, methods, drafters, rules, data, metrics, and whether their weights are here",
    "fetch": "weights of the real models and metrics, and data: sizes and licences first",
    "evaluate": "score existing images from any source",
    "compare": "two runs, image by image: paired tests, intervals, effect sizes",
    "breakdown": "acceptance, steps and speed-up by category of prompt, caption length, position",
    "reference": "statistics of real images, for FID and the like",
    "audit": "is a method lossless? measured on models whose distribution is known",
    "bench": "milliseconds per step, part by part, next to the memory floor",
    "probe": "a target's confidence in its tokens, and the earlier tokens it attends to",
    "suite": "several methods, models, prompts and seeds, as one YAML names them: one table",
    "tables": "the papers' tables, measured next to published",
    "show": "rows of runs on the screen: filter, sort, group; seeds pooled",
    "collect": "rows from folders, CSV, Parquet and stores in one file",
    "report": "one page of results to read and share: leaderboard, plots, images, audits",
    "push": "rows of runs, or a drafter, into a repository of a hub, with a card",
    "train": "a drafter for a target",
    "convert": "an EAGLE drafter to and from LANTERN's layout",
}


def module(name: str) -> str:
    """The module of a sub-command, whose `main` takes the arguments and returns the exit code."""
    return f"specbench.cli.{'choices' if name == 'list' else name}"
