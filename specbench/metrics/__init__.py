"""Metrics: images and their items -> one `Score` per column of a row.

A metric is one choice conf/metrics/NAME.yaml, which names a subclass of `base.Metric` as "module:Class" (in this
package or in a plug-in) and its options. Neither torch nor any network is imported before the first image is scored.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specbench import errors
from specbench.config import parameters, registry
from specbench.config.registry import ASSETS
from specbench.metrics.base import (
    Images,
    Metric,
    PromptItem,
    Score,
    Scorer,
    ScoringContext,
    Unavailable,
    by_prompt,
    over_prompts,
)
from specbench.metrics.outputs import OutputCache, Outputs, image_key
from specbench.rows.remark import Remark, remark
from specbench.rows.summary import mean
from specbench.storage import home, image_files
from specbench.storage.progress import tqdm

__all__ = [
    "ASSETS",
    "MetricChoice",
    "OutputCache",
    "Outputs",
    "Score",
    "ScoringContext",
    "Unavailable",
    "choice",
    "difference_stderr",
    "image_key",
    "metric",
    "missing",
    "score",
    "scorer_outputs",
    "scoring_context",
]


@dataclass(frozen=True)
class MetricChoice:
    """A choice of conf/metrics: its name, its one-line description, and its options."""

    name: str
    line: str
    options: Mapping[str, Any]


def choice(name: str) -> MetricChoice:
    """The choice with this name. Raises UsageError if it does not exist."""
    descriptions = parameters.single_metrics()
    if name not in descriptions:
        raise errors.unknown("metric", name, descriptions)
    options = dict(parameters.default("metrics", name, name))
    for declared in ("metric", "columns", "features", "files", "world"):  # keys of the choice that are not options
        options.pop(declared, None)
    return MetricChoice(name, descriptions[name], options)


def _metric_class(chosen: MetricChoice) -> type[Metric]:
    metric_class: type[Metric] = registry.find("metrics", chosen.name)
    return metric_class


def metric(name: str, context: ScoringContext) -> Metric:
    """A metric in its scoring context; loads no network. Raises UsageError for an unknown name or option."""
    chosen = choice(name)
    return _metric_class(chosen)(context, chosen.options)


class References(Protocol):
    """The parameters of a run or of a scoring that name files of metrics."""

    @property
    def metrics_dir(self) -> str | None: ...
    @property
    def reference(self) -> str | None: ...
    @property
    def data(self) -> str: ...


def scoring_context(cfg: References, device: str = "cpu", batch: int = ScoringContext.batch) -> ScoringContext:
    """The scoring context of a configuration: its `metrics_dir`, `reference` (a file, or the name of a data set) and
    `data`."""
    folder, reference, data = cfg.metrics_dir, cfg.reference, cfg.data
    if reference is not None and reference in parameters.choices("data"):
        data, reference = reference, None
    return ScoringContext(
        ASSETS,
        home.expanded(folder) if folder else home.metrics_folder(),
        home.expanded(reference) if reference else None,
        data,
        device,
        batch,
    )


def missing(name: str, context: ScoringContext) -> str:
    """The reason why the metric `name` cannot be measured here, in one line; empty if its weights are available."""
    try:
        metric(name, context).cache_key  # noqa: B018 (raises)
    except Unavailable as e:
        return str(e)
    return ""


def score(
    names: Sequence[str],
    images: Images,
    items: Sequence[PromptItem],
    context: ScoringContext,
    cached: Outputs | None = None,
) -> dict[str, Score]:
    """Column -> score, for the named metrics, over images (N) and their items (N), paired by position.

    One batch of images is in memory at a time. Scorer outputs are read from `cached`, and new outputs are added to it.
    If a metric cannot be measured here, or on these images, its scores have the value None and a remark on the reason.
    The order of the pairs does not matter and, on a CPU, neither does `context.batch`.

    Raises UsageError for an unknown name, for two metrics with the same column and for an image that cannot be read;
    ValueError if the numbers of images and items differ.
    """
    names = list(dict.fromkeys(names))
    parameters.check_metrics(names)
    if len(images) != len(items):
        raise ValueError(f"{len(images)} images cannot be paired with {len(items)} items")
    cached = Outputs(None) if cached is None else cached
    hashed = _HashedImages(images)
    groups: dict[str, dict[str, Metric]] = {}  # scorer -> the metrics that share it, by name
    scores: dict[str, tuple[Score, ...]] = {}

    def unmeasured(name: str, reason: str | Remark, backend: str = "") -> None:
        scores[name] = (Score.unmeasured(reason, backend),) * len(parameters.metric_columns(name))

    for name in names:
        requested = metric(name, context)
        try:
            cache_key = requested.cache_key
        except Unavailable as e:
            unmeasured(name, str(e))
            continue
        if not len(images):
            unmeasured(name, remark("no_images"))
        elif reason := requested.refuses(hashed, items):
            unmeasured(name, reason, cache_key)
        else:
            groups.setdefault(cache_key, {})[name] = requested
    for cache_key, group in groups.items():
        try:
            outputs, order = _sorted_outputs(next(iter(group.values())), hashed, items, cached)
        except Unavailable as e:
            for name in group:
                unmeasured(name, str(e))
            continue
        paired = [items[i] for i in order]
        for name, member in group.items():
            cached.name(name, cache_key)
            try:
                values = over_prompts(member, member.score(outputs, paired), outputs, paired)
                scores[name] = tuple(map(_finite, values))
            except Unavailable as e:
                unmeasured(name, str(e), cache_key)
    columns = {name: parameters.metric_columns(name) for name in names}
    return {column: value for name in names for column, value in zip(columns[name], scores[name], strict=True)}


def scorer_outputs(metric: Metric, images: Images, items: Sequence[PromptItem], cached: Outputs) -> np.ndarray:
    """Outputs (N, width) of the metric's scorer for images (N) and their items (N), in their order.

    No score is computed. Outputs are cached as in `score`. Raises the errors of `score`, and Unavailable.
    """
    outputs, order = _sorted_outputs(metric, _HashedImages(images), items, cached)
    return outputs[np.argsort(order)]


class Scored(Protocol):
    """Images (N) that were scored, and their items (N), paired by position."""

    @property
    def images(self) -> Images: ...
    @property
    def items(self) -> Sequence[PromptItem]: ...


def difference_stderr(name: str, a: Scored, b: Scored, context: ScoringContext, cached: Outputs) -> float | None:
    """The standard error of the metric's first column over `a` minus over `b`: over pairs of images, or over prompts if
    prompts have several images.

    None if the metric is not a mean over images and the influence of an image on it is unknown. The scorer's outputs
    are read from `cached`.
    """
    chosen = metric(name, context)
    sides = []
    try:
        for side in (a, b):
            outputs = scorer_outputs(chosen, side.images, side.items, cached)
            per_image = chosen.per_image(outputs)
            sides.append(chosen.influences(outputs, side.items) if per_image is None else per_image)
    except Unavailable:
        return None
    if sides[0] is None or sides[1] is None:
        return None
    differences: np.ndarray = sides[0] - sides[1]
    return mean(differences.tolist(), by_prompt(a.items)).stderr if np.isfinite(differences).all() else None


def _finite(score: Score) -> Score:
    """A score of NaN or inf becomes an unmeasured score."""
    if score.value is None or math.isfinite(score.value):
        return score
    return Score(None, None, score.backend, (remark("not_finite", value=str(score.value)), *score.remarks))


class _HashedImages:
    """Images that are checked when they are read, and whose digests are kept. If the `Images` have a list `digests` (of
    a run, or of files), it is used."""

    def __init__(self, images: Images) -> None:
        self._images = images
        digests = getattr(images, "digests", None)
        self.digests: list[str | None] = [None] * len(images) if digests is None else digests

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> np.ndarray:
        image = self._images[index]
        image_files.check(image)
        if self.digests[index] is None:
            self.digests[index] = image_files.digest(image)
        return image

    def key(self, index: int, prompt: str | None) -> str | None:
        """The key of an image in an `OutputCache`; None before the image is read."""
        digest = self.digests[index]
        return None if digest is None else image_key(digest, prompt)


def _sorted_outputs(
    metric: Metric, images: _HashedImages, items: Sequence[PromptItem], cached: Outputs
) -> tuple[np.ndarray, list[int]]:
    """The scorer's outputs (N, width) for all images, and the index of the image of each row.

    The rows are sorted by their keys, so that sums over them do not depend on the order of the images.
    """
    outputs = cached.cache(metric.cache_key)
    prompts = [item.prompt if metric.reads_prompt else None for item in items]
    todo = [i for i, prompt in enumerate(prompts) if (key := images.key(i, prompt)) is None or key not in outputs]
    if todo:
        _add_outputs(metric, images, items, prompts, outputs, todo)
    keys = [images.key(i, prompt) or "" for i, prompt in enumerate(prompts)]
    order = sorted(range(len(keys)), key=lambda i: (keys[i], items[i].id, items[i].prompt, items[i].labels or ()))
    return outputs.rows([keys[i] for i in order]), order


def _add_outputs(
    metric: Metric,
    images: _HashedImages,
    items: Sequence[PromptItem],
    prompts: Sequence[str | None],
    outputs: OutputCache,
    todo: Sequence[int],
) -> None:
    """Reads the images at the indices `todo` in batches, and adds the missing outputs to the cache."""
    scorer: Scorer | None = None
    size = metric.context.batch
    interval = 0.2 if sys.stderr.isatty() else 20.0
    readers = ThreadPoolExecutor(max(1, min(8, size, os.cpu_count() or 1)))
    with (
        _exact(metric.context.device),
        readers,
        tqdm(
            total=len(images),
            initial=len(images) - len(todo),
            desc=metric.cache_key,
            unit="image",
            mininterval=interval,
        ) as bar,
    ):
        for start in range(0, len(todo), size):
            rows = todo[start : start + size]
            batch = list(readers.map(images.__getitem__, rows))
            missing: dict[str, int] = {}  # key -> index in the batch; equal images are scored once
            for position, i in enumerate(rows):
                key = images.key(i, prompts[i])
                assert key is not None  # it was read
                if key not in outputs:
                    missing.setdefault(key, position)
            if missing:
                scorer = scorer or metric.scorer()
                computed = scorer([batch[p] for p in missing.values()], [items[rows[p]] for p in missing.values()])
                outputs.add(list(missing), computed)
            del batch  # before the next batch is read
            bar.update(len(rows))


@contextmanager
def _exact(device: str) -> Iterator[None]:
    """Disables reduced precision on a GPU: scores on different devices must differ by rounding only."""
    if not device.startswith("cuda"):
        yield
        return
    import torch

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
