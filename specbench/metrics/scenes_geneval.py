"""GenEval's tasks on images of *scenes*, by the embedded reader: no detector and no download.

The reader's most probable attributes are the detections: an object for each position of the layout that it reads, with
the shape and colour that it reads there. `tasks` scores them by GenEval's rules. A prompt of `data=scenes_geneval`
poses one task; a caption of `data=scenes` poses every task that it can (see `data.scenes_geneval.tasks_of`).

The values are comparable only between runs with the same backend. They are never GenEval's scores of a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.data.geneval import TASKS
from specbench.metrics.base import Images, PromptItem
from specbench.metrics.embedded import EmbeddedMetric, EmbeddedScorer, of_scenes
from specbench.metrics.tasks import Detection, TaskMetric, solves

if TYPE_CHECKING:
    from torch import Tensor

_HALF = 9.0  # half the side of an object's box in pixels


class ScenesGenEval(EmbeddedMetric, TaskMetric):
    """Needs items with labels. Scorer outputs (N, 14) float32: the index of the most probable choice of each attribute,
    of objects that are not there, too."""

    weights = "scenes_reader.safetensors"

    @property
    def cache_key(self) -> str:
        """The reward uses the same network and caches other outputs of it."""
        return f"{super().cache_key}, attributes"

    def scorer(self) -> EmbeddedScorer:
        import torch

        from specbench.models import evaluators as ev

        reader = ev.load(self.path, ev.AttributeReader, self.context.device)

        def read(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            return torch.stack([logits.argmax(-1) for logits in reader(x)], 1).float()

        return EmbeddedScorer(self, read)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        if all(map(of_scenes, items)):
            return ""
        return "these prompts come without labels of scenes, so there are no objects to look for"

    def solved(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray:
        from specbench.data.scenes_geneval import tasks_of

        found = np.full((len(items), len(TASKS)), np.nan)
        for row, read, item in zip(found, outputs.astype(int).tolist(), items, strict=True):
            posed = {item.metadata["tag"]: item.metadata} if item.metadata else tasks_of(item.labels or ())
            seen = detections(read)
            for task, metadata in posed.items():
                row[TASKS.index(task)] = solves(metadata, seen, lambda some, _: [one.colour for one in some])
        return found


def detections(labels: Sequence[int]) -> dict[str, list[Detection]]:
    """Shape -> the objects of that shape, of 14 labels of scenes; those of absent objects are not looked at."""
    from specbench.data import scenes

    read = dict(zip(scenes.ATTRIBUTES, labels, strict=True))
    found: dict[str, list[Detection]] = {}
    for slot, (x, y) in enumerate(scenes.centres(scenes.LAYOUTS[read["layout"]])):
        box = (x - _HALF, y - _HALF, x + _HALF, y + _HALF)
        one = Detection(box, scenes.COLOURS[read[f"colour{slot}"]])
        found.setdefault(scenes.SHAPES[read[f"shape{slot}"]], []).append(one)
    return found
