"""Times the steps of a configuration: the real loop, at one position of the image, part by part."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specbench import data
from specbench.bench import floor
from specbench.bench.floor import ATTEMPTS, Bases
from specbench.config import registry
from specbench.decoding.batch import Decoded
from specbench.decoding.loop import Decoding
from specbench.decoding.planned import PlannedGroups
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
    """steps: timed, after `warmup` more; context: positions before a step's root, including the prefix (None: half of
    the image); nodes: numbers of nodes for which the target's pass is timed alone; images: full images to decode, by
    the method and by vanilla AR (0: none); forced: mean accepted length to which the drafts are forced."""

    steps: int = 30
    warmup: int = 5
    context: int | None = None
    nodes: tuple[int, ...] = (1, 6, 16, 32, 64)
    images: int = 1
    forced: float | None = None


class ForcedLength:
    """Overrides a verdict with a fixed pattern of accepted tokens: step s accepts floor((s + 1) x) - floor(s x) tokens
    of the draft's deepest path, x = length - 1, so that the mean over steps is `length` tokens per step. The rule still
    runs and is timed."""

    def __init__(self, length: float) -> None:
        self.extra = length - 1

    def __call__(self, verdict: VerificationResult, draft: Draft, step: Tensor) -> VerificationResult:
        tree, most = draft.tree, verdict.path.shape[1]
        wanted = torch.floor((step + 1) * self.extra) - torch.floor(step * self.extra)
        depth = torch.where(draft.valid, tree.depth, 0)
        deepest = depth.argmax(1, keepdim=True)
        length = torch.minimum(wanted.long(), depth.gather(1, deepest)[:, 0]).clamp_max(most)
        above = tree.ancestors.expand(len(length), -1, -1)
        above = above.gather(1, deepest.unsqueeze(-1).expand(-1, -1, above.shape[-1]))  # (B, 1, M): nodes on the path
        level = torch.arange(most + 1, device=length.device)
        path = (above & (tree.depth.unsqueeze(1) == level[:, None])).long().argmax(-1)  # (B, D + 1): by depth
        path = path.gather(1, torch.minimum(level, length[:, None]))
        next_token = verdict.tokens.gather(1, verdict.length[:, None])
        tokens = torch.cat([draft.tokens.gather(1, path[:, 1:]), next_token], 1).scatter(1, length[:, None], next_token)
        return VerificationResult(path[:, 1:], length, tokens, verdict.next_probs, verdict.first)


def _prompts(cfg: Mapping[str, Any], rows: int) -> list[str]:
    """The first prompts of a run; where their files were never fetched, prompts that are shipped: a bench scores no
    image."""
    try:
        found = data.load({**cfg, "n": rows})
    except UsageError:
        if cfg["data"] not in registry.data_sources():
            raise
        found = data.load({**cfg, "data": "geneval", "n": min(rows, 553)})
    return [found[i % len(found)].prompt for i in range(rows)]


def measure(cfg: Mapping[str, Any], plan: BenchPlan) -> dict[str, Any]:
    """Values of a checked configuration, by the names of `rows.COLUMNS`; times are medians over steps, in
    milliseconds. RunError: other work disturbed every attempt."""
    pipeline = Pipeline.load({**cfg, "emitted_draws": 0})  # a bench looks at no image
    rows = int(cfg["batch"])
    conditioning = pipeline.encode(_prompts(cfg, rows))
    reset_peak_memory(pipeline.device)
    if isinstance(pipeline, ContinuousPipeline):
        found = _continuous(pipeline, conditioning, plan, rows)
    else:
        found = _discrete(pipeline, conditioning, plan, rows)
    found["weights"] = pipeline.weights
    found["peak_memory_mib"] = peak_memory_mib(pipeline.device)
    return found


def _discrete(pipeline: Pipeline, conditioning: Any, plan: BenchPlan, rows: int) -> dict[str, Any]:
    device, target = pipeline.device, pipeline.model.target
    rng = RandomStreams([(0, i) for i in range(rows)], device)
    drafter, guided = pipeline.config.drafter, pipeline.config.sampling.guided
    if plan.forced is not None:
        if plan.forced > drafter.shape.height + 1:
            raise UsageError(
                f"forced_accept={plan.forced:g} is more than the {drafter.shape.height + 1} tokens that a step of this"
                " method can commit; give a smaller one, or longer drafts"
            )
        pipeline = pipeline.overridden(ForcedLength(plan.forced))
    vanilla = pipeline.vanilla()
    with torch.inference_mode():
        _tune(pipeline, plan.nodes, 2 * rows if guided else rows, plan.context or target.length)
        clock = Clock(device)
        decoding = pipeline.images(conditioning, rng, clock)
        context = position_of(decoding, plan.context)
        parts = _steps(decoding, clock, plan, context)
        del decoding  # one state at a time: the keys and values of a large model take gigabytes
        again = pipeline.images(conditioning, rng)
        with Passes(device, floor.passes(pipeline.config.target, drafter)) as passes:
            _take(again, plan, context, passes)
        del again
        single = _single_nodes(pipeline, vanilla, conditioning, rng, rows, context, plan)
        plain, by_nodes = single.plain, single.by_nodes
        recorded = {
            name: _recorded(one.engine, one.images(conditioning, rng), plan, context)
            for name, one in (("", pipeline), ("vanilla_", vanilla))
            if isinstance(one.engine, Graphs)
        }
        tree, num_chains = drafter.shape.tree, drafter.shape.num_chains(target)
        if num_chains > 1:  # as many nodes as all chains together
            tree = build(chain_paths(num_chains * tree.nodes - 1))
        own = statistics.median(_pass(pipeline, conditioning, rows, tree, context, plan)) if recorded else None
    speed = floor.bandwidth(device)
    both = 2 * rows if guided else rows
    weights, drafts, cache = (
        floor.of_target(target),
        floor.of_drafts(drafter, target),
        floor.of_cache(target, both, context),
    )
    found: dict[str, Any] = {
        "rows": both,
        "context": context,
        "nodes": tree.nodes,
        "steps": plan.steps,
        **{f"{name}_ms": 1e3 * value for name, value in parts.items()},
        **{f"{name}recorded_step_ms": 1e3 * value for name, value in recorded.items()},
        "recorded_forward_ms": None if own is None else 1e3 * own,
        "passes_ms": 1e3 * statistics.median(passes.seconds()[plan.warmup :]),
        "vanilla_step_ms": 1e3 * sum(plain.values()),
        "vanilla_forward_ms": 1e3 * plain["forward"],
        "bandwidth_gb_s": speed / 1e9,
        "arithmetic_gflop_s": floor.arithmetic(device, target.output.weight.dtype) / 1e9,
        "node_gflop": floor.operations(target, both, context) / 1e9,
        "weights_gb": weights / 1e9,
        "draft_weights_gb": drafts / 1e9,
        "cache_gb": cache / 1e9,
        "forward_floor_ms": 1e3 * (weights + cache) / speed,
        "draft_floor_ms": 1e3 * drafts / speed,
        "by_nodes": {n: 1e3 * value for n, value in by_nodes.items()},
        "by_nodes_executed": "recorded" if recorded else "eager",
        "attempts": single.attempts,
    }
    if single.bases is not None:
        found |= {"bases_difference": single.bases.difference, "bases_noise": single.bases.noise}
    found["step_ms"] = sum(found[f"{name}_ms"] for name in parts)
    found["step_floor_ms"] = found["forward_floor_ms"] + found["draft_floor_ms"]
    found["passes_share"] = found["passes_ms"] / found["step_ms"]
    found |= _against_floors(found)
    if plan.images:
        ways = [partial(one.decode, conditioning) for one in (pipeline, vanilla)]
        _interleaved(ways, rows, range(1))  # warms up
        found |= _compared(pipeline.tokens_per_image, _interleaved(ways, rows, range(1, plan.images + 1)))
        found["token_floor_ms"] = found["step_floor_ms"] / found["accepted_length"]
        found["vanilla_token_floor_ms"] = found["forward_floor_ms"]
    return found


@dataclass(frozen=True)
class _SingleNodes:
    """What costs relative to one node rest on: the median seconds of the parts of vanilla AR's steps, and of the
    target's pass alone by number of nodes; how often it was measured, and the two measurements of one node where they
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
    """Measures until both agree on a single node; RunError where they never do. (A recorded pass is no measurement of
    the same thing as that of a step, which is timed kernel by kernel.)"""
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


