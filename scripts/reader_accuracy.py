"""How good the embedded reader is by itself: the scores that `metrics=scenes_geneval` gives to images that show what
their captions state, as drawn and after the embedded tokenizer.

    python scripts/reader_accuracy.py [n]     # 6,000 captions unless given; a minute on one core
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from specbench import metrics
from specbench.config import configuration, registry
from specbench.data import scenes, scenes_geneval
from specbench.metrics.tasks import TASKS


def main(n: int) -> None:
    """Prints a line for each kind of image."""
    items = scenes_geneval.items({"n": n})
    drawn = np.stack([scenes.draw(scenes_geneval.sample(item.index)) for item in items])
    for name, images in (("as drawn", drawn), ("after the tokenizer", reconstructed(drawn))):
        context = metrics.ScoringContext(metrics.ASSETS, metrics.ASSETS)
        scores = metrics.score(["scenes_geneval"], images, items, context)
        parts = [f"{task} {scores[f'geneval_{task}'].value:.4f}" for task in TASKS]
        overall = scores["geneval"]
        print(f"{name}: {overall.value:.4f} ± {overall.stderr:.4f} ({', '.join(parts)}), n={n}, {overall.backend}")


def reconstructed(images: np.ndarray) -> np.ndarray:
    """Images (N, 64, 64, 3) uint8 through the embedded VQ tokenizer and back."""
    cfg = configuration.compose(["model=llamagen_scenes"])
    model = registry.find("model", cfg["model"])(cfg, torch.device("cpu"), torch.float32)
    blocks = np.array_split(images, -(-len(images) // 100))
    with torch.inference_mode():
        return np.concatenate([model.decode_image(model.codes(scenes.to_float(block))) for block in blocks])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6000)
