"""Jacobi windows with distributions: SJD, SCD, SJD++ (`sjd_window`) and SJD-PAC (`pac_window`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbench.decoding.drafters.pac_window import PACWindow
from specbench.decoding.drafters.sjd_window import SJDWindow
from specbench.decoding.loop import Drafter
from specbench.decoding.shape import DraftShape


@dataclass(frozen=True)
class Choice:
    """The parameters of conf/drafter/sjd.yaml. A window of width 1 has no tree."""

    window: int
    tree: str
    depth: int
    width: int
    init: str
    fresh: str
    stored: str
    siblings: str
    branch: str
    plain_until: int
    plain_from: int | None
    refine: bool
    coupling: str
    tau: float

    @property
    def shape(self) -> DraftShape:
        return self.build(None).shape

    def build(self, model: Any) -> Drafter:
        names = ["window", "init", "refine", "fresh", "plain_until", "plain_from", "coupling", "tau", "stored"]
        of_tree = ["width", "depth", "siblings", "branch"]
        if self.width == 1:
            return SJDWindow(**{name: getattr(self, name) for name in names})
        return PACWindow(**{name: getattr(self, name) for name in [*names, *of_tree]}, form=self.tree)
