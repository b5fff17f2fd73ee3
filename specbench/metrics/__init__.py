"""Metrics: pictures and the items they were made for -> one `Score` each.

A metric is one file of this package and one entry of `METRICS`. Neither torch nor torchmetrics is imported before a
metric is computed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specbench import errors
from specbench.metrics.base import Item, Metric, Score
from specbench.registry import ASSETS

__all__ = ["ASSETS", "METRICS", "Entry", "Score", "available", "missing", "score"]


@dataclass(frozen=True)
class Entry:
    """target: "module:Class" of a `Metric`; line: what it says, in one line; needs: files under the assets folder."""

    target: str
    line: str
    needs: tuple[str, ...]


METRICS = {
    "fid": Entry(
        "specbench.metrics.fid:FrechetDistance",
        "Fréchet distance between the features of these pictures and of real validation pictures (lower is better)",
        ("scenes_classifier.safetensors",),
    ),
    "clip_score": Entry(
        "specbench.metrics.clip_score:ClipScore",
        "mean cosine between a picture and its caption in a two-tower model (higher is better)",
        ("scenes_two_tower.safetensors",),
    ),
    "image_reward": Entry(
        "specbench.metrics.image_reward:ImageReward",
        "how surely a reader finds the caption's attributes: 1 certainly, 0 as by chance (higher is better)",
        ("scenes_reader.safetensors",),
    ),
}


def available() -> dict[str, str]:
    """Name -> what it measures, in one line."""
    return {name: entry.line for name, entry in METRICS.items()}


def missing(name: str, assets: Path = ASSETS) -> list[str]:
    """The weight files that metric `name` needs and does not find; empty if it can be measured."""
    if name not in METRICS:
        raise errors.unknown("metric", name, METRICS)
    return [file for file in METRICS[name].needs if not (assets / file).exists()]


def score(
    names: Sequence[str],
    images: np.ndarray,
    items: Sequence[Item],
    *,
    device: str = "cpu",
    batch: int = 128,
    assets: Path = ASSETS,
) -> dict[str, Score]:
    """Score images (N, H, W, 3) uint8 against items (N), paired by position, by each of the named metrics.

    A metric that cannot be measured here has value None and a note that says why. UsageError for an unknown name;
    ValueError where images and items cannot be paired. On a CPU the result does not depend on `batch`.
    """
    for name in names:
        if name not in METRICS:
            raise errors.unknown("metric", name, METRICS)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(f"images must be uint8 (N, H, W, 3), not {images.dtype} {images.shape}")
    if len(images) != len(items):
        raise ValueError(f"{len(images)} images cannot be paired with {len(items)} items")
    out = {}
    for name in dict.fromkeys(names):
        absent = missing(name, assets)
        if absent:
            out[name] = Score.unmeasured(f"no {', '.join(absent)}: run `make train-scenes`")
        elif len(images) == 0:
            out[name] = Score.unmeasured("no pictures")
        else:
            module, attribute = METRICS[name].target.split(":")
            metric: Metric = getattr(importlib.import_module(module), attribute)(assets, device, batch)
            out[name] = metric.score(images, items)
    return out
