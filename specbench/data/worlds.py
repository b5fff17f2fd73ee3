"""The embedded worlds: captioned pictures that are drawn from a seed, and photographs of classes.

A world has attributes. Shared attributes describe the whole picture. The others exist once per slot: an object, or a
region. A *description* of a picture states all attributes. In a drawn world, the layout is the first attribute, the
caption says the same as the description in words, and everything else about the picture is drawn at random.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from specbench.config.run_config import PromptSelection
from specbench.data.base import Item
from specbench.errors import unknown

SPLITS = ("train", "validation")
VALIDATION_SHARE = 8  # one description in eight belongs to the validation split
ABSENT = -1  # label of an attribute that the picture does not have


class Description(Protocol):
    """The attributes of a picture, which its caption states. In a drawn world, its `repr` decides the split."""

    def labels(self) -> list[int]:
        """One class index per attribute of the world; `ABSENT` if the picture does not have the attribute."""
        ...


@dataclass(frozen=True)
class Sample:
    """One entry of a split: its description, its caption and, in a drawn world, the generator state that draws its
    image."""

    index: int
    scene: Any  # a Description
    caption: str
    rng: np.random.Generator


@dataclass(frozen=True)
class World:
    """An embedded world.

    size: pixels per side; draw: a function that gives the image (size, size, 3) uint8 of a sample; shared, slot:
    attribute -> its choices, for the picture and for each of its `slots` slots; positions: layout -> the positions of
    its slots.
    """

    name: str
    size: int
    draw: Callable[[Sample], np.ndarray]
    shared: Mapping[str, tuple[str, ...]]
    slot: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slots: int = 0
    positions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def sample(self, split: str, index: int, seed: int = 0) -> Sample:
        """The `index`-th entry of `split`. The same arguments always give the same entry."""
        raise NotImplementedError

    def items(self, wanted: PromptSelection) -> list[Item]:
        """The prompts of a selection."""
        raise NotImplementedError

    @cached_property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        """Name -> choices, in the order of labels: the shared attributes, then those per slot: "shape0", ..."""
        return {
            **self.shared,
            **{f"{name}{number}": choices for number in range(self.slots) for name, choices in self.slot.items()},
        }

    @cached_property
    def position_attributes(self) -> dict[str, tuple[str, ...]]:
        """Like `attributes`, with positions instead of slots: "shape left"."""
        positions = dict.fromkeys(position for slots in self.positions.values() for position in slots)
        return {
            **self.shared,
            **{f"{name} {position}": choices for position in positions for name, choices in self.slot.items()},
        }

    def labels(self, description: Description, slots: Sequence[Any]) -> list[int]:
        """The class index of each of `attributes`, `ABSENT` for an attribute that is empty and for slots beyond
        `slots`."""
        padded = [*slots, *[None] * (self.slots - len(slots))]
        values = [(getattr(description, name), choices) for name, choices in self.shared.items()]
        values += [(getattr(slot, name, ""), choices) for slot in padded for name, choices in self.slot.items()]
        return [choices.index(value) if value else ABSENT for value, choices in values]

    def by_position(self, labels: np.ndarray) -> np.ndarray:
        """Labels (N, attributes) -> labels (N, position attributes); `ABSENT` at empty positions."""
        names, width, first = list(self.position_attributes), len(self.slot), len(self.shared)
        out = np.full((len(labels), len(names)), ABSENT)
        out[:, :first] = labels[:, :first]
        for layout, positions in enumerate(self.positions.values()):
            rows = np.flatnonzero(labels[:, 0] == layout)
            for number, position in enumerate(positions):
                to, start = names.index(f"{next(iter(self.slot))} {position}"), first + width * number
                out[rows, to : to + width] = labels[rows, start : start + width]
        return out

    def render(self, split: str, indices: Sequence[int], seed: int = 0) -> tuple[np.ndarray, list[str], np.ndarray]:
        """Images (N, size, size, 3) uint8, captions, and labels (N, attributes) int64 of these entries of a split."""
        samples = [self.sample(split, int(i), seed) for i in indices]
        labels = np.array([s.scene.labels() for s in samples], dtype=np.int64)
        return np.stack([self.draw(s) for s in samples]), [s.caption for s in samples], labels

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """All words that a caption can contain, sorted. Deterministic, so a text encoder's word ids never change. The
        first use takes a second."""
        found = {word for index in range(4000) for word in words(self.sample("train", index).caption)}
        return tuple(sorted(found))

    def describes(self, labels: Sequence[int] | None) -> bool:
        """Whether the labels are attributes of this world."""
        return labels is not None and len(labels) == len(self.attributes)


@dataclass(frozen=True, kw_only=True)
class DrawnWorld(World):
    """A world whose pictures are drawn. describe, caption: functions that give a description, and its caption; key: of
    the random generators."""

    describe: Callable[[np.random.Generator], Description]
    caption: Callable[[Any, np.random.Generator], str]
    key: int = 0

    def sample(self, split: str, index: int, seed: int = 0) -> Sample:
        if split not in SPLITS:
            raise ValueError(f"{self.name} has no split '{split}' (it has: {', '.join(SPLITS)})")
        validation = split == "validation"
        rng = np.random.Generator(np.random.Philox(key=[self.key + 2 * seed + validation, index]))
        scene = self.describe(rng)
        while is_validation(scene) != validation:
            scene = self.describe(rng)
        return Sample(index, scene, self.caption(scene, rng), rng)

    def items(self, wanted: PromptSelection) -> list[Item]:
        """The first `n` entries of a split, for any seed: a split already is an endless random sequence, and its
        captions belong to the images of the same index. Raises UsageError for an unknown split."""
        split = wanted.own["split"]
        if split not in SPLITS:
            raise unknown(f"split of {self.name}", split, SPLITS)
        samples = (self.sample(split, index) for index in wanted.drawn)
        return [
            Item(s.index, s.caption, tuple(s.scene.labels()), str(s.index), category=s.scene.layout) for s in samples
        ]


def is_validation(description: Description) -> bool:
    """Whether a description belongs to the validation split. The splits share no description."""
    return zlib.crc32(repr(description).encode()) % VALIDATION_SHARE == 0


def words(caption: str) -> list[str]:
    """The words of a caption, in lower case, without punctuation."""
    return re.findall(r"[a-z]+", caption.lower())


def rgb(hue: Any, saturation: Any, value: Any) -> np.ndarray:
    """Colours (..., 3) in 0 to 1 of hue, saturation and value: numbers or arrays (...), hue periodic in 1."""
    hue, saturation, value = (np.asarray(x)[..., None] for x in (hue % 1.0, saturation, value))
    k = (np.array([5.0, 3.0, 1.0]) + hue * 6) % 6
    colours: np.ndarray = value * (1 - saturation * np.clip(np.minimum(k, 4 - k), 0, 1))
    return colours


@dataclass(frozen=True)
class Wording:
    """Chooses the words of a caption. synonyms: name -> its words; a name without an entry is its own word."""

    rng: np.random.Generator
    synonyms: Mapping[str, tuple[str, ...]]

    def one_of(self, options: Sequence[str]) -> str:
        return options[int(self.rng.integers(len(options)))]

    def word(self, name: str) -> str:
        return self.one_of(self.synonyms.get(name, (name,)))


NAMES = ("scenes", "textures", "fashion")


def world(name: str) -> World:
    """The world of this name."""
    result: World = import_module(f"specbench.data.{name}").WORLD
    return result
