"""Compare ImageReward's two backends, `image_reward` and `image_reward_package`: the same rewards from the same files?

Runs in the environment of the extra image-reward: `uv pip install -e '.[image-reward]'` where the extra metrics is not.
Scores a few images with both and prints the largest difference; exits 1 where it is beyond the tolerance, 2 where a
file is unusable. With --weights and --vocabulary these are the official files; without them random weights of the
official layout (1.8 GB in a temporary folder) and a made-up vocabulary, which shows the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import string
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.errors import UsageError, install
from specbench.metrics import blip, image_reward, image_reward_package
from specbench.storage import image_files

PROMPTS = (
    "a red circle left of a large blue square",
    "A photo of a café, at night.",
    "an armchair in the shape of an avocado, " * 8,  # more than 35 tokens
    "",
)
SIZES = ((256, 256), (512, 512), (300, 401), (97, 64))  # height and width


@dataclass(frozen=True)
class Line:
    """An image's item."""

    prompt: str
    labels: tuple[int, ...] | None = None


def random_weights(seed: int) -> dict[str, Tensor]:
    """Tensors of ImageReward.pt's names and shapes. Each layer keeps the size of what goes through it, so that rewards
    differ between images: with the default small random weights any two networks give equal rewards."""
    with torch.device("meta"):
        network = blip.Blip().state_dict()
    wide, text = blip.VISION["hidden_size"], blip.TEXT["hidden_size"]
    shapes = {name: tuple(network[place.name].shape) for name, place in blip.table().items()}
    for name, width in (("vision", wide), ("text", text)):  # BLIP's projections, which ImageReward does not use
        shapes |= {f"blip.{name}_proj.weight": (256, width), f"blip.{name}_proj.bias": (256,)}
    stream = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=stream)
        if len(shape) == 1:
            scaled = 0.1 * x + ("norm" in name.lower() and name.endswith("weight"))
        elif "embed" in name and "proj" not in name:
            scaled = x
        else:
            scaled = x / math.sqrt(math.prod(shape[1:]))
        found[name] = scaled
    return found


def made_up_vocabulary() -> str:
    """A vocabulary of the size of bert-base-uncased, with its special tokens at their indices and all letters."""
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    words = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [*letters, *(f"##{c}" for c in letters), "circle", "avocado", "##chair"]
    size = blip.TEXT["vocab_size"] - 2
    return "\n".join([*words, *(f"word{i}" for i in range(size - len(words)))]) + "\n"


def check(weights: Path, vocabulary: Path, given: list[Path], device: str, tolerance: float) -> bool:
    """Print each image's rewards and the largest difference; whether it is within the tolerance."""
    shown: list[np.ndarray] = [image_files.read(path) for path in given]
    if not shown:
        stream = np.random.default_rng(0)
        coarse = [stream.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in SIZES]
        shown = [np.kron(c, np.ones((-(-h // 8), -(-w // 8), 1), np.uint8))[:h, :w] for c, (h, w) in zip(coarse, SIZES)]
    items = [Line(PROMPTS[i % len(PROMPTS)]) for i in range(len(shown))]
    print("loading the package's model", flush=True)
    theirs = image_reward_package.PackageScorer(image_reward_package.load(weights, vocabulary, device))(shown, items)[
        :, 0
    ]
    print("loading the native model", flush=True)
    native = image_reward.ImageRewardScorer(blip.load(weights, device), blip.Captions(vocabulary), device)
    ours = native(shown, items)[:, 0]
    for image, a, b in zip(shown, theirs, ours):
        print(f"{image.shape[1]:5d} x {image.shape[0]:<5d} package {a:+.6f}  native {b:+.6f}")
    difference, spread = float(np.abs(theirs - ours).max()), float(np.ptp(theirs))
    fine = bool(np.isfinite(difference)) and difference <= tolerance
    telling = len(shown) == 1 or spread > 100 * tolerance
    print(f"largest difference {difference:.2e}{'' if fine else '  BEYOND THE TOLERANCE'}")
    if not telling:
        print(f"the rewards differ by {spread:.2e} only, which is too little to tell one backend from another")
    return fine and telling


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, help="ImageReward.pt")
    parser.add_argument("--vocabulary", type=Path, help="vocab.txt of bert-base-uncased")
    parser.add_argument("--images", type=Path, help="a folder of images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    asked = parser.parse_args(argv)
    try:
        if importlib.util.find_spec("ImageReward") is None:
            raise UsageError(f"the package is not here: {install('image-reward')}")
        given = image_files.find(asked.images)[:16] if asked.images else []
        if asked.images and not given:
            raise UsageError(f"there are no images in {asked.images}; name a folder of images")
        with tempfile.TemporaryDirectory() as folder:
            weights, vocabulary = asked.weights, asked.vocabulary
            if weights is None:
                weights = Path(folder) / "ImageReward.pt"
                torch.save(random_weights(0), weights)
            if vocabulary is None:
                vocabulary = Path(folder) / "vocab.txt"
                vocabulary.write_text(made_up_vocabulary(), encoding="utf-8")
            return 0 if check(weights, vocabulary, given, asked.device, asked.tolerance) else 1
    except UsageError as e:
        print(f"check_image_reward: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
