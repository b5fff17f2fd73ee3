"""Two samples that are paired, value by value: the difference, its interval and tests, and its effect size.

The t-test is the one of Cool-SD, Appendix C.4; the Wilcoxon signed-rank test next to it assumes only a symmetric
distribution of the differences. scipy computes both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.rows.differences import LEVEL, pairs_for

#: Cohen's names (1988, section 2.2) for effects from this size on.
SIZES = ((0.8, "large"), (0.5, "medium"), (0.2, "small"), (0.0, "negligible"))
_ROUNDING = 12  # significant decimal digits of values


@dataclass(frozen=True)
class PairedTest:
    """low, high: interval of the mean difference; statistic, df: of the t-test; p: its
    two-sided p-value; wilcoxon: that of the signed-rank test; d_z: Cohen's, the mean difference over the differences'
    standard deviation. The last two are None where there are no values a pair."""

    low: float
    high: float
    statistic: float
    df: int
    p: float
    wilcoxon: float | None = None
    d_z: float | None = None


@dataclass(frozen=True)
class Paired:
    """Statistics of b - a over n pairs (a, b). `test` None: all differences are equal, so there is nothing to test."""

    n: int
    mean_a: float
    mean_b: float
    difference: float
    test: PairedTest | None


def paired(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, resolution: float = 0.0) -> Paired:
    """Compare finite values a and b, (n,) each, n >= 2, paired by position. Where the two of a pair differ by no more
    than `resolution`, that is rounding, and they count as equal."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    n, means, scale = len(x), (float(x.mean()), float(y.mean())), float(max(np.abs(x).max(), np.abs(y).max()))
    y = np.where(np.abs(y - x) <= resolution, x, y)
    # Differences that are equal but for rounding count as equal, which matters to ranks.
    ranked = np.round((y - x) / scale, _ROUNDING) if scale else np.zeros(n)
    if np.ptp(ranked) == 0:
        return Paired(n, *means, float(ranked[0] * scale), None)
    from scipy import stats

    differences, found = y - x, stats.ttest_rel(y, x)
    low, high = found.confidence_interval(LEVEL)
    mean, std = float(differences.mean()), float(differences.std(ddof=1))
    wilcoxon = float(stats.wilcoxon(ranked).pvalue)
    test = PairedTest(float(low), float(high), float(found.statistic), n - 1, float(found.pvalue), wilcoxon, mean / std)
    return Paired(n, *means, mean, test)


def by_influence(value_a: float, value_b: float, a: np.ndarray, b: np.ndarray, resolution: float = 0.0) -> Paired:
    """Compare two statistics of whole sets by the influences a and b, (n,) each of mean zero, of their n >= 2 paired
    members: one of them moves its statistic, to first order, by 1 / n of its influence. resolution: see `paired`.

    The difference's standard error is then sqrt(sum (b - a)^2 / (n (n - 1))), and the difference over it has nearly
    Student's t distribution with n - 1 degrees of freedom: of means, whose influences are the values less their mean,
    this is the paired t-test.
    """
    n, difference = len(a), value_b - value_a
    moved = np.where(np.abs(b - a) <= resolution, 0.0, b - a)
    error = math.sqrt(float(np.square(moved).sum()) / (n * (n - 1)))
    if error <= 10.0**-_ROUNDING * max(abs(value_a), abs(value_b)):
        return Paired(n, value_a, value_b, difference if abs(difference) > resolution else 0.0, None)
    from scipy import stats

    half, t = error * float(stats.t.ppf((1 + LEVEL) / 2, n - 1)), difference / error
    p = 2 * float(stats.t.sf(abs(t), n - 1))
    return Paired(n, value_a, value_b, difference, PairedTest(difference - half, difference + half, t, n - 1, p))


def pairs_needed(found: Paired) -> tuple[int, int] | None:
    """The pairs with which a test would find a difference of this size (`pairs_for`), and the same for the
    end of the interval that is farthest from zero; None where there is no difference.

    The first number is as uncertain as the difference; fewer pairs than the second are too few even where that was
    unlucky.
    """
    if found.test is None or not found.difference:
        return None
    error = abs(found.difference / found.test.statistic)
    farthest = max(abs(found.test.low), abs(found.test.high))
    return (
        pairs_for(abs(found.difference), found.n, error),
        pairs_for(farthest, found.n, error),
    )


@dataclass(frozen=True)
class DistributionTest:
    """Whether images of A and B have one distribution, by n pairs of features: their energy distance, its average after
    swaps of random pairs, and the share `p` of the swaps, the unswapped pairs among them, that give at least as much.
    Where the two of a pair are independent given their prompt, p is exact: for equal distributions it is at most x with
    probability at most x."""

    n: int
    distance: float
    swapped: float
    p: float


def distribution_test(a: np.ndarray, b: np.ndarray, swaps: int = 999) -> DistributionTest | None:
    """Compare finite features a and b (n, d), paired by position, each dimension in units of its standard deviation
    over both. None where all are the same. The swaps are random, but always the same for n pairs.

    Energy distance (Székely and Rizzo 2004): 2 E|x - y| - E|x - x'| - E|y - y'|.
    """
    n, both = len(a), np.concatenate([a, b]).astype(np.float64)
    spread = both.std(0)
    both = both[:, spread > 0] / spread[spread > 0]
    if not both.shape[1] or (both[:n] == both[n:]).all():
        return None
    from scipy.spatial.distance import cdist

    apart = cdist(both, both).astype(np.float32)
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), (swaps, n))
    weights = np.concatenate([np.ones((1, n), np.float32), signs])
    weights = np.concatenate([weights, -weights], 1)  # of A's, then of B's
    distances = -np.einsum("sn,sn->s", weights @ apart, weights).astype(np.float64) / n**2
    # At least as much but for rounding: a swap of all pairs gives the same distance.
    as_much = int((distances[1:] >= distances[0] * (1 - 1e-4)).sum())
    return DistributionTest(n, float(distances[0]), float(distances[1:].mean()), (1 + as_much) / (1 + swaps))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979), in the order given: the probability that any of the true hypotheses among these
    has one of at most x is at most x, for any dependence between the tests."""
    adjusted = [0.0] * len(p)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def size(d_z: float) -> str:
    """Cohen's name for an effect size: "negligible", "small", "medium" or "large"."""
    return next(name for least, name in SIZES if abs(d_z) >= least)
