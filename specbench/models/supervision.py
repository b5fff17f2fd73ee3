"""What a drafter network learns from: sequences of a target, its hidden states over them, and the distributions that
follow. A network of another kind brings a `Training`, which says how it drafts over such a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from specbench.models.language import Language, Prefix


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
        """The logits of codes, float32, among logits (..., vocabulary)."""
        grammar = self.target.grammar
        return (logits if grammar is None else logits[..., : grammar.codes]).float()


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


@dataclass
class DraftLogits:
    """Logits (N, n, codes) of the tokens at image `positions` (n,) int64; `features` (N, n, dim), where the drafter
    predicts hidden states too."""

    logits: Tensor
    positions: Tensor
    features: Tensor | None = None

    @classmethod
    def after(cls, first: int, logits: Tensor, features: Tensor | None = None) -> DraftLogits:
        """Of the consecutive tokens from image position `first` on."""
        return cls(logits, torch.arange(first, first + logits.shape[1], device=logits.device), features)


class Training:
    """How a network of one kind drafts over a batch, and what of it is trained."""

    evaluated: int  # drafted positions in the last validation

    def __init__(self, network: Any, head: TargetHead) -> None:
        self.network, self.head = network, head
        self.dtype = next(network.parameters()).dtype  # may differ from the target's

    def draft(self, batch: Batch, depth: int, generator: torch.Generator | None = None) -> Iterator[DraftLogits]:
        """The outputs for drafted positions 1 .. depth in order, or fewer. generator: of what a training step draws,
        such as the places where it drafts; None in a validation, which drafts at the same places each time."""
        raise NotImplementedError

    def depth(self, unroll_steps: int) -> int:
        """Drafted positions that the network learns."""
        return 1

    def freeze(self) -> None:
        """Keep the token table as it is, where that is the target's."""


class DraftModelTraining(Training):
    network: Language
    evaluated = 1

    def draft(self, batch: Batch, depth: int, generator: torch.Generator | None = None) -> Iterator[DraftLogits]:
        assert batch.given is not None
        conditioning, drop = batch.given
        floats = {
            f.name: value.to(self.dtype)
            for f in fields(conditioning)
            if (value := getattr(conditioning, f.name)).is_floating_point()
        }
        network = self.network
        hidden = hidden_states(network, prefixed(network, replace(conditioning, **floats), drop), batch.tokens)
        yield DraftLogits.after(0, self.head.codes(network.head(hidden[:, batch.valid.shape[1] - 1 :])))
