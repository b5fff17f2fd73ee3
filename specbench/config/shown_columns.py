"""The columns of rows that metrics fill, as conf/metrics declares them: title, better side and decimals.

One metric declares a column; the other metrics that fill it only name it:

    columns:
      fid: {title: Fréchet distance, better: lower, decimals: 2}

    columns: [fid]

A metric that estimates a covariance of features also declares their number, by the name of their extractor in backends:

    features: {scenes-classifier: 64}
"""

from __future__ import annotations

from collections.abc import Mapping

from specbench.config import parameters
from specbench.config.caches import cached
from specbench.config.shown_column import ShownColumn as ShownColumn
from specbench.errors import UsageError


def of_metrics() -> Mapping[str, ShownColumn]:
    """Column -> how it is shown, for every metric."""
    return parameters.found_choices().columns


def features(metric: str) -> dict[str, int]:
    """Feature extractor -> number of features, of a metric that estimates their covariance; empty for another metric.
    UsageError, naming the file, for a wrong declaration."""
    declared = parameters.default("metrics", metric, metric).get("features", {})
    if not isinstance(declared, Mapping) or not all(type(d) is int and d > 0 for d in declared.values()):
        raise UsageError(f"conf/metrics/{metric}.yaml: features needs EXTRACTOR: INTEGER (got {declared!r})")
    return {str(name): d for name, d in declared.items()}


@cached
def features_of(column: str) -> dict[str, int]:
    """The same of all metrics that fill a column."""
    metrics = [one for one in parameters.single_metrics() if column in parameters.metric_columns(one)]
    return {name: d for metric in metrics for name, d in features(metric).items()}
