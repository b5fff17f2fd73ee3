"""GenEval's six tasks in the world of *scenes*: captions of the validation split, with one task per caption.

A caption states a full scene in the grammar that the embedded models were trained on. Its task says which part is
tested, in the format of GenEval's metadata (Ghosh et al. 2023): the objects that the image must show, by shape, and for
some tasks their colour, number or position. The grammar has no numerals: the counting task lists its objects ("a row of
a small red circle, a large blue circle and ..."), and a caption has at most three objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from specbench.config.run_config import PromptSelection
from specbench.data import scenes, worlds
from specbench.data.base import Item
from specbench.data.geneval import TASKS

_KEY = 2**63 + 1  # of the generator; differs from all keys of `World.sample`
#: Position of the second of two objects, relative to the first.
_RELATIONS = {"beside": "right of", "above": "below"}


def items(wanted: PromptSelection) -> list[Item]:
    """`n` captions; the i-th has task i modulo 6. They do not depend on `seed`, and a larger n extends a smaller one.

    labels: as `World.render` returns them; metadata: as `tasks_of` returns it.
    """
    captions = []
    for s in map(sample, wanted.drawn):
        labels, task = s.scene.labels(), TASKS[s.index % len(TASKS)]
        captions.append(Item(s.index, s.caption, tuple(labels), str(s.index), metadata=tasks_of(labels)[task]))
    return captions


def sample(index: int) -> worlds.Sample:
    """The scene of a caption, and the generator state that draws its image."""
    rng, task = np.random.Generator(np.random.Philox(key=[_KEY, index])), TASKS[index % len(TASKS)]
    scene = scenes.draw_scene(rng)
    while not worlds.is_validation(scene) or task not in tasks_of(scene.labels()):
        scene = scenes.draw_scene(rng)
    return worlds.Sample(index, scene, scenes.write_caption(scene, rng), rng)


def tasks_of(labels: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Task -> GenEval metadata (tag, include, exclude), for all tasks that a scene with these 14 labels can test.

    The tasks of two objects need different shapes; color_attr also needs different colours. Counting needs two objects
    of one shape.
    """
    stated = dict(zip(scenes.ATTRIBUTES, labels, strict=True))
    layout = scenes.LAYOUTS[stated["layout"]]
    count = scenes.LAYOUT_COUNT[layout]
    shapes = [scenes.SHAPES[stated[f"shape{slot}"]] for slot in range(count)]
    colours = [scenes.COLOURS[stated[f"colour{slot}"]] for slot in range(count)]
    plain = [{"class": shape, "count": 1} for shape in shapes]
    coloured = [{**plain_object, "color": colour} for plain_object, colour in zip(plain, colours, strict=True)]
    tasks: dict[str, dict[str, Any]] = {}
    if count == 1:
        tasks |= {"single_object": {"include": plain}, "colors": {"include": coloured}}
    if count == 2 and len(set(shapes)) == 2:
        position = [plain[0], {**plain[1], "position": [_RELATIONS[layout], 0]}]
        tasks |= {"two_object": {"include": plain}, "position": {"include": position}}
        if len(set(colours)) == 2:
            tasks["color_attr"] = {"include": coloured}
    if len(numbers := Counter(shapes)) < count:
        tasks["counting"] = {
            "include": [{"class": shape, "count": number} for shape, number in numbers.items()],
            "exclude": [{"class": shape, "count": number + 1} for shape, number in numbers.items()],
        }
    return {task: {"tag": task, **tasks[task]} for task in TASKS if task in tasks}
