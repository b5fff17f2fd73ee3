"""The roofline of a device with the target's passes: the cost of a pass over more nodes, and its cause."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Okabe and Ito's colours, distinguishable for colour-blind readers, each with its own marker for print.
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "v"), ("#E69F00", "D"), ("#56B4E9", "P"))


def draw(rows: Sequence[Mapping[str, str]], stem: Path) -> list[Path]:
    """Draws the passes timed by number of nodes in rows (as read from their file), as SVG and PNG; nothing where no row
    has any. Returns the files written. The ceilings are those of the newest row."""
    shown = [row for row in rows if row["by_nodes"] and row["node_gflop"]]
    if not shown:
        return []
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.hashsalt": "specbench", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    drawn, axis = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    latest: dict[str, Mapping[str, str]] = {_name(row): row for row in shown}
    intensities = []
    for number, (name, row) in enumerate(latest.items()):
        colour, marker = _STYLES[number % len(_STYLES)]
        work, read = float(row["node_gflop"]), float(row["weights_gb"]) + float(row["cache_gb"])
        nodes = {int(n): ms for n, ms in json.loads(row["by_nodes"]).items()}
        x = [n * work / read for n in nodes]
        y = [n * work / (ms / 1e3) for n, ms in nodes.items()]
        intensities += x
        axis.plot(x, y, color=colour, marker=marker, linewidth=1, markersize=5, label=name)
        for n, a, b in zip(nodes, x, y, strict=True):
            axis.annotate(str(n), (a, b), textcoords="offset points", xytext=(4, -9), fontsize=7, color=colour)
    newest = shown[-1]
    speed, peak = float(newest["bandwidth_gb_s"]), float(newest["arithmetic_gflop_s"])
    ends = min(*intensities, peak / speed) / 2, max(*intensities, peak / speed) * 2
    edge = [ends[0], peak / speed, ends[1]]
    roof = [min(x * speed, peak) for x in edge]
    axis.plot(edge, roof, color="black", linewidth=1.5, label=f"{speed:,.0f} GB/s, {peak:,.0f} GFLOP/s measured")
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="operations a byte that must be read (FLOP/B); numbers at the points: nodes",
        ylabel="operations a second (GFLOP/s)",
        title=f"The target's pass on {newest['device_name']}",
    )
    axis.grid(True, which="both", linewidth=0.3, alpha=0.6)
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    files = [stem.with_name(f"{stem.name}_roofline.{kind}") for kind in ("svg", "png")]
    for file in files:
        drawn.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(drawn)
    return files


def _name(row: Mapping[str, str]) -> str:
    return f"{row['model']}, {row['rows']} rows, {row['context']} positions before ({row['dtype']})"
