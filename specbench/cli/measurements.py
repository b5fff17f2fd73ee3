"""`specbench audit`, `bench` and `probe`: what is measured of a method or a target beside a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specbench.cli.arguments import CommandLine, Own, command
from specbench.cli.commands import FAILED, fail
from specbench.config import command_line, parameters
from specbench.errors import RunError, UsageError

if TYPE_CHECKING:
    from specbench.config.run_config import RunConfig


@command(
    "audit",
    {
        "--all": Own("flag", "every preset; a parameter reaches those that have it and can take the value"),
        "--variants": Own("flag", "the same of every variant of the presets that have some"),
    },
    others=["specbench.audit.arguments:ARGUMENTS", "specbench.config.parameters:table"],
    tables={
        "arguments, as name=value:": "specbench.audit.arguments:ARGUMENTS",
        "columns:": "specbench.audit.arguments:COLUMNS",
    },
)
def audit(line: CommandLine) -> int:
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
    from specbench.audit.rows import table

    wanted = plan.planned(line.others, line["--all"], line["--variants"])
    print(table(list(plan.measured(wanted))))
    if wanted.out is not None:
        print(f"wrote {wanted.out}")
    return 0


_MOST = 10**6
#: Parameters of other steps of a run.
_NOT_TIMED = frozenset(
    "n seed shard shards baseline warmup data split prompts metrics protocol reference metrics_dir data_dir"
    " workers ray_address experiment".split()
)


def timed() -> list[str]:
    """The parameters of a run that a benchmark of steps takes."""
    return [name for name in parameters.table() if name not in _NOT_TIMED]


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
    others=["specbench.cli.measurements:timed"],
    tables={"columns:": "specbench.bench.rows:COLUMNS"},
)
def bench(line: CommandLine) -> int:
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
        if key in _NOT_TIMED or command_line.is_hydras(key):
            raise UsageError(f"'{key}' belongs to specbench run; a benchmark times steps and has no such parameter")
    if line["bench.bandwidth"] and not line["--plan"]:
        raise UsageError("bench.bandwidth= goes with --plan; a benchmark measures the bandwidth")
    found, code = (_planned(line, given), 0) if line["--plan"] else _measured(line, given)
    print(json.dumps(found[0] if len(found) == 1 else found))
    return code


def _jobs(line: CommandLine, given: Sequence[str], title: str) -> Iterator[RunConfig]:
    """The configurations of the jobs, all of them checked before the first one."""
    from specbench.config import configuration
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


#: Parameters that affect a probe; the target draws alone, or with an exact rule and a drafter.
ACCEPTED = frozenset(
    "method drafter drafter_weights window model weights size reduced device dtype data split caption prompts data_dir"
    " n seed temperature top_k top_p cfg_scale prompt_length instruction suffix negative".split()
)


@command(
    "probe",
    {
        "probe.strengths=": Own(
            "numbers",
            "with drafter=: strengths of the bands, as numbers with commas, or none",
            low=0,
            high=1000,
            also=("none",),
            default="0.15,0.25,0.45,0.8,1.2",
        ),
        "probe.offsets=": Own(
            "integer", "distances at which a token is hidden, 1 to this; 0: none", low=0, high=10_000, default="16"
        ),
        "out=FILE.csv": Own("path", "a file that the row is added to", written=True),
    },
    others=["specbench.cli.measurements:ACCEPTED"],
)
def probe(line: CommandLine) -> int:
    """Draws images with the target alone and measures the distribution of each of their tokens: the mass of its most
    probable tokens, its entropy, and how far it moves where an earlier token is hidden from the position that gives it.
    Takes the parameters of specbench run that belong to the model, the prompts and the sampling. The last line is JSON.

    With a drafter of chains (drafter=eagle window=5) it decodes exactly instead, and replays the drafted chains under
    other rules: tokens per round of token-wise and of block verification by length; tokens per round and divergence of
    UniformRSD, Cool-SD and bands on the same nodes; and the decay of a band by depth.

      specbench probe n=16
      specbench probe n=32 drafter=eagle window=5
      specbench probe model=llamagen_xl data=coco2017 n=100 out=results/probe/mine.csv
    """
    given = command_line.read(line.others)
    for name, _, value in (argument.partition("=") for argument in given):
        if name not in ACCEPTED:
            raise UsageError(f"a probe has no '{name}': it takes {', '.join(sorted(ACCEPTED | set(probe.own)))}")
        if name == "method" and value != "vanilla":
            raise UsageError("in a probe the target draws alone: leave method= out")
    replays = any(argument.startswith("drafter=") and argument != "drafter=none" for argument in given)
    if (unused := "probe.offsets" if replays else "probe.strengths") in line.given:
        raise UsageError(f"{unused}= is for a probe {'without' if replays else 'with'} drafter=: leave it out")
    from specbench.bench import rows

    file = rows.ROUNDS if replays else rows.PROBES
    out = line["out"]
    if out is not None:
        file.read(out)
    others = [argument for argument in given if argument != "method=vanilla"]
    from specbench.config import configuration

    cfg = configuration.compose([*others, "method=vanilla"])
    if replays:
        strengths = line["probe.strengths"]
        found = rows.rounds(cfg, [] if strengths == "none" else strengths)
    else:
        found = [rows.probe(cfg, line["probe.offsets"])]
    if out is not None:
        for one in found:
            file.append(out, one)
    print(rows.describe_rounds(found) if replays else rows.describe_probe(found[0]))
    print(json.dumps(found if replays else found[0]))
    return 0
