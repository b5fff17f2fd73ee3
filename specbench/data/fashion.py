"""*fashion*: the embedded world of photographs. Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747): 60,000 training and
10,000 test photographs of clothes, 28 x 28 grey pixels in ten classes. Here they have a black border of two pixels.

The photographs are not part of specbench: training reads the files of Debian's package dataset-fashion-mnist. Decoding
and scoring need only the class names.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from specbench.config.run_config import PromptSelection
from specbench.data import base
from specbench.data.base import Item
from specbench.data.worlds import SPLITS, Sample, World
from specbench.errors import MissingFilesError, UsageError
from specbench.storage import home

SIZE, _PIXELS = 32, 28  # pixels per side, with and without the border
#: Class number -> name, in the order of the files' labels.
NAMES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
PACKAGE, FOLDER = "dataset-fashion-mnist", Path("/usr/share/datasets/fashion-mnist")
#: Split -> the start of its files' names. The test photographs are the validation split.
_FILES = dict(zip(SPLITS, ("train", "t10k"), strict=True))
COUNTS = dict(zip(SPLITS, (60_000, 10_000), strict=True))


@dataclass(frozen=True)
class Photograph:
    """The index of a photograph in its split, and its class."""

    split: str
    index: int
    number: int

    def labels(self) -> list[int]:
        return [self.number]


@cache
def photographs(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The photographs (N, 28, 28) uint8 of a split and their class numbers (N,) uint8. Raises MissingFilesError if the
    package's files are not here, and UsageError for damaged files."""
    n = COUNTS[split]
    images = _read(f"{_FILES[split]}-images-idx3-ubyte.gz", (n, _PIXELS, _PIXELS))
    return images, _read(f"{_FILES[split]}-labels-idx1-ubyte.gz", (n,))


def _read(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of an idx file: two zero bytes, the type (8: uint8), the number of sizes, the sizes as big-endian
    32-bit integers, then the values."""
    path = _find(name)
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise UsageError(f"{path} cannot be read ({error}); install the package {PACKAGE} again") from error
    header = bytes((0, 0, 8, len(shape))) + np.array(shape, dtype=">u4").tobytes()
    if not content.startswith(header) or len(content) != len(header) + np.prod(shape):
        raise UsageError(f"{path} is not Fashion-MNIST's file of {shape[0]} entries; install {PACKAGE} again")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def _find(name: str) -> Path:
    for folder in (FOLDER, home.data_folder("fashion")):
        if os.path.isfile(folder / name):
            return folder / name
    raise MissingFilesError(
        f"the photographs of fashion are not here ({name}): install them with `apt-get install {PACKAGE}`, or put the"
        f" files of this package into {home.data_folder('fashion')}",
        is_published=False,
    )


@dataclass(frozen=True)
class Photographs(World):
    """A world of photographs. Its splits are finite, and in the order of the files for any seed."""

    def sample(self, split: str, index: int, seed: int = 0) -> Sample:
        if not 0 <= index < COUNTS[split]:
            raise UsageError(f"{self.name} has {COUNTS[split]:,} photographs of split {split}: use at most as many")
        number = int(photographs(split)[1][index])
        return Sample(index, Photograph(split, index, number), NAMES[number], np.random.default_rng(seed))

    def items(self, wanted: PromptSelection) -> list[Item]:
        """`n` class names; see `base.spread`."""
        return [Item(i, NAMES[number], (number,), name) for i, number, name in base.spread(len(NAMES), wanted)]


def draw(sample: Sample) -> np.ndarray:
    """The photograph of a sample, (32, 32, 3) uint8, whose three channels are equal."""
    photograph: Photograph = sample.scene
    border = (SIZE - _PIXELS) // 2
    grey = np.pad(photographs(photograph.split)[0][photograph.index], border)
    return np.repeat(grey[..., None], 3, -1)


def numbers_in(prompts: Sequence[str], model: str) -> list[int]:
    """The classes that the prompts name; see `base.class_numbers`."""
    return base.class_numbers(prompts, NAMES, model, f"name one of {', '.join(NAMES)} (data=fashion has them all)")


WORLD = Photographs(name="fashion", size=SIZE, draw=draw, shared={"garment": NAMES})
items = WORLD.items
