"""The empty draft: vanilla autoregression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.loop import Outcome
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import build
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
    passes, constants = 0, ("tree",)

    def __init__(self) -> None:
        self.tree = build([])

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
