"""What decides what is built next: passes of a target, recorded in two ways, measured by turns.

A pass is what a step takes most of. Each line has the ratio of two times and the decision that follows from it, which
was made before anything was measured. Without a device every pass is done once at a small size, by Triton's
interpreter.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from gpu_checks import gates, results
from gpu_checks.gates import CONTEXT, Pass, recorded_pass, timed
from specbench.engine.graph import Graphs, call_block, compiling, inductor
from specbench.engine.kernels import FusedKernels, block, launch
from specbench.engine.kernels.attention import Counters, attend
from specbench.engine.kernels.tiles import Tiles, default_attention
from specbench.engine.masks import TreeMask

#: A number of weights that no product has more of.
EVERY_WEIGHT = 1 << 30
#: Targets, numbers of nodes, positions and weights for which tiles are tuned, and which the first stage compiles.
TUNED = (("7b", ((1,), CONTEXT["7b"], EVERY_WEIGHT)), ("xl", ((1, 33), CONTEXT["xl"])))
#: Seconds of one experiment.
LIMIT = 120
#: Largest difference of two ways' logits, relative to the largest logit: bfloat16 keeps eight bits.
DIFFERENCE = 0.06

Decision = Callable[[float], str]


def checks(fast: bool) -> Iterator[results.Check]:
    """Those of the 7B target follow each other, since one network is held at a time; those that compile come last."""
    some: dict[str, Callable[[], dict[str, Any]]] = {
        "XL, one node: next layer's weights prefetched by loads": partial(prefetch, bulk=False),
        "XL, one node: next layer's weights prefetched in bulk": partial(prefetch, bulk=True),
        "XL, one node: dependent launch off": dependent,
        "7B, one node: few-row products instead of cuBLAS": few_rows,
        "7B: 33 nodes instead of 32": partial(one_more_node, 32),
        "7B: 65 nodes instead of 64": partial(one_more_node, 64),
        "7B attention, 33 queries: smaller blocks": attention_blocks,
    }
    for target, nodes in [("xl", 1)] if fast else [("7b", 33), ("xl", 1), ("xl", 33), ("7b", 1)]:
        count = "one node" if nodes == 1 else f"{nodes} nodes"
        name = f"{target.upper()}, {count}: Inductor's blocks instead of engine=triton"
        some[name] = partial(inductor_blocks, target, nodes)
    yield from ((name, partial(_limited, experiment)) for name, experiment in some.items())


def _limited(experiment: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """TimeoutError after `LIMIT` seconds, so that the next experiment has its turn."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        return experiment()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def recorded(kernels: FusedKernels | None = None) -> Graphs:
    return Graphs(gates.recorder(), kernels)


def line(ms: Mapping[str, float], of: str, to: str, decision: Decision) -> dict[str, Any]:
    """Of the time of one way relative to another."""
    ratio = ms[of] / ms[to]
    times = ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
    row = {"ratio": ratio, "measured": ratio, "unit": "x", "ms": dict(ms), "device": gates.device_name()}
    return row | {"note": f"{decision(ratio)} ({times})"}


def of_passes(ways: Mapping[str, Pass], of: str, to: str, decision: Decision, exact: bool) -> dict[str, Any]:
    """A `line`, after a comparison of the logits with the logits of `to`; exact: bit for bit."""
    row = line(timed({name: way.run for name, way in ways.items()}), of, to, decision)
    [want] = ways[to].logits
    differences = {
        name: float((way.logits[0].float() - want.float()).abs().max() / want.float().abs().max())
        for name, way in ways.items()
    }
    ok = all(difference <= (0.0 if exact else DIFFERENCE) for difference in differences.values())
    return row | {"differences": differences} | ({} if ok else {"ok": False, "note": f"logits differ: {differences}"})


def worth(most: float, yes: str, no: str) -> Decision:
    """One of two decisions: yes, where the ratio is at most so much."""
    return lambda ratio: f"{yes if ratio <= most else no}, limit {most:g}"


def dependent() -> dict[str, Any]:
    ways = {key: recorded_pass("xl", 1, recorded(FusedKernels(dependent=key == "on"))) for key in ("on", "off")}
    return of_passes(ways, "off", "on", worth(1.02, "delete dependent launch", "keep dependent launch"), exact=True)


def few_rows() -> dict[str, Any]:
    kernels = FusedKernels(gates.stored_tiles(), most_weights=EVERY_WEIGHT)
    kernels.tune(gates.network("7b").layers, (1,), gates.ROWS, CONTEXT["7b"])
    ways = {
        "cuBLAS": recorded_pass("7b", 1, recorded(FusedKernels())),
        "few rows": recorded_pass("7b", 1, recorded(kernels)),
    }
    decision = worth(0.98, "few-row products at every size of weights", "keep cuBLAS for large weights")
    return of_passes(ways, "few rows", "cuBLAS", decision, exact=False)


