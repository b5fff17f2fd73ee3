"""`specbench audit`, `bench` and `probe`: measurements of a method or a target outside of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specbench.cli.arguments import Argument, CommandLine, command
from specbench.cli.commands import FAILED, fail
from specbench.config import command_line, parameters
from specbench.errors import RunError, UsageError

if TYPE_CHECKING:
    from specbench.config.run_config import RunConfig


@command(
    "audit",
    {
        "--all": Argument("flag", "every preset; a parameter applies to the presets that have it and accept the value"),
        "--variants": Argument("flag", "also every variant of the presets that have variants"),
    },
    others=["specbench.audit.audit_arguments:ARGUMENTS", "specbench.config.parameters:table"],
    tables={
        "arguments, as name=value:": "specbench.audit.audit_arguments:ARGUMENTS",
        "columns:": "specbench.audit.audit_arguments:COLUMNS",
    },
)
def audit(line: CommandLine) -> int:
    """Decodes many sequences of small models whose distribution is known, with the method's real loop, rule and
    drafter, and tests whether the sequences have the target's distribution. Takes the parameters of specbench run that
    belong to the method, its drafter, its rule and the sampling (temperature, top_k, top_p). Drafts have several sizes
    below the length of a sequence, unless you set window=, tree=, nodes=, depth= or width=. The model's draft tables
    replace a drafter that needs a network, in the shape of its drafts; with window= they draft a chain, with tree= a
    tree, whatever the preset's shape. The models of real classes have random weights, caches, guidance (cfg_scale) and
    an image grammar, and drafters with random networks. For continuous tokens (method=cspd) the models are small
    diffusion heads that can be sampled without limit: the sequences are compared with as many of the target's own, and
    the sampling is temperature and final_noise. A method is refuted if p_value is below 1e-05, or if an enumerated
    distribution differs from the target's; below 0.001, ten times as many sequences decide. A method with a part that
    was never used is undecided. The exit code is 1 if a method is refuted.

    verifier= audits a verifier of another engine instead of a method: a Python function (p, q, tokens, rng) ->
    (accepted tokens, next token), on the draft tables. records= reads decisions that an engine recorded, and tests
    whether the emitted tokens are samples of p. docs/audit.md explains both.

      specbench audit method=sjd window=3 temperature=0.7
      specbench audit method=cool_sd delta=1.1 window=3 audit.tables=mine.npz out=mine.csv
      specbench audit method=cspd criterion=paper gamma=4 audit.model=d1t5
      specbench audit --all out=all.csv
      specbench audit verifier=mine.py:verify window=3
      specbench audit records=mine.npz
    """
    from specbench.audit import plan
    from specbench.audit.audit_text import table

    wanted = plan.planned(line.others, line["--all"], line["--variants"])
    rows = list(plan.measured(wanted))
    print(table(rows))
    if wanted.out is not None:
        print(f"wrote {wanted.out}")
    return FAILED if any(row["verdict"] == "not lossless" for row in rows) else 0


_MOST = 10**6
#: Parameters of other steps of a run.
_NOT_TIMED = frozenset(
    "n seed shard shards baseline warmup data split prompts metrics protocol reference metrics_dir data_dir"
    " workers ray_address experiment".split()
)


def timed() -> list[str]:
    """The parameters of a run that a benchmark of steps accepts."""
    return [name for name in parameters.table() if name not in _NOT_TIMED]


@command(
    "bench",
    {
        "-m, --multirun": Argument("flag", "a grid: several values of a parameter, a job for each combination"),
        "--plan": Argument(
            "flag",
            "measure nothing: memory for weights, caches and peak, the memory floor of a step, and the devices that it"
            " fits on, from shapes alone; fetches nothing and needs no GPU",
        ),
        "bench.steps=": Argument("integer", "steps to time", low=1, high=_MOST, default="30"),
        "bench.context=": Argument(
            "integer",
            "positions before the timed steps, including the prompt (default: the middle of the image)",
            low=1,
            high=_MOST,
        ),
        "bench.nodes=": Argument(
            "integers",
            "numbers of nodes for which the target's pass is timed alone",
            low=1,
            high=_MOST,
            default="1,6,16,32,64",
        ),
        "bench.images=": Argument(
            "integer",
            "whole images to decode with the method and with vanilla AR; 0: none",
            low=0,
            high=_MOST,
            default="1",
        ),
        "forced_accept=": Argument(
            "number",
            "mean accepted length, tokens per step, that is enforced whatever the rule decides, to time a published"
            " length without weights",
            low=1,
            high=1e6,
        ),
        "bench.bandwidth=": Argument(
            "string", "with --plan: bandwidth of the device in GB/s, or the name of a known device (default: all)"
        ),
        "out=FILE.csv": Argument("path", "a file for the rows; the figure is written next to it", written=True),
    },
    others=["specbench.cli.measurements:timed"],
    tables={"columns:": "specbench.bench.benchmark_rows:COLUMNS"},
)
def bench(line: CommandLine) -> int:
    """Times decoding steps of any model, method and batch size, with the real loop, at one position of the image:
    drafting, the target's pass, verification, commit and rest. Next to each is its floor: the bytes that it must read
    over the measured bandwidth of this device. Time does not depend on weights: weights=random needs none. Takes the
    parameters of specbench run that belong to model, method, drafter, rule, batch and device. The last line is JSON.
    The target's pass over one token is measured twice. If the two times differ by more than their noise, they are
    measured again, at most three times; if they never agree, there is no row, and the exit code is 1.

      specbench bench
      specbench bench model=lumina_mgpt weights=random method=sjd_pac forced_accept=4.51 bench.context=2400
      specbench bench -m method=cool_sd,sjd batch=1,8 out=results/bench/mine.csv

      specbench bench --plan model=emu3 method=sjd engine=triton bench.bandwidth=h200
    """
    overrides = command_line.read(line.others, line["--multirun"])
    for key in (argument.partition("=")[0] for argument in overrides):
        if key in _NOT_TIMED or command_line.is_hydras(key):
            raise UsageError(f"'{key}' belongs to specbench run; a benchmark times steps and has no such parameter")
    if line["bench.bandwidth"] and not line["--plan"]:
        raise UsageError("bench.bandwidth= needs --plan: without it, the benchmark measures the bandwidth")
    rows, code = (_planned(line, overrides), 0) if line["--plan"] else _measured(line, overrides)
    print(json.dumps(rows[0] if len(rows) == 1 else rows))
    return code


def _jobs(line: CommandLine, overrides: Sequence[str], title: str) -> Iterator[RunConfig]:
    """The configurations of the jobs. All are checked before the first one is yielded."""
    from specbench.config import configuration
    from specbench.harness.method import check

    jobs = [job.cfg for job in configuration.grid(overrides, line["--multirun"])]
    for cfg in jobs:
        check(cfg)
    yield from tqdm(jobs, desc=title, unit="job", disable=len(jobs) == 1)


def _measured(line: CommandLine, overrides: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """The rows of the jobs, printed and added to the file, and the exit code. A job that other processes disturbed has
    no row, and does not stop the others."""
    from specbench.bench import benchmark, floor
    from specbench.bench.benchmark_rows import ROWS, describe, row

    out, rows, code = line["out"], [], 0
    if out is not None:
        ROWS.read(out)  # a file with other content is refused before the measurement starts
    chosen = {name: line[f"bench.{name}"] for name in ("steps", "context", "nodes", "images")}
    plan = benchmark.BenchPlan(forced=line["forced_accept"], **chosen)
    for cfg in _jobs(line, overrides, "bench"):
        try:
            rows.append(row(cfg, benchmark.measure(cfg, plan), plan.forced))
        except RunError as error:
            with tqdm.external_write_mode():
                code = fail(f"{cfg.method} on {cfg.model}, batch {cfg.batch}: {error}", FAILED)
            continue
        print(describe(rows[-1]))
        if out is not None:
            ROWS.append(out, rows[-1])
    if out is not None and rows:
        drawn = floor.draw_roofline(ROWS.read(out), out.with_suffix(""))
        print(f"wrote {', '.join(str(path) for path in (out, *drawn))}")
    return rows, code


def _planned(line: CommandLine, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """`--plan`: measures and writes nothing."""
    from specbench.bench import devices, needs

    chosen, plans = devices.of_bandwidth(line["bench.bandwidth"]), []
    for cfg in _jobs(line, overrides, "plan"):
        planned = needs.plan(cfg, line["bench.context"])
        by_device = needs.on_devices(planned, chosen)
        plans.append(asdict(planned) | {"devices": {name: device.plain() for name, device in by_device.items()}})
        print(needs.describe(planned, by_device))
    return plans


#: Parameters that affect a probe. The target draws alone.
ACCEPTED = frozenset(
    "method model weights size reduced device dtype data split caption prompts data_dir"
    " n seed temperature top_k top_p cfg_scale prompt_length instruction suffix negative".split()
)


@command(
    "probe",
    {
        "probe.offsets=": Argument(
            "integer", "distances at which a token is hidden, from 1 to this; 0: none", low=0, high=10_000, default="16"
        ),
        "out=FILE.csv": Argument("path", "a file to which the row is added", written=True),
    },
    others=["specbench.cli.measurements:ACCEPTED"],
)
def probe(line: CommandLine) -> int:
    """Draws images with the target alone and measures the distribution of each of their tokens: the mass of its most
    probable tokens, its entropy, and how much it changes if an earlier token is hidden from the position that predicts
    it. Takes the parameters of specbench run that belong to the model, the prompts and the sampling. The last line is
    JSON.

      specbench probe n=16
      specbench probe model=llamagen_xl data=coco2017 n=100 out=results/probe/mine.csv
    """
    overrides = command_line.read(line.others)
    for name, _, value in (argument.partition("=") for argument in overrides):
        if name not in ACCEPTED:
            raise UsageError(f"a probe has no '{name}': it takes {', '.join(sorted(ACCEPTED | set(probe.by_name)))}")
        if name == "method" and value != "vanilla":
            raise UsageError("in a probe the target draws alone: leave method= out")
    from specbench.bench import benchmark_rows

    out = line["out"]
    if out is not None:
        benchmark_rows.PROBES.read(out)
    others = [argument for argument in overrides if argument != "method=vanilla"]
    from specbench.config import configuration

    cfg = configuration.compose([*others, "method=vanilla"])
    result = benchmark_rows.probe(cfg, line["probe.offsets"])
    if out is not None:
        benchmark_rows.PROBES.append(out, result)
    print(benchmark_rows.describe_probe(result))
    print(json.dumps(result))
    return 0
