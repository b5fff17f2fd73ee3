"""Two samples that are paired value by value: the difference, its interval and tests, its effect size, and how many
pairs a test needs. Rows, comparisons, tables and suites all use these functions.

The t-test follows Cool-SD, Appendix C.4. The Wilcoxon signed-rank test assumes only a symmetric distribution of the
differences. scipy computes both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

LEVEL = 0.95  # of intervals; 1 - LEVEL is the level of the tests
POWER = 0.95  # the probability that a test detects a difference
_MANY = 10**9  # pairs: the normal distribution
#: Cohen's names (1988, section 2.2) for effects of at least this size.
SIZES = ((0.8, "large"), (0.5, "medium"), (0.2, "small"), (0.0, "negligible"))
_ROUNDING = 12  # significant decimal digits of values


def half_interval(n: int, stderr: float) -> float:
    """Half the `LEVEL` interval of a mean difference of n pairs with this standard error, by Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1 + LEVEL) / 2)) * stderr


def p_value(n: int, difference: float, stderr: float) -> float:
    """Two-sided p-value of the paired t-test of a mean difference of n pairs with this standard error > 0."""
    from scipy.special import stdtr

    return 2 * float(stdtr(n - 1, -abs(difference) / stderr))


@cache
def _noncentrality(n: int) -> float:
    """The difference, in units of its standard error, that a two-sided t-test of n >= 2 pairs at the level 1 - `LEVEL`
    detects with probability `POWER`: from the non-central t distribution. 3.60 for many pairs, 25 for two."""
    from scipy.special import nctdtrinc, stdtrit

    return float(nctdtrinc(n - 1, 1 - POWER, stdtrit(n - 1, (1 + LEVEL) / 2)))


def reach(n: int, stderr: float) -> float:
    """The difference that this test detects with probability `POWER` if n pairs have the standard error `stderr`."""
    return _noncentrality(n) * stderr


def pairs_for(size: float, n: int, stderr: float) -> int:
    """The number of pairs with which that test detects a difference of `size`, if n pairs have the error `stderr`."""
    deviation = stderr * math.sqrt(n)  # of one pair
    needed = max(2, math.ceil((_noncentrality(_MANY) * deviation / size) ** 2))
    while reach(needed, deviation / math.sqrt(needed)) > size:
        needed += 1
    return needed


@dataclass(frozen=True)
class PairedTest:
    """low, high: interval of the mean difference; statistic, df: of the t-test; p: its two-sided p-value; wilcoxon: the
    p-value of the signed-rank test; d_z: Cohen's, the mean difference over the standard deviation of the differences.
    The last two are None if there are no values for single pairs."""

    low: float
    high: float
    statistic: float
    df: int
    p: float
    wilcoxon: float | None = None
    d_z: float | None = None


@dataclass(frozen=True)
class Paired:
    """Statistics of b - a over n pairs (a, b). test: None if all differences are equal, so that there is nothing to
    test."""

    n: int
    mean_a: float
    mean_b: float
    difference: float
    test: PairedTest | None


