"""Metrics: images and their items -> one `Score` per column of a row.

A metric is one choice conf/metrics/NAME.yaml, which names a module of this package and its options. The module has a
class `Measure` (see `base.Metric`). Neither torch nor any network is imported before the first image is scored.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from tqdm import tqdm

from specbench import errors
from specbench.config import parameters
from specbench.config.registry import ASSETS
from specbench.metrics.base import Item, Judge, Metric, Pictures, Place, Score, Unavailable
from specbench.metrics.outputs import Outputs, Shelf, key
from specbench.storage import image_files

__all__ = [
    "ASSETS",
    "Choice",
    "Outputs",
    "Place",
    "Score",
    "Shelf",
    "Unavailable",
    "available",
    "choice",
    "columns",
    "judge",
    "key",
    "metric",
    "missing",
    "score",
]


@dataclass(frozen=True)
class Choice:
    """A choice of conf/metrics: its name, its description in one line, its module in this package, and its options."""

    name: str
    line: str
    module: str
    options: Mapping[str, Any]


def available() -> dict[str, str]:
    """Name -> what it measures, in one line, of every single metric. Sets of metrics are left out."""
    return parameters.single_metrics()


def choice(name: str) -> Choice:
    """The choice with this name. UsageError for a name that does not exist."""
    if name not in available():
        raise errors.unknown("metric", name, available())
    options = dict(parameters.default("metrics", name, name))
    del options["columns"]
    return Choice(name, available()[name], options.pop("metric"), options)


@cache
def _measure(module: str) -> type[Metric]:
    found: type[Metric] = importlib.import_module(f"specbench.metrics.{module}").Measure
    return found


def metric(name: str, place: Place) -> Metric:
    """A metric in its scoring context; loads no network. UsageError for an unknown name or option."""
    chosen = choice(name)
    return _measure(chosen.module)(place, chosen.options)


def columns(name: str) -> tuple[str, ...]:
    """The columns of a row that a metric fills."""
    return parameters.metric_columns(name)


def missing(name: str, place: Place) -> str:
    """What metric `name` lacks here, in one line; empty where its weights are available."""
    try:
        metric(name, place).judged_by  # noqa: B018 (raises)
    except Unavailable as e:
        return str(e)
    return ""


def score(
    names: Sequence[str], images: Pictures, items: Sequence[Item], place: Place, keep: Outputs | None = None
) -> dict[str, Score]:
    """Column -> score of each of the named metrics, over images (N) and their items (N), paired by position.

    One batch of images is in memory at a time. Per-image scorer outputs are cached in `keep`; a cached output is not
    computed again. A metric that cannot be measured here, or on these images, has scores with value None and a note
    with the reason. The order of the pairs does not matter and, on a CPU, neither does `place.batch`.

    UsageError for an unknown name, for two metrics of one column and for an image that cannot be read; ValueError
    where images and items cannot be paired.
    """
    names = list(dict.fromkeys(names))
    parameters.check_metrics(names)
    if len(images) != len(items):
        raise ValueError(f"{len(images)} images cannot be paired with {len(items)} items")
    keep = Outputs(None) if keep is None else keep
    seen = _Seen(images)
    groups: dict[str, dict[str, Metric]] = {}  # scorer -> the metrics that share it, by name
    scores: dict[str, tuple[Score, ...]] = {}

    def unmeasured(name: str, note: str, backend: str = "") -> None:
        scores[name] = (Score.unmeasured(note, backend),) * len(columns(name))

    for name in names:
        one = metric(name, place)
        try:
            judged_by = one.judged_by
        except Unavailable as e:
            unmeasured(name, str(e))
            continue
        if not len(images):
            unmeasured(name, "no images")
        elif refused := one.refuses(seen, items):
            unmeasured(name, refused, judged_by)
        else:
            groups.setdefault(judged_by, {})[name] = one
    for judged_by, group in groups.items():
        try:
            outputs, order = _judged(judged_by, next(iter(group.values())), seen, items, keep)
        except Unavailable as e:
            for name in group:
                unmeasured(name, str(e))
            continue
        paired = [items[i] for i in order]
        for name, one in group.items():
            keep.name(name, judged_by)
            try:
                scores[name] = tuple(map(_finite, one.score(outputs, paired)))
            except Unavailable as e:
                unmeasured(name, str(e), judged_by)
    return {column: one for name in names for column, one in zip(columns(name), scores[name], strict=True)}


def judge(one: Metric, images: Pictures, items: Sequence[Item], keep: Outputs) -> np.ndarray:
    """Outputs (N, width) of the scorer of a metric for images (N) and their items (N), in their order.

    No score is computed. Outputs in `keep` are not computed again, as in `score`. Raises as `score`, and Unavailable.
    """
    found, order = _judged(one.judged_by, one, _Seen(images), items, keep)
    return found[np.argsort(order)]


def _finite(one: Score) -> Score:
    """A score of NaN or inf becomes an unmeasured one."""
    if one.value is None or math.isfinite(one.value):
        return one
    return Score.unmeasured("; ".join(filter(None, [f"the value is {one.value}", one.note])), one.backend)


# --- scoring ----------------------------------------------------------------------------------------------------------


class _Seen:
    """Images that are checked when they are read, and whose digests are stored. The list `digests` of the `Pictures`
    is used where there is one: those of a run, which holds the digests already, and files."""

    def __init__(self, images: Pictures) -> None:
        self._images = images
        known = getattr(images, "digests", None)
        self.digests: list[str | None] = [None] * len(images) if known is None else known

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> np.ndarray:
        picture = self._images[index]
        image_files.check(picture)
        if self.digests[index] is None:
            self.digests[index] = image_files.digest(picture)
        return picture

    def key(self, index: int, prompt: str | None) -> str | None:
        """The key of an image; None before it is known."""
        digest = self.digests[index]
        return None if digest is None else key(digest, prompt)


def _judged(
    judged_by: str, one: Metric, seen: _Seen, items: Sequence[Item], keep: Outputs
) -> tuple[np.ndarray, list[int]]:
    """The scorer's outputs (N, width) for all images and, for each row, the index of its image.

    The rows are in the order of their keys, so that sums over them do not depend on the order of the images.
    """
    shelf = keep.shelf(judged_by)
    prompts = [item.prompt if one.reads_prompt else None for item in items]
    todo = [i for i, prompt in enumerate(prompts) if (found := seen.key(i, prompt)) is None or found not in shelf]
    if todo:
        _judge(judged_by, one, seen, items, prompts, shelf, todo)
    keys = [seen.key(i, prompt) or "" for i, prompt in enumerate(prompts)]
    order = sorted(range(len(keys)), key=lambda i: (keys[i], items[i].id, items[i].prompt, items[i].labels or ()))
    return shelf.rows([keys[i] for i in order]), order


def _judge(
    judged_by: str,
    one: Metric,
    seen: _Seen,
    items: Sequence[Item],
    prompts: Sequence[str | None],
    shelf: Shelf,
    todo: Sequence[int],
) -> None:
    """Reads the images at the indices `todo` in batches, and adds the missing outputs to the cache."""
    judge: Judge | None = None
    size = one.place.batch
    interval = 0.2 if sys.stderr.isatty() else 20.0
    readers = ThreadPoolExecutor(max(1, min(8, size, os.cpu_count() or 1)))
    with (
        _exact(one.place.device),
        readers,
        tqdm(total=len(seen), initial=len(seen) - len(todo), desc=judged_by, unit="image", mininterval=interval) as bar,
    ):
        for start in range(0, len(todo), size):
            rows = todo[start : start + size]
            found = list(readers.map(seen.__getitem__, rows))
            owed: dict[str, int] = {}  # key -> index in the batch; equal images are scored once
            for place, i in enumerate(rows):
                name = seen.key(i, prompts[i])
                assert name is not None  # it was read
                if name not in shelf:
                    owed.setdefault(name, place)
            if owed:
                judge = judge or one.judge()
                said = judge([found[p] for p in owed.values()], [items[rows[p]] for p in owed.values()])
                shelf.add(list(owed), said)
            del found  # before the next batch is read
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
