"""The empty draft: vanilla autoregression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specbench.decoding.loop import Outcome
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import build
from specbench.decoding.verify import Draft


class NoDraft:
    passes = 0

    def __init__(self) -> None:
        self.tree = build([])

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> Any:
        self.tree = self.tree.to(rng.key.device)
        return torch.zeros(len(rng), 0, session.vocab_size, device=rng.key.device)

    def propose(self, state: Any, history: Tensor, count: Tensor, step: Tensor) -> Draft:
        root = history.gather(1, (count - 1).clamp_min(0)[:, None])
        return Draft(self.tree, root, state, torch.ones_like(root, dtype=torch.bool))

    def commit(self, state: Any, outcome: Outcome) -> None:
        pass
