"""The classes of *scenes*: images of one object, whose class is its colour and shape, such as "red circle".

The images are portraits of the scenes with one object: it is large and near the centre, as in other data sets of
classes. Its fill, exact position and background are free, so that a class-conditional model has a broad distribution to
learn. Images are spread evenly: 40 consecutive images have each class once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from specbench.config.run_config import PromptSelection
from specbench.data import base, scenes, worlds
from specbench.data.base import Item

#: Class number -> name: shape by shape, in the order of `scenes.SHAPES` and `scenes.COLOURS`.
NAMES = tuple(f"{colour} {shape}" for shape in scenes.SHAPES for colour in scenes.COLOURS)
#: The attributes that a class states.
ATTRIBUTES = ("layout", "shape0", "colour0")

_LAYOUT, _SHAPE, _COLOUR = (list(scenes.ATTRIBUTES).index(name) for name in ATTRIBUTES)
_SINGLE = scenes.LAYOUTS.index("single")


def items(wanted: PromptSelection) -> list[Item]:
    """`n` class names; see `base.spread`.

    labels: as `World.render` returns them; all but the attributes of `ATTRIBUTES` are `worlds.ABSENT`.
    """
    return [Item(i, NAMES[number], labels_of(number), name) for i, number, name in base.spread(len(NAMES), wanted)]


def labels_of(number: int) -> tuple[int, ...]:
    """The 14 labels of a class: one object, its shape and colour."""
    labels = [worlds.ABSENT] * len(scenes.ATTRIBUTES)
    shape, colour = divmod(number, len(scenes.COLOURS))
    labels[_LAYOUT], labels[_SHAPE], labels[_COLOUR] = _SINGLE, shape, colour
    return tuple(labels)


def numbers_of(labels: np.ndarray) -> np.ndarray:
    """Labels (N, 14) int64 of scenes -> class numbers (N,) int64; -1 for a scene that does not have exactly one
    object."""
    numbers = labels[:, _SHAPE] * len(scenes.COLOURS) + labels[:, _COLOUR]
    return np.where(labels[:, _LAYOUT] == _SINGLE, numbers, -1)


def numbers_in(prompts: Sequence[str], model: str) -> list[int]:
    """The classes that the prompts name; see `base.class_numbers`."""
    advice = (
        f"name a colour ({', '.join(scenes.COLOURS)}) and a shape ({', '.join(scenes.SHAPES)}), such as 'red circle'"
        " (data=scenes_classes has them all)"
    )
    return base.class_numbers(prompts, NAMES, model, advice)


def portraits(split: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Portraits of the first `n` scenes of a split with one object: images (n, 64, 64, 3) uint8, and class numbers
    (n,) int64."""
    every = (scenes.sample(split, index, seed) for index in itertools.count())
    samples = list(itertools.islice((s for s in every if s.scene.layout == "single"), n))
    labels = np.array([s.scene.labels() for s in samples], dtype=np.int64)
    return np.stack([scenes.draw(s, portrait=True) for s in samples]), numbers_of(labels)
