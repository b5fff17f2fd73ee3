"""The remarks in a row's note: how it was measured, and why a metric is missing. (On its images: `rows.degenerate`.)

A run whose metric could not be computed is complete: its images and its row exist. It ends with exit code 3 if the
metric was requested, on the command line or by an experiment, a protocol, a suite or a table, and with 0 if it is a
default of the model or the data set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbench.config import parameters, protocols, variants
from specbench.rows import timing
from specbench.rows.journal import Record
from specbench.rows.shown import unsteady


def measurement_remarks(
    cfg: Mapping[str, Any], sessions: Mapping[str, Mapping[str, Any]], row: Mapping[str, Any]
) -> list[str]:
    """Remarks on how a row was measured."""
    remarks, timed = protocol_remarks(cfg), row["timing"]
    if other := variants.departures(cfg):
        remarks.append(f"departs from variant {cfg['variant']}: {', '.join(other)}")
    if not parameters.in_raster_order(cfg):
        remarks.append("perplexity, log_prob: of each token given those that existed when it was sampled")
    if cfg["batch"] > 1:
        remarks.append(f"decoded in batches of {cfg['batch']}: a latency is measured at batch 1 only")
    if timing.is_timed(cfg) and not timed:
        remarks.append("some images were decoded without timing: a run in another folder measures seconds")
    elif timed and row["baseline_run_id"]:
        paired = (row["timed_pairs"] or 0) - (row["further_pairs"] or 0)
        batches = -(-row["images"] // cfg["batch"])
        if paired < batches:
            what = "images" if cfg["batch"] == 1 else "batches"
            remarks.append(
                f"{batches - paired} of {batches} {what} were not decoded next to their baseline: they do not count in"
                " speed-ups in seconds"
            )
    if why := unsteady(row):
        remarks.append(f"{why}: its seconds are not valid")
    num_workers = max(session.get("workers", 1) for session in sessions.values())
    if num_workers > 1:
        remarks.append(f"decoded by {num_workers} workers: no seconds are measured")
    if len(sessions) > 1:
        remarks.append(f"decoded in {len(sessions)} processes" + (": their timings are mixed" if timed else ""))
        for name in ("commit", "plugins", "device_name", "torch", "prompt_length"):
            if len({str(session.get(name)) for session in sessions.values()}) > 1:
                remarks.append(f"the processes differ in {name.replace('_', ' ')}, the last one's is given")
    return remarks


def emitted_remarks(cfg: Mapping[str, Any], images: Sequence[Record]) -> list[str]:
    """Why a row has no emitted_tv or emitted_kl."""
    if images[0].drafts is not None or not cfg["emitted_draws"]:
        return []
    outside = [r.emitted_outside for r in images if r.emitted_outside is not None]
    if not outside:
        verification = cfg.get("verification", "token")
        what = f"verification={verification}"
        if verification == "token":
            what = f"rule {cfg['rule']} on trees of sampled tokens"
        not_drawn = {"stored": "old", "siblings": "residual", "coupling": "threshold", "opening": "greedy"}
        if any(cfg.get(name) == value for name, value in not_drawn.items()):
            what = "tokens that were not drawn from their stored distribution"
        if cfg.get("drafter") == "vvs":
            what = "tokens that are not verified"
        if not parameters.in_raster_order(cfg):
            what = f"drafter {cfg['drafter']}, whose tokens are not sampled in raster order"
        return [f"emitted_kl: like emitted_tv not computed for {what}"]
    if len(outside) < len(images):
        return [f"emitted_kl: not recorded for {len(images) - len(outside)} images, which an earlier process decoded"]
    share = sum(outside) / len(outside)
    return [f"emitted_kl: infinite, as the target never gives {share:.2g} of the emitted tokens"] * (share > 0)


def unread_remarks(unread: Iterable[int | None]) -> list[str]:
    """How many prompts the model did not read to their end; unread: of each prompt, see `Record`."""
    counts = list(unread)
    if not (cut := [count for count in counts if count]):
        return []
    return [f"prompts: the text encoder cuts off the end of {len(cut)} of {len(counts)} (up to {max(cut)} tokens)"]


def protocol_remarks(cfg: Mapping[str, Any]) -> list[str]:
    """Remarks on the protocol of a row: where the run departs from it, and which parameters it does not state.

    cfg: the checked configuration. Returns [] for a run without a protocol.
    """
    if not cfg["protocol"]:
        return []
    protocol = protocols.read(protocols.name_of(cfg["protocol"]))
    departs, open_, several, code = sentences = (
        f"departs from protocol {protocol.label}",
        f"not stated by protocol {protocol.label}, so the run's own",
        f"one of the values of protocol {protocol.label}",
        f"by the released code of protocol {protocol.label}, not by its paper",
    )
    parts: dict[str, list[str]] = {sentence: [] for sentence in sentences}
    chosen = {"variant": protocol.variant[cfg["method"]]} if cfg["method"] in protocol.variant else {}
    for key, value in (protocol.values_for(cfg["model"], cfg["data"]) | chosen).items():
        if key not in cfg:
            continue
        setting = f"{key} {_shown(key, cfg[key])}"
        options = protocols.options(key, value)
        shown = [_shown(key, option) for option in options]
        if value is None:
            parts[open_].append(setting)
        elif not any(_same(cfg[key], option) for option in options):
            parts[departs].append(f"{setting} (not {' or '.join(shown)})")
        elif len(options) > 1:
            parts[several].append(f"{setting} (of {', '.join(shown)})")
        elif key in protocol.from_code:
            parts[code].append(setting)
    others = f"{', '.join(protocol.models)}, not {cfg['model']}" if protocol.models else "no model"
    other_model = [] if cfg["model"] in protocol.models else [f"protocol {protocol.label} names {others}"]
    return other_model + [f"{sentence}: {', '.join(items)}" for sentence, items in parts.items() if items]


def _same(value: Any, option: Any) -> bool:
    """Whether a run has a protocol's value; it may have more metrics."""
    return set(option) <= set(value) if isinstance(value, list) and isinstance(option, list) else value == option


def _shown(name: str, value: Any) -> str:
    if value is None:
        return parameters.table()[name].null
    if isinstance(value, list):
        return " + ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def pieces(note: str) -> list[tuple[str, str]]:
    """The remarks of a row's note, each with the column that it is about, or with its own first words."""
    return [(piece, piece.partition(": ")[0]) for piece in re.split(r"; (?=[a-z][a-z0-9_]*: )", note)]


def unmeasured(metrics: Iterable[str], row: Mapping[str, Any]) -> dict[str, str]:
    """Metric -> why the row has no value in its first column, in the words of the note."""
    reasons = {column: piece.partition(": ")[2] for piece, column in pieces(row.get("note") or "")}
    columns = {name: parameters.metric_columns(name)[0] for name in metrics}
    return {
        name: reasons.get(column) or "the row does not say why"
        for name, column in columns.items()
        if row.get(column) in (None, "")
    }
