"""What a row's note says about how the row was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench.config import parameters, variants
from specbench.rows import protocol, seconds, timing
from specbench.rows.journal import Record


def measurement_remarks(
    cfg: Mapping[str, Any], sessions: Mapping[str, Mapping[str, Any]], row: Mapping[str, Any]
) -> list[str]:
    """Remarks on how a row was measured."""
    found, timed = protocol.remarks(cfg), row["timing"]
    if other := variants.departures(cfg):
        found.append(f"departs from variant {cfg['variant']}: {', '.join(other)}")
    if _leaves_raster_order(cfg):
        found.append("perplexity, log_prob: of each token given those that existed when it was sampled")
    if cfg["batch"] > 1:
        found.append(f"decoded in batches of {cfg['batch']}: a latency is measured at batch 1 only")
    if timing.is_timed(cfg) and not timed:
        found.append("some images were decoded without timing: a run in another folder measures seconds")
    elif timed and row["baseline_run_id"]:
        paired = (row["timed_pairs"] or 0) - (row["further_pairs"] or 0)
        batches = -(-row["images"] // cfg["batch"])
        if paired < batches:
            what = "images" if cfg["batch"] == 1 else "batches"
            found.append(
                f"{batches - paired} of {batches} {what} were not decoded next to their baseline: they do not count in"
                " speed-ups in seconds"
            )
    if why := seconds.unsteady(row):
        found.append(f"{why}: its seconds are not shown")
    num_workers = max(session.get("workers", 1) for session in sessions.values())
    if num_workers > 1:
        found.append(f"decoded by {num_workers} workers: no seconds are measured")
    if len(sessions) > 1:
        found.append(f"decoded in {len(sessions)} processes" + (": their timings are mixed" if timed else ""))
        for name in ("commit", "plugins", "device_name", "torch"):
            if len({str(session.get(name)) for session in sessions.values()}) > 1:
                found.append(f"the processes differ in {name.replace('_', ' ')}, the last one's is given")
    return found


def emitted_remarks(cfg: Mapping[str, Any], images: Sequence[Record]) -> list[str]:
    """Why a row lacks emitted_tv or emitted_kl."""
    if images[0].drafts is not None or not cfg["emitted_draws"]:
        return []
    outside = [r.emitted_outside for r in images if r.emitted_outside is not None]
    if not outside:
        way = cfg.get("verification", "token")
        what = f"rule {cfg['rule']} on trees of sampled tokens" if way == "token" else f"verification={way}"
        not_drawn = {"stored": "old", "siblings": "residual", "coupling": "threshold", "opening": "greedy"}
        if any(cfg.get(name) == value for name, value in not_drawn.items()):
            what = "tokens that were not drawn from their stored distribution"
        if cfg.get("drafter") == "vvs":
            what = "tokens that are not verified"
        if _leaves_raster_order(cfg):
            what = f"drafter {cfg['drafter']}, whose tokens are not sampled in raster order"
        return [f"emitted_kl: like emitted_tv not computed for {what}"]
    if len(outside) < len(images):
        return [f"emitted_kl: not recorded of {len(images) - len(outside)} images, which an earlier process decoded"]
    share = sum(outside) / len(outside)
    return [f"emitted_kl: infinite, as the target never gives {share:.2g} of the emitted tokens"] * (share > 0)


def _leaves_raster_order(cfg: Mapping[str, Any]) -> bool:
    return parameters.default("drafter", cfg["drafter"], "raster") is False
