"""The empty draft: vanilla autoregression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.loop import Drafter, Outcome
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.verify import Draft
from specbench.engine.state import Buffers, put


@dataclass
class EmptyState:
    probs: Tensor  # (B, 0, V)
    valid: Tensor  # (B, 1) bool

    constants = ("probs", "valid")

    def buffers(self) -> Buffers:
        return {}


class NoDraft:
    constants = ("tree",)

    def __init__(self) -> None:
        self.shape = shape({})
        self.tree = self.shape.tree

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> EmptyState:
        device = rng.key.device
        put(self, device)
        return EmptyState(
            torch.zeros(len(rng), 0, session.vocab_size, device=device),
            torch.ones(len(rng), 1, dtype=torch.bool, device=device),
        )

    def propose(self, state: EmptyState, history: Tensor, count: Tensor, step: Tensor) -> Draft:
        root = history.gather(1, (count - 1).clamp_min(0)[:, None])
        return Draft(self.tree, root, state.probs, state.valid)

    def commit(self, state: EmptyState, outcome: Outcome) -> None:
        pass


def shape(cfg: Mapping[str, Any]) -> DraftShape:
    return DraftShape(build_tree([]))


def build(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return NoDraft()
