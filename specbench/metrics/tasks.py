"""GenEval's rules and statistics (Ghosh et al. 2023), whatever detects the objects: when an image solves its task, and
the score of each task with its standard error.

An image solves a task if it has every object of `include`, in its number, colour and position, and not as many as
`exclude` names. Only the most confident detections of a class count, as many as are asked for. Imports nothing heavy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.data.geneval import TASKS
from specbench.metrics.base import Metric, PromptItem, Score, by_prompt
from specbench.rows import summary

#: Share of two boxes' sizes by which their centres must be apart along an axis, to be at different positions.
APART = 0.1


@dataclass(frozen=True)
class Detection:
    """An object of an image: its box (x0, y0, x1, y1) in pixels, y downwards. colour: its own, where it is known."""

    box: tuple[float, float, float, float]
    colour: str = ""


#: The detections of each class, the most confident first.
Detections = Mapping[str, Sequence[Detection]]
#: Some detections of a class -> the name of each one's colour.
Colours = Callable[[Sequence[Detection], str], Sequence[str]]


def solves(metadata: Mapping[str, Any], found: Detections, colours: Colours) -> bool:
    """Whether an image with these detections has what the metadata of its prompt states (include, exclude)."""
    groups: list[Sequence[Detection] | None] = []
    for wanted in metadata.get("include", ()):
        name, count = wanted["class"], wanted["count"]
        some = list(found.get(name, ()))[:count]
        fits = len(some) == count
        if fits and "color" in wanted:
            fits = list(colours(some, name)).count(wanted["color"]) == count
        if fits and "position" in wanted:
            relation, target = wanted["position"]
            others = groups[target]
            fits = others is not None and all(relation in relations(a, b) for a in some for b in others)
        groups.append(some if fits else None)
    too_many = any(len(found.get(one["class"], ())) >= one["count"] for one in metadata.get("exclude", ()))
    return None not in groups and not too_many


def relations(a: Detection, b: Detection) -> set[str]:
    """Where `a` is, seen from `b`: none to two of left of, right of, above and below.

    Along each axis the offset of the centres is shortened by `APART` of both sizes. The direction counts that has more
    than half the length of the whole offset.
    """
    boxes = np.array([a.box, b.box], dtype=np.float64).reshape(2, 2, 2)
    offset = boxes[0].mean(0) - boxes[1].mean(0)
    free = np.maximum(np.abs(offset) - APART * np.abs(boxes[:, 1] - boxes[:, 0]).sum(0), 0) * np.sign(offset)
    if (np.abs(free) < 1e-3).all():
        return set()
    x, y = free / np.linalg.norm(offset)
    seen = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in seen.items() if holds}


class TaskMetric(Metric):
    """Shares of the images that solve their task, by task, and the mean over the tasks: each task counts the same.

    The standard errors are over prompts: the images of one are not independent of each other.
    """

    counts_prompts = True

    @abstractmethod
    def solved(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray:
        """(N, 6) float64, one column for each of `TASKS`: 1 where the image solves the task, 0 where it does not, NaN
        where its prompt does not pose it."""

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        solved, groups = self.solved(outputs, items), by_prompt(items)
        backend, scores = self.backend(), []
        for column in solved.T:
            posed = ~np.isnan(column)
            found = summary.ratio(np.where(posed, column, 0).tolist(), posed.tolist(), groups)
            scores.append(Score(found.value, found.stderr, backend, "" if posed.any() else "no prompt poses it"))
        if lacking := [task for task, one in zip(TASKS, scores, strict=True) if one.value is None]:
            why = f"the mean of all tasks, and no prompt poses {', '.join(lacking)}"
            return (Score.unmeasured(why, backend), *scores)
        moved, value = _influences(solved), float(np.mean([one.value for one in scores]))
        spread = summary.mean(moved.tolist(), groups)
        counts = ", ".join(map(str, (~np.isnan(solved)).sum(0)))
        # A task with a single prompt has no error, and neither has the mean.
        error = None if any(one.stderr is None for one in scores) else spread.stderr
        return (Score(value, error, backend, f"mean of the {len(TASKS)} tasks of {counts} images"), *scores)

    def backend(self) -> str:
        """See `Score`."""
        return self.cache_key

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        solved = self.solved(outputs, items)
        return None if np.isnan(solved).all(0).any() else _influences(solved)


def _influences(solved: np.ndarray) -> np.ndarray:
    """How each image moves the mean over the tasks: (N,) of mean zero, see `Metric.influences`."""
    shares = (~np.isnan(solved)).mean(0)
    moved: np.ndarray = np.nansum((solved - np.nanmean(solved, 0)) / shares, 1) / len(TASKS)
    return moved
