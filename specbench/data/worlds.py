"""The embedded worlds: captioned pictures that are drawn from a seed, and what every world states about its own.

A world has attributes. The shared ones are those of the whole picture, and the layout is the first of them. The others
exist once per slot: an object, or a region. A *description* of a picture states all of them. Its caption says the same
in words, and everything else about the picture is drawn at random.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from specbench.data.base import Item
from specbench.errors import unknown

SPLITS = ("train", "validation")
VALIDATION_SHARE = 8  # one description in eight belongs to the validation split
ABSENT = -1  # label of an attribute that the picture does not have


class Description(Protocol):
    """What a caption can state about a picture. Its `repr` decides the split."""

    @property
    def layout(self) -> str: ...
    def labels(self) -> list[int]:
        """One class index per attribute of the world, `ABSENT` where the picture has no such attribute."""
        ...


@dataclass(frozen=True)
class Sample:
    """One entry of a split: its description, its caption, and the generator state that draws its image."""

    index: int
    scene: Any  # a Description
    caption: str
    rng: np.random.Generator


@dataclass(frozen=True)
class World:
    """size: pixels a side; shared, slot: name of an attribute -> its choices, of the picture and of each of `slots`
    slots; positions: layout -> where its slots are; describe, caption, draw: a description, its caption, the image
    (size, size, 3) uint8 of a sample; key: of its generators."""

    name: str
    size: int
    shared: Mapping[str, tuple[str, ...]]
    slot: Mapping[str, tuple[str, ...]]
    slots: int
    positions: Mapping[str, tuple[str, ...]]
    describe: Callable[[np.random.Generator], Description]
    caption: Callable[[Any, np.random.Generator], str]
    draw: Callable[[Sample], np.ndarray]
    key: int = 0

    @cached_property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        """Name -> choices, in the order of labels: the shared ones, then "shape0" and the others of each slot."""
        return {
            **self.shared,
            **{f"{name}{number}": choices for number in range(self.slots) for name, choices in self.slot.items()},
        }

    @cached_property
    def position_attributes(self) -> dict[str, tuple[str, ...]]:
        """The same with positions instead of slots: "shape left"."""
        places = dict.fromkeys(place for held in self.positions.values() for place in held)
        return {
            **self.shared,
            **{f"{name} {place}": choices for place in places for name, choices in self.slot.items()},
        }

    def by_position(self, labels: np.ndarray) -> np.ndarray:
        """Labels (N, attributes) -> labels (N, position attributes); `ABSENT` where there is nothing."""
        names, width, first = list(self.position_attributes), len(self.slot), len(self.shared)
        out = np.full((len(labels), len(names)), ABSENT)
        out[:, :first] = labels[:, :first]
        for layout, places in enumerate(self.positions.values()):
            rows = np.flatnonzero(labels[:, 0] == layout)
            for number, place in enumerate(places):
                to, start = names.index(f"{next(iter(self.slot))} {place}"), first + width * number
                out[rows, to : to + width] = labels[rows, start : start + width]
        return out

    def sample(self, split: str, index: int, seed: int = 0) -> Sample:
        """The `index`-th entry of `split`. The same arguments always give the same entry."""
        if split not in SPLITS:
            raise ValueError(f"{self.name} has no split '{split}' (it has: {', '.join(SPLITS)})")
        wanted = split == "validation"
        rng = np.random.Generator(np.random.Philox(key=[self.key + 2 * seed + wanted, index]))
        scene = self.describe(rng)
        while is_validation(scene) != wanted:
            scene = self.describe(rng)
        return Sample(index, scene, self.caption(scene, rng), rng)

    def items(self, cfg: Mapping[str, Any]) -> list[Item]:
        """The first `n` of a split, whatever the seed: a split is an endless random sequence already, and each of its
        captions belongs to an image of the same index. UsageError for an unknown split."""
        if cfg["split"] not in SPLITS:
            raise unknown(f"split of {self.name}", cfg["split"], SPLITS)
        samples = (self.sample(cfg["split"], index) for index in range(cfg["n"]))
        return [
            Item(s.index, s.caption, tuple(s.scene.labels()), str(s.index), category=s.scene.layout) for s in samples
        ]

    def render(self, split: str, indices: Sequence[int], seed: int = 0) -> tuple[np.ndarray, list[str], np.ndarray]:
        """Images (N, size, size, 3) uint8, captions, and labels (N, attributes) int64 of indices of a split."""
        samples = [self.sample(split, int(i), seed) for i in indices]
        labels = np.array([s.scene.labels() for s in samples], dtype=np.int64)
        return np.stack([self.draw(s) for s in samples]), [s.caption for s in samples], labels

    def vocabulary(self) -> list[str]:
        """Every word that a caption can hold, sorted. Deterministic, so a text encoder's word ids never change."""
        return sorted({word for index in range(4000) for word in words(self.sample("train", index).caption)})

    def describes(self, labels: Sequence[int] | None) -> bool:
        """Whether labels are attributes of this world."""
        return labels is not None and len(labels) == len(self.attributes)


def is_validation(description: Description) -> bool:
    """Whether a description belongs to the validation split; the splits share none."""
    return zlib.crc32(repr(description).encode()) % VALIDATION_SHARE == 0


def words(caption: str) -> list[str]:
    """The words of a caption, lower case, punctuation dropped."""
    return re.findall(r"[a-z]+", caption.lower())


def labels_of(values: Iterator[tuple[str, tuple[str, ...]]]) -> list[int]:
    """The class indices of (value, choices); `ABSENT` of an empty value."""
    return [choices.index(value) if value else ABSENT for value, choices in values]


NAMES = ("scenes", "textures")


def world(name: str) -> World:
    """The world of this name."""
    held: World = import_module(f"specbench.data.{name}").WORLD
    return held