def _against_floors(found: Mapping[str, Any]) -> dict[str, Any]:
    """Times relative to the bytes that must be read: of recorded steps and passes where there are some."""
    step, vanilla, forward = (found.get(f"{name}_ms") for name in _RECORDED)
    shares = {
        "recorded_floor_share": found["step_floor_ms"] / step if step else None,
        "vanilla_recorded_floor_share": found["forward_floor_ms"] / vanilla if vanilla else None,
    }
    step, forward = step or found["step_ms"], forward or found["forward_ms"]
    return {
        **shares,
        "bandwidth_share": found["forward_floor_ms"] / forward,
        "overhead": (step - forward) / forward,
    }


def _tune(pipeline: Pipeline, nodes: Iterable[int], rows: int, slots: int) -> None:
    """Before the first measurement, lets fused kernels choose their tiles for passes over so many sequences of `slots`
    positions: of the given numbers of nodes, and of those that the method has. A device does this once; later runs use
    the tiles, too."""
    kernels: Any = pipeline.engine.kernels
    if kernels is None:
        return
    shape = pipeline.config.drafter.shape
    tree = shape.tree
    levels = tree.depth[0].bincount().tolist()
    every = shape.num_chains(pipeline.config.target) * tree.nodes
    counts = {1, every, tree.height + 1, *levels, *nodes}
    kernels.tune(pipeline.model.target.layers, sorted(counts), rows, slots)


