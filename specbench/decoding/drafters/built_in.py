"""The Jacobi windows that come with models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.drafters.window import Window, WindowState
from specbench.decoding.loop import Drafter
from specbench.decoding.shape import DraftShape
from specbench.decoding.verify import Draft


@dataclass(frozen=True)
class Choice:
    """The parameters of conf/drafter/built_in.yaml."""

    window: int
    opening: str
    plain_until: int
    plain_from: int | None

    @property
    def shape(self) -> DraftShape:
        return self.build(None).shape

    def build(self, model: Any) -> Drafter:
        return BuiltIn(self.window, plain_until=self.plain_until, plain_from=self.plain_from, opening=self.opening)


@dataclass(eq=False)
class BuiltIn(Window):
    """The sampling code of Lumina-mGPT 2 and SimpleAR. Neither keeps the target's distribution. Lumina-mGPT 2 samples
    from the target's own distribution after a rejection (`rules.relaxed.Redraw`), and SimpleAR begins with tokens that
    were not sampled. Recorded runs of both are goldens.

    Drafts are drawn again at each step, and new positions hold random point masses. With `plain_from` the window
    becomes shorter towards this token, by the number of tokens before the step that has just ended, as in the released
    loop: a draft may reach beyond it.

    opening: "random" begins with new positions, as Lumina-mGPT 2 does. "greedy" is SimpleAR's beginning: the first step
    passes token 0 at every position (SimpleAR: the padding token), verifies nothing, and takes the most probable first
    token. The second step drafts the most probable token of every position, as if it had been sampled, and always
    accepts the first of them.
    """

    fresh: str = "point"
    opening: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.greedy = self.opening == "greedy"
        self.shape = replace(self.shape, biased=self.greedy, skips=self.greedy)

    def propose(self, state: WindowState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        draft = super().propose(state, history, num_committed, step)
        if self.greedy:
            first, second = (num_committed == 0)[:, None], (num_committed == 1)[:, None]
            state.tokens.masked_fill_(first, 0)
            torch.where(second, state.probs.argmax(-1), state.tokens, out=state.tokens)
            draft.tokens[:, 1:] = state.tokens
            draft.greedy = first[:, 0]
            draft.unverified = F.pad(second, (1, state.tokens.shape[1] - 1))
        return draft

    def _drafts(self, state: WindowState, num_committed: Tensor) -> Tensor:
        before = num_committed - state.length - 1
        positions = (state.until - 1 - before).clamp(0, self.tree.height)
        return positions * (num_committed >= max(self.plain_until, int(self.greedy)))

    def _valid(self, state: WindowState, num_committed: Tensor) -> Tensor:
        return self.tree.depth <= self._drafts(state, num_committed)[:, None]
