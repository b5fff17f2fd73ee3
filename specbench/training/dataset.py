"""Batches of a drafter's training examples, with hidden states that are computed on demand."""

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
        """The batch of examples `rows` (n,) int64, without the prompt where `drop` (n,) bool is true."""
        ...


class LiveDataset:
    """Computes hidden states on demand, from tokens (N, T) and their prompts."""

    def __init__(self, target: Language, tokens: np.ndarray, conditions: Conditions) -> None:
        self.target, self.tokens, self.conditions = target, tokens, conditions
        self.device = target.output.weight.device

    def __len__(self) -> int:
        return len(self.tokens)

    def inputs(self, rows: np.ndarray, drop: np.ndarray) -> tuple[Tensor, Any, Tensor]:
        """Tokens, conditioning and `drop` on the device."""
        return self._to_device(self.tokens[rows]), self.conditions(rows), torch.as_tensor(drop).to(self.device)

    def batch(self, rows: np.ndarray, drop: np.ndarray) -> Batch:
        return self.batch_of(self.tokens[rows], rows, drop)

    @torch.no_grad()
    def batch_of(self, tokens: np.ndarray, rows: np.ndarray, drop: np.ndarray) -> Batch:
        """The batch of tokens (n, T), with the prompts of examples `rows`."""
        ids, conditioning, dropped = (
            self._to_device(tokens),
            self.conditions(rows),
            torch.as_tensor(drop).to(self.device),
        )
        prefix = prefixed(self.target, conditioning, dropped)
        hidden = hidden_states(self.target, prefix, ids)
        return Batch(ids, hidden, following_ids(self.target, prefix, ids), prefix.valid, (conditioning, dropped))

    def _to_device(self, tokens: np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(tokens, dtype=np.int64)).to(self.device)
