"""The training data of drafter networks: sequences of a target, its hidden states, and the resulting distributions.
Every kind of network defines a `Training`, which drafts over such a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specbench.models.language import Language, Prefix


@dataclass
class Batch:
    """N sequences.

    tokens (N, T) int64; hidden (N, P - 1 + T, width): the target's hidden states at all positions except the last;
    index P - 1 + t gives the distribution of token t; ids (N, P - 2 + T): the vocabulary ids from position 1; valid (N,
    P) bool: valid positions of the prefix; given: the arguments of `prefixed` for a separate model, None if hidden
    states were stored without them.
    """

    tokens: Tensor
    hidden: Tensor
    ids: Tensor
    valid: Tensor
    given: tuple[Any, Tensor] | None = None


@dataclass(frozen=True)
class TargetHead:
    """Computes the target's distributions over codes from hidden states."""

    target: Language

    @property
    def free(self) -> Tensor:
        """Which image positions have codes, (T,) bool; at the others, the grammar forces a token."""
        grammar, device = self.target.grammar, self.target.output.weight.device
        if grammar is None:
            return torch.ones(self.target.length, dtype=torch.bool, device=device)
        return (grammar.forced < 0).to(device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., codes) float32 of hidden states, which are inputs of the head."""
        return self.codes(self.target.head(hidden.to(self.target.output.weight.dtype)))

    def codes(self, logits: Tensor) -> Tensor:
        """The logits of the codes, float32, from logits (..., vocabulary)."""
        grammar = self.target.grammar
        return (logits if grammar is None else logits[..., : grammar.codes]).float()


def prefixed(model: Language, conditioning: Any, drop: Tensor) -> Prefix:
    """The prefixes of N prompts; the unconditional prefix of guidance where `drop` (N,) bool is true."""
    prefix, n = model.condition(conditioning, guided=True), len(drop)
    rows = torch.arange(n, device=drop.device) + n * drop
    return Prefix(prefix.inputs[rows], prefix.valid[rows], prefix.ids[rows])


def hidden_states(model: Language, prefix: Prefix, tokens: Tensor) -> Tensor:
    """Hidden states (N, P - 1 + T, width) of a prefix and tokens (N, T); the last token is not an input."""
    return model.uncached(prefix, tokens[:, :-1])


def following_ids(model: Language, prefix: Prefix, tokens: Tensor) -> Tensor:
    """The vocabulary ids (N, P - 2 + T) from position 1 to the second last."""
    return torch.cat([prefix.ids[:, 1:], model.ids(tokens[:, :-1])], 1)


@dataclass
class DraftLogits:
    """The drafter's outputs for the tokens at image `positions` (n,) int64. outputs (N, n, ...): what `head` computes
    logits from, or the logits without a head; features (N, n, dim): predicted hidden states, if the drafter has them.
    """

    outputs: Tensor
    positions: Tensor
    features: Tensor | None = None
    head: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def after(
        cls,
        first: int,
        outputs: Tensor,
        features: Tensor | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> DraftLogits:
        """For consecutive tokens from image position `first`."""
        return cls(outputs, torch.arange(first, first + outputs.shape[1], device=outputs.device), features, head)

    @cached_property
    def logits(self) -> Tensor:
        """Logits (N, n, codes)."""
        return self.outputs if self.head is None else self.head(self.outputs)

    def some(self, share: float, generator: torch.Generator | None) -> DraftLogits:
        """A random share of the positions, at least one. Its logits take less time, if there is a head."""
        n = len(self.positions)
        if share == 1:
            return self
        order = torch.rand(n, generator=generator, device=self.positions.device).argsort()
        chosen = order[: max(1, round(share * n))].sort().values
        features = None if self.features is None else self.features[:, chosen]
        return DraftLogits(self.outputs[:, chosen], self.positions[chosen], features, self.head)


class Training:
    """How a network of one kind drafts over a batch, and which parameters are trained."""

    evaluated: int  # drafted positions in the last validation

    def __init__(self, network: Any, head: TargetHead) -> None:
        self.network, self.head = network, head
        self.dtype = next(network.parameters()).dtype  # may differ from the target's

    def draft(self, batch: Batch, depth: int, generator: torch.Generator | None = None) -> Iterator[DraftLogits]:
        """The outputs for drafted positions 1 .. depth, or fewer, in order. generator: of the random choices of a
        training step, such as the positions where it drafts; None in a validation, which always drafts at the same
        positions."""
        raise NotImplementedError

    def depth(self, unroll_steps: int) -> int:
        """Number of drafted positions that the network learns."""
        return 1

    def freeze(self) -> None:
        """Do not train the token table if it is the target's."""


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

        def head(states: Tensor) -> Tensor:
            return self.head.codes(network.head(states))

        yield DraftLogits.after(0, hidden[:, batch.valid.shape[1] - 1 :], head=head)
