"""The Jacobi windows that models bring along: the sampling codes of Lumina-mGPT 2 and SimpleAR.

Neither keeps the target's distribution. Lumina-mGPT 2 samples from the target's own distribution after a rejection
(`rules.relaxed.Redraw`); SimpleAR begins with tokens that were not sampled. Recorded runs of both codes are goldens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.drafters.window import Window, WindowState, window_shape
from specbench.decoding.loop import Drafter
from specbench.decoding.shape import DraftShape
from specbench.decoding.verify import Draft
from specbench.errors import check_choice


class BuiltIn(Window):
    """A window of drafts that are drawn again each step, whose new positions hold random point masses. It ends before
    token `plain_from` of an image, where it has one; `plain_until`, `plain_from` as of `Window`.

    opening: "random" begins with new positions, as Lumina-mGPT 2 does. "greedy" is SimpleAR's beginning. The first step
    passes token 0 at every position (SimpleAR: the padding token), verifies nothing, and takes the most probable first
    token. The second step drafts the most probable token of every position, as if it had been sampled, and accepts the
    first of them in any case.
    """

    def __init__(
        self, window: int, opening: str = "random", plain_until: int = 0, plain_from: int | None = None
    ) -> None:
        check_choice("opening", opening, ("random", "greedy"))
        super().__init__(window, fresh="point", plain_until=plain_until, plain_from=plain_from)
        self.greedy = opening == "greedy"
        self.shape = opened(self.shape, opening)

    def propose(self, state: WindowState, history: Tensor, count: Tensor, step: Tensor) -> Draft:
        draft = super().propose(state, history, count, step)
        if self.greedy:
            first, second = (count == 0)[:, None], (count == 1)[:, None]
            state.tokens.masked_fill_(first, 0)
            torch.where(second, state.probs.argmax(-1), state.tokens, out=state.tokens)
            draft.tokens[:, 1:] = state.tokens
            draft.greedy = first[:, 0]
            draft.unverified = F.pad(second, (1, state.tokens.shape[1] - 1))
        return draft

    def _valid(self, state: WindowState, count: Tensor) -> Tensor:
        behind = count[:, None] + self.tree.depth
        drafts = self._drafts(state, count)[:, None] & (behind <= state.until) & (count[:, None] >= int(self.greedy))
        return drafts | (self.tree.depth == 0)


def opened(shape: DraftShape, opening: str) -> DraftShape:
    """The shape of a window with this opening."""
    return replace(shape, biased=opening == "greedy", skips=opening == "greedy")


def shape(cfg: Mapping[str, Any]) -> DraftShape:
    return opened(window_shape(cfg["window"]), cfg["opening"])


def build(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return BuiltIn(*(cfg[name] for name in ("window", "opening", "plain_until", "plain_from")))