def one_more_node(nodes: int) -> dict[str, Any]:
    ms = timed({str(n): recorded_pass("7b", n, recorded(FusedKernels())).run for n in (nodes, nodes + 1)})
    decision = worth(1.03, "leave windows as they are", f"draft {nodes - 1} tokens, so that a pass has {nodes} nodes")
    return line(ms, str(nodes + 1), str(nodes), decision)


def attention_blocks() -> dict[str, Any]:
    """Of all layers, so that no keys are in the L2 cache."""
    nodes, device = 33, gates.device()
    layers, heads, dim, slots = (1, 1, 16, 64) if gates.small() else (32, 32, 128, 2496)
    root = torch.full((2,), slots - nodes - 8, device=device)
    mask = TreeMask.chain(torch.zeros_like(root), root[:, None] + torch.arange(nodes, device=device))
    q = torch.randn(2, nodes, heads, dim, device=device).bfloat16()
    k, v = (torch.randn(layers, 2, heads, slots, dim, device=device).bfloat16() for _ in range(2))
    counters, depends, outputs = Counters(), launch.can_depend(device), {}

    def run(queries: int) -> None:
        tiles = Tiles()
        key = tiles.attention_key(2 * heads, nodes, dim, q.dtype)
        tiles.tuned_attention[key] = default_attention(queries, dim, q.dtype, depends)
        for layer in range(layers):
            outputs[queries] = attend(q, k[layer], v[layer], mask, counters, tiles, depends)

    ms = timed({str(queries): recorded().repeated(partial(run, queries), device) for queries in (16, 32, 64)})
    fastest = min(("16", "32"), key=lambda queries: ms[queries])
    decision = worth(0.95, f"blocks of {fastest} queries by default at 33 nodes", "keep blocks of 64 queries")
    alike = all(torch.allclose(outputs[64], outputs[queries], rtol=0.02, atol=0.02) for queries in (16, 32))
    return line(ms, fastest, "64", decision) | ({} if alike else {"ok": False, "note": "outputs differ"})


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

    def __init__(self, blocks: Any, bulk: bool) -> None:
        super().__init__()
        self.weights = [
            [p.detach().flatten().view(torch.int32) for p in one.parameters() if p.dim() == 2] for one in blocks
        ]
        most = max(p.numel() for some in self.weights for p in some)
        self.scratch = torch.empty(triton.cdiv(most, 32768), dtype=torch.int32, device=gates.device())
        self.bulk, self.side = bulk, None if gates.small() else torch.cuda.Stream()

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


def prefetch(bulk: bool) -> dict[str, Any]:
    if bulk and (gates.small() or torch.cuda.get_device_capability() < (9, 0)):
        raise results.SkippedError("the instruction needs a device of compute capability 9.0")
    kernels = Prefetching(gates.network("xl").layers, bulk)
    ways = {
        "prefetched": recorded_pass("xl", 1, recorded(kernels)),
        "plain": recorded_pass("xl", 1, recorded(FusedKernels())),
    }
    decision = worth(0.95, "build the side branch into engine=triton", "no side branch")
    return of_passes(ways, "prefetched", "plain", decision, exact=True)


#: By target and whether a pass has more rows than few: what the ratio of Inductor's time to ours decides.
INDUCTOR = {
    ("7b", True): worth(1.05, "delete the path above 16 rows", "keep the path above 16 rows"),
    ("xl", True): lambda ratio: "7B decides about the path above 16 rows",
    ("xl", False): worth(1.15, "delete the few-row kernels: they gain under 15 % at XL", "keep the few-row kernels"),
    ("7b", False): lambda ratio: "XL decides about the few-row kernels",
}


def inductor_blocks(name: str, nodes: int) -> dict[str, Any]:
    """Blocks are compiled once for all layers, without a device by PyTorch's own operations. Ours have tuned tiles,
    since Inductor tunes its own."""
    kernels = FusedKernels(gates.stored_tiles())
    kernels.tune(gates.network(name).layers, (nodes,), gates.ROWS, CONTEXT[name])
    traced = torch.compile(call_block, backend="aot_eager", fullgraph=True, dynamic=False)
    compiled = Graphs(compiling(gates.recorder(), (lambda: traced) if gates.small() else inductor))
    ways = {
        "triton": recorded_pass(name, nodes, recorded(kernels)),
        "graph": recorded_pass(name, nodes, recorded()),
        "compiled": recorded_pass(name, nodes, compiled),
    }
    return of_passes(ways, "compiled", "triton", INDUCTOR[name, 2 * nodes > block.MOST_ROWS], exact=False)
