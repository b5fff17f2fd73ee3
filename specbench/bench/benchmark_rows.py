"""The rows of `specbench bench` and `specbench probe`: their columns, and a row as text."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.rows import provenance
from specbench.rows.columns import shared
from specbench.storage import origin
from specbench.storage.csv_text import RowFile

#: Distances at which a probe hides a token.
OFFSETS = 16

COLUMNS = {
    **shared("time specbench commit config_hash model weights method drafter rule"),
    "parameters": "parameters of the drafter, the rule and the sampling",
    "batch": "images at once",
    "rows": "sequences at once: twice the batch with guidance",
    "forced_accept": "accepted length to which drafts were forced",
    "context": "positions before the timed steps",
    "nodes": "nodes of the target's pass, including the root",
    "steps": "steps timed; every _ms is the median over them",
    "step_ms": "a whole step: the sum of its parts",
    "draft_ms": "drafting",
    "forward_ms": "the target's pass (continuous tokens: without its head)",
    "head_ms": "the target's samples, drawn by its diffusion head (continuous tokens)",
    "verify_ms": "guidance, distributions and the rule",
    "commit_ms": "update of caches and drafter",
    "rest_ms": "bookkeeping",
    "passes_ms": "the part of the step inside the passes of the target's and the drafter's networks",
    "passes_share": "share of the step inside these passes; the rest is the method's own work",
    "overhead": "(step - target's pass) / target's pass, both recorded if the engine records",
    "recorded_step_ms": "a step replayed as one recorded graph (engine=graph); its parts are timed kernel by kernel",
    "vanilla_recorded_step_ms": "the same for vanilla AR",
    "recorded_forward_ms": "the target's pass over the step's nodes, recorded and replayed alone",
    "recorded_floor_share": "floor of a step / recorded step",
    "vanilla_recorded_floor_share": "floor of the target's pass / recorded step of vanilla AR",
    "vanilla_step_ms": "a step of vanilla AR at the same position",
    "vanilla_forward_ms": "the target's pass in this step",
    "bandwidth_gb_s": "measured memory bandwidth of this device",
    "arithmetic_gflop_s": "its measured floating-point operations per second in matrix products",
    "node_gflop": "operations of the target's pass per node, all rows",
    "weights_gb": "weights that a pass of the target reads",
    "cache_gb": "keys and values that this pass reads",
    "draft_weights_gb": "weights that drafting reads",
    "forward_floor_ms": "time to read the target's weights and cache at that bandwidth",
    "draft_floor_ms": "time to read the drafter's weights",
    "step_floor_ms": "the sum of both",
    "token_floor_ms": "floor of a step / accepted length: the least time per token",
    "vanilla_token_floor_ms": "the same for vanilla AR: floor of the target's pass",
    "bandwidth_share": "floor of the target's pass / its time, recorded if the engine records",
    "diffusion_step_ms": "one step of the diffusion head in vanilla AR",
    "diffusion_floor_ms": "its floor",
    "by_nodes": "JSON: the target's pass in ms by number of nodes, alone",
    "by_nodes_executed": "how it was executed: recorded (replayed as a graph) or eager (kernel by kernel)",
    "node_cost": "JSON: the same relative to one node",
    "bases_difference": "relative difference of the two measurements of one node: by_nodes, vanilla_forward_ms (eager)",
    "bases_noise": "the largest difference that their noise allows; empty below 5 steps, when nothing is refused",
    "attempts": "measurements of vanilla AR and of the passes by number of nodes, until both agreed on one node",
    "tokens": "tokens of an image",
    "accepted_length": "tokens of an image / target passes",
    "latency_s": "mean seconds of whole images at once, from prefill to the last token",
    "vanilla_latency_s": "the same for vanilla AR",
    "tokens_per_s": "tokens of all images at once / latency",
    "images_per_s": "images at once / latency",
    "step_compression": "target passes of vanilla AR / target passes of the method",
    "speedup": "latency of vanilla AR / latency",
    "speedup_share": "speed-up / step compression",
    "peak_memory_mib": "peak: device memory on CUDA, resident memory of the process on the CPU",
    **shared("device device_name dtype engine torch driver threads plugins"),
}

#: What was measured, for rows about the distributions of a model.
OF_PROBE = {
    **shared("config_hash time specbench commit model weights data split"),
    "seed": "seed of the images",
    "temperature": "softmax temperature of the distributions, 1 if it is 0",
    "top_k": "top-k of the decoding; the distributions are from before it",
    "top_p": "top-p of the decoding; the distributions are from before it",
    "cfg_scale": "guidance scale",
    "images": "images",
}
#: The device and the versions of a probe.
WHERE = shared("device device_name torch driver python threads plugins")

PROBE_COLUMNS = {
    **OF_PROBE,
    "top_probabilities": "JSON list: mean mass of the 1, 2, ..., 100 most probable tokens",
    "entropy": "mean entropy of a distribution, nats",
    "entropy_stderr": "its standard error over images",
    "tv_by_distance": "JSON list: mean total variation between a distribution and the one without the token 1, 2, ..."
    " positions before the last one",
    "tv_by_distance_stderr": "their standard errors over images",
    "width": "tokens in a row of the image",
    **WHERE,
}

#: Columns of lists, as JSON.
LISTS = frozenset("top_probabilities tv_by_distance tv_by_distance_stderr".split())

ROWS = RowFile(COLUMNS, "benchmarks")
PROBES = RowFile(PROBE_COLUMNS, "probes")


def row(cfg: RunConfig, values: Mapping[str, Any], forced: float | None = None) -> dict[str, Any]:
    """The row of a benchmarked configuration, from the values of `benchmark.measure`."""
    parts = [p for p in parameters.table() if p in cfg and p in _described()]
    parts = [p for p in parts if p != "drafter_weights" or cfg.drafter_weights]
    parts = [p for p in parts if p != "verification" or cfg.verification != "token"]
    by_nodes = {str(n): round(ms, 5) for n, ms in values["by_nodes"].items()}
    least = by_nodes.get("1")
    derived = {
        "parameters": " ".join(f"{p}={cfg.get(p)}" for p in parts),
        "forced_accept": forced,
        "by_nodes": json.dumps(by_nodes) if by_nodes else None,
        "node_cost": json.dumps({n: round(ms / least, 4) for n, ms in by_nodes.items()}) if least else None,
    }
    return complete(cfg, {**values, **derived}, COLUMNS)


def probe(cfg: RunConfig, offsets: int = OFFSETS) -> dict[str, Any]:
    """The row of a probed configuration."""
    from specbench.bench import distributions

    return complete(cfg, distributions.measure(cfg, offsets), PROBE_COLUMNS)


def complete(cfg: RunConfig, measured: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row of a configuration: the columns that are not in `measured` are those of the configuration, and where and
    when it was measured."""
    from specbench.harness.pipeline import resolve_device

    values = {
        "config_hash": provenance.config_hash(cfg),
        "plugins": "; ".join(parameters.plugins_of(cfg.plain())) or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{name: cfg.get(name) for name in columns if name in cfg},
        **origin.environment(resolve_device(cfg.device)),
        **{name: _cell(value) for name, value in measured.items()},
    }
    return {name: values.get(name) for name in columns}


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps([None if v is None else round(v, 5) for v in value], separators=(",", ":"))
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _costs(row: Mapping[str, Any]) -> dict[str, str]:
    """The target's pass by number of nodes, relative to one node: a range if one node was measured twice."""
    by_nodes = json.loads(row["by_nodes"])
    bases = [by_nodes["1"], *([row["vanilla_forward_ms"]] if row["by_nodes_executed"] == "eager" else [])]
    ends = {n: [f"{ms / base:.2f}" for base in (max(bases), min(bases))] for n, ms in by_nodes.items() if n != "1"}
    return {n: low if low == high else f"{low} to {high}" for n, (low, high) in ends.items()}


