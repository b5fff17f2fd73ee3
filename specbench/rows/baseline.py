"""The row of the vanilla AR images that a run decoded for comparison."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specbench.config import indices, parameters, registry
from specbench.errors import UsageError
from specbench.rows import degenerate, selection, summary, timing
from specbench.rows.columns import COLUMNS, METRICS, Columns, Row
from specbench.rows.csv_files import as_read
from specbench.rows.journal import Record, read_records
from specbench.rows.remark import as_json, remark
from specbench.rows.scores import ScoreJournal, images_fingerprint, prompts_fingerprint, score_columns
from specbench.rows.shown import MACHINE

RECORDS = "baseline.jsonl"  # in a run's folder
_OF_RUN = "/baseline"  # appended to the run_id of a run, it is the run_id of its baseline
#: Columns, besides parameters, in which a baseline agrees with its run.
_SHARED = ("time", "specbench", "commit", "plugins", "prompts_hash", "images", "resolution", "tokens", "python")


def baselines(rows: Iterable[Row], runs: Iterable[tuple[Path, Row]]) -> tuple[list[Columns], list[str]]:
    """The rows of the runs' baselines: one for each configuration of vanilla AR, from the newest run, unless `rows`
    contain a run of the same vanilla AR. And a sentence on each that cannot be read."""
    known = {_same(row) for row in rows if row["method"] == "vanilla"}
    newest: dict[Any, tuple[Path, Row]] = {}
    for folder, row in runs:
        if not row["run_id"] or row["baseline_run_id"] != f"{row['run_id']}{_OF_RUN}":
            continue
        key = _same(_of_vanilla(row))
        if key not in known and (key not in newest or str(row["time"]) > str(newest[key][1]["time"])):
            newest[key] = folder, row
    baseline_rows = {folder: baseline_row(folder, row) for folder, row in newest.values()}
    unread = [
        f"no line for the vanilla AR images of {folder}: {RECORDS} or scores.jsonl is missing or damaged;"
        f" specbench evaluate {folder} scores them again"
        for folder, row in baseline_rows.items()
        if row is None
    ]
    return [row for row in baseline_rows.values() if row is not None], unread


def is_baseline(row: Row) -> bool:
    """Whether a row was made by `baseline_row`. A report can keep such a row without its run."""
    return str(row["run_id"]).endswith(_OF_RUN) and row["baseline_run_id"] == row["run_id"]


def run_of(row: Row) -> str:
    """The run_id of the run that decoded a baseline."""
    return str(row["run_id"]).removesuffix(_OF_RUN)


def baseline_row(folder: Path, row: Row) -> Columns | None:
    """The row of the baseline of a run in `folder`, as a run of method=vanilla would have it; row: the row of the run.
    None if records or scores of the baseline are missing or damaged."""
    try:
        stored = {record.index: record for record in read_records(folder / RECORDS)}
        if row["n"] > len(stored):  # the row is damaged
            return None
        images = [stored[i] for i in indices.of_row(row)]
        values = {**_of_vanilla(row), **_measured(images), **_scores(folder, row, images)}
    except (OSError, UsageError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    return as_read(dict.fromkeys(COLUMNS) | {name: value for name, value in values.items() if name in COLUMNS})


def _of_vanilla(row: Row) -> Columns:
    """The values in a row that its baseline shares: the parameters without the method's, and where it was decoded."""
    of_method = parameters.method_parameters() | {"variant"}
    names = [name for name in (*parameters.table(), *MACHINE, *_SHARED) if name in row and name not in of_method]
    backends = {f"{name}_backend": row[f"{name}_backend"] for name in METRICS}
    return {
        **{name: row[name] for name in names},
        **backends,
        **{part: parameters.default_choice(part) for part in parameters.PARTS},
        "method": "vanilla",
        **parameters.method_choices("vanilla"),
        "weights": registry.target_weights(str(row["weights"] or "")) or None,
        "run_id": row["baseline_run_id"],
        "baseline_run_id": row["baseline_run_id"],
        "remarks": as_json([remark("for_comparison", run=row["run_id"])]),
    }


def _same(row: Row) -> tuple[Any, ...]:
    return *selection.key(row), str(row["seed"]), str(row["prompts_hash"])


def _measured(images: list[Record]) -> Columns:
    columns = summary.speed(images) | summary.columns(images) | summary.versus(images, images)
    degenerate_images = degenerate.count(degenerate.of_records(images))
    return columns | {"timing": timing.was_timed(images), "degenerate_images": degenerate_images}


def _scores(folder: Path, row: Row, images: list[Record]) -> Columns:
    """The newest scores of these images, by the same scorers as the run's."""
    digests, prompts = images_fingerprint(record.sha256 for record in images), prompts_fingerprint(images)
    lines = ScoreJournal(folder / "scores.jsonl")
    known = [line for line in lines if (line.side, line.images, line.prompts) == ("vanilla", digests, prompts)]
    scores = score_columns(sorted(known, key=lambda line: line.is_measured))
    same = [name for name in METRICS if name in scores and scores[f"{name}_backend"] == row[f"{name}_backend"]]
    return {f"{name}{end}": scores[f"{name}{end}"] for name in same for end in ("", "_stderr", "_backend")}
