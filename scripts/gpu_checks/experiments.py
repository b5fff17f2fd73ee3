"""What decides what is built next: passes of a target, recorded in two ways, measured by turns.

A pass is what a step takes most of: the inputs of the nodes, the layers and the head, of one image with guidance, so
two rows. Each line has the ratio of two times and the decision that follows from it, which was made before anything was
measured. Without a device every pass is done once at a small size, by Triton's interpreter, and the ratio is None.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_checks import gates, models, results
from specbench.bench import floor
from specbench.decoding.trees import build, chain_paths
from specbench.engine.graph import Action, BlockCall, Graphs, call_block, compiling, cuda_graphs, inductor
from specbench.engine.kernels import FusedKernels, block, launch
from specbench.engine.kernels.attention import Counters, attend
from specbench.engine.kernels.tiles import Tiles, default_attention
from specbench.engine.masks import TreeMask

#: Positions before the nodes.
CONTEXT = {"xl": 400, "7b": 2400}
#: A number of weights that no product has more of.
EVERY_WEIGHT = 1 << 30
#: Targets, numbers of nodes, positions and weights for which tiles are tuned, and which the first stage compiles.
TUNED = (("7b", ((1,), CONTEXT["7b"], EVERY_WEIGHT)), ("xl", ((1, 33), CONTEXT["xl"])))
#: Seconds of one experiment.
LIMIT = 120
#: Largest difference of two ways' logits, relative to the largest logit: bfloat16 keeps eight bits.
DIFFERENCE = 0.06

#: Nodes of a pass without a device: two rows of them are more than few.
MOST_DRY = 9

Decision = Callable[[float], str]


def checks(cuda: bool, fast: bool) -> Iterator[results.Check]:
    """Those of the 7B target follow each other, since one network is held at a time; those that compile come last."""
    some: dict[str, Callable[[bool], dict[str, Any]]] = {
        "XL, one node: next layer's weights prefetched by loads": partial(prefetch, bulk=False),
        "XL, one node: next layer's weights prefetched in bulk": partial(prefetch, bulk=True),
        "XL, one node: dependent launch off": dependent,
        "7B, one node: few-row products instead of cuBLAS": few_rows,
        "7B: 33 nodes instead of 32": partial(one_more_node, 32),
        "7B: 65 nodes instead of 64": partial(one_more_node, 64),
        "7B attention, 33 queries: smaller blocks": attention_blocks,
    }
    compiled = {
        "7B, 33 nodes: Inductor's blocks instead of engine=triton": partial(inductor_blocks, "7b", 33),
        "7B, one node: Inductor's blocks instead of engine=triton": partial(inductor_blocks, "7b", 1),
        "XL, one node: Inductor's blocks instead of engine=triton": partial(inductor_blocks, "xl", 1),
        "XL, 33 nodes: Inductor's blocks instead of engine=triton": partial(inductor_blocks, "xl", 33),
    }
    for name, experiment in (some if fast else some | compiled).items():
        yield name, partial(_limited, experiment, cuda)


@torch.inference_mode()
def _limited(experiment: Callable[[bool], dict[str, Any]], cuda: bool) -> dict[str, Any]:
    """TimeoutError after `LIMIT` seconds, so that the next experiment has its turn."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        return experiment(cuda)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def device_of(cuda: bool) -> torch.device:
    return torch.device("cuda" if cuda else "cpu")


@lru_cache(1)
def small_network(name: str) -> Any:
    return models.target(name, "cpu", torch.bfloat16, 2 if name == "xl" else 1, small=True)


def network(name: str, cuda: bool) -> Any:
    return gates.network(name) if cuda else small_network(name)


@dataclass
class Way:
    """A recorded function, and the logits (R, M, V) of its last call."""

    run: Action
    logits: list[Tensor]


def not_recorded(functions: Mapping[str, Action], device: torch.device) -> list[Action]:
    """Instead of a recorder, where nothing can be recorded."""
    return list(functions.values())


def graphs(cuda: bool, kernels: Any = None) -> Graphs:
    """An engine that records, where there is a device."""
    return Graphs(cuda_graphs if cuda else not_recorded, kernels)


def recorded_pass(name: str, nodes: int, cuda: bool, engine: Graphs) -> Way:
    """A pass of a target over a chain of nodes, the root included."""
    model, device, nodes = network(name, cuda), device_of(cuda), nodes if cuda else min(nodes, MOST_DRY)
    session = model.open(models.conditioning(name, 1, device.type, torch.bfloat16, not cuda), 1, True, nodes)
    if engine.kernels is not None:
        session.use(engine.kernels)
    tree = build(chain_paths(nodes - 1)).to(device)
    count = torch.full((1,), CONTEXT[name] - session.prefix_length if cuda else 1, device=device)
    history = torch.zeros(1, session.length + nodes, dtype=torch.int64, device=device)
    logits: list[Tensor] = []

    def forward() -> None:
        logits[:] = session.forward(history[:, :nodes], tree, history, count)[:1]

    return Way(engine.repeated(forward, device), logits)


