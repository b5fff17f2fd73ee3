"""The classes of *scenes*: images of one object, whose class is its colour and shape, such as "red circle".

The images are portraits of the scenes with one object: it is large and near the centre, as objects are in images
that come by class. Its fill, exact position and background are free, so that a class-conditional model has a broad
distribution to learn. Images are spread evenly: every forty in a row have each class once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.data import base, scenes
from specbench.data.base import Item
from specbench.errors import UsageError

#: Class number -> name: shape by shape, in the order of `scenes.SHAPES` and `scenes.COLOURS`.
NAMES = tuple(f"{colour} {shape}" for shape in scenes.SHAPES for colour in scenes.COLOURS)
#: The attributes that a class states.
ATTRIBUTES = ("layout", "shape0", "colour0")

_LAYOUT, _SHAPE, _COLOUR = (list(scenes.ATTRIBUTES).index(name) for name in ATTRIBUTES)
_SINGLE = scenes.LAYOUTS.index("single")


def items(cfg: Mapping[str, Any]) -> list[Item]:
    """`n` class names; see `base.spread`.

    labels: as of `scenes.render`, of which only those of `ATTRIBUTES` are given; the others are `scenes.ABSENT`.
    """
    return [Item(i, NAMES[number], labels_of(number), name) for i, number, name in base.spread(len(NAMES), cfg)]


def labels_of(number: int) -> tuple[int, ...]:
    """The 14 labels of a class: one object, its shape and colour."""
    labels = [scenes.ABSENT] * len(scenes.ATTRIBUTES)
    shape, colour = divmod(number, len(scenes.COLOURS))
    labels[_LAYOUT], labels[_SHAPE], labels[_COLOUR] = _SINGLE, shape, colour
    return tuple(labels)


def numbers_of(labels: np.ndarray) -> np.ndarray:
    """Labels (N, 14) int64 of scenes -> class numbers (N,) int64; -1 where there is not one object."""
    numbers = labels[:, _SHAPE] * len(scenes.COLOURS) + labels[:, _COLOUR]
    return np.where(labels[:, _LAYOUT] == _SINGLE, numbers, -1)


def number_of(prompt: str) -> int | None:
    """The class that a prompt names, by its words or its number; None where it names none."""
    words = prompt.lower().split()
    if len(words) == 1 and words[0].isascii() and words[0].isdigit() and len(words[0]) <= 6:
        return int(words[0]) if int(words[0]) < len(NAMES) else None
    name = " ".join(words)
    return NAMES.index(name) if name in NAMES else None


def numbers_in(prompts: Sequence[str], model: str) -> list[int]:
    """The classes that prompts name, for a model of this name. UsageError where one names none."""
    found = []
    for prompt in prompts:
        number = number_of(prompt)
        if number is None:
            raise UsageError(
                f"{model} draws one object, and '{prompt[:40]}' is not one of its classes: name a colour"
                f" ({', '.join(scenes.COLOURS)}) and a shape ({', '.join(scenes.SHAPES)}), such as 'red circle', or"
                f" a number from 0 to {len(NAMES) - 1}; data=scenes_classes has them all"
            )
        found.append(number)
    return found


def portraits(split: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Portraits of the first `n` scenes of a split with one object: images (n, 64, 64, 3) uint8, and class numbers
    (n,) int64."""
    found = singles(split, n, seed)
    labels = np.array([s.scene.labels() for s in found], dtype=np.int64)
    return np.stack([scenes.draw(s, portrait=True) for s in found]), numbers_of(labels)


def singles(split: str, n: int, seed: int = 0) -> list[scenes.Sample]:
    """The first `n` scenes of a split with one object."""
    samples = (scenes.sample(split, index, seed) for index in itertools.count())
    return list(itertools.islice((s for s in samples if s.scene.layout == "single"), n))