def _before(decoding: Decoding) -> int:
    """Positions before the image."""
    session: Any = decoding.session
    return int(session.prefix_length)


def position_of(decoding: Decoding, context: int | None) -> int:
    """The number of positions before the root of the timed steps; default: the middle of the image."""
    prefix = _before(decoding)
    context = prefix + decoding.total // 2 if context is None else context
    if not prefix < context < prefix + decoding.total:
        raise UsageError(
            f"bench.context={context} is outside the image: its tokens have the positions {prefix + 1} to"
            f" {prefix + decoding.total - 1}"
        )
    return context


def _steps(decoding: Decoding, clock: Clock, plan: BenchPlan, context: int) -> dict[str, float]:
    """Median seconds of each part of steps, see `_take`."""
    _take(decoding, plan, context)
    return _medians(clock.seconds()[plan.warmup :])


def _take(decoding: Decoding, plan: BenchPlan, context: int, passes: Passes | None = None) -> None:
    """Runs steps that all start at the same position, among random tokens."""
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, decoding.session.codes, decoding.history.shape, generator=rng)
    decoding.history.copy_(tokens)
    for _ in range(plan.warmup + plan.steps):
        decoding.num_committed.fill_(context - _before(decoding))
        decoding.steps.zero_()  # the buffers hold as many steps as the image has tokens
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
    """Of each part, the median over the steps that have it."""
    parts = {part: [step[part] for step in steps if part in step] for part in PARTS}
    return {part: statistics.median(times) for part, times in parts.items() if times}


