"""The standard error of the difference of a metric between two sets of images of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specbench import metrics
from specbench.metrics.base import Images, PromptItem, ScoringContext, Unavailable, by_prompt
from specbench.metrics.outputs import Outputs
from specbench.rows.summary import mean


class Scored(Protocol):
    """Images (N) that were scored, and their items (N), paired by position."""

    @property
    def images(self) -> Images: ...
    @property
    def items(self) -> Sequence[PromptItem]: ...


def difference_stderr(
    name: str, mine: Scored, theirs: Scored, context: ScoringContext, cached: Outputs
) -> float | None:
    """The standard error of a metric over `mine` minus that over `theirs`, in its first column. It is over pairs of
    images, or over prompts where these have several.

    None where the metric is no mean over images and the influence of an image on it is not known. The outputs of the
    scorer are read from `cached`.
    """
    one = metrics.metric(name, context)
    sides = []
    try:
        for some in (mine, theirs):
            outputs = metrics.scorer_outputs(one, some.images, some.items, cached)
            own = one.per_image(outputs)
            sides.append(one.influences(outputs, some.items) if own is None else own)
    except Unavailable:
        return None
    if sides[0] is None or sides[1] is None:
        return None
    moved: np.ndarray = sides[0] - sides[1]
    return mean(moved.tolist(), by_prompt(mine.items)).stderr if np.isfinite(moved).all() else None
