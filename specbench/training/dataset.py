"""Training batches of a drafter: sequences of a target, its hidden states over them, and the distributions of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specbench.models.language import Language, Prefix

#: Examples (n,) int64 -> their conditioning on the target's device.
Conditions = Callable[[np.ndarray], Any]


@dataclass
class Batch:
    """N sequences. tokens (N, T) int64; hidden (N, P - 1 + T, width): the target's hidden states at all positions
    but the last; index P - 1 + t gives the distribution of token t; ids (N, P - 2 + T): the vocabulary ids at positions
    1 and on; valid (N, P) bool: the prefix's positions. `given` is the input of a separate model's prefix (see
    `prefixed`), None where hidden states were stored without it."""

    tokens: Tensor
    hidden: Tensor
    ids: Tensor
    valid: Tensor
    given: tuple[Any, Tensor] | None = None


class Dataset(Protocol):
    def __len__(self) -> int: ...
    def batch(self, rows: np.ndarray, drop: np.ndarray) -> Batch:
        """Of examples `rows` (n,) int64, without their prompt where `drop` (n,) bool is true."""
        ...


def prefixed(model: Language, conditioning: Any, drop: Tensor) -> Prefix:
    """The prefix of N prompts; where `drop` (N,) bool is true, the unconditional prefix of guidance."""
    both, n = model.condition(conditioning, guided=True), len(drop)
    rows = torch.arange(n, device=drop.device) + n * drop
    return Prefix(both.inputs[rows], both.valid[rows], both.ids[rows])


def hidden_states(model: Language, prefix: Prefix, tokens: Tensor) -> Tensor:
    """Hidden states (N, P - 1 + T, width) over a prefix and tokens (N, T), whose last token is not an input."""
    return model.uncached(prefix, tokens[:, :-1])


def following_ids(model: Language, prefix: Prefix, tokens: Tensor) -> Tensor:
    """The vocabulary ids (N, P - 2 + T) at positions 1 and on, up to the one before the last."""
    return torch.cat([prefix.ids[:, 1:], model.ids(tokens[:, :-1])], 1)


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


@dataclass(frozen=True)
class TargetHead:
    """Computes distributions from hidden states: the target's, over the codes that its grammar allows."""

    target: Language

    @property
    def free(self) -> Tensor:
        """Which image positions hold codes, (T,) bool; the others hold the one token that the grammar forces."""
        grammar, device = self.target.grammar, self.target.output.weight.device
        if grammar is None:
            return torch.ones(self.target.length, dtype=torch.bool, device=device)
        return (grammar.forced < 0).to(device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits (..., codes) of hidden states, the inputs of the head."""
        return self.codes(self.target.head(hidden.to(self.target.output.weight.dtype)))

    def codes(self, logits: Tensor) -> Tensor:
        """Of logits (..., vocabulary) those of codes, float32."""
        grammar = self.target.grammar
        return (logits if grammar is None else logits[..., : grammar.codes]).float()
