"""Experiments that decide the next steps of the development. Each compares two passes of a target: by our kernels and
by blocks that Inductor compiles, or with one node more. The passes alternate.

A pass is what a step takes most of. Each line has the ratio of two times and the decision that follows from it, which
was made before anything was measured. Without a device every pass is done once at a small size, by Triton's
interpreter.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch

from gpu_checks import gates, results
from gpu_checks.gates import CONTEXT, Pass, recorded_pass, timed
from specbench.engine.graph import Graphs, call_block, compiling, inductor
from specbench.engine.kernels import FusedKernels, block

#: Nodes and positions of the passes for which tiles are tuned, and which the first stage compiles.
TUNED = (("xl", ((1, 33), CONTEXT["xl"])), ("7b", ((32, 33, 64, 65), CONTEXT["7b"])))
#: Seconds of one experiment.
LIMIT = 120
#: Largest difference of two ways' logits, relative to the largest logit: bfloat16 keeps eight bits.
DIFFERENCE = 0.06

Decision = Callable[[float], str]


def checks(fast: bool) -> Iterator[results.Check]:
    """The decisive ones first, since a stage that is stopped loses the last ones."""
    for nodes in (1,) if fast else (1, 4):
        yield f"XL, {nodes} nodes: weights not requested early", partial(_limited, partial(early, "xl", nodes))
    for target, nodes, limits in () if fast else (("xl", 26, {"MOST_ROWS": 64}), ("7b", 1, {"MOST_WEIGHTS": 1 << 24})):
        name = f"{target.upper()}, {nodes} nodes: fused products instead of cuBLAS, {limits}"
        yield name, partial(_limited, partial(more_fused, target, nodes, limits))
    for nodes in () if fast else (32, 64):
        yield f"7B: {nodes + 1} nodes instead of {nodes}", partial(_limited, partial(one_more_node, nodes))
    for target, nodes in [("xl", 1)] if fast else [("xl", 1), ("7b", 33), ("7b", 1), ("xl", 33)]:
        count = "one node" if nodes == 1 else f"{nodes} nodes"
        name = f"{target.upper()}, {count}: Inductor's blocks instead of engine=triton"
        yield name, partial(_limited, partial(inductor_blocks, target, nodes))


def _limited(experiment: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """TimeoutError after `LIMIT` seconds, so that the next experiment can run."""

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


def line(ms: Mapping[str, float], numerator: str, denominator: str, decision: Decision) -> dict[str, Any]:
    """The row of the time of one pass relative to another."""
    ratio = ms[numerator] / ms[denominator]
    times = ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
    row = {"ratio": ratio, "measured": ratio, "unit": "x", "ms": dict(ms), "device": gates.device_name()}
    return row | {"note": f"{decision(ratio)} ({times})"}


def of_passes(passes: Mapping[str, Pass], numerator: str, denominator: str, decision: Decision) -> dict[str, Any]:
    """A `line`, after a comparison of the logits with the logits of `denominator`. Every replay must give the same
    bits: otherwise a kernel reads memory before an earlier kernel has written it."""
    first = {}
    for name, timed_pass in passes.items():
        timed_pass.run()
        first[name] = timed_pass.logits[0].clone()
    row = line(timed({name: timed_pass.run for name, timed_pass in passes.items()}), numerator, denominator, decision)
    [want] = passes[denominator].logits
    differences = {
        name: float((timed_pass.logits[0].float() - want.float()).abs().max() / want.float().abs().max())
        for name, timed_pass in passes.items()
    }
    ok = all(difference <= DIFFERENCE for difference in differences.values())
    changed = [name for name, timed_pass in passes.items() if not torch.equal(first[name], timed_pass.logits[0])]
    note = f"replays differ: {', '.join(changed)}" if changed else "" if ok else f"logits differ: {differences}"
    return row | {"differences": differences} | ({"ok": False, "note": note} if note else {})


def worth(most: float, yes: str, no: str) -> Decision:
    """A decision: `yes` if the ratio is at most `most`, otherwise `no`."""
    return lambda ratio: f"{yes if ratio <= most else no}, limit {most:g}"


def one_more_node(nodes: int) -> dict[str, Any]:
    """Compares a pass of `nodes` + 1 nodes (a window of `nodes` tokens and the root) with a pass of `nodes` nodes."""
    kernels = FusedKernels(gates.stored_tiles())
    kernels.tune(gates.network("7b").layers, (nodes, nodes + 1), gates.ROWS, CONTEXT["7b"])
    ms = timed({str(n): recorded_pass("7b", n, recorded(kernels)).run for n in (nodes, nodes + 1)})
    decision = worth(1.03, "leave windows as they are", f"draft {nodes - 1} tokens, so that a pass has {nodes} nodes")
    return line(ms, str(nodes + 1), str(nodes), decision)


def early(name: str, nodes: int) -> dict[str, Any]:
    """Compares a pass whose kernels do not request the weights of later kernels with one whose kernels do."""
    ways = {}
    for way, prefetch in (("early", True), ("not early", False)):
        kernels = FusedKernels(gates.stored_tiles(), prefetch=prefetch)
        kernels.tune(gates.network(name).layers, (nodes,), gates.ROWS, CONTEXT[name])
        ways[way] = recorded_pass(name, nodes, recorded(kernels))
    return of_passes(ways, "not early", "early", worth(1.01, "delete the requests", "keep the requests"))


def more_fused(name: str, nodes: int, limits: dict[str, int]) -> dict[str, Any]:
    """Compares a pass whose larger products are computed here, too, up to other limits of `block`, with a pass whose
    larger products are computed by cuBLAS."""
    kernels = FusedKernels(gates.stored_tiles())
    ways = {"cuBLAS": recorded_pass(name, nodes, recorded(kernels))}
    ways["cuBLAS"].run()
    with mock.patch.multiple(block, **limits):
        kernels.tune(gates.network(name).layers, (nodes,), gates.ROWS, CONTEXT[name])
        ways["fused"] = recorded_pass(name, nodes, recorded(kernels))
        ways["fused"].run()
    return of_passes(ways, "fused", "cuBLAS", worth(0.97, "raise the limit", "leave the limit"))


#: By target and whether a pass has more rows than few: what the ratio of Inductor's time to ours decides.
INDUCTOR = {
    ("7b", True): worth(1.05, "delete the path above 16 rows", "keep the path above 16 rows"),
    ("xl", True): lambda ratio: "7B decides about the path above 16 rows",
    ("xl", False): worth(1.15, "delete the few-row kernels: they gain under 15 % at XL", "keep the few-row kernels"),
    ("7b", False): lambda ratio: "XL decides about the few-row kernels",
}


def inductor_blocks(name: str, nodes: int) -> dict[str, Any]:
    """Blocks are compiled once for all layers; without a device by PyTorch's own operations. Our kernels have tuned
    tiles, since Inductor tunes its own."""
    kernels = FusedKernels(gates.stored_tiles())
    kernels.tune(gates.network(name).layers, (nodes,), gates.ROWS, CONTEXT[name])
    traced = torch.compile(call_block, backend="aot_eager", fullgraph=True, dynamic=False)
    compiled = Graphs(compiling(gates.recorder(), (lambda: traced) if gates.small() else inductor))
    ways = {
        "triton": recorded_pass(name, nodes, recorded(kernels)),
        "graph": recorded_pass(name, nodes, recorded()),
        "compiled": recorded_pass(name, nodes, compiled),
    }
    return of_passes(ways, "compiled", "triton", INDUCTOR[name, 2 * nodes > block.MOST_ROWS])
