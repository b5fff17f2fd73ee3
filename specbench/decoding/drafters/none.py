"""Drafts without tokens: vanilla autoregression, and ZipAR (He et al. 2024, arXiv 2412.04062).

ZipAR decodes rows of an image in parallel, one token of each row per pass, without any verification. Every token is
sampled once, from the target's distribution given the tokens that exist. That is the distribution of raster order only
if a row begins after the end of the row above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.loop import Drafter, StepResult, last_token
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.verify import Draft
from specbench.decoding.zipar_passes import PlannedRows
from specbench.engine.state import Buffers, put


@dataclass
class EmptyState:
    """probs (n, 0, V) and valid (n, 1) bool of n chains; plan: the positions that the passes visit, None in raster
    order."""

    probs: Tensor
    valid: Tensor
    plan: PlannedRows | None = None

    constants = ("probs", "valid", "plan")

    def buffers(self) -> Buffers:
        return {}


class NoDraft:
    """The target alone, token by token in raster order."""

    constants = ("tree",)

    def __init__(self) -> None:
        self.shape = _shape()
        self.tree = self.shape.tree

    def plan(self, session: Any, rng: RandomStreams) -> PlannedRows | None:
        """The positions that the passes over the rows of `rng` visit; None in raster order."""
        return None

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> EmptyState:
        device = rng.key.device
        put(self, device)
        plan = self.plan(session, rng)
        chains = len(rng) if plan is None else len(plan.owner)
        probs = torch.zeros(chains, 0, session.vocab_size, device=device)
        return EmptyState(probs, torch.ones(chains, 1, dtype=torch.bool, device=device), plan)

    def propose(self, state: EmptyState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        if state.plan is None:
            return Draft(self.tree, last_token(history, num_committed), state.probs, state.valid)
        token, positions = state.plan.parallel_positions(history, step)
        return Draft(self.tree, token.view(-1, 1), state.probs, state.valid, parallel_positions=positions)

    def commit(self, state: EmptyState, result: StepResult) -> None:
        pass


class ZipAR(NoDraft):
    """window: tokens that a row of the image has when the next one begins; a window of at least the width of a row is
    raster order. first_row: whether the second row waits for the whole first one ("alone", as on LlamaGen) or not
    ("overlap"). missing: whether tokens that do not exist are "masked", or slots that hold "zero" replace them, as in
    the released code for LlamaGen.

    A token's random number depends only on its position, so with window=row it is the same as in vanilla decoding.
    """

    def __init__(self, window: int, first_row: str = "alone", missing: str = "masked") -> None:
        self.window, self.alone, self.masked = window, first_row == "alone", missing == "masked"
        self.shape = _shape(window)
        self.tree = self.shape.tree

    def plan(self, session: Any, rng: RandomStreams) -> PlannedRows:
        return PlannedRows(session, len(rng), rng.key.device, self.window, self.alone, self.masked)


def _shape(lag: int | None = None) -> DraftShape:
    return DraftShape(build_tree([]), biased=lag is not None, lag=lag)


@dataclass(frozen=True)
class Choice:
    """conf/drafter/none.yaml."""

    @property
    def shape(self) -> DraftShape:
        return _shape()

    def build(self, model: Any) -> Drafter:
        return NoDraft()


@dataclass(frozen=True)
class ZipARRows:
    """The parameters of conf/drafter/zipar.yaml."""

    window: int
    first_row: str
    missing: str

    @property
    def shape(self) -> DraftShape:
        return _shape(self.window)

    def build(self, model: Any) -> Drafter:
        return ZipAR(self.window, self.first_row, self.missing)
