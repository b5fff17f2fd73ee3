"""GenEval's six tasks in the world of *scenes*: captions of the validation split, one task each.

A caption states a full scene in the scenes' own grammar, as every caption that the embedded models were trained on. Its
task says which part of it is tested, in the format of GenEval's metadata (Ghosh et al. 2023): the objects that must be
there, by shape, and for some tasks their colour, number or position. The grammar has no numerals: the counting task
lists its objects ("a row of a small red circle, a large blue circle and ..."), and no caption has more than three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.data import scenes, worlds
from specbench.data.base import Item
from specbench.data.geneval import TASKS

_KEY = 2**63 + 1  # of the generator, apart from those of `scenes.sample`
#: Where the second of two objects is, seen from the first.
_RELATIONS = {"beside": "right of", "above": "below"}


def items(cfg: Mapping[str, Any]) -> list[Item]:
    """`n` captions; the i-th has task i modulo six. They do not depend on `seed`, and a larger n extends a smaller one.

    labels: as of `scenes.render`; metadata: as of `tasks_of`.
    """
    found = []
    for s in map(sample, range(cfg["n"])):
        labels, task = s.scene.labels(), TASKS[s.index % len(TASKS)]
        found.append(Item(s.index, s.caption, tuple(labels), str(s.index), metadata=tasks_of(labels)[task]))
    return found


def sample(index: int) -> worlds.Sample:
    """The scene behind a caption, and the generator state that draws an image of it."""
    rng, task = np.random.Generator(np.random.Philox(key=[_KEY, index])), TASKS[index % len(TASKS)]
    scene = scenes.draw_scene(rng)
    while not worlds.is_validation(scene) or task not in tasks_of(scene.labels()):
        scene = scenes.draw_scene(rng)
    return worlds.Sample(index, scene, scenes.write_caption(scene, rng), rng)


def tasks_of(labels: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Task -> GenEval metadata (tag, include, exclude), of every task that a scene with these 14 labels poses.

    Two objects are tested where their shapes differ, and for color_attr their colours, too; objects are counted where
    some have one shape.
    """
    stated = dict(zip(scenes.ATTRIBUTES, labels, strict=True))
    layout = scenes.LAYOUTS[stated["layout"]]
    count = scenes.LAYOUT_COUNT[layout]
    shapes = [scenes.SHAPES[stated[f"shape{slot}"]] for slot in range(count)]
    colours = [scenes.COLOURS[stated[f"colour{slot}"]] for slot in range(count)]
    plain = [{"class": shape, "count": 1} for shape in shapes]
    coloured = [{**one, "color": colour} for one, colour in zip(plain, colours, strict=True)]
    found: dict[str, dict[str, Any]] = {}
    if count == 1:
        found |= {"single_object": {"include": plain}, "colors": {"include": coloured}}
    if count == 2 and len(set(shapes)) == 2:
        position = [plain[0], {**plain[1], "position": [_RELATIONS[layout], 0]}]
        found |= {"two_object": {"include": plain}, "position": {"include": position}}
        if len(set(colours)) == 2:
            found["color_attr"] = {"include": coloured}
    if len(numbers := Counter(shapes)) < count:
        found["counting"] = {
            "include": [{"class": shape, "count": number} for shape, number in numbers.items()],
            "exclude": [{"class": shape, "count": number + 1} for shape, number in numbers.items()],
        }
    return {task: {"tag": task, **found[task]} for task in TASKS if task in found}
