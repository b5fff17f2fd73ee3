"""The examples of a drafter's training as batches, whose hidden states are computed on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specbench.models.language import Language
from specbench.models.supervision import Batch, following_ids, hidden_states, prefixed

#: Examples (n,) int64 -> their conditioning on the target's device.
Conditions = Callable[[np.ndarray], Any]


class Dataset(Protocol):
    def __len__(self) -> int: ...
    def batch(self, rows: np.ndarray, drop: np.ndarray) -> Batch:
        """Of examples `rows` (n,) int64, without their prompt where `drop` (n,) bool is true."""
        ...


class LiveDataset:
    """Hidden states are computed on demand, from tokens (N, T) and their prompts."""

    def __init__(self, target: Language, tokens: np.ndarray, conditions: Conditions) -> None:
        self.target, self.tokens, self.conditions = target, tokens, conditions
        self.device = target.output.weight.device

    def __len__(self) -> int:
        return len(self.tokens)

    def inputs(self, rows: np.ndarray, drop: np.ndarray) -> tuple[Tensor, Any, Tensor]:
        """Tokens, conditioning and `drop` on the device."""
        return self._moved(self.tokens[rows]), self.conditions(rows), torch.as_tensor(drop).to(self.device)

    def batch(self, rows: np.ndarray, drop: np.ndarray) -> Batch:
        return self.of(self.tokens[rows], rows, drop)

    @torch.no_grad()
    def of(self, tokens: np.ndarray, rows: np.ndarray, drop: np.ndarray) -> Batch:
        """Of tokens (n, T) that belong to the prompts of examples `rows`."""
        moved, conditioning, dropped = self._moved(tokens), self.conditions(rows), torch.as_tensor(drop).to(self.device)
        prefix = prefixed(self.target, conditioning, dropped)
        hidden = hidden_states(self.target, prefix, moved)
        return Batch(moved, hidden, following_ids(self.target, prefix, moved), prefix.valid, (conditioning, dropped))

    def _moved(self, tokens: np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(tokens, dtype=np.int64)).to(self.device)
