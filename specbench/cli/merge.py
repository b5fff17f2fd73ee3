"""`specbench merge`: one run of the shards of a run."""

from __future__ import annotations

from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.cli.exits import unmeasured
from specbench.errors import UsageError
from specbench.storage import home


@command(
    "merge",
    {
        "DIR": Words("the folders of all shards of one run", 1),
        "out=DIR": Own("path", "a new folder for the whole run", required=True),
        "metrics=NAME|[..]": Own("text", "further metrics of the whole run"),
    },
)
def main(line: CommandLine) -> int:
    """Makes one run of the finished runs with shard=1/N to shard=N/N: its records and images are theirs, and its images
    are scored as a whole. A merge that was stopped continues with the same command.

      specbench run method=sjd n=64 shard=1/2 out=part1
      specbench run method=sjd n=64 shard=2/2 out=part2
      specbench merge part1 part2 out=whole
    """
    from specbench.config import configuration
    from specbench.harness import run
    from specbench.harness.planned import PlannedRun

    metrics = [f"metrics={line['metrics']}"] if line["metrics"] else []
    given = configuration.values(metrics, ["metrics"])
    folders = [home.expanded(word) for word in line.words]
    if absent := [folder for folder in folders if not (folder / "config.yaml").is_file()]:
        raise UsageError(f"{absent[0]} holds no run; name the folders of all shards")
    outcome = run.merge(folders, line["out"], given)
    print(outcome.report())
    return unmeasured([PlannedRun(outcome.folder.path, outcome.config, asked=bool(metrics))])
