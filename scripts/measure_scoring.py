"""Rate and memory of scoring many images by a network of full size with random weights; no download.

    OMP_NUM_THREADS=2 python scripts/measure_scoring.py fd_dinov2 5000 --folder DIR     # or cmmd

Draws images of 256 x 256 into DIR, extracts their features as `specbench evaluate` does (batch by batch, cached there)
and computes the distance to a reference of random features with its standard error, whatever n. Prints images a second
and the peak of resident memory; exit 1 above 3 GB. Stopped, the same command continues; a second time it extracts
nothing. Without --folder everything is in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from specbench import metrics
from specbench.data.base import Item
from specbench.metrics import clip, dinov2, frechet
from specbench.metrics.compared import ComparedMetric
from specbench.metrics.reference import ReferenceStatistics
from specbench.rows import provenance, shown
from specbench.storage import image_files

LIMIT_GB, SIDE = 3.0, 256
#: Metric -> its network with random weights.
NETWORKS: dict[str, Callable[[], nn.Module]] = {"fd_dinov2": dinov2.DINOv2, "cmmd": clip.random_image_tower}
LOADERS: dict[str, tuple[Any, str]] = {"fd_dinov2": (dinov2, "load"), "cmmd": (clip, "load_image_tower")}


def gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def draw(folder: Path, count: int) -> list[Path]:
    """Images that differ: a coarse pattern of colours each, enlarged."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i:05d}.png" for i in range(count)]
    for i, path in enumerate(paths):
        if not path.exists():
            coarse = np.random.default_rng(i).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path)
    return paths


def with_random_weights(name: str) -> ComparedMetric:
    """A metric whose scorer is random, compared with random features."""
    torch.manual_seed(0)
    network = NETWORKS[name]().eval().requires_grad_(False)
    module, load = LOADERS[name]
    setattr(module, load, lambda *_: network)
    whole = type(metrics.metric(name, metrics.ScoringContext(Path(), Path())))

    class Random(whole):  # type: ignore[misc, valid-type]
        cache_key, published_files = f"{name}-random", (Path(),)

    one: ComparedMetric = Random(metrics.ScoringContext(Path(), Path()), {})
    real = np.random.default_rng(0).standard_normal((2 * one.width, one.width)).astype(np.float32)
    moments, origin = frechet.Moments.of(torch.from_numpy(real)), {"data": "random", "cache_key": one.cache_key}
    statistics = ReferenceStatistics(
        moments.mean.numpy(), moments.covariance.numpy(), "random", real, len(real), origin
    )
    one.__dict__["reference"] = statistics
    return one


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metric", choices=sorted(NETWORKS))
    parser.add_argument("count", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args(arguments)
    shown.IMAGES_PER_FEATURE = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        images = image_files.ImageFiles(draw(folder / "images", given.count))
        items = [Item(i, "", None, str(i)) for i in range(given.count)]
        one, cached = with_random_weights(given.metric), metrics.Outputs(folder)
        before, began, spent = len(cached.cache(one.cache_key)), time.perf_counter(), time.process_time()
        outputs = metrics.scorer_outputs(one, images, items, cached)
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        made = len(cached.cache(one.cache_key)) - before
        began = time.perf_counter()
        (score,) = one.score(outputs, items)
        scored = time.perf_counter() - began
    rate = f"{made / seconds:.2f} images/s, {made / spent:.2f} a CPU second" if made else "nothing was left to extract"
    print(f"{given.metric}: {given.count} images, {made} extracted in {seconds:.0f} s: {rate}")
    print(f"the distance and its standard error in {scored:.1f} s: {score.value} ± {score.stderr}")
    print(f"peak of resident memory: {gigabytes():.2f} GB; limit {LIMIT_GB} GB")
    where = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, commit {provenance.commit()}, {provenance.utc()}")
    return int(gigabytes() > LIMIT_GB)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
