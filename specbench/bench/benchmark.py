"""Times the steps of a configuration: the real loop, at one position of the image, part by part."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specbench import data
from specbench.bench import floor
from specbench.bench.floor import ATTEMPTS, Bases
from specbench.config import registry
from specbench.config.run_config import RunConfig
from specbench.decoding.batch import Decoded
from specbench.decoding.loop import Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.trees import Tree, build, chain_paths
from specbench.decoding.verify import Draft, VerificationResult
from specbench.engine.clock import Clock, Passes
from specbench.engine.graph import Graphs
from specbench.errors import UsageError
from specbench.harness.pipeline import ContinuousPipeline, Pipeline
from specbench.harness.worker import peak_memory_mib, reset_peak_memory

_RECORDED = ("recorded_step", "vanilla_recorded_step", "recorded_forward")
PARTS = ("draft", "forward", "head", "verify", "commit", "rest")


@dataclass(frozen=True)
class BenchPlan:
    """steps: timed steps, after `warmup` more; context: positions before a step's root, including the prefix (None:
    half of the image); nodes: numbers of nodes for which the target's pass is timed alone; images: full images to
    decode, by the method and by vanilla AR (0: none); forced: the mean accepted length to which drafts are forced."""

    steps: int = 30
    warmup: int = 5
    context: int | None = None
    nodes: tuple[int, ...] = (1, 6, 16, 32, 64)
    images: int = 1
    forced: float | None = None


class ForcedLength:
    """Replaces a verdict by a fixed pattern of accepted tokens. Step s accepts floor((s + 1) x) - floor(s x) tokens of
    the draft's deepest path, x = length - 1, so the mean over steps is `length` tokens per step. The rule still runs
    and is timed."""

    def __init__(self, length: float) -> None:
        self.extra = length - 1

    def __call__(self, verdict: VerificationResult, draft: Draft, step: Tensor) -> VerificationResult:
        tree, most = draft.tree, verdict.path.shape[1]
        accepted = torch.floor((step + 1) * self.extra) - torch.floor(step * self.extra)
        depth = torch.where(draft.valid, tree.depth, 0)
        deepest = depth.argmax(1, keepdim=True)
        length = torch.minimum(accepted.long(), depth.gather(1, deepest)[:, 0]).clamp_max(most)
        above = tree.ancestors.expand(len(length), -1, -1)
        above = above.gather(1, deepest.unsqueeze(-1).expand(-1, -1, above.shape[-1]))  # (B, 1, M): nodes on the path
        level = torch.arange(most + 1, device=length.device)
        path = (above & (tree.depth.unsqueeze(1) == level[:, None])).long().argmax(-1)  # (B, D + 1): by depth
        path = path.gather(1, torch.minimum(level, length[:, None]))
        next_token = verdict.tokens.gather(1, verdict.length[:, None])
        tokens = torch.cat([draft.tokens.gather(1, path[:, 1:]), next_token], 1).scatter(1, length[:, None], next_token)
        return VerificationResult(path[:, 1:], length, tokens, verdict.next_probs, verdict.first)


def _prompts(cfg: RunConfig, rows: int) -> list[str]:
    """The first prompts of a run. If their files were never fetched, prompts that come with specbench: a benchmark
    scores no image."""
    try:
        items = data.load(replace(cfg.prompts, n=rows))
    except UsageError:
        if cfg.data not in registry.data_sources():
            raise
        items = data.load(replace(cfg.prompts, data="geneval", n=min(rows, 553)))
    return [items[i % len(items)].prompt for i in range(rows)]


def measure(cfg: RunConfig, plan: BenchPlan) -> dict[str, Any]:
    """Values of a checked configuration, by the names of `benchmark_rows.COLUMNS`; times are medians over steps, in
    milliseconds. RunError if other work disturbed every attempt."""
    pipeline = Pipeline.load(cfg.changed(emitted_draws=0))  # a benchmark uses no statistics of images
    rows = int(cfg.batch)
    conditioning = pipeline.encode(_prompts(cfg, rows))
    reset_peak_memory(pipeline.device)
    if isinstance(pipeline, ContinuousPipeline):
        values = _continuous(pipeline, conditioning, plan, rows)
    else:
        values = _discrete(pipeline, conditioning, plan, rows)
    values["weights"] = pipeline.weights
    values["peak_memory_mib"] = peak_memory_mib(pipeline.device)
    return values


def _discrete(pipeline: Pipeline, conditioning: Any, plan: BenchPlan, rows: int) -> dict[str, Any]:
    if plan.forced is not None:
        pipeline = _forced(pipeline, plan.forced)
    vanilla = pipeline.vanilla()
    with torch.inference_mode():
        times = _times(pipeline, vanilla, conditioning, plan, rows)
    sequences = 2 * rows if pipeline.config.sampling.guided else rows
    values = {"rows": sequences, "steps": plan.steps, **_in_milliseconds(times)}
    values |= _bounds(pipeline, sequences, times.context)
    values["step_floor_ms"] = values["forward_floor_ms"] + values["draft_floor_ms"]
    values |= _against_floors(values)
    if plan.images:
        decoders = [partial(each.decode, conditioning) for each in (pipeline, vanilla)]
        _interleaved(decoders, rows, range(1))  # warms up
        values |= _compared(pipeline.tokens_per_image, _interleaved(decoders, rows, range(1, plan.images + 1)))
        values["token_floor_ms"] = values["step_floor_ms"] / values["accepted_length"]
        values["vanilla_token_floor_ms"] = values["forward_floor_ms"]
    return values


def _forced(pipeline: Pipeline, length: float) -> Pipeline:
    """The pipeline with drafts that are accepted as if their mean accepted length were `length`."""
    longest = pipeline.config.drafter.shape.height + 1
    if length > longest:
        raise UsageError(
            f"forced_accept={length:g} is more than the {longest} tokens that a step of this method can commit; give a"
            " smaller one, or longer drafts"
        )
    return pipeline.overridden(ForcedLength(length))


@dataclass(frozen=True)
class _Times:
    """Median seconds. context: positions before the timed steps; nodes: of a step's pass; parts: of the method's step,
    in alternation with the host; passes: of the target's and the drafter's passes of a step; single: see
    `_SingleNodes`; recorded: of replayed steps ("" and "vanilla_"), empty if the engine records none, as is
    recorded_pass, the replayed pass over `nodes`."""

    context: int
    nodes: int
    parts: dict[str, float]
    passes: float
    single: _SingleNodes
    recorded: dict[str, float]
    recorded_pass: float | None


def _times(pipeline: Pipeline, vanilla: Pipeline, conditioning: Any, plan: BenchPlan, rows: int) -> _Times:
    """Everything that is timed at one position of the image. Only one decoding exists at a time: the keys and values of
    a large model take gigabytes."""
    device, target, drafter = pipeline.device, pipeline.model.target, pipeline.config.drafter
    rng = RandomStreams([(0, i) for i in range(rows)], device)
    sequences = 2 * rows if pipeline.config.sampling.guided else rows
    _tune(pipeline, plan.nodes, sequences, plan.context or target.length)

    clock = Clock(device)
    decoding = pipeline.images(conditioning, rng, clock)
    context = position_of(decoding, plan.context)
    _take(decoding, plan, context)
    parts = _medians(clock.seconds()[plan.warmup :])
    del decoding

    decoding = pipeline.images(conditioning, rng)
    with Passes(device, floor.passes(pipeline.config.target, drafter)) as passes:
        _take(decoding, plan, context, passes)
    del decoding

    single = _single_nodes(pipeline, vanilla, conditioning, rng, rows, context, plan)
    recorded = {
        name: _recorded(each.engine, each.images(conditioning, rng), plan, context)
        for name, each in (("", pipeline), ("vanilla_", vanilla))
        if isinstance(each.engine, Graphs)
    }
    tree, num_chains = drafter.shape.tree, drafter.shape.num_chains(target)
    if num_chains > 1:  # as many nodes as all chains together
        tree = build(chain_paths(num_chains * tree.nodes - 1))
    return _Times(
        context=context,
        nodes=tree.nodes,
        parts=parts,
        passes=statistics.median(passes.seconds()[plan.warmup :]),
        single=single,
        recorded=recorded,
        recorded_pass=(
            statistics.median(_pass(pipeline, conditioning, rows, tree, context, plan)) if recorded else None
        ),
    )


def _in_milliseconds(times: _Times) -> dict[str, Any]:
    """The times by the names of their columns."""
    single = times.single
    values: dict[str, Any] = {
        "context": times.context,
        "nodes": times.nodes,
        **{f"{name}_ms": 1e3 * value for name, value in times.parts.items()},
        **{f"{name}recorded_step_ms": 1e3 * value for name, value in times.recorded.items()},
        "recorded_forward_ms": None if times.recorded_pass is None else 1e3 * times.recorded_pass,
        "passes_ms": 1e3 * times.passes,
        "vanilla_step_ms": 1e3 * sum(single.plain.values()),
        "vanilla_forward_ms": 1e3 * single.plain["forward"],
        "by_nodes": {n: 1e3 * value for n, value in single.by_nodes.items()},
        "by_nodes_executed": "recorded" if times.recorded else "eager",
        "attempts": single.attempts,
    }
    if single.bases is not None:
        values |= {"bases_difference": single.bases.difference, "bases_noise": single.bases.noise}
    values["step_ms"] = sum(values[f"{name}_ms"] for name in times.parts)
    values["passes_share"] = values["passes_ms"] / values["step_ms"]
    return values


def _bounds(pipeline: Pipeline, sequences: int, context: int) -> dict[str, Any]:
    """What a step must read and compute, what the device reads and computes in a second, and the lower bounds that
    follow for a pass of the target and for drafting."""
    device, target, drafter = pipeline.device, pipeline.model.target, pipeline.config.drafter
    speed = floor.bandwidth(device)
    weights, drafts = floor.of_target(target), floor.of_drafts(drafter, target)
    cache = floor.of_cache(target, sequences, context)
    return {
        "bandwidth_gb_s": speed / 1e9,
        "arithmetic_gflop_s": floor.arithmetic(device, target.output.weight.dtype) / 1e9,
        "node_gflop": floor.operations(target, sequences, context) / 1e9,
        "weights_gb": weights / 1e9,
        "draft_weights_gb": drafts / 1e9,
        "cache_gb": cache / 1e9,
        "forward_floor_ms": 1e3 * (weights + cache) / speed,
        "draft_floor_ms": 1e3 * drafts / speed,
    }


@dataclass(frozen=True)
class _SingleNodes:
    """The measurements to which costs are relative: the median seconds of the parts of vanilla AR's steps, and of the
    target's pass alone by number of nodes; how often they were measured; and the two measurements of one node, if they
    can be compared."""

    plain: dict[str, float]
    by_nodes: dict[int, float]
    attempts: int
    bases: Bases | None


def _single_nodes(
    pipeline: Pipeline,
    vanilla: Pipeline,
    conditioning: Any,
    rng: RandomStreams,
    rows: int,
    context: int,
    plan: BenchPlan,
) -> _SingleNodes:
    """Measures until both agree on a single node; RunError if they never do. (A recorded pass cannot be compared with
    the pass in a step, which is timed kernel by kernel.)"""
    recorded = isinstance(pipeline.engine, Graphs)
    chains = {n: build(chain_paths(n - 1)) for n in plan.nodes}
    for attempt in range(1, ATTEMPTS + 1):
        clock = Clock(pipeline.device)
        _take(vanilla.images(conditioning, rng, clock), plan, context)
        steps = clock.seconds()[plan.warmup :]
        alone = {n: _pass(pipeline, conditioning, rows, tree, context, plan) for n, tree in chains.items()}
        bases = Bases([step["forward"] for step in steps], alone[1]) if 1 in alone and not recorded else None
        if bases is None or bases.agree:
            medians = {n: statistics.median(samples) for n, samples in alone.items()}
            return _SingleNodes(_medians(steps), medians, attempt, bases)
    assert bases is not None
    raise bases.refusal()


def _against_floors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Times relative to the bytes that must be read; recorded steps and passes are used if they exist."""
    step, vanilla, forward = (values.get(f"{name}_ms") for name in _RECORDED)
    shares = {
        "recorded_floor_share": values["step_floor_ms"] / step if step else None,
        "vanilla_recorded_floor_share": values["forward_floor_ms"] / vanilla if vanilla else None,
    }
    step, forward = step or values["step_ms"], forward or values["forward_ms"]
    return {
        **shares,
        "bandwidth_share": values["forward_floor_ms"] / forward,
        "overhead": (step - forward) / forward,
    }


