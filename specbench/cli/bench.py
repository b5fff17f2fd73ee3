"""`specbench bench`: milliseconds per step, part by part, next to the memory floor of this device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from specbench.cli.arguments import CommandLine, Own, command
from specbench.cli.exits import FAILED, fail
from specbench.config import command_line, configuration, parameters
from specbench.config.run_config import RunConfig
from specbench.errors import RunError, UsageError

_MOST = 10**6
#: Parameters of a run that a benchmark of steps does not take.
_UNUSED = frozenset(
    "n seed shard shards baseline warmup data split prompts metrics protocol reference metrics_dir data_dir"
    " workers ray_address experiment".split()
)


def names() -> list[str]:
    """The parameters of a run that a benchmark takes."""
    return [name for name in parameters.table() if name not in _UNUSED]


@command(
    "bench",
    {
        "-m, --multirun": Own("flag", "a grid: several values of a parameter, a job for each combination"),
        "--plan": Own(
            "flag",
            "measure nothing: what weights, caches and peak memory take, the launches and the memory floor of a step,"
            " and which devices it fits, from shapes alone; fetches nothing and needs no GPU",
        ),
        "bench.steps=": Own("integer", "steps to time", low=1, high=_MOST, default="30"),
        "bench.context=": Own(
            "integer",
            "positions before the timed steps, including the prompt (default: the middle of the image)",
            low=1,
            high=_MOST,
        ),
        "bench.nodes=": Own(
            "integers",
            "numbers of nodes for which the target's pass is timed alone",
            low=1,
            high=_MOST,
            default="1,6,16,32,64",
        ),
        "bench.images=": Own(
            "integer",
            "whole images to decode, by the method and by vanilla AR; 0: none",
            low=0,
            high=_MOST,
            default="1",
        ),
        "forced_accept=": Own(
            "number",
            "mean accepted length, tokens a step, to which drafts are forced, whatever the rule decides, so that a"
            " published one can be timed without weights",
            low=1,
            high=1e6,
        ),
        "bench.bandwidth=": Own(
            "string", "with --plan: the device's, in GB/s, or the name of a known one (default: all known ones)"
        ),
        "out=FILE.csv": Own("path", "a file for the rows; the figure is written next to it", written=True),
    },
    others=["specbench.cli.bench:names"],
    tables={"columns:": "specbench.bench.rows:COLUMNS"},
)
def main(line: CommandLine) -> int:
    """Times decoding steps of any model, method and batch size, with the real loop: drafting, the target's pass,
    verification, commit and rest, at one position of the image; each next to its floor, the bytes that it must read
    over the measured bandwidth of this device. Time does not depend on weights: weights=random needs none. Takes the
    parameters of specbench run that belong to model, method, drafter, rule, batch and device. The last line is JSON.
    The target's pass over one token is measured twice. Where the two differ by more than their noise they are measured
    again, three times at most; where they never agree there is no row, and the exit code is 1.

      specbench bench
      specbench bench model=lumina_mgpt weights=random method=sjd_pac forced_accept=4.51 bench.context=2400
      specbench bench -m method=cool_sd,sjd batch=1,8 out=results/bench/mine.csv

      specbench bench --plan model=emu3 method=sjd engine=triton bench.bandwidth=h200
    """
    given = command_line.read(line.others, line["--multirun"])
    for key in (argument.partition("=")[0] for argument in given):
        if key in _UNUSED or command_line.is_hydras(key):
            raise UsageError(f"'{key}' belongs to specbench run; a benchmark times steps and has no such parameter")
    if line["bench.bandwidth"] and not line["--plan"]:
        raise UsageError("bench.bandwidth= goes with --plan; a benchmark measures the bandwidth")
    found, code = (_planned(line, given), 0) if line["--plan"] else _measured(line, given)
    print(json.dumps(found[0] if len(found) == 1 else found))
    return code


def _jobs(line: CommandLine, given: Sequence[str], title: str) -> Iterator[RunConfig]:
    """The configurations of the jobs, all of them checked before the first one."""
    from specbench.harness.method import check

    jobs = [job.cfg for job in configuration.grid(given, line["--multirun"])]
    for cfg in jobs:
        check(cfg)
    yield from tqdm(jobs, desc=title, unit="job", disable=len(jobs) == 1)


def _measured(line: CommandLine, given: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """A row of each job, printed and added to the file, and the exit code: a job that other work disturbed has no row,
    and stops no other one."""
    from specbench.bench import floor, measure
    from specbench.bench.rows import ROWS, describe, row

    out, rows, code = line["out"], [], 0
    if out is not None:
        ROWS.read(out)  # a file of something else is refused before anything is measured
    chosen = {name: line[f"bench.{name}"] for name in ("steps", "context", "nodes", "images")}
    plan = measure.BenchPlan(forced=line["forced_accept"], **chosen)
    for cfg in _jobs(line, given, "bench"):
        try:
            rows.append(row(cfg, measure.measure(cfg, plan), plan.forced))
        except RunError as error:
            with tqdm.external_write_mode():
                code = fail(f"{cfg['method']} on {cfg['model']}, batch {cfg['batch']}: {error}", FAILED)
            continue
        print(describe(rows[-1]))
        if out is not None:
            ROWS.append(out, rows[-1])
    if out is not None and rows:
        drawn = floor.draw_roofline(ROWS.read(out), out.with_suffix(""))
        print(f"wrote {', '.join(str(path) for path in (out, *drawn))}")
    return rows, code


def _planned(line: CommandLine, given: Sequence[str]) -> list[dict[str, Any]]:
    """`--plan`: nothing is measured or written."""
    from specbench.bench import devices, plan

    chosen, plans = devices.of_bandwidth(line["bench.bandwidth"]), []
    for cfg in _jobs(line, given, "plan"):
        planned = plan.plan(cfg, line["bench.context"])
        plans.append({**planned, "devices": plan.on_devices(planned, chosen)})
        print(plan.describe(plans[-1]))
    return plans