def _described() -> set[str]:
    sampling = ("temperature", "top_k", "top_p", "entropy_temperature", "top_n_sigma", "cfg_scale", "cfg_schedule")
    return {*parameters.method_parameters(), *sampling, "size"}


def describe(row: Mapping[str, Any]) -> str:
    """A row as text, part by part."""
    head = f"{row['model']} ({row['weights']}), {row['method']}, batch {row['batch']}, {row['device_name']}"
    context = f", {row['context']} positions before" if row["context"] else ""
    lines = [f"{head}: {row['nodes']} nodes a step{context}"]
    names = {
        "draft": "draft",
        "forward": "target's pass",
        "head": "diffusion head",
        "verify": "verification",
        "commit": "commit",
        "rest": "rest",
    }
    for part, name in names.items():
        value = row[f"{part}_ms"]
        if value is None:
            continue
        least = row.get(f"{part}_floor_ms")
        relative = f"   floor {least:8.3f}   {value / least:6.1f} x floor" if least else ""
        lines.append(f"  {name:16s} {value:9.3f} ms   {value / row['step_ms']:6.1%}{relative}")
    lines.append(f"  {'step':16s} {row['step_ms']:9.3f} ms   vanilla {row['vanilla_step_ms']:.3f} ms")
    if row["passes_ms"]:
        lines.append(f"  {'in networks':16s} {row['passes_ms']:9.3f} ms   {row['passes_share']:6.1%}")
    if row["recorded_step_ms"]:
        for name, prefix, least in (("recorded step", "", "step"), ("of vanilla AR", "vanilla_", "forward")):
            ms, share = (row[f"{prefix}recorded_{value}"] for value in ("step_ms", "floor_share"))
            reached = f"   floor {row[f'{least}_floor_ms']:8.3f} ms, {share:.1%} of it" if share else ""
            lines.append(f"  {name:16s} {ms:9.3f} ms{reached}")
    if row["diffusion_step_ms"]:
        least = row["diffusion_floor_ms"]
        lines.append(f"  a diffusion step takes {row['diffusion_step_ms']:.3f} ms, floor {least:.4f} ms")
    if row["node_cost"]:
        cost = ", ".join(f"{n}: {text}" for n, text in _costs(row).items())
        lines.append(f"  target's pass by nodes, relative to one ({row['by_nodes_executed']}): {cost}")
    if row["latency_s"]:
        lines.append(
            f"  whole images: {row['latency_s']:.3f} s, vanilla {row['vanilla_latency_s']:.3f} s;"
            f" {row['speedup']:.2f} x as fast with {row['step_compression']:.2f} x fewer passes"
            f" ({row['accepted_length']:.2f} tokens per pass)"
        )
    if row["token_floor_ms"]:
        plain = row["vanilla_token_floor_ms"]
        lines.append(f"  floor of a token: {row['token_floor_ms']:.3f} ms, vanilla {plain:.3f} ms")
    lines.append(f"  reads {row['bandwidth_gb_s']:.1f} GB/s; peak memory {row['peak_memory_mib']:.0f} MiB")
    return "\n".join(lines)


def describe_probe(row: Mapping[str, Any]) -> str:
    """A probe as text."""
    top, moved = json.loads(row["top_probabilities"]), json.loads(row["tv_by_distance"])
    lines = [
        f"{row['model']}, {row['images']} images: the most probable token has {top[0]:.3f} on average,",
        f"the ten most probable {top[min(9, len(top) - 1)]:.3f}; entropy {row['entropy']:.2f} nats",
    ]
    if moved:
        lines.append("total variation by distance: " + ", ".join(f"{i}: {tv:.3f}" for i, tv in enumerate(moved, 1)))
    return "\n".join(lines)
