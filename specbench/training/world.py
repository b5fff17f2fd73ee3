"""The training set of *scenes*, rendered once into a folder and mapped from there."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from specbench.data import scenes
from specbench.storage.files import write_atomically

CHUNK = 1000


@dataclass(frozen=True)
class World:
    images: np.ndarray  # (N, 64, 64, 3) uint8
    captions: list[str]
    labels: np.ndarray  # (N, 14) int64


def _chunk(args: tuple[str, int, int, int]) -> tuple[np.ndarray, list[str], np.ndarray]:
    split, start, stop, seed = args
    return scenes.render(split, range(start, stop), seed)


def load(work: Path, split: str, n: int, seed: int = 0) -> World:
    """The first `n` scenes of a split; rendered on every core the first time, read from `work` afterwards."""
    work.mkdir(parents=True, exist_ok=True)
    stem = work / f"{split}-{n}-{seed}"
    images, text = stem.with_suffix(".images.npy"), stem.with_suffix(".json")
    if not text.exists():
        jobs = [(split, i, min(n, i + CHUNK), seed) for i in range(0, n, CHUNK)]
        store = np.lib.format.open_memmap(images, mode="w+", dtype=np.uint8, shape=(n, scenes.SIZE, scenes.SIZE, 3))
        captions, labels = [], []
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            for job, (i, c, y) in zip(
                jobs, tqdm(pool.map(_chunk, jobs), total=len(jobs), desc=f"render {split}"), strict=True
            ):
                store[job[1] : job[2]] = i
                captions += c
                labels.append(y)
        store.flush()
        write_atomically(text, json.dumps({"captions": captions, "labels": np.concatenate(labels).tolist()}).encode())
    meta = json.loads(text.read_text())
    return World(np.load(images, mmap_mode="c"), meta["captions"], np.array(meta["labels"], dtype=np.int64))
