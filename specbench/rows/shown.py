"""Which values of a row cannot be compared as they are, and why, from its cells alone (text or values): seconds of a
timing that was not steady, and statistics that are biased for few images. Such a value is printed with a remark.

A Fréchet distance compares covariances of features. The covariance of few images is estimated badly, which biases the
distance upwards, by an amount that falls as 1 / n and depends on the method. So a distance of fewer than
`IMAGES_PER_FEATURE` images per feature can only be compared with one of the same n, and even then the difference is no
evidence: images that vary less can have the smaller value although their distance is larger. A metric that estimates
such a covariance declares the number of features, by the name of their extractor in backends:

    features: {scenes-classifier: 64}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from specbench.config import parameters
from specbench.config.yaml_files import cached
from specbench.errors import UsageError
from specbench.rows import remark_text
from specbench.rows.columns import (
    OF_TIMING,
    SHIFT_BOUND,
    SPEEDUPS,
    TIMED_COLUMNS,
    Columns,
    Row,
    resolved,
    stderr_of,
)
from specbench.rows.remark import Remark, remark

IMAGES_PER_FEATURE = 16
#: Columns that identify the machine of a timing, and their names in print.
MACHINE = {
    "device_name": "device",
    "device": "device",
    "threads": "threads",
    "dtype": "dtype",
    "engine": "engine",
    "torch": "PyTorch",
    "driver": "driver",
}


def shown(row: Row) -> Columns:
    """The row with 0 for values that are rounding errors. (Tables do the same with cells.)"""
    result = dict(row)
    for name, value in row.items():
        if isinstance(value, float) and value and not resolved(name, value):
            result |= {name: 0.0, stderr_of(name): None}
    return result


# Images


def bias(n: int, features: int) -> list[Remark]:
    """The remark on a Fréchet distance of `n` images over this many features; [] if they are enough."""
    few = n < IMAGES_PER_FEATURE * features
    return [remark("biased", per_feature=IMAGES_PER_FEATURE, features=features)] * few


def is_biased(row: Row, column: str) -> bool:
    """Whether a row has fewer images than the Fréchet distance in this column needs."""
    return bool(bias_of_difference(row, column))


def bias_of_difference(row: Row, column: str) -> str:
    """Why the difference of the Fréchet distance in this column from one of as many images is no evidence; "" for
    enough images, and for another statistic."""
    width = _features_of(column).get(str(row.get(f"{column}_backend") or "").partition("@")[0])
    n = row.get("images") or row.get("n")
    few = bias(int(n), width) if width and n else []
    return remark_text.joined(replace(r, code="biases") for r in few)


def features(metric: str) -> dict[str, int]:
    """Feature extractor -> number of features, for a metric that estimates their covariance; {} for another metric.
    UsageError, naming the file, for a wrong declaration."""
    declared = parameters.default("metrics", metric, metric).get("features", {})
    if not isinstance(declared, Mapping) or not all(type(d) is int and d > 0 for d in declared.values()):
        raise UsageError(f"conf/metrics/{metric}.yaml: features needs EXTRACTOR: INTEGER (got {declared!r})")
    return {str(name): d for name, d in declared.items()}


@cached
def _features_of(column: str) -> dict[str, int]:
    """The features of all metrics that fill a column, see `features`."""
    metrics = [name for name in parameters.single_metrics() if column in parameters.metric_columns(name)]
    return {name: d for metric in metrics for name, d in features(metric).items()}


# Seconds


def doubt(row: Row, column: str) -> str:
    """Why a row's seconds or speed-up are in doubt; "" if they are not. Vanilla's own speed-up is 1 by definition."""
    if column not in TIMED_COLUMNS or column in OF_TIMING or row.get(column) in (None, ""):
        return ""
    is_speedup = column in SPEEDUPS or column in map(stderr_of, SPEEDUPS)
    if is_speedup and is_vanilla(row):
        return ""
    if values := unsteady(row):
        return f"Not valid: {remark_text.unsteady(values)}."
    if not is_speedup or _holds(row):
        return ""
    return f"Not valid: {row.get('timed_pairs') or 0} timed pairs are too few for an error."


def unsteady(row: Row) -> dict[str, float]:
    """Why the timing of a row is not valid although it has enough pairs, as the values of a remark with the code
    "unsteady"; {} if it is valid."""
    if not row.get("timed_pairs") or _holds(row):
        return {}
    if row.get("speedup_shift") in (None, "") or float(row["speedup_shift"]) <= SHIFT_BOUND:
        return {}
    pairs, further = (round(float(row.get(name) or 0)) for name in ("timed_pairs", "further_pairs"))  # or their means
    return {"pairs": pairs, "further": further, "shift": float(row["speedup_shift"])}


def _holds(row: Row) -> bool:
    return bool(row.get("timed_pairs")) and str(row.get("timing_valid")).lower() == "true"


def is_vanilla(row: Row) -> bool:
    return bool(row.get("run_id")) and row.get("baseline_run_id") == row.get("run_id")


def common_machine(rows: Iterable[Row], columns: Sequence[str]) -> tuple[str, ...] | None:
    """The machine of most of the rows that have a value in one of these columns; in a tie, the machine of the first.
    If some rows have timed pairs, only these count. None if no row has a value."""
    timed = [row for row in rows if any(row.get(column) for column in columns)]
    counts = Counter(machine(row) for row in [row for row in timed if row.get("timed_pairs")] or timed)
    return counts.most_common(1)[0][0] if counts else None


def machine(row: Row) -> tuple[str, ...]:
    """The machine of a row: the values of `MACHINE`."""
    return tuple(str(row.get(name) or "") for name in MACHINE)


def elsewhere(row: Row, column: str, common: tuple[str, ...]) -> str:
    """Why a row's seconds cannot be compared with those of the machine of the other lines; "" if they can."""
    if column in SPEEDUPS and is_vanilla(row):
        return ""
    differing = {MACHINE[n]: (a, b) for n, a, b in zip(MACHINE, machine(row), common) if a != b}
    if not differing:
        return ""
    parts = [
        f"{name} {value or 'unknown'} instead of {other or 'unknown'}" for name, (value, other) in differing.items()
    ]
    return f"Timed otherwise than the rest of the column ({', '.join(parts)}): do not compare."
