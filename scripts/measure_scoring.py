"""How much memory scoring takes: N images of 512x512 through Inception-V3 (random weights) and the Fréchet distance.

    python scripts/measure_scoring.py 1000

Prints the peak of resident memory before and while scoring, and exits with 1 where it passes 3 GB.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from specbench import metrics
from specbench.data.base import Item
from specbench.metrics import frechet, inception
from specbench.metrics import reference as references
from specbench.storage import image_files
from specbench.storage.files import cached_sha256

LIMIT_GB = 3.0
SIDE = 512


def gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def draw(folder: Path, count: int) -> list[Path]:
    """Pictures that differ: a coarse pattern of colours each, enlarged."""
    paths = []
    for i in range(count):
        coarse = np.random.default_rng(i).integers(0, 256, (16, 16, 3), np.uint8)
        paths.append(folder / f"{i:05d}.jpg")
        Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    return paths


def random_weights(folder: Path) -> None:
    """An Inception with random weights, where the published one belongs; its hash is taken for the published one."""
    network = inception.blank()
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    path = folder / "inception" / inception.FILES[0]
    path.parent.mkdir(parents=True)
    torch.save(network.state_dict(), path)
    inception.SHA256 = cached_sha256(path)


def main(count: int) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = draw(folder, count)
        random_weights(folder)
        context = metrics.ScoringContext(Path(), folder, folder / "real.npz", device="cpu", batch=64)
        real = np.abs(np.random.default_rng(0).standard_normal((3000, inception.FEATURES))).astype(np.float32)
        moments = frechet.Moments.of(torch.from_numpy(real))
        cache_key = metrics.metric("fid", context).cache_key
        mean, covariance = moments.mean.numpy(), moments.covariance.numpy()
        assert context.reference is not None
        references.write(
            context.reference,
            references.ReferenceStatistics(
                mean, covariance, "random", real, len(real), {"data": "random", "cache_key": cache_key}
            ),
        )
        del real
        print(f"before: {gigabytes():.2f} GB at most", flush=True)
        began = time.perf_counter()
        items = [Item(i, "", None, str(i)) for i in range(count)]
        score = metrics.score(["fid"], image_files.ImageFiles(paths), items, context)["fid"]
        if score.value is None:
            print(f"not scored: {score.note}")
            return 1
        spent = time.perf_counter() - began
        print(f"{count} images of {SIDE}x{SIDE} in {spent:.0f} s: {gigabytes():.2f} GB at most; {score.note}")
    return int(gigabytes() > LIMIT_GB)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