def _tune(pipeline: Pipeline, nodes: Iterable[int], rows: int, slots: int) -> None:
    """Before the first measurement, lets fused kernels choose their tiles for passes over `rows` sequences of `slots`
    positions: for the given numbers of nodes, and for the method's. A device does this once; later runs use the
    tiles, too."""
    kernels: Any = pipeline.engine.kernels
    if kernels is None:
        return
    shape = pipeline.config.drafter.shape
    tree = shape.tree
    levels = tree.depth[0].bincount().tolist()
    all_nodes = shape.num_chains(pipeline.config.target) * tree.nodes
    counts = {1, all_nodes, tree.height + 1, *levels, *nodes}
    kernels.tune(pipeline.model.target.layers, sorted(counts), rows, slots)


def _before(decoding: Decoding) -> int:
    """The number of positions before the image."""
    session: Any = decoding.session
    return int(session.prefix_length)


def position_of(decoding: Decoding, context: int | None) -> int:
    """The number of positions before the root of the timed steps; default: the middle of the image. UsageError outside
    the image."""
    prefix = _before(decoding)
    context = prefix + decoding.total // 2 if context is None else context
    if not prefix < context < prefix + decoding.total:
        raise UsageError(
            f"bench.context={context} is outside the image: its tokens have the positions {prefix + 1} to"
            f" {prefix + decoding.total - 1}"
        )
    return context


