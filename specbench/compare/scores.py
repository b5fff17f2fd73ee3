"""What the metrics of one pass say: a metric's value over its images, and how each of them moves it, from the scorer
outputs that the run keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from specbench import data
from specbench.compare.passes import ScoredPass
from specbench.config import indices, parameters, registry
from specbench.errors import UsageError, plain
from specbench.rows.journal import Record

if TYPE_CHECKING:
    from specbench.metrics.base import Metric


@dataclass(frozen=True)
class MetricOfRun:
    """scorer: what must be the same in runs that are compared: the scorer's cache key or, of a metric of all images
    together, its basis. value: over all images. influences (P,): how each of P prompts moves it, of mean zero, in the
    order of their index."""

    scorer: str
    value: float
    influences: np.ndarray


def of_column(one: ScoredPass, column: str) -> MetricOfRun:
    """The metric that fills a column of the row, over all images of a run. UsageError where it is not measured."""
    from specbench import metrics

    outputs = metrics.Outputs(one.folder)
    known = [name for name in outputs.scorers if name in parameters.single_metrics()]
    found = [name for name in known if parameters.metric_columns(name)[0] == column]
    if not found:
        raise UsageError(f"{plain(one.argument)} did not measure {plain(column)}: compare runs that did")
    scorer, mine = outputs.scorers[found[0]], metric(one, found[0])
    records = [record for _, record in sorted(one.records.items())]
    prompts = [indices.prompt_of(record.index) for record in records]
    try:
        rows = outputs.cache(scorer).rows(keys(mine, records))
        per_image = mine.per_image(rows)
        if per_image is not None:
            value = float(per_image.mean())
            return MetricOfRun(scorer, value, of_prompts(finite(per_image - value), prompts))
        if mine.cache_key != scorer:
            raise UsageError(f"it was scored by {plain(scorer)}, whose weights are not here")
        value, influences = value_and_influences(mine, rows, items(one, records))
        return MetricOfRun(mine.basis(), value, of_prompts(finite(influences), prompts))
    except (UsageError, metrics.Unavailable) as e:
        raise UsageError(f"{plain(one.argument)}: {found[0]}: {e}") from None
    except (ArithmeticError, LookupError, RuntimeError, ValueError):
        raise UsageError(
            f"not every image of {plain(one.argument)} has an output of {plain(scorer)}: score the run with specbench"
            " evaluate"
        ) from None


def metric(one: ScoredPass, name: str) -> Metric:
    """A metric in the scoring context of a run's configuration."""
    from specbench import metrics
    from specbench.harness.scoring import scoring_context

    settings = {key: str(one.cfg.get(key) or "") for key in ("metrics_dir", "reference", "data")}
    return metrics.metric(name, scoring_context(settings))


def keys(one: Metric, records: Sequence[Record]) -> list[str]:
    """The keys of these images among the cached outputs of a metric's scorer."""
    from specbench.metrics.outputs import image_key

    return [image_key(r.sha256, r.prompt if one.reads_prompt else None) for r in records]


def value_and_influences(one: Metric, outputs: np.ndarray, prompts: Sequence[data.Item]) -> tuple[float, np.ndarray]:
    """The value of a metric of all images together, and the influence of each (N,). UsageError where it has none."""
    score, influences = one.score(outputs, prompts)[0], one.influences(outputs, prompts)
    if score.value is None or influences is None:
        few = f"{len(prompts)} pairs are too few for an interval of its difference"
        raise UsageError(f"a statistic of all images together, and {score.note if score.value is None else few}")
    return score.value, influences


def items(one: ScoredPass, mine: Sequence[Record]) -> list[data.Item]:
    """The prompts of these records; with their labels, where the code generates the data set."""
    if not registry.is_drawn(str(one.cfg.get("data"))):
        return [data.Item(r.index, r.prompt, None, r.id) for r in mine]
    made = data.load({**one.cfg, "n": max(indices.prompt_of(r.index) for r in mine) + 1})
    found = [replace(made[indices.prompt_of(r.index)], index=r.index) for r in mine]
    if any(item.prompt != r.prompt for item, r in zip(found, mine)):
        raise UsageError(f"its prompts are not those of data={one.cfg['data']} now")
    return found


def of_prompts(influences: np.ndarray, prompts: Sequence[int]) -> np.ndarray:
    """How each prompt (G,) moves a statistic, from how each of its images (N,) does: 1 / G of the one is the sum of 1 /
    N of the others."""
    _, of = np.unique(prompts, return_inverse=True)
    sums = np.bincount(of, influences)
    return np.asarray(sums * (len(sums) / len(influences)))


def finite(values: np.ndarray) -> np.ndarray:
    """ValueError for values that are not."""
    if not np.isfinite(values).all():
        raise ValueError("not finite")
    return values
