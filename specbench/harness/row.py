"""The row of a run: a pure function of its configuration, records and scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from specbench import data
from specbench.config import indices, parameters, registry
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.rows import degenerate, provenance, remark, summary, timing
from specbench.rows.columns import COLUMNS, Columns, Row, stderr_of
from specbench.rows.journal import Journal, Record
from specbench.rows.provenance import DecodingProcess, RunMetadata
from specbench.rows.remarks import emitted_remarks, measurement_remarks, unread_remarks
from specbench.rows.scores import ScoreLine, score_columns, score_remarks


def row(
    config: RunConfig,
    metadata: RunMetadata,
    records: Sequence[Record],
    baseline: Sequence[Record] | None,
    scores: Iterable[ScoreLine],
    again: Sequence[Record] = (),
) -> Columns:
    """The row (`COLUMNS`) of a run. It depends only on its arguments: on no file and no clock.

    Args:
        metadata: the run's id, and the processes that decoded the records.
        records: the records of the images of the first n prompts, in order.
        baseline: the records of vanilla AR on the same prompts; None if the run has no baseline.
        scores: a line for each metric and, with a baseline, one for its difference from the baseline.
        again: images of both passes that were timed again, in the order of decoding.

    Raises UsageError if `metadata` does not contain a process of the records.
    """
    scores = list(scores)
    reference = records if config.is_vanilla else baseline
    used = {record.session for record in [*records, *(reference or [])]}
    if unknown := sorted(used.union(record.session for record in again) - metadata.sessions.keys()):
        raise UsageError(f"run.json has no entry for process {unknown[0]:.40} of its records: restore the file")
    sessions = {name: session for name, session in metadata.sessions.items() if name in used}
    last = sessions[max(sessions, key=lambda name: sessions[name].started)]
    columns: Columns = dict.fromkeys(COLUMNS)
    columns |= {name: value for name, value in config.plain().items() if name in COLUMNS}
    columns |= {name: value for name, value in asdict(last).items() if name in COLUMNS}
    columns |= {"run_id": metadata.run_id, "config_hash": provenance.config_hash(config)}
    columns["time"] = _newest([*records, *(reference or [])], scores)
    columns["plugins"] = _plugins(last, scores)
    columns["prompts_hash"], columns["images"] = data.prompts_hash(records), len(records)
    columns["n"] = len({indices.prompt_of(record.index) for record in records})
    columns |= score_columns(scores)
    columns |= _measured(config, columns, records, reference, again, metadata.run_id)
    remarks = measurement_remarks(config, sessions, columns) + emitted_remarks(config, records)
    remarks += unread_remarks(record.unread for record in records if not indices.repeat_of(record.index))
    if metadata.smallest_batch:
        remarks.append(remark.remark("smaller_batches", batch=metadata.smallest_batch))
    wrong = degenerate.of_records(records)
    columns["degenerate_images"] = degenerate.count(wrong)
    remarks += [*(finding.remark for finding in wrong), *score_remarks(scores)]
    columns["remarks"] = remark.as_json(remarks) or None
    return columns


def _newest(records: Sequence[Record], scores: Sequence[ScoreLine]) -> str:
    """When the newest of the records and scores was made, in the form of `provenance.utc`."""
    done = datetime.fromtimestamp(max(record.done for record in records), UTC).isoformat(timespec="seconds")
    return max([done, *(line.time for line in scores)])


def against(run: Path, vanilla: Path, n: int) -> Columns:
    """The columns that compare a run with the vanilla AR images of another run, over the first n prompts. Columns in
    seconds are not among them, since the two runs did not alternate. UsageError if the prompts differ."""
    method, baseline = (Journal(folder / "records.jsonl").records_of(range(n)) for folder in (run, vanilla))
    if [(r.index, r.prompt, r.id) for r in method] != [(r.index, r.prompt, r.id) for r in baseline]:
        raise UsageError(f"{run} and {vanilla} have different prompts; remove one of the folders")
    columns = summary.versus(method, baseline)
    kept = {name: columns[name] for name in ("speedup_step", stderr_of("speedup_step"))}
    return {**kept, "baseline_run_id": RunMetadata.read(vanilla / "run.json").run_id}


def _measured(
    config: RunConfig,
    row: Row,
    records: Sequence[Record],
    reference: Sequence[Record] | None,
    again: Sequence[Record],
    run_id: str,
) -> Columns:
    """The columns of the images and of their baseline; row: the columns of the configuration."""
    columns: Columns = {"timing": timing.was_timed([*records, *(reference or [])])}
    columns |= summary.speed(records) | summary.columns(records, parameters.in_raster_order(config.drafter))
    if columns.get("perplexity") is not None:
        # see `Sampling.unfiltered`
        temperature = 1 if row.get("entropy_temperature") is not None else row["temperature"] or 1
        columns["perplexity_backend"] = _conditions(row) + f", temperature {temperature:g}"
    for name in ("emitted_tv", "emitted_kl"):
        if columns.get(name) is not None:
            columns[f"{name}_backend"] = _conditions(row) + _sampling(row)
    if reference:
        columns |= summary.versus(records, reference, again)
        if "gamma" in config:
            columns |= summary.expected_speedup(records, reference, config.own["gamma"])
            if config.verification == "block" or config.own["tries"] > 1:
                columns["speedup_expected"] = None  # see `summary.expected_speedup`
        columns["baseline_run_id"] = run_id + ("" if config.is_vanilla else "/baseline")
    return columns


def _plugins(process: DecodingProcess, scores: Iterable[ScoreLine]) -> str | None:
    """The plug-ins that decoded in a process, and the plug-ins that scored."""
    decoded = process.plugins.split("; ")
    return "; ".join(sorted({*decoded, *(label for line in scores for label in line.plugins)} - {""})) or None


def _conditions(row: Row) -> str:
    """The conditions of a row's likelihoods: "target:llamagen_scenes@1a2b3c4d, cfg_scale 3"."""
    digest = registry.target_weights(row["weights"]).rpartition(":")[2]
    return f"target:{row['model']}@{digest}, cfg_scale {row['cfg_scale']:g}"


def _sampling(row: Row) -> str:
    """How the target is sampled: ", temperature 1, top_k 100"."""
    parameters_and_defaults = (("temperature", None), ("top_k", None), ("top_p", 1), ("top_n_sigma", None))
    curve = row.get("entropy_temperature")
    suffix = f", entropy_temperature {curve}" if curve is not None else ""
    changed = [(name, row[name]) for name, off in parameters_and_defaults if row.get(name) not in (None, off)]
    return "".join(f", {name} {value:g}" for name, value in changed) + suffix
