"""The ratio test on fixed groups of near codes: the static grouping that GSD compares itself with (2508.07747)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.rules.base import Rule, Setting, ratio
from specbench.decoding.rules.gsd import RESAMPLE, GroupRule
from specbench.decoding.shape import DraftShape
from specbench.errors import check_choice


class Neighbourhood(GroupRule):
    """Accept x with min(1, r(G) / q(G)), where the group G is x and its nearest codes.

    Groups are neighbourhoods centred on the candidate, not a partition of the codebook, so the rule changes even the
    distribution over groups.
    """

    name = "neighbourhood"
    constants = ("members",)

    def __init__(self, near: Tensor, resample: str = "vanilla") -> None:
        """near (V, group - 1) int64: the other members of every code's group."""
        super().__init__(resample)
        own = torch.arange(len(near), device=near.device)[:, None]
        self.members = torch.cat([own, near], 1)

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        group = self.members[token]
        return ratio(r.gather(-1, group).sum(-1), q.gather(-1, group).sum(-1))

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """As of `Rule`."""
        return ratio(r[..., self.members].sum(-1), q[..., self.members].sum(-1))


def check(cfg: Mapping[str, Any], shape: DraftShape) -> None:
    """Raises UsageError for a value that the rule does not have."""
    check_choice("resample", cfg["resample"], RESAMPLE, Neighbourhood.name)


def build(cfg: Mapping[str, Any], setting: Setting) -> Rule:
    codebook = setting.codebook()
    if cfg["group"] == 1:  # every token is its own group: exact
        return Neighbourhood(torch.zeros(len(codebook), 0, dtype=torch.int64), cfg["resample"])
    return Neighbourhood(setting.neighbours(codebook, cfg["group"] - 1, cfg["proximity"]), cfg["resample"])
