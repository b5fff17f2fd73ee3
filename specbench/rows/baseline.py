"""The vanilla AR images that a run decoded for comparison, as a row of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specbench.config import indices, parameters
from specbench.errors import UsageError
from specbench.rows import degenerate, selection, summary, timing
from specbench.rows.columns import COLUMNS, METRICS
from specbench.rows.csv_files import as_read
from specbench.rows.journal import Record, read_records
from specbench.rows.scores import ScoreJournal, fingerprint, prompts_fingerprint, score_columns
from specbench.rows.shown import MACHINE

Row = Mapping[str, Any]
RECORDS = "baseline.jsonl"  # in a run's folder
_OF_RUN = "/baseline"  # after the run_id of a run: that of its baseline
#: Columns, besides parameters, in which a baseline agrees with its run.
_SHARED = ("time", "specbench", "commit", "plugins", "prompts_hash", "images", "resolution", "tokens", "python")


def baselines(rows: Iterable[Row], runs: Iterable[tuple[Path, Row]]) -> list[dict[str, Any]]:
    """The baselines of runs with their folders, one for each configuration of vanilla AR, that of the newest run. What
    `rows` have as a run of vanilla AR, and what cannot be read, is left out."""
    known = {_same(row) for row in rows if row["method"] == "vanilla"}
    newest: dict[Any, tuple[Path, Row]] = {}
    for folder, row in runs:
        if not row["run_id"] or row["baseline_run_id"] != f"{row['run_id']}{_OF_RUN}":
            continue
        key = _same(_of_vanilla(row))
        if key not in known and (key not in newest or str(row["time"]) > str(newest[key][1]["time"])):
            newest[key] = folder, row
    found = (baseline_row(folder, row) for folder, row in newest.values())
    return [row for row in found if row is not None]


def is_baseline(row: Row) -> bool:
    """Whether a row is one of `baseline_row`, which a report can keep without its run."""
    return str(row["run_id"]).endswith(_OF_RUN) and row["baseline_run_id"] == row["run_id"]


def run_of(row: Row) -> str:
    """The run_id of the run that decoded a baseline."""
    return str(row["run_id"]).removesuffix(_OF_RUN)


def baseline_row(folder: Path, row: Row) -> dict[str, Any] | None:
    """The row of the baseline of a run in `folder`, whose row is `row`: what a run of method=vanilla would have. None
    where its records or scores are absent or damaged."""
    try:
        stored = {record.index: record for record in read_records(folder / RECORDS)}
        if row["n"] > len(stored):  # of a damaged row
            return None
        images = [stored[i] for i in indices.of_row(row)]
        found = {**_of_vanilla(row), **_measured(images), **_scores(folder, row, images)}
    except (OSError, UsageError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    return as_read(dict.fromkeys(COLUMNS) | {name: value for name, value in found.items() if name in COLUMNS})


def _of_vanilla(row: Row) -> dict[str, Any]:
    """What a row says about its baseline: the parameters without its method's, and where it was decoded."""
    of_method = parameters.method_parameters() | {"variant"}
    names = [name for name in (*parameters.table(), *MACHINE, *_SHARED) if name in row and name not in of_method]
    backends = {f"{name}_backend": row[f"{name}_backend"] for name in METRICS}
    return {
        **{name: row[name] for name in names},
        **backends,
        **{part: parameters.default_choice(part) for part in parameters.PARTS},
        "method": "vanilla",
        **parameters.method_choices("vanilla"),
        "weights": str(row["weights"] or "").partition("+")[0] or None,  # without the drafter's
        "run_id": row["baseline_run_id"],
        "baseline_run_id": row["baseline_run_id"],
        "note": f"decoded by run {row['run_id']} for comparison",
    }


def _same(row: Row) -> tuple[Any, ...]:
    return *selection.key(row), str(row["seed"]), str(row["prompts_hash"])


def _measured(images: list[Record]) -> dict[str, Any]:
    found = summary.speed(images) | summary.columns(images) | summary.versus(images, images)
    degenerate_images = degenerate.column(images, degenerate.of_records(images))
    return found | {"timing": timing.was_timed(images), "degenerate_images": degenerate_images}


def _scores(folder: Path, row: Row, images: list[Record]) -> dict[str, Any]:
    """The newest scores of these images, by what scored the run."""
    digests, prompts = fingerprint(record.sha256 for record in images), prompts_fingerprint(images)
    lines = ScoreJournal(folder / "scores.jsonl")
    known = [line for line in lines if (line.side, line.images, line.prompts) == ("vanilla", digests, prompts)]
    found = score_columns(sorted(known, key=lambda line: line.is_measured))
    same = [name for name in METRICS if name in found and found[f"{name}_backend"] == row[f"{name}_backend"]]
    return {f"{name}{end}": found[f"{name}{end}"] for name in same for end in ("", "_stderr", "_backend")}
