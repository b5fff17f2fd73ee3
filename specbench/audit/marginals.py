"""Exact distributions of parts of a sequence, against which decoded sequences are counted.

A short sequence is one part. A longer one of a Markov model has too many values to be counted; its n-grams at every
position have few.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.audit.tabular import Tables, codes, sequence_probs
from specbench.decoding.sampling import Sampling


@dataclass(frozen=True)
class Marginal:
    """The distribution probs (V**length,) float64 of the tokens from position `start` on, coded base V, first token
    most significant."""

    vocab: int
    start: int
    length: int
    probs: Tensor

    def counts(self, tokens: Tensor) -> Tensor:
        """How often each value (V**length,) occurs in sequences (N, T)."""
        part = tokens[:, self.start : self.start + self.length]
        return torch.bincount(codes(part, self.vocab), minlength=len(self.probs)).double()

    def prefixes(self, counts: Tensor) -> list[Tensor]:
        """Counts (or a distribution) of the part's first 1, 2 .. tokens."""
        return [counts.view(self.vocab**t, -1).sum(1) for t in range(1, self.length + 1)]


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities (n, V) float64 that `sampling` shall give guided logits (n, V): the definition once more, so
    that a mistake in `Sampling` does not move what it is compared with."""
    size = logits.shape[-1]
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), size).double()
    curve = sampling.entropy
    probs = (logits.double() / (sampling.temperature if curve is None else 1)).softmax(-1)
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:  # what ties with the last one stays
        ordered = torch.where(ordered >= ordered[:, [min(sampling.top_k, size) - 1]], ordered, 0.0)
        ordered = ordered / ordered.sum(-1, keepdim=True)
    if sampling.top_p < 1:  # the token that reaches the share stays
        ordered = torch.where(ordered.cumsum(-1) - ordered <= sampling.top_p, ordered, 0.0)
    kept = torch.zeros_like(probs).scatter(-1, index, ordered)
    if sampling.top_n_sigma is not None:
        left = torch.where(kept > 0, logits.double(), torch.nan)
        sigma = left.square().nanmean(-1, keepdim=True).sqrt()
        kept = torch.where(left >= logits.amax(-1, keepdim=True) - sampling.top_n_sigma * sigma, kept, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    if curve is None:
        return kept
    a, b, c = curve
    entropy = -torch.xlogy(kept, kept).sum(-1, keepdim=True)
    kept = kept ** (1 / (sampling.temperature * (a * (-entropy / b).exp() + c)))
    return kept / kept.sum(-1, keepdim=True)


def of_sequence(tables: Tables) -> list[Marginal]:
    """The sequence as a whole."""
    return [Marginal(tables[0].shape[1], 0, len(tables), sequence_probs(tables))]


def of_grams(tables: Tables, n: int) -> list[Marginal]:
    """Of a Markov model: n tokens from every position on, and the shorter parts at the end."""
    vocab, contexts = tables[0].shape[1], max(map(len, tables))
    before = torch.ones(1, dtype=torch.float64)  # of what the token at `start` may depend on
    found = []
    for start in range(len(tables)):
        length = min(n, len(tables) - start)
        # (context, tokens so far, context of the next token)
        context, probs = torch.arange(len(before)), before[:, None]
        for t in range(start, start + length):
            following = tables[t].double()[context]  # (context of the next token, V)
            probs = (probs.unsqueeze(-1) * following.view(*probs.shape, vocab)).flatten(1)
            context = ((context[:, None] * vocab + torch.arange(vocab)) % contexts).flatten()
        found.append(Marginal(vocab, start, length, probs.sum(0)))
        joint = before[:, None] * tables[start].double()
        after = ((torch.arange(len(before))[:, None] * vocab + torch.arange(vocab)) % contexts).flatten()
        before = torch.zeros(min(contexts, len(before) * vocab), dtype=torch.float64)
        before.scatter_add_(0, after, joint.flatten())
    return found
