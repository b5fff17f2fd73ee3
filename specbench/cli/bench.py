"""`specbench bench`: milliseconds per step, part by part, next to the memory floor of this device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from specbench.bench.rows import COLUMNS, ROWS, describe, row
from specbench.config import command_line, configuration
from specbench.errors import UsageError, integer, parse_arguments, split_own
from specbench.storage.files import writable

#: The arguments of benchmarks only, with their meanings.
ARGUMENTS = {
    "bench.steps": "steps to time (default: 30)",
    "bench.context": "positions before the timed steps, including the prompt (default: the middle of the image)",
    "bench.nodes": "numbers of nodes for which the target's pass is timed alone (default: 1,6,16,32,64)",
    "bench.images": "whole images to decode, by the method and by vanilla AR; 0: none (default: 1)",
    "forced_accept": "mean accepted length to which drafts are forced, whatever the rule decides, so that a published\n"
    "one can be timed without weights",
    "bench.bandwidth": "with --plan: the device's, in GB/s, or the name of a known one (default: all known ones)",
    "out": "a .csv file for the rows; the figure is written next to it",
}
_MOST = 10**6
#: Parameters of a run that a benchmark does not use.
_UNUSED = frozenset(
    "n seed shard shards baseline warmup data split prompts metrics protocol reference metrics_dir data_dir"
    " workers ray_address".split()
)

_HELP = """\
usage: specbench bench [-m] [--plan] [name=value ...]

Times decoding steps of any model, method and batch size, with the real loop: drafting, the target's pass, verification,
commit and rest, at one position of the image; each next to its floor, the bytes that it must read over the measured
bandwidth of this device. Time does not depend on weights: weights=random needs none. Takes the parameters of
specbench run that belong to model, method, drafter, rule, batch and device. The last line is JSON.

  specbench bench
  specbench bench model=lumina_mgpt weights=random method=sjd_pac forced_accept=4.51 bench.context=2400
  specbench bench -m method=cool_sd,sjd batch=1,8 out=results/bench/mine.csv

  specbench bench --plan model=emu3 method=sjd engine=triton bench.bandwidth=h200

  -m, --multirun  a grid: several values of a parameter, a job for each combination
  --plan          measure nothing: what weights, caches and peak memory take, the launches and the memory floor of a
                  step, and which devices it fits, from shapes alone; fetches nothing and needs no GPU
"""


def main(arguments: Sequence[str]) -> int:
    """Returns 0 when everything was measured.

    Raises:
        UsageError: bad arguments, or a path that cannot be written.
    """
    line = parse_arguments("bench", arguments, ["-m", "--multirun"], ["--plan"])
    if line.help:
        print(_help())
        return 0
    own, given = _sorted_out(
        command_line.normalized(command_line.quote_paths(line.arguments, line.multirun, ARGUMENTS))
    )
    plan = _plan(own)
    if line.plan:
        return _print_plans(own, plan, configuration.grid(given, line.multirun))
    if "bench.bandwidth" in own:
        raise UsageError("bench.bandwidth= goes with --plan; a benchmark measures the bandwidth")
    out = writable(own["out"]) if "out" in own else None
    if out is not None:
        ROWS.read(out)  # a file of something else is refused before anything is measured
    jobs = [job.cfg for job in configuration.grid(given, line.multirun)]
    from specbench.bench import measure, roofline
    from specbench.harness.method import check

    for cfg in jobs:
        check(cfg)
    rows = []
    for cfg in tqdm(jobs, desc="bench", unit="job", disable=len(jobs) == 1):
        rows.append(row(cfg, measure.measure(cfg, plan), plan.forced))
        print(describe(rows[-1]))
        if out is not None:
            ROWS.append(out, rows[-1])
    if out is not None:
        drawn = roofline.draw(ROWS.read(out), out.with_suffix(""))
        print(f"wrote {', '.join(str(path) for path in (out, *drawn))}")
    print(json.dumps(rows[-1] if len(rows) == 1 else rows))
    return 0


def _print_plans(own: Mapping[str, str], bench: Any, jobs: Sequence[configuration.Job]) -> int:
    """`--plan`: nothing is measured or written."""
    from specbench.bench import plan
    from specbench.harness.method import check

    chosen = plan.devices(own.get("bench.bandwidth"))
    for job in jobs:
        check(job.cfg)
    plans = []
    for job in tqdm(jobs, desc="plan", unit="job", disable=len(jobs) == 1):
        planned = plan.plan(job.cfg, bench.context)
        plans.append({**planned, "devices": plan.on_devices(planned, chosen)})
        print(plan.describe(plans[-1]))
    print(json.dumps(plans[0] if len(plans) == 1 else plans))
    return 0


def _help() -> str:
    arguments = [f"  {name + '=':<15} " + line.replace("\n", "\n" + " " * 18) for name, line in ARGUMENTS.items()]
    columns = [f"  {name:<20} {line}" for name, line in COLUMNS.items()]
    return _HELP + "\n".join([*arguments, "", "columns:", *columns])


def _sorted_out(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    own, rest = split_own(arguments, ARGUMENTS, "bench.")
    for argument in rest:
        key = argument.partition("=")[0]
        if key in _UNUSED or key.startswith(("hydra.", "hydra/")) or key == "experiment":
            raise UsageError(f"'{key}' belongs to specbench run; a benchmark times steps and has no such parameter")
    return own, rest


def _plan(own: Mapping[str, str]) -> Any:
    from specbench.bench.measure import BenchPlan

    chosen: dict[str, Any] = {}
    for name, least in (("steps", 1), ("context", 1), ("images", 0)):
        if text := own.get(f"bench.{name}"):
            chosen[name] = integer(f"bench.{name}", text, least, _MOST)
    if text := own.get("bench.nodes"):
        chosen["nodes"] = tuple(
            sorted({integer("bench.nodes", part, 1, _MOST) for part in text.strip("[]").split(",")})
        )
    if text := own.get("forced_accept"):
        try:
            chosen["forced"] = float(text)
        except ValueError:
            chosen["forced"] = 0.0
        if not 1 <= chosen["forced"] <= 1e6:
            raise UsageError(f"forced_accept must be a number of at least 1, tokens a step (got {text})")
    return BenchPlan(**chosen)
