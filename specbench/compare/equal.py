"""Curves of runs, such as rules at several strengths. Compares every pair of curves at equal x, over the range of x
that both reach, paired prompt by prompt.

A curve connects its runs by straight lines. Left of its first run it has the y of that run, which reaches as much.
Prompts are resampled, with the same samples for all curves, and both curves are computed again from every sample, so
that variation that the curves share cancels. The mean difference over the range is the area between the curves over its
width. The band around the differences is simultaneous: with a probability of 95 % it contains the true difference at
all values of x. Its width is the quantile of the largest deviation, each in units of its standard error (Montiel Olea
and Plagborg-Møller 2019, sup-t).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from specbench.compare import passes
from specbench.compare.comparison import STATISTICS, Statistic
from specbench.compare.passes import ScoredPass
from specbench.config import indices
from specbench.errors import UsageError, plain, unknown
from specbench.rows.journal import Record
from specbench.rows.paired import LEVEL
from specbench.storage.csv_text import RowFile

COLUMNS = {
    "panel": "the panel of the figure that contains the curves",
    "x": "the column at whose equal values they are compared",
    "y": "the column that is compared",
    "a": "the first curve",
    "b": "the second curve",
    "prompts": "prompts that all runs share",
    "from_x": "lower end of the range of x: the first point of the curve that starts later",
    "to_x": "upper end of the range: both curves reach it in 97.5 % of the samples",
    "y_a": "mean of the first curve over the range",
    "y_b": "mean of the second curve",
    "ratio": "y_b / y_a, if both are above 0 in every sample",
    "ratio_low": "lower end of its interval of 95 %",
    "ratio_high": "upper end",
    "difference": "y_b - y_a: the area between the curves over the width of the range",
    "low": "lower end of its interval of 95 %",
    "high": "upper end",
    "p": "two-sided p-value of the difference, without adjustment",
    "at": "values of x, equally spaced over the range",
    "values": "y of the first curve at each of them",
    "differences": "y of the second curve minus y of the first one at each of them",
    "margins": "half widths of the band: it contains all true differences with a probability of 95 %",
    "runs": "identifies the runs of the panel",
}
ROWS = RowFile(COLUMNS, "pairs of curves")
RESAMPLES = 9_999
_VALUES = 21  # values of x at which curves are compared
_REACHED = 0.975  # the share of the samples that reach the upper end of the range
_NEGLIGIBLE = 1e-12  # relative; a smaller error is rounding
#: The divergence the other way round is of the same tokens: curves show it, and `compare` does not test it again.
_REVERSE = Statistic(
    "emitted_kl_reverse",
    lambda r: r.emitted_kl_reverse,
    "KL(target || emitted) is {d} nats {more} with {b} than with {a}",
)
_Y = {statistic.name: statistic for statistic in (*STATISTICS, _REVERSE)}


@dataclass(frozen=True)
class CurvePoint:
    """A run as a point of a curve. x: the sum of `over` over the sum of `under`, (n,) each, for n prompts. y: the value
    of the run; dy (n,): how each prompt moves y, of mean zero. scorer: of y, if it is a metric."""

    over: np.ndarray
    under: np.ndarray
    y: float
    dy: np.ndarray
    scorer: str = ""

    @property
    def x(self) -> float:
        return float(self.over.sum() / self.under.sum())


@dataclass(frozen=True)
class SampledCurve:
    """x and y (1 + samples, points) of a curve: for all prompts, then for each sample of them."""

    x: np.ndarray
    y: np.ndarray

    def at(self, values: np.ndarray) -> np.ndarray:
        """y (1 + samples, n) at n values of x: straight lines between points, constant outside of them."""
        left, width = self.x[:, :-1, None], np.diff(self.x, axis=1)[:, :, None]
        share = np.clip((values - left) / np.maximum(width, np.finfo(float).tiny), 0, 1)
        return np.asarray(self.y[:, :1] + np.einsum("spv,sp->sv", share, np.diff(self.y, axis=1)))


@dataclass(frozen=True)
class CurveDifference:
    """y of a curve B minus y of a curve A at equal x.

    at (V,): values of x over the common range; values, differences, margins (V,): y of A, the difference and half the
    width of the band at each of them. mean_a, mean_b: over the range. interval: of their difference; ratio_interval: of
    their ratio, None if a sample has a mean of at most 0. p: of the difference, None if all samples have the same."""

    at: np.ndarray
    values: np.ndarray
    differences: np.ndarray
    margins: np.ndarray
    mean_a: float
    mean_b: float
    interval: tuple[float, float]
    ratio_interval: tuple[float, float] | None
    p: float | None


def rows(curves: Mapping[str, Sequence[ScoredPass]], x: str, y: str) -> Iterator[dict[str, str | float | int | None]]:
    """The rows, without panel and runs, of every pair of curves. Without a common range of x, a row has no values.

    Raises UsageError if x or y is not a statistic of these runs, or if their prompts or scorers differ.
    """
    prompts = _prompts([run for runs in curves.values() for run in runs])
    points = {label: [point(run, x, y) for run in runs] for label, runs in curves.items()}
    if len(scorers := sorted({p.scorer for of_curve in points.values() for p in of_curve})) > 1:
        raise UsageError(f"{y} was scored by {' and by '.join(map(plain, scorers))}: score all runs by one")
    resolution = _Y[y].resolution if y in _Y else 0.0
    for a, b, result in pairs(points, resolution=resolution):
        about: dict[str, str | float | int | None] = {"x": x, "y": y, "a": a, "b": b, "prompts": len(prompts)}
        if result is None:
            yield about
            continue
        ratio = result.ratio_interval
        yield {
            **about,
            "from_x": float(result.at[0]),
            "to_x": float(result.at[-1]),
            "y_a": result.mean_a,
            "y_b": result.mean_b,
            **(
                {"ratio": result.mean_b / result.mean_a, "ratio_low": ratio[0], "ratio_high": ratio[1]} if ratio else {}
            ),
            "difference": result.mean_b - result.mean_a,
            "low": result.interval[0],
            "high": result.interval[1],
            "p": result.p,
            **{name: _listed(getattr(result, name)) for name in ("at", "values", "differences", "margins")},
        }


def _listed(values: np.ndarray) -> str:
    return json.dumps([float(f"{value:.6g}") for value in values], separators=(",", ":"))


def pairs(
    curves: Mapping[str, Sequence[CurvePoint]], samples: int = RESAMPLES, resolution: float = 0.0
) -> Iterator[tuple[str, str, CurveDifference | None]]:
    """Every pair of curves: their labels, and the comparison, None without a common range. samples: how often the
    prompts are resampled, at random, but with the same samples for the same number of prompts; resolution: of y."""
    n = len(next(iter(curves.values()))[0].dy)
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), samples)
    weights = np.concatenate([np.ones((1, n)), counts])
    sampled = {label: curve(points, weights) for label, points in curves.items()}
    for (a, first), (b, second) in combinations(sampled.items(), 2):
        yield a, b, difference(first, second, n, resolution)


def curve(points: Sequence[CurvePoint], weights: np.ndarray) -> SampledCurve:
    """A curve through points, in the order of their x, with weights (1 + samples, n) of the prompts, the first all 1.

    In a sample, neighbours may change their order in x. Then the x are sorted, and y keeps its order: both belong to a
    strength, with which x grows.
    """
    points = sorted(points, key=lambda p: p.x)
    over, under, moved = (np.stack([getattr(p, name) for p in points], 1) for name in ("over", "under", "dy"))
    y = np.array([p.y for p in points]) + weights @ moved / len(moved)
    return SampledCurve(np.sort((weights @ over) / (weights @ under), axis=1), y)


def difference(a: SampledCurve, b: SampledCurve, n: int, resolution: float = 0.0) -> CurveDifference | None:
    """B minus A over the common range, from the same samples of n prompts; None if they have no such range."""
    low = max(a.x[0, 0], b.x[0, 0])
    high = np.quantile(np.minimum(a.x[:, -1], b.x[:, -1]), 1 - _REACHED)
    if not low < high:
        return None
    at = np.linspace(low, high, _VALUES)
    y_a, y_b = a.at(at), b.at(at)
    means = [np.trapezoid(y, at, axis=1)[:, None] / (high - low) for y in (y_a, y_b)]
    differences, mean = y_b - y_a, means[1] - means[0]
    negligible = max(resolution, _NEGLIGIBLE * max(np.abs(y_a).max(), np.abs(y_b).max()))
    (half,), p = _margins(mean, n, negligible)
    ratios: tuple[float, float] | None = None
    if min(means[0].min(), means[1].min()) > 0:
        logs = np.log(means[1] / means[0])
        (wide,), _ = _margins(logs, n, _NEGLIGIBLE)
        ratios = math.exp(logs[0, 0] - wide), math.exp(logs[0, 0] + wide)
    return CurveDifference(
        at,
        y_a[0],
        differences[0],
        _margins(differences, n, negligible)[0],
        float(means[0][0, 0]),
        float(means[1][0, 0]),
        (float(mean[0, 0] - half), float(mean[0, 0] + half)),
        ratios,
        p,
    )


def _margins(statistics: np.ndarray, n: int, negligible: float) -> tuple[np.ndarray, float | None]:
    """Half widths (k,) of simultaneous intervals of k statistics (1 + samples, k): first the measured values, then the
    values in samples of n prompts. And the p-value of "all are 0", None if no standard error is above `negligible`.

    The spread of samples of n prompts is too small by sqrt((n - 1) / n), so deviations and standard errors are divided
    by this. Deviations, in units of the standard error, are multiplied by the quantile of Student's t over the normal
    quantile, because samples do not show how uncertain the spread of few prompts is.
    """
    from scipy import stats

    deviations = (statistics[1:] - statistics[0]) * math.sqrt(n / (n - 1))
    error = deviations.std(0)
    varies = error > negligible
    unit = np.where(varies, error, np.inf)
    wider = float(stats.t.ppf((1 + LEVEL) / 2, n - 1) / stats.norm.ppf((1 + LEVEL) / 2))
    largest = wider * (np.abs(deviations) / unit).max(1)
    p = (1 + int((largest >= (np.abs(statistics[0]) / unit).max()).sum())) / len(statistics)
    return np.quantile(largest, LEVEL) * error, p if varies.any() else None


def point(run: ScoredPass, x: str, y: str) -> CurvePoint:
    """A run as a point. x: step_compression or accepted_length_mean; y: a statistic of an image, or the column of a
    metric."""
    by_prompt: dict[int, list[Record]] = {}
    for index, record in sorted(run.records.items()):
        by_prompt.setdefault(indices.prompt_of(index), []).append(record)
    groups = list(by_prompt.values())
    if x == "step_compression":
        over, under = (np.array([sum(getattr(r, k) for r in g) for g in groups], float) for k in ("tokens", "steps"))
    elif x == "accepted_length_mean":
        over, under = np.array([np.mean([r.accepted_length for r in g]) for g in groups]), np.ones(len(groups))
    else:
        raise unknown("statistic of equal curves", x, ("step_compression", "accepted_length_mean"))
    if y not in _Y:
        metric = passes.of_column(run, y)
        return CurvePoint(over, under, metric.value, metric.influences, metric.scorer)
    values = [[_Y[y].value(r) for r in group] for group in groups]
    if any(v is None for group in values for v in group):
        raise UsageError(f"{plain(run.argument)} did not measure {y}: compare runs that did")
    means = np.array([np.mean([float(v) for v in group if v is not None]) for group in values])
    return CurvePoint(over, under, float(means.mean()), means - means.mean())


def _prompts(runs: Sequence[ScoredPass]) -> set[int]:
    """The indices of the prompts of all runs. UsageError if the images have different (index, id, prompt)."""
    first, *others = [{(i, r.id, r.prompt) for i, r in run.records.items()} for run in runs]
    for run, images in zip(runs[1:], others, strict=True):
        if images != first:
            raise UsageError(
                f"{plain(runs[0].argument)} and {plain(run.argument)} have different prompts: compare curves of the"
                " same prompts and n"
            )
    return {indices.prompt_of(index) for index, _, _ in first}
