"""How many images a statistic of a row needs, from the row's cells alone (text or values).

A Fréchet distance compares covariances of features. The covariance of few images is estimated badly, which biases the
distance upwards, by an amount that falls as 1 / n and depends on the method. There is no distance of fewer than
`IMAGES_PER_FEATURE` images for each feature, whichever network the features come from. A metric that estimates such a
covariance declares the number of features, by the name of their extractor in backends:

    features: {scenes-classifier: 64}

How many pairs a difference needs follows from its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specbench.config import parameters
from specbench.config.yaml_files import cached
from specbench.errors import UsageError

IMAGES_PER_FEATURE = 16
LEVEL = 0.95  # of intervals; 1 - LEVEL is the level of the tests
POWER = 0.95  # the probability with which a test finds a difference


def reach(stderr: float) -> float:
    """The difference that a two-sided test at the level 1 - `LEVEL` finds with probability `POWER`, where its standard
    error is `stderr`: (z_a + z_b) stderr, a normal approximation."""
    from scipy.special import ndtri

    return float(ndtri((1 + LEVEL) / 2) + ndtri(POWER)) * stderr


def pairs_for(size: float, n: int, stderr: float) -> int:
    """The pairs with which that test finds a difference of `size`, if n pairs have the standard error `stderr`."""
    return math.ceil(n * (reach(stderr) / size) ** 2)


def too_few(n: int, features: int) -> str:
    """Why `n` images give no Fréchet distance over so many features; empty where they do."""
    needed = IMAGES_PER_FEATURE * features
    if n >= needed:
        return ""
    return f"n < {IMAGES_PER_FEATURE} x {features} features: a Fréchet distance needs {needed:,} images"


def features(metric: str) -> dict[str, int]:
    """Feature extractor -> number of features, of a metric that estimates their covariance; empty for another metric.
    UsageError, naming the file, for a wrong declaration."""
    declared = parameters.default("metrics", metric, metric).get("features", {})
    if not isinstance(declared, Mapping) or not all(type(d) is int and d > 0 for d in declared.values()):
        raise UsageError(f"conf/metrics/{metric}.yaml: features needs EXTRACTOR: INTEGER (got {declared!r})")
    return {str(name): d for name, d in declared.items()}


@cached
def _features_of(column: str) -> dict[str, int]:
    """The same of all metrics that fill a column."""
    metrics = [one for one in parameters.single_metrics() if column in parameters.metric_columns(one)]
    return {name: d for metric in metrics for name, d in features(metric).items()}


def too_few_for(metric: str, n: int) -> str:
    """The same for a metric by its name; empty for a metric that is no Fréchet distance."""
    return next(filter(None, (too_few(n, d) for d in features(metric).values())), "")


def withheld(row: Mapping[str, Any], column: str) -> str:
    """Why a row's value of a column is not printed; empty where it is. Older rows have values of any n."""
    extractor = str(row.get(f"{column}_backend") or "").partition("@")[0]
    needed = _features_of(column).get(extractor)
    n = row.get("images") or row.get("n")
    why = too_few(int(n), needed) if needed and n else ""
    return f"Not printed: {why}." if why else ""
