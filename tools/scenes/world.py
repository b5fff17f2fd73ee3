"""The training set of an embedded world, rendered once and mapped from a folder."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
from tqdm import tqdm

from specbench.data import worlds
from specbench.data.worlds import World
from specbench.storage.files import write_atomically

CHUNK = 1000


@dataclass(frozen=True)
class Split:
    images: np.ndarray  # (N, size, size, 3) uint8
    captions: list[str]
    labels: np.ndarray  # (N, attributes) int64


def load(world: World, work: Path, split: str, n: int, seed: int = 0) -> Split:
    """The first `n` scenes of a split: rendered on all cores the first time, and read from `work` afterwards."""
    work.mkdir(parents=True, exist_ok=True)
    stem = work / f"{split}-{n}-{seed}"
    images, text = stem.with_suffix(".images.npy"), stem.with_suffix(".json")
    if not text.exists():
        jobs = [range(i, min(n, i + CHUNK)) for i in range(0, n, CHUNK)]
        store = np.lib.format.open_memmap(images, mode="w+", dtype=np.uint8, shape=(n, world.size, world.size, 3))
        captions, labels = [], []
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            parts = pool.map(_rendered, repeat(world.name), repeat(split), jobs, repeat(seed))
            for job, (i, c, y) in zip(jobs, tqdm(parts, total=len(jobs), desc=f"render {split}"), strict=True):
                store[job.start : job.stop] = i
                captions += c
                labels.append(y)
        store.flush()
        write_atomically(text, json.dumps({"captions": captions, "labels": np.concatenate(labels).tolist()}).encode())
    metadata = json.loads(text.read_text())
    return Split(np.load(images, mmap_mode="c"), metadata["captions"], np.array(metadata["labels"], dtype=np.int64))


def _rendered(world: str, split: str, indices: range, seed: int) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Takes the world's name, because a name can be sent to another process."""
    return worlds.world(world).render(split, indices, seed)