def _take(decoding: Decoding, plan: BenchPlan, context: int, passes: Passes | None = None) -> None:
    """Runs steps that all start at the same position, among random tokens."""
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, decoding.session.codes, decoding.history.shape, generator=rng)
    decoding.history.copy_(tokens)
    for _ in range(plan.warmup + plan.steps):
        decoding.num_committed.fill_(context - _before(decoding))
        decoding.steps.zero_()  # the buffers have room for as many steps as the image has tokens
        if passes is not None:
            passes.begin()
        decoding.step()


def _recorded(engine: Graphs, decoding: Decoding, plan: BenchPlan, context: int) -> float:
    """Median seconds of a step that is replayed as one graph, at the same position."""
    recorded = engine.record(decoding)

    def step() -> None:
        decoding.num_committed.fill_(context - _before(decoding))
        decoding.steps.zero_()
        recorded.step()

    device = decoding.num_committed.device
    return statistics.median(floor.seconds(step, device, samples=max(3, plan.steps // 5)))


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each part, the median over the steps that have it."""
    parts = {part: [step[part] for step in steps if part in step] for part in PARTS}
    return {part: statistics.median(times) for part, times in parts.items() if times}


def _pass(pipeline: Pipeline, conditioning: Any, rows: int, tree: Tree, context: int, plan: BenchPlan) -> list[float]:
    """Seconds, several samples, of the target's pass over a draft's nodes, including the root. The pass is recorded if
    the engine records the steps, since the host takes longer to start a pass than the device to execute it."""
    device, tree = pipeline.device, tree.to(pipeline.device)
    target: Any = pipeline.config.target
    session = target.open(conditioning, rows, pipeline.config.sampling.guided, tree.nodes)
    if pipeline.engine.kernels is not None:
        session.use(pipeline.engine.kernels)
    num_committed = torch.full((rows,), context - session.prefix_length, device=device)
    history = torch.zeros(rows, session.length + tree.nodes, dtype=torch.int64, device=device)
    tokens = history[:, : tree.nodes]

    def forward() -> None:
        session.forward(tokens, tree, history, num_committed)

    repeated = pipeline.engine.repeated(forward, device)
    return floor.seconds(repeated, device, samples=max(3, plan.steps // 5))


def _continuous(pipeline: ContinuousPipeline, conditioning: Any, plan: BenchPlan, rows: int) -> dict[str, Any]:
    """Times full images: a pass of a masked target processes all positions at every step."""
    if plan.forced is not None:
        raise UsageError("forced_accept= needs discrete tokens; with continuous tokens, gamma= sets a draft's length")
    device, target, vanilla = pipeline.device, pipeline.model.target, pipeline.vanilla()
    timed = (pipeline, Clock(device)), (vanilla, Clock(device))
    decoders = [partial(each.decode, conditioning, clock=clock) for each, clock in timed]
    _interleaved([partial(each.decode, conditioning) for each, _ in timed], rows, range(1))  # warms up
    outputs = _interleaved(decoders, rows, range(1, max(1, plan.images) + 1))
    seconds = [clock.seconds() for _, clock in timed]
    parts, plain = map(_medians, seconds)
    speed, weights = floor.bandwidth(device), floor.of_pass(target)
    values = {
        "rows": rows * target.halves,
        "nodes": pipeline.rule.gamma + 1,
        "steps": len(seconds[0]),
        **{f"{name}_ms": 1e3 * value for name, value in parts.items()},
        "vanilla_step_ms": 1e3 * sum(plain.values()),
        "vanilla_forward_ms": 1e3 * plain["forward"],
        "diffusion_step_ms": 1e3 * plain["head"] / target.steps,
        "bandwidth_gb_s": speed / 1e9,
        "weights_gb": weights / 1e9,
        "forward_floor_ms": 1e3 * weights / speed,
        "diffusion_floor_ms": 1e3 * floor.of_diffusion_step(target) / speed,
        "by_nodes": {},
    }
    values["step_ms"] = 1e3 * sum(parts.values())
    return values | _compared(pipeline.tokens_per_image, outputs)


#: Decodes one image per (seed, prompt index).
Decode = Callable[[list[tuple[int, int]]], Decoded[Any]]


def _interleaved(decoders: Sequence[Decode], rows: int, seeds: Iterable[int]) -> list[list[Decoded[Any]]]:
    """Decodes full images, from prefill to the last token, alternating the decoders. Returns the outputs of all seeds
    for each decoder."""
    outputs = [[decode([(seed, i) for i in range(rows)]) for decode in decoders] for seed in seeds]
    return [list(by_seed) for by_seed in zip(*outputs, strict=True)]


def _compared(tokens: int, outputs: Sequence[Sequence[Decoded[Any]]]) -> dict[str, Any]:
    """Statistics of full images. outputs: of the method and of vanilla AR."""
    method, vanilla = outputs
    rows = len(method[0].tokens)
    seconds, plain = (statistics.fmean(out.seconds for out in outs) for outs in (method, vanilla))
    steps, most = (statistics.fmean(float(out.steps.double().mean()) for out in outs) for outs in (method, vanilla))
    return {
        "tokens": tokens,
        "accepted_length": tokens / steps,
        "latency_s": seconds,
        "vanilla_latency_s": plain,
        "tokens_per_s": rows * tokens / seconds,
        "images_per_s": rows / seconds,
        "step_compression": most / steps,
        "speedup": plain / seconds,
        "speedup_share": plain / seconds / (most / steps),
    }
