"""Orders in which a model fills an image if not row by row, and the number of tokens that each pass samples.

Sources: ARPG (arXiv 2503.10568; hp-l33/ARPG, models/arpg.py) draws random orders; the sizes of its groups follow an
arccosine or a cosine. LPD (arXiv 2507.01957; orders/ and models/lpd.py of its code) has orders by locality.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.errors import UsageError


@dataclass(frozen=True)
class GroupOrder:
    """See `decoding.planned.TokenOrder`."""

    orders: Tensor
    sizes: tuple[int, ...]
    whole: bool = False

    @classmethod
    def of(cls, cfg: Mapping[str, Any], side: int) -> GroupOrder:
        """From flat parameters, for an image of side * side tokens. Raises UsageError for an impossible number of
        passes."""
        sizes = group_sizes(side * side, cfg["iterations"], cfg["group_schedule"])
        rng = np.random.default_rng(cfg["order_seed"])
        make: dict[str, Callable[[], np.ndarray]] = {
            "random": partial(rng.permutation, side * side),
            "locality": partial(locality_order, side, sizes, cfg["repulsion"], rng),
            "raster": partial(np.arange, side * side),
        }
        orders = [make[cfg["order"]]() for _ in range(cfg["orders"])]
        return cls(torch.from_numpy(np.stack(orders)), sizes)


def group_sizes(length: int, passes: int | None, schedule: str) -> tuple[int, ...]:
    """The number of tokens that each pass samples, for an image of `length` tokens. passes = None: one token per pass.

    After pass s of S, "cosine" leaves a share of cos(pi/2 s/S) tokens and "arccos" a share of 2/pi arccos(s/S), both
    rounded down. Every pass samples at least one token and, except the last, leaves at least one (ARPG; MAR's schedule
    is the cosine). "lpd" rounds the differences of the cosine to the nearest integer; the first group has 1 token. If
    the sum is not `length`, the last groups are changed by one token each (our choice: it gives LPD's published lists
    for 20 and 32 passes).
    """
    if passes is None:
        return (1,) * length
    if not 1 <= passes <= length:
        raise UsageError(f"an image of {length} tokens takes 1 to {length} iterations (got {passes})")
    if schedule == "lpd":
        return _rounded(length, passes)
    share = {"cosine": lambda t: math.cos(math.pi / 2 * t), "arccos": lambda t: 2 / math.pi * math.acos(t)}[schedule]
    sizes, left = [], length
    for step in range(1, passes):
        after = max(1, min(left - 1, math.floor(length * share(step / passes))))
        sizes.append(left - after)
        left = after
    return (*sizes, left)


def _rounded(length: int, passes: int) -> tuple[int, ...]:
    shares = [math.cos(math.pi / 2 * step / passes) for step in range(passes + 1)]
    sizes = [max(1, round(length * (a - b))) for a, b in pairwise(shares)]
    if passes > 1:
        sizes[0] = 1
    last = passes
    while (missing := length - sum(sizes)) != 0:
        last = last - 1 if last > 1 else passes - 1
        sizes[last] += 1 if missing > 0 else -(sizes[last] > 1)
    return tuple(sizes)


def locality_order(side: int, sizes: tuple[int, ...], repulsion: int, rng: np.random.Generator) -> np.ndarray:
    """An order (T,) by LPD's locality (arXiv 2507.01957), for an image of side * side tokens.

    The cells of a group are near existing cells and far from each other. The score of a cell is the sum of 1 / distance
    over its existing neighbours (of eight). Cells with a score of at least 1 join the group, highest score first and
    equal ones in random order, unless a cell of the group is within `repulsion` rows and columns. If the group is not
    full, the cells that are farthest from it join one after the other.
    """
    cells = np.stack(np.divmod(np.arange(side * side), side), 1)
    offset = cells[:, None] - cells
    gap, distance = np.abs(offset).max(-1), np.linalg.norm(offset, axis=-1)
    weight = np.where(gap == 1, 1 / np.maximum(distance, 1), 0)
    free, order = np.ones(len(cells), dtype=bool), []
    for size in sizes:
        score = weight[:, ~free].sum(1)
        ranked = rng.permutation(np.flatnonzero(free))
        ranked = ranked[np.argsort(-score[ranked], kind="stable")]
        group: list[int] = []
        for cell in ranked[score[ranked] >= 1]:
            if len(group) < size and (gap[cell, group] > repulsion).all():
                group.append(int(cell))
        group_distance = distance[:, group].min(1, initial=2 * side)
        while len(group) < size:
            candidates = ranked[~np.isin(ranked, group)]
            cell = int(candidates[group_distance[candidates].argmax()])
            group.append(cell)
            group_distance = np.minimum(group_distance, distance[cell])
        free[group] = False
        order += group
    return np.array(order)