def compared(ways: Mapping[str, Action], cuda: bool) -> dict[str, float] | None:
    """Milliseconds, by turns, so that a change of the device's clock meets all; None without a device."""
    if not cuda:
        for run in ways.values():
            run()
        return None
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, run in ways.items():
            taken[name] += floor.seconds(run, torch.device("cuda"), least=0.02, samples=3)
    return {name: 1e3 * statistics.median(some) for name, some in taken.items()}


def line(ms: Mapping[str, float] | None, of: str, to: str, decision: Decision) -> dict[str, Any]:
    """Of the time of one way relative to another."""
    if ms is None:
        return {"ratio": None, "note": "dry: no CUDA device"}
    ratio = ms[of] / ms[to]
    times = ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
    device = torch.cuda.get_device_name()
    note = f"{decision(ratio)} ({times})"
    return {"ratio": ratio, "measured": ratio, "unit": "x", "ms": dict(ms), "note": note, "device": device}


def of_passes(ways: Mapping[str, Way], of: str, to: str, cuda: bool, decision: Decision, exact: bool) -> dict[str, Any]:
    """A `line`, after a comparison of the logits with the logits of `to`; exact: bit for bit."""
    found = line(compared({name: way.run for name, way in ways.items()}, cuda), of, to, decision)
    [want] = ways[to].logits
    differences = {
        name: float((way.logits[0].float() - want.float()).abs().max() / want.float().abs().max())
        for name, way in ways.items()
    }
    ok = all(difference <= (0.0 if exact else DIFFERENCE) for difference in differences.values())
    return found | {"differences": differences} | ({} if ok else {"ok": False, "note": f"logits differ: {differences}"})


def worth(most: float, yes: str, no: str) -> Decision:
    """One of two decisions: yes, where the ratio is at most so much."""
    return lambda ratio: f"{yes if ratio <= most else no}, limit {most:g}"


def dependent(cuda: bool) -> dict[str, Any]:
    ways = {
        key: recorded_pass("xl", 1, cuda, graphs(cuda, FusedKernels(dependent=key == "on"))) for key in ("on", "off")
    }
    decision = worth(1.02, "delete dependent launch", "keep dependent launch")
    return of_passes(ways, "off", "on", cuda, decision, exact=True)


def few_rows(cuda: bool) -> dict[str, Any]:
    kernels = FusedKernels(gates.stored_tiles(), most_weights=EVERY_WEIGHT)
    kernels.tune(network("7b", cuda).layers, (1,), gates.ROWS, CONTEXT["7b"])
    ways = {
        "cuBLAS": recorded_pass("7b", 1, cuda, graphs(cuda, FusedKernels())),
        "few rows": recorded_pass("7b", 1, cuda, graphs(cuda, kernels)),
    }
    decision = worth(0.98, "few-row products at every size of weights", "keep cuBLAS for large weights")
    return of_passes(ways, "few rows", "cuBLAS", cuda, decision, exact=False)


def one_more_node(nodes: int, cuda: bool) -> dict[str, Any]:
    ways = {str(n): recorded_pass("7b", n, cuda, graphs(cuda, FusedKernels())) for n in (nodes, nodes + 1)}
    ms = compared({name: way.run for name, way in ways.items()}, cuda)
    decision = worth(1.03, "leave windows as they are", f"draft {nodes - 1} tokens, so that a pass has {nodes} nodes")
    return line(ms, str(nodes + 1), str(nodes), decision)


def attention_blocks(cuda: bool) -> dict[str, Any]:
    """Of all layers, so that no keys are in the L2 cache."""
    nodes, device = 33, device_of(cuda)
    layers, heads, dim, slots = (32, 32, 128, 2496) if cuda else (1, 1, 16, 64)
    root = torch.full((2,), slots - nodes - 8, device=device)
    mask = TreeMask.chain(torch.zeros_like(root), root[:, None] + torch.arange(nodes, device=device))
    q = torch.randn(2, nodes, heads, dim, device=device).bfloat16()
    k, v = (torch.randn(layers, 2, heads, slots, dim, device=device).bfloat16() for _ in range(2))
    engine, counters, ways, outputs = graphs(cuda), Counters(), {}, {}
    depends = launch.can_depend(device)

    def run(queries: int) -> None:
        tiles = Tiles()
        key = tiles.attention_key(2 * heads, nodes, dim, q.dtype)
        tiles.tuned_attention[key] = default_attention(queries, dim, q.dtype, depends)
        for layer in range(layers):
            outputs[queries] = attend(q, k[layer], v[layer], mask, counters, tiles, depends)

    for queries in (16, 32, 64):
        ways[str(queries)] = engine.repeated(partial(run, queries), device)
    ms = compared(ways, cuda)
    fastest = min((16, 32), key=lambda queries: 1.0 if ms is None else ms[str(queries)])
    decision = worth(0.95, f"blocks of {fastest} queries by default at 33 nodes", "keep blocks of 64 queries")
    found = line(ms, str(fastest), "64", decision)
    alike = all(torch.allclose(outputs[64], outputs[queries], rtol=0.02, atol=0.02) for queries in (16, 32))
    return found if alike else found | {"ok": False, "note": "outputs differ"}


