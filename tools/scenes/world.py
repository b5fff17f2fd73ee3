"""An embedded world: what draws its pictures, and its training set, rendered once and mapped from a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
from tqdm import tqdm

from specbench.data import scenes, scenes_classes
from specbench.storage.files import write_atomically

CHUNK = 1000
#: (split, indices, seed) -> images (N, H, H, 3) uint8, captions, labels (N, attributes) int64
Render = Callable[[str, range, int], tuple[np.ndarray, list[str], np.ndarray]]


@dataclass(frozen=True)
class World:
    """What the stages draw from. name: in the names of its models and weights; portraits: images of one object and
    their classes, of the first n scenes of a split that show one."""

    name: str = "scenes"
    render: Render = scenes.render
    size: int = scenes.SIZE
    portraits: Callable[[str, int], tuple[np.ndarray, np.ndarray]] = scenes_classes.portraits


SCENES = World()


@dataclass(frozen=True)
class Split:
    images: np.ndarray  # (N, 64, 64, 3) uint8
    captions: list[str]
    labels: np.ndarray  # (N, 14) int64


def load(world: World, work: Path, split: str, n: int, seed: int = 0) -> Split:
    """The first `n` scenes of a split; rendered on every core the first time, read from `work` afterwards."""
    work.mkdir(parents=True, exist_ok=True)
    stem = work / f"{split}-{n}-{seed}"
    images, text = stem.with_suffix(".images.npy"), stem.with_suffix(".json")
    if not text.exists():
        jobs = [range(i, min(n, i + CHUNK)) for i in range(0, n, CHUNK)]
        store = np.lib.format.open_memmap(images, mode="w+", dtype=np.uint8, shape=(n, world.size, world.size, 3))
        captions, labels = [], []
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            parts = pool.map(world.render, repeat(split), jobs, repeat(seed))
            for job, (i, c, y) in zip(jobs, tqdm(parts, total=len(jobs), desc=f"render {split}"), strict=True):
                store[job.start : job.stop] = i
                captions += c
                labels.append(y)
        store.flush()
        write_atomically(text, json.dumps({"captions": captions, "labels": np.concatenate(labels).tolist()}).encode())
    meta = json.loads(text.read_text())
    return Split(np.load(images, mmap_mode="c"), meta["captions"], np.array(meta["labels"], dtype=np.int64))
