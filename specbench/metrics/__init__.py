"""Metrics: images and their items -> one `Score` per column of a row.

A metric is one choice conf/metrics/NAME.yaml, which names a subclass of `base.Metric` as "module:Class", in this
package or in that of a plug-in, and its options. Neither torch nor any network is imported before the first image is
scored.
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
    """A choice of conf/metrics: its name, its description in one line, and its options."""

    name: str
    line: str
    options: Mapping[str, Any]


def choice(name: str) -> MetricChoice:
    """The choice with this name. UsageError for a name that does not exist."""
    known = parameters.single_metrics()
    if name not in known:
        raise errors.unknown("metric", name, known)
    options = dict(parameters.default("metrics", name, name))
    for declared in (
        "metric",
        "columns",
        "features",
        "files",
        "world",
    ):  # read by others
        options.pop(declared, None)
    return MetricChoice(name, known[name], options)


def _metric_class(chosen: MetricChoice) -> type[Metric]:
    found: type[Metric] = registry.find("metrics", chosen.name)
    return found


def metric(name: str, context: ScoringContext) -> Metric:
    """A metric in its scoring context; loads no network. UsageError for an unknown name or option."""
    chosen = choice(name)
    return _metric_class(chosen)(context, chosen.options)


def scoring_context(cfg: Mapping[str, Any], device: str = "cpu", batch: int = ScoringContext.batch) -> ScoringContext:
    """The scoring context of a configuration: its `metrics_dir`, `reference` (a file, or the name of a data set) and
    `data`."""
    folder, reference, data = cfg["metrics_dir"], cfg["reference"], cfg["data"]
    if reference in parameters.choices("data"):
        reference, data = None, reference
    return ScoringContext(
        ASSETS,
        home.expanded(folder) if folder else home.metrics_folder(),
        home.expanded(reference) if reference else None,
        data,
        device,
        batch,
    )


def missing(name: str, context: ScoringContext) -> str:
    """What metric `name` lacks here, in one line; empty where its weights are available."""
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
    """Column -> score of each of the named metrics, over images (N) and their items (N), paired by position.

    One batch of images is in memory at a time. Per-image scorer outputs are read from `cached`, and new ones are
    added to it. A metric that cannot be measured here, or on these images, has scores with value None and a note with
    the reason. The order of the pairs does not matter and, on a CPU, neither does `context.batch`.

    UsageError for an unknown name, for two metrics of one column and for an image that cannot be read; ValueError
    where images and items cannot be paired.
    """
    names = list(dict.fromkeys(names))
    parameters.check_metrics(names)
    if len(images) != len(items):
        raise ValueError(f"{len(images)} images cannot be paired with {len(items)} items")
    cached = Outputs(None) if cached is None else cached
    hashed = _HashedImages(images)
    groups: dict[str, dict[str, Metric]] = {}  # scorer -> the metrics that share it, by name
    scores: dict[str, tuple[Score, ...]] = {}

    def unmeasured(name: str, note: str, backend: str = "") -> None:
        scores[name] = (Score.unmeasured(note, backend),) * len(parameters.metric_columns(name))

    for name in names:
        one = metric(name, context)
        try:
            cache_key = one.cache_key
        except Unavailable as e:
            unmeasured(name, str(e))
            continue
        if not len(images):
            unmeasured(name, "no images")
        elif refused := one.refuses(hashed, items):
            unmeasured(name, refused, cache_key)
        else:
            groups.setdefault(cache_key, {})[name] = one
    for cache_key, group in groups.items():
        try:
            outputs, order = _sorted_outputs(next(iter(group.values())), hashed, items, cached)
        except Unavailable as e:
            for name in group:
                unmeasured(name, str(e))
            continue
        paired = [items[i] for i in order]
        for name, one in group.items():
            cached.name(name, cache_key)
            try:
                found = over_prompts(one, one.score(outputs, paired), outputs, paired)
                scores[name] = tuple(map(_finite, found))
            except Unavailable as e:
                unmeasured(name, str(e), cache_key)
    columns = {name: parameters.metric_columns(name) for name in names}
    return {column: one for name in names for column, one in zip(columns[name], scores[name], strict=True)}


def scorer_outputs(one: Metric, images: Images, items: Sequence[PromptItem], cached: Outputs) -> np.ndarray:
    """Outputs (N, width) of the scorer of a metric for images (N) and their items (N), in their order.

    No score is computed. Outputs are cached as in `score`. Raises as `score`, and Unavailable.
    """
    found, order = _sorted_outputs(one, _HashedImages(images), items, cached)
    return found[np.argsort(order)]


class Scored(Protocol):
    """Images (N) that were scored, and their items (N), paired by position."""

    @property
    def images(self) -> Images: ...
    @property
    def items(self) -> Sequence[PromptItem]: ...


def difference_stderr(
    name: str, mine: Scored, theirs: Scored, context: ScoringContext, cached: Outputs
) -> float | None:
    """The standard error of a metric over `mine` minus that over `theirs`, in its first column. It is over pairs of
    images, or over prompts where these have several.

    None where the metric is no mean over images and the influence of an image on it is not known. The outputs of the
    scorer are read from `cached`.
    """
    one = metric(name, context)
    sides = []
    try:
        for some in (mine, theirs):
            outputs = scorer_outputs(one, some.images, some.items, cached)
            own = one.per_image(outputs)
            sides.append(one.influences(outputs, some.items) if own is None else own)
    except Unavailable:
        return None
    if sides[0] is None or sides[1] is None:
        return None
    moved: np.ndarray = sides[0] - sides[1]
    return mean(moved.tolist(), by_prompt(mine.items)).stderr if np.isfinite(moved).all() else None


def _finite(one: Score) -> Score:
    """A score of NaN or inf becomes an unmeasured one."""
    if one.value is None or math.isfinite(one.value):
        return one
    return Score.unmeasured("; ".join(filter(None, [f"the value is {one.value}", one.note])), one.backend)


class _HashedImages:
    """Images that are checked when they are read, and whose digests are stored. The list `digests` of the `Images` is
    used where there is one: those of a run, which holds the digests already, and files."""

    def __init__(self, images: Images) -> None:
        self._images = images
        known = getattr(images, "digests", None)
        self.digests: list[str | None] = [None] * len(images) if known is None else known

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> np.ndarray:
        image = self._images[index]
        image_files.check(image)
        if self.digests[index] is None:
            self.digests[index] = image_files.digest(image)
        return image

    def key(self, index: int, prompt: str | None) -> str | None:
        """The key of an image in an `OutputCache`; None before the image was read."""
        digest = self.digests[index]
        return None if digest is None else image_key(digest, prompt)


def _sorted_outputs(
    one: Metric, images: _HashedImages, items: Sequence[PromptItem], cached: Outputs
) -> tuple[np.ndarray, list[int]]:
    """The scorer's outputs (N, width) for all images and, for each row, the index of its image.

    The rows are in the order of their keys, so that sums over them do not depend on the order of the images.
    """
    outputs = cached.cache(one.cache_key)
    prompts = [item.prompt if one.reads_prompt else None for item in items]
    todo = [i for i, prompt in enumerate(prompts) if (key := images.key(i, prompt)) is None or key not in outputs]
    if todo:
        _add_outputs(one, images, items, prompts, outputs, todo)
    keys = [images.key(i, prompt) or "" for i, prompt in enumerate(prompts)]
    order = sorted(range(len(keys)), key=lambda i: (keys[i], items[i].id, items[i].prompt, items[i].labels or ()))
    return outputs.rows([keys[i] for i in order]), order


def _add_outputs(
    one: Metric,
    images: _HashedImages,
    items: Sequence[PromptItem],
    prompts: Sequence[str | None],
    outputs: OutputCache,
    todo: Sequence[int],
) -> None:
    """Reads the images at the indices `todo` in batches, and adds the absent outputs to the cache."""
    scorer: Scorer | None = None
    size = one.context.batch
    interval = 0.2 if sys.stderr.isatty() else 20.0
    readers = ThreadPoolExecutor(max(1, min(8, size, os.cpu_count() or 1)))
    with (
        _exact(one.context.device),
        readers,
        tqdm(
            total=len(images), initial=len(images) - len(todo), desc=one.cache_key, unit="image", mininterval=interval
        ) as bar,
    ):
        for start in range(0, len(todo), size):
            rows = todo[start : start + size]
            batch = list(readers.map(images.__getitem__, rows))
            absent: dict[str, int] = {}  # key -> index in the batch; equal images are scored once
            for position, i in enumerate(rows):
                key = images.key(i, prompts[i])
                assert key is not None  # it was read
                if key not in outputs:
                    absent.setdefault(key, position)
            if absent:
                scorer = scorer or one.scorer()
                found = scorer([batch[p] for p in absent.values()], [items[rows[p]] for p in absent.values()])
                outputs.add(list(absent), found)
            del batch  # before the next batch is read
            bar.update(len(rows))


@contextmanager
def _exact(device: str) -> Iterator[None]:
    """No reduced precision on a GPU: a score must not depend on where it is computed by more than rounding."""
    if not device.startswith("cuda"):
        yield
        return
    import torch

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
