"""ZipAR (He et al. 2024, arXiv 2412.04062): rows of an image in parallel, one token of each in a pass, without any
verification. Every token is sampled once, from the target's distribution given the tokens that exist; that is the
distribution of raster order only where a row begins after the end of the one above."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.fronts import PlannedRows
from specbench.decoding.loop import Drafter, Outcome
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.verify import Draft
from specbench.engine.state import Buffers, put
from specbench.errors import check_choice


@dataclass
class ZipState:
    schedule: PlannedRows
    probs: Tensor  # (B * K, 0, V)
    valid: Tensor  # (B * K, 1) bool

    constants = ("schedule", "probs", "valid")

    def buffers(self) -> Buffers:
        return {}


class ZipAR:
    """window: tokens that a row of the image has when the next one begins; from the width of a row on it is raster
    order. first_row: whether the second row waits for the whole first one ("alone", as on LlamaGen) or not ("overlap").
    missing: whether tokens that do not exist are "masked", or slots that hold "zero" count in their place, as in the
    released code for LlamaGen.

    A token's random number depends on its position alone, so that with window=row it is that of vanilla decoding.
    """

    constants = ("tree",)

    def __init__(self, window: int, first_row: str = "alone", missing: str = "masked") -> None:
        check_choice("first_row", first_row, ("alone", "overlap"))
        check_choice("missing", missing, ("masked", "zero"))
        self.window, self.alone, self.masked = window, first_row == "alone", missing == "masked"
        self.shape = _shape(window)
        self.tree = self.shape.tree

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> ZipState:
        device = rng.key.device
        put(self, device)
        schedule = PlannedRows(session, len(rng), device, self.window, self.alone, self.masked)
        chains = len(schedule.owner)
        return ZipState(
            schedule,
            torch.zeros(chains, 0, session.vocab_size, device=device),
            torch.ones(chains, 1, dtype=torch.bool, device=device),
        )

    def propose(self, state: ZipState, history: Tensor, count: Tensor, step: Tensor) -> Draft:
        token, fronts = state.schedule.fronts(history, step)
        return Draft(self.tree, token.view(-1, 1), state.probs, state.valid, fronts=fronts)

    def commit(self, state: ZipState, outcome: Outcome) -> None:
        pass


def _shape(window: int) -> DraftShape:
    return DraftShape(build_tree([]), biased=True, lag=window)


def shape(cfg: Mapping[str, Any]) -> DraftShape:
    return _shape(cfg["window"])


def build(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return ZipAR(cfg["window"], cfg["first_row"], cfg["missing"])
