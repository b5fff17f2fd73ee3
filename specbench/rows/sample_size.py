"""How many images a statistic of a row needs, from the row's cells alone (text or values).

A Fréchet distance compares covariances of features. The covariance of few images is estimated badly, which biases the
distance upwards, by an amount that falls as 1 / n and depends on the method. There is no distance of fewer than
`IMAGES_PER_FEATURE` images for each feature, whichever network the features come from (conf/metrics declares how many).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.config import shown_columns

IMAGES_PER_FEATURE = 16


def too_few(n: int, features: int) -> str:
    """Why `n` images give no Fréchet distance over so many features; empty where they do."""
    needed = IMAGES_PER_FEATURE * features
    if n >= needed:
        return ""
    return f"n < {IMAGES_PER_FEATURE} x {features} features: a Fréchet distance needs {needed:,} images"


def too_few_for(metric: str, n: int) -> str:
    """The same for a metric by its name; empty for a metric that is no Fréchet distance."""
    return next(filter(None, (too_few(n, d) for d in shown_columns.features(metric).values())), "")


def withheld(row: Mapping[str, Any], column: str) -> str:
    """Why a row's value of a column is not printed; empty where it is. Older rows have values of any n."""
    extractor = str(row.get(f"{column}_backend") or "").partition("@")[0]
    features = shown_columns.features_of(column).get(extractor)
    n = row.get("images") or row.get("n")
    why = too_few(int(n), features) if features and n else ""
    return f"Not printed: {why}." if why else ""