def _pass(pipeline: Pipeline, conditioning: Any, rows: int, tree: Tree, context: int, plan: BenchPlan) -> list[float]:
    """Seconds, several times, of the target's pass over a draft's nodes, including the root: recorded where the engine
    records the steps, since the host takes longer to start a pass than the device to execute it."""
    device, tree = pipeline.device, tree.to(pipeline.device)
    target: Any = pipeline.config.target
    session = target.open(conditioning, rows, pipeline.config.sampling.guided, tree.nodes)
    if pipeline.engine.kernels is not None:
        session.use(pipeline.engine.kernels)
    num_committed = torch.full((rows,), context - session.prefix_length, device=device)
    history = torch.zeros(rows, session.length + tree.nodes, dtype=torch.int64, device=device)
    tokens = history[:, : tree.nodes]
    positions = None
    if target.order is not None:  # groups of so many tokens, as far into the image
        groups = [min(tree.nodes, session.length - i) for i in range(0, session.length, tree.nodes)]
        passes = PlannedGroups(target.order, RandomStreams([(0, i) for i in range(rows)], device), groups)
        tokens, positions = passes.parallel_positions(history, num_committed // tree.nodes)

    def forward() -> None:
        if positions is None:
            session.forward(tokens, tree, history, num_committed)
        else:
            session.forward_at_positions(tokens, positions, history)

    repeated = pipeline.engine.repeated(forward, device)
    return floor.seconds(repeated, device, samples=max(3, plan.steps // 5))


def _continuous(pipeline: ContinuousPipeline, conditioning: Any, plan: BenchPlan, rows: int) -> dict[str, Any]:
    """Times full images: a pass of a masked target processes all positions at every step."""
    if plan.forced is not None:
        raise UsageError("forced_accept= needs discrete tokens; with continuous tokens, gamma= sets a draft's length")
    device, target, vanilla = pipeline.device, pipeline.model.target, pipeline.vanilla()
    both = (pipeline, Clock(device)), (vanilla, Clock(device))
    ways = [partial(one.decode, conditioning, clock=clock) for one, clock in both]
    _interleaved([partial(one.decode, conditioning) for one, _ in both], rows, range(1))  # warms up
    outputs = _interleaved(ways, rows, range(1, max(1, plan.images) + 1))
    spent = [clock.seconds() for _, clock in both]
    parts, plain = map(_medians, spent)
    speed, once = floor.bandwidth(device), floor.of_pass(target)
    found = {
        "rows": rows * target.halves,
        "nodes": pipeline.rule.gamma + 1,
        "steps": len(spent[0]),
        **{f"{name}_ms": 1e3 * value for name, value in parts.items()},
        "vanilla_step_ms": 1e3 * sum(plain.values()),
        "vanilla_forward_ms": 1e3 * plain["forward"],
        "diffusion_step_ms": 1e3 * plain["head"] / target.steps,
        "bandwidth_gb_s": speed / 1e9,
        "weights_gb": once / 1e9,
        "forward_floor_ms": 1e3 * once / speed,
        "diffusion_floor_ms": 1e3 * floor.of_diffusion_step(target) / speed,
        "by_nodes": {},
    }
    found["step_ms"] = 1e3 * sum(parts.values())
    return found | _compared(pipeline.tokens_per_image, outputs)


#: Decodes one image per (seed, prompt index).
Way = Callable[[list[tuple[int, int]]], Decoded[Any]]


def _interleaved(ways: Sequence[Way], rows: int, seeds: Iterable[int]) -> list[list[Decoded[Any]]]:
    """Decodes full images, from prefill to the last token, alternating the ways; returns the output of every seed for
    each way."""
    outputs = [[way([(seed, i) for i in range(rows)]) for way in ways] for seed in seeds]
    return [list(some) for some in zip(*outputs, strict=True)]


def _compared(tokens: int, outputs: Sequence[Sequence[Decoded[Any]]]) -> dict[str, Any]:
    """Statistics of full images; outputs: of the method and of vanilla AR."""
    method, vanilla = outputs
    rows = len(method[0].tokens)
    seconds, plain = (statistics.fmean(out.seconds for out in some) for some in (method, vanilla))
    steps, most = (statistics.fmean(float(out.steps.double().mean()) for out in some) for some in (method, vanilla))
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
