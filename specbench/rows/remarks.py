"""The remarks of a row: how it was measured, and why a metric is missing. (On its images: `rows.degenerate`.)

A run whose metric could not be computed is complete: its images and its row exist. It ends with exit code 3 if the
metric was requested, on the command line or by an experiment, a protocol, a suite or a table, and with 0 if it is a
default of the model or the data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbench.config import parameters, protocols, variants
from specbench.config.run_config import RunConfig
from specbench.rows import timing
from specbench.rows.columns import Row
from specbench.rows.journal import Record
from specbench.rows.provenance import DecodingProcess
from specbench.rows.remark import Remark, remark, remarks_of
from specbench.rows.remark_text import of_column
from specbench.rows.shown import unsteady


def measurement_remarks(cfg: RunConfig, sessions: Mapping[str, DecodingProcess], row: Row) -> list[Remark]:
    """Remarks on how a row was measured."""
    remarks, timed = protocol_remarks(cfg), row["timing"]
    if changes := variants.departures(cfg):
        remarks.append(remark("variant", variant=cfg.variant, changes=changes))
    if not parameters.in_raster_order(cfg.drafter):
        remarks += [remark("own_order", column) for column in ("perplexity", "log_prob_mean")]
    if cfg.batch > 1:
        remarks.append(remark("batches", batch=cfg.batch))
    if timing.is_timed(cfg) and not timed:
        remarks.append(remark("not_timed"))
    elif timed and row["baseline_run_id"]:
        paired = (row["timed_pairs"] or 0) - (row["further_pairs"] or 0)
        batches = -(-row["images"] // cfg.batch)
        if paired < batches:
            values = {"unpaired": batches - paired, "batches": batches, "in_batches": cfg.batch > 1}
            remarks.append(Remark("unpaired", values))
    if values := unsteady(row):
        remarks.append(Remark("unsteady", values))
    num_workers = max(process.workers for process in sessions.values())
    if num_workers > 1:
        remarks.append(remark("workers", workers=num_workers))
    if len(sessions) > 1:
        remarks.append(remark("processes", processes=len(sessions), timed=timed))
        for name in ("commit", "plugins", "device_name", "torch", "prompt_length"):
            if len({str(getattr(process, name)) for process in sessions.values()}) > 1:
                remarks.append(remark("processes_differ", what=name.replace("_", " ")))
    return remarks


def emitted_remarks(cfg: RunConfig, images: Sequence[Record]) -> list[Remark]:
    """Why a row has no emitted_tv or emitted_kl."""
    if images[0].drafts is not None or not cfg.emitted_draws:
        return []
    outside = [r.emitted_outside for r in images if r.emitted_outside is not None]
    if not outside:
        return [_not_emitted(cfg).about("emitted_kl")]
    if len(outside) < len(images):
        return [remark("emitted_not_recorded", "emitted_kl", images=len(images) - len(outside))]
    share = sum(outside) / len(outside)
    return [remark("emitted_infinite", "emitted_kl", share=share)] * (share > 0)


def _not_emitted(cfg: RunConfig) -> Remark:
    """Why no emitted divergence is computed for a method."""
    if not parameters.in_raster_order(cfg.drafter):
        return remark("emitted_order", drafter=cfg.drafter)
    if cfg.drafter == "vvs":
        return remark("emitted_not_verified")
    not_drawn = {"stored": "old", "siblings": "residual", "coupling": "threshold", "opening": "greedy"}
    if any(cfg.get(name) == value for name, value in not_drawn.items()):
        return remark("emitted_not_drawn")
    if (verification := cfg.verification) == "token":
        return remark("emitted_tree", rule=cfg.rule)
    return remark("emitted_verification", verification=verification)


def unread_remarks(unread: Iterable[int | None]) -> list[Remark]:
    """How many prompts the model did not read to their end; unread: of each prompt, see `Record`."""
    counts = list(unread)
    if not (cut := [count for count in counts if count]):
        return []
    return [remark("prompts_cut", cut=len(cut), prompts=len(counts), tokens=max(cut))]


def protocol_remarks(cfg: RunConfig) -> list[Remark]:
    """Remarks on the protocol of a row: where the run departs from it, and which parameters it does not state.

    cfg: the checked configuration. Returns [] for a run without a protocol.
    """
    if not cfg.protocol:
        return []
    protocol = protocols.read(protocols.name_of(cfg.protocol))
    parts: dict[str, dict[str, Any]] = {
        code: {} for code in ("protocol_departs", "protocol_open", "protocol_one_of", "protocol_code")
    }
    chosen = {"variant": protocol.variant[cfg.method]} if cfg.method in protocol.variant else {}
    for key, value in (protocol.values_for(cfg.model, cfg.data) | chosen).items():
        if key not in cfg:
            continue
        options = list(protocols.options(key, value))
        if value is None:
            parts["protocol_open"][key] = cfg.get(key)
        elif not any(_same(cfg.get(key), option) for option in options):
            parts["protocol_departs"][key] = [cfg.get(key), options]
        elif len(options) > 1:
            parts["protocol_one_of"][key] = [cfg.get(key), options]
        elif key in protocol.from_code:
            parts["protocol_code"][key] = cfg.get(key)
    label, models = protocol.label, list(protocol.models)
    remarks = [] if cfg.model in models else [remark("protocol_models", protocol=label, models=models, model=cfg.model)]
    return remarks + [remark(code, protocol=label, settings=settings) for code, settings in parts.items() if settings]


def _same(value: Any, option: Any) -> bool:
    """Whether a run has a protocol's value; it may have more metrics."""
    return set(option) <= set(value) if isinstance(value, list) and isinstance(option, list) else value == option


def unmeasured(metrics: Iterable[str], row: Row) -> dict[str, str]:
    """Metric -> why the row has no value in its first column."""
    remarks = remarks_of(row)
    columns = {name: parameters.metric_columns(name)[0] for name in metrics}
    return {
        name: of_column(remarks, column) or "the row does not say why"
        for name, column in columns.items()
        if row.get(column) in (None, "")
    }