def paired(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, resolution: float = 0.0) -> Paired:
    """Compares finite values a and b, (n,) each, n >= 2, paired by position. Two values that differ by at most
    `resolution` count as equal, because their difference is a rounding error."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    n, means, scale = len(x), (float(x.mean()), float(y.mean())), float(max(np.abs(x).max(), np.abs(y).max()))
    y = np.where(np.abs(y - x) <= resolution, x, y)
    # Differences that are equal except for rounding count as equal, which matters to ranks.
    ranked = np.round((y - x) / scale, _ROUNDING) if scale else np.zeros(n)
    if np.ptp(ranked) == 0:
        return Paired(n, *means, float(ranked[0] * scale), None)
    from scipy import stats

    differences, ttest = y - x, stats.ttest_rel(y, x)
    low, high = ttest.confidence_interval(LEVEL)
    mean, std = float(differences.mean()), float(differences.std(ddof=1))
    wilcoxon = float(stats.wilcoxon(ranked).pvalue)
    test = PairedTest(float(low), float(high), float(ttest.statistic), n - 1, float(ttest.pvalue), wilcoxon, mean / std)
    return Paired(n, *means, mean, test)


def by_influence(value_a: float, value_b: float, a: np.ndarray, b: np.ndarray, resolution: float = 0.0) -> Paired:
    """Compares two statistics of whole sets by the influences a and b, (n,) each of mean zero, of their n >= 2 paired
    members: to first order, a member moves its statistic by 1 / n of its influence. resolution: see `paired`.

    The standard error of the difference is then sqrt(sum (b - a)^2 / (n (n - 1))), and the difference over it has
    nearly Student's t distribution with n - 1 degrees of freedom. For means, whose influences are the values minus
    their mean, this is the paired t-test.
    """
    n, difference = len(a), value_b - value_a
    moved = np.where(np.abs(b - a) <= resolution, 0.0, b - a)
    error = math.sqrt(float(np.square(moved).sum()) / (n * (n - 1)))
    if error <= 10.0**-_ROUNDING * max(abs(value_a), abs(value_b)):
        return Paired(n, value_a, value_b, difference if abs(difference) > resolution else 0.0, None)
    half, t, p = half_interval(n, error), difference / error, p_value(n, difference, error)
    return Paired(n, value_a, value_b, difference, PairedTest(difference - half, difference + half, t, n - 1, p))


def pairs_needed(result: Paired) -> tuple[int, int] | None:
    """The number of pairs with which a test would detect a difference of this size (`pairs_for`), and the number for
    the end of the interval that is farthest from zero. None if there is no difference.

    The first number is as uncertain as the difference. Fewer pairs than the second number are too few even if the
    estimate was too small by chance.
    """
    if result.test is None or not result.difference:
        return None
    error = abs(result.difference / result.test.statistic)
    farthest = max(abs(result.test.low), abs(result.test.high))
    return (
        pairs_for(abs(result.difference), result.n, error),
        pairs_for(farthest, result.n, error),
    )


@dataclass(frozen=True)
class DistributionTest:
    """Whether images of A and B have the same distribution, tested on n pairs of features: their energy distance, its
    average after swaps of random pairs, and the share `p` of the swaps (including the unswapped pairs) that give at
    least this distance. If the two images of a pair are independent given their prompt, p is exact: for equal
    distributions it is at most x with probability at most x."""

    n: int
    distance: float
    swapped: float
    p: float


def distribution_test(a: np.ndarray, b: np.ndarray, swaps: int = 999) -> DistributionTest | None:
    """Compares finite features a and b (n, d), paired by position, each dimension in units of its standard deviation
    over both. None if all are the same. The swaps are random, but always the same for n pairs.

    Energy distance (Székely and Rizzo 2004): 2 E|x - y| - E|x - x'| - E|y - y'|.
    """
    n, features = len(a), np.concatenate([a, b]).astype(np.float64)
    spread = features.std(0)
    features = features[:, spread > 0] / spread[spread > 0]
    if not features.shape[1] or (features[:n] == features[n:]).all():
        return None
    from scipy.spatial.distance import cdist

    apart = cdist(features, features).astype(np.float32)
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), (swaps, n))
    weights = np.concatenate([np.ones((1, n), np.float32), signs])
    weights = np.concatenate([weights, -weights], 1)  # for A's features, then for B's
    distances = -np.einsum("sn,sn->s", weights @ apart, weights).astype(np.float64) / n**2
    # At least this distance, except for rounding: a swap of all pairs gives the same distance.
    at_least = int((distances[1:] >= distances[0] * (1 - 1e-4)).sum())
    return DistributionTest(n, float(distances[0]), float(distances[1:].mean()), (1 + at_least) / (1 + swaps))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979), in the given order. The probability that any true hypothesis among these has an
    adjusted p-value of at most x is at most x, for any dependence between the tests."""
    adjusted = [0.0] * len(p)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def size(d_z: float) -> str:
    """Cohen's name for an effect size: "negligible", "small", "medium" or "large"."""
    return next(name for least, name in SIZES if abs(d_z) >= least)
