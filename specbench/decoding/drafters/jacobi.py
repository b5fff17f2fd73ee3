"""Jacobi decoding (Song et al. 2021): the draft is the target's own last guesses, kept where they match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbench.decoding.drafters.window import Window
from specbench.decoding.loop import Drafter
from specbench.decoding.shape import DraftShape


@dataclass(frozen=True)
class Choice:
    """The parameters of conf/drafter/jacobi.yaml."""

    window: int
    init: str

    @property
    def shape(self) -> DraftShape:
        return self.build(None).shape

    def build(self, model: Any) -> Drafter:
        return Window(self.window, self.init, match=True)