@triton.jit
def _touch(WEIGHT, SCRATCH, size, BULK: tl.constexpr):
    """Bring 128 KB of WEIGHT, `size` values int32, into the L2 cache: by 32 instructions, one a thread, or by loads,
    whose sum is stored so that they are not removed."""
    first = tl.program_id(0).to(tl.int64) * 32768
    if BULK:
        at = first + tl.arange(0, 32) * 1024
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 4096; mov.u32 $0, 0;", "=r,l",
            [WEIGHT + tl.where(at + 1024 <= size, at, 0)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        total = tl.zeros([4096], tl.int32)
        for part in range(8):
            at = first + part * 4096 + tl.arange(0, 4096)
            total += tl.load(WEIGHT + at, mask=at < size, other=0)
        tl.store(SCRATCH + tl.program_id(0), tl.sum(total))


class Prefetching(FusedKernels):
    """Kernels of a pass at whose layers a side branch of the recording begins, which reads the next layer's weights
    into the L2 cache; it ends with the last layer."""

    def __init__(self, blocks: Any, bulk: bool, cuda: bool) -> None:
        super().__init__()
        self.weights = [
            [p.detach().flatten().view(torch.int32) for p in one.parameters() if p.dim() == 2] for one in blocks
        ]
        most = max(p.numel() for some in self.weights for p in some)
        self.scratch = torch.empty(triton.cdiv(most, 32768), dtype=torch.int32, device=device_of(cuda))
        self.bulk, self.side = bulk, torch.cuda.Stream() if cuda else None

    def block(self, one: Any, stream: Any, context: Any, layer: int) -> Any:
        if layer + 1 < len(self.weights):
            self._fork(layer + 1)
        out = super().block(one, stream, context, layer)
        if self.side is not None and layer + 1 == len(self.weights):
            torch.cuda.current_stream().wait_stream(self.side)
        return out

    def _fork(self, layer: int) -> None:
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for weight in self.weights[layer]:
                grid = (triton.cdiv(weight.numel(), 32768),)
                warps = 1 if self.bulk else 8
                launch.start(_touch, grid, weight, self.scratch, weight.numel(), self.bulk, num_warps=warps)


def prefetch(cuda: bool, bulk: bool) -> dict[str, Any]:
    if bulk and not (cuda and torch.cuda.get_device_capability() >= (9, 0)):
        raise results.SkippedError("the instruction needs a device of compute capability 9.0")
    kernels = Prefetching(network("xl", cuda).layers, bulk, cuda)
    ways = {
        "prefetched": recorded_pass("xl", 1, cuda, graphs(cuda, kernels)),
        "plain": recorded_pass("xl", 1, cuda, graphs(cuda, FusedKernels())),
    }
    decision = worth(0.95, "build the side branch into engine=triton", "no side branch")
    return of_passes(ways, "prefetched", "plain", cuda, decision, exact=True)


@cache
def traced() -> BlockCall:
    """Blocks compiled by PyTorch's own operations, where there is no device."""
    return torch.compile(call_block, backend="aot_eager", fullgraph=True, dynamic=False)


def inductor_blocks(name: str, nodes: int, cuda: bool) -> dict[str, Any]:
    """Blocks are compiled once for all layers. Ours have tuned tiles, since Inductor tunes its own."""
    kernels = FusedKernels(gates.stored_tiles())
    kernels.tune(network(name, cuda).layers, (nodes,), gates.ROWS, CONTEXT[name])
    compiled = Graphs(compiling(cuda_graphs, inductor) if cuda else compiling(not_recorded, traced))
    ways = {
        "triton": recorded_pass(name, nodes, cuda, graphs(cuda, kernels)),
        "graph": recorded_pass(name, nodes, cuda, graphs(cuda)),
        "compiled": recorded_pass(name, nodes, cuda, compiled),
    }
    if 2 * nodes > block.MOST_ROWS:
        decision = worth(1.05, "delete the path above 16 rows", "keep the path above 16 rows")
        if name == "xl":
            decision = lambda ratio: "7B decides about the path above 16 rows"  # noqa: E731
    elif name == "xl":
        decision = worth(1.15, "delete the few-row kernels: they gain under 15 % at XL", "keep the few-row kernels")
    else:
        decision = lambda ratio: "XL decides about the few-row kernels"  # noqa: E731
    return of_passes(ways, "compiled", "triton", cuda, decision, exact=False)
