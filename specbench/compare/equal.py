"""Curves of runs, such as rules at several strengths, at an equal value of a statistic: every pair of curves, paired
prompt by prompt.

Between two neighbouring runs of a curve y is interpolated linearly in x. To first order a prompt moves the interpolated
value by its influences on x and y of both runs, so that the difference of two curves has a standard error in which the
prompts that all runs share are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from specbench.compare import scores
from specbench.compare.comparison import STATISTICS
from specbench.compare.paired import Paired, by_influence
from specbench.compare.passes import ScoredPass
from specbench.errors import UsageError, plain, unknown
from specbench.rows import indices
from specbench.rows.csv_files import RowFile
from specbench.rows.journal import Record

COLUMNS = {
    "panel": "the panel of the figure, in which the curves are",
    "x": "the column at whose equal value they are compared",
    "value": "that value",
    "y": "the column that is compared",
    "a": "the first curve",
    "b": "the second curve",
    "prompts": "prompts that all runs share",
    "y_a": "y of the first curve at this value, interpolated",
    "y_b": "that of the second curve",
    "difference": "y_b - y_a",
    "low": "lower end of its interval of 95 %",
    "high": "upper end",
    "z": "the difference over its standard error: t with one degree of freedom less than prompts",
    "p": "two-sided, without adjustment",
    "runs": "identifies the runs of the panel",
}
ROWS = RowFile(COLUMNS, "pairs of curves")
_Y = {statistic.name: statistic for statistic in STATISTICS}


@dataclass(frozen=True)
class CurvePoint:
    """A run: x, y, and the influences (n,) of its n prompts on each, whose means are zero.
    scorer: of y, where it is a metric."""

    x: float
    y: float
    dx: np.ndarray
    dy: np.ndarray
    scorer: str = ""


def rows(
    curves: Mapping[str, Sequence[ScoredPass]], x: str, value: float, y: str
) -> Iterator[dict[str, str | float | int | None]]:
    """The rows, less panel and runs, of every pair of curves that both reach `value` of x.

    Raises UsageError where x or y is no statistic of these runs, and where their prompts or scorers differ.
    """
    prompts = _prompts([one for some in curves.values() for one in some])
    points = {label: [point(one, x, y) for one in some] for label, some in curves.items()}
    if len(scorers := sorted({one.scorer for some in points.values() for one in some})) > 1:
        raise UsageError(f"{y} was scored by {' and by '.join(map(plain, scorers))}: score all runs by one")
    for a, b, found in pairs(points, value, _Y[y].resolution if y in _Y else 0.0):
        test = found.test
        yield {
            "x": x,
            "value": value,
            "y": y,
            "a": a,
            "b": b,
            "prompts": len(prompts),
            "y_a": found.mean_a,
            "y_b": found.mean_b,
            "difference": found.difference,
            **({"low": test.low, "high": test.high, "z": test.statistic, "p": test.p} if test else {}),
        }


def pairs(
    curves: Mapping[str, Sequence[CurvePoint]], value: float, resolution: float = 0.0
) -> Iterator[tuple[str, str, Paired]]:
    """Every pair of curves that reach x = `value`: their labels, and the comparison of y there. resolution: of y."""
    found = {label: interpolated(some, value) for label, some in curves.items()}
    for (a, at_a), (b, at_b) in combinations(found.items(), 2):
        if at_a is not None and at_b is not None:
            yield a, b, by_influence(at_a[0], at_b[0], at_a[1], at_b[1], resolution)


def interpolated(points: Sequence[CurvePoint], x: float) -> tuple[float, np.ndarray] | None:
    """y at x between the two neighbours of x, and the influences (n,) of the prompts on it; None outside of all."""
    for left, right in pairwise(sorted(points, key=lambda point: point.x)):
        if left.x <= x <= right.x and right.x > left.x:
            share, slope = (x - left.x) / (right.x - left.x), (right.y - left.y) / (right.x - left.x)
            moved = (1 - share) * (left.dy - slope * left.dx) + share * (right.dy - slope * right.dx)
            return left.y + share * (right.y - left.y), moved
    return None


def point(run: ScoredPass, x: str, y: str) -> CurvePoint:
    """A run as a point: x is step_compression or accepted_length_mean, y a statistic of an image, or the column of a
    metric."""
    by_prompt: dict[int, list[Record]] = {}
    for index, record in sorted(run.records.items()):
        by_prompt.setdefault(indices.prompt_of(index), []).append(record)
    some = list(by_prompt.values())
    if x == "step_compression":
        tokens, steps = (np.array([sum(getattr(r, k) for r in of) for of in some], float) for k in ("tokens", "steps"))
        ratio = tokens.sum() / steps.sum()
        at, dx = float(ratio), ratio * (tokens / tokens.mean() - steps / steps.mean())
    elif x == "accepted_length_mean":
        at, dx = _mean([[r.accepted_length for r in of] for of in some])
    else:
        raise unknown("statistic of equal curves", x, ("step_compression", "accepted_length_mean"))
    if y not in _Y:
        metric = scores.of_column(run, y)
        return CurvePoint(at, metric.value, dx, metric.influences, metric.scorer)
    values = [[_Y[y].of(r) for r in of] for of in some]
    if any(v is None for of in values for v in of):
        raise UsageError(f"{plain(run.argument)} did not measure {y}: compare runs that did")
    height, dy = _mean([[float(v) for v in of if v is not None] for of in values])
    return CurvePoint(at, height, dx, dy)


def _mean(values: Sequence[Sequence[float]]) -> tuple[float, np.ndarray]:
    """The mean of the prompts' means, and the influences of the prompts on it."""
    means = np.array([np.mean(of) for of in values], float)
    return float(means.mean()), means - means.mean()


def _prompts(runs: Sequence[ScoredPass]) -> set[int]:
    """The prompts of all runs, which must be the same: (index, id) pairs of images."""
    first, *others = [{(i, r.id, r.prompt) for i, r in run.records.items()} for run in runs]
    for run, images in zip(runs[1:], others, strict=True):
        if images != first:
            raise UsageError(
                f"{plain(runs[0].argument)} and {plain(run.argument)} have different prompts: compare curves of the"
                " same prompts and n"
            )
    return {indices.prompt_of(index) for index, _, _ in first}
