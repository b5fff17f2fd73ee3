"""The positions of a draft's nodes: after the committed tokens in raster order, or in K chains at several positions of
the image at once, for example one in each of several rows of the image. (A row of the image is called a "line" here,
because a row is an image of the batch.)

A method decides only which positions the next pass visits. Positions, cache slots and masks follow from that. A token
has its position in raster order and the cache slot of that position. A node attends to the existing tokens at positions
before its own. So a cache holds a grid with gaps, not a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.rng import RandomStreams
from specbench.decoding.trees import Tree
from specbench.engine.ops import Kernels


class Raster:
    """The layout of a step's draft in raster order: one tree after `num_committed` (B,) tokens. In general a draft has
    n nodes in each of K chains of each of B images (see `ParallelPositions`); here K is 1. verdict: a
    `verify.VerificationResult`; stats: a `trace.StepStats`."""

    fuses = True  # kernels can add the tokens of a verdict

    def __init__(self, tree: Tree, num_committed: Tensor) -> None:
        self.tree, self.num_committed = tree, num_committed

    @property
    def next_positions(self) -> Tensor:
        """The image positions (B, K * n) of the tokens that follow the nodes."""
        return self.num_committed[:, None] + self.tree.depth

    def forward(self, session: Any, tokens: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        """The session's logits and hidden states for the nodes, tokens (B * K, n)."""
        outputs: tuple[Tensor, Tensor] = session.forward(tokens, self.tree, history, self.num_committed)
        return outputs

    def streams(self, rng: RandomStreams, step: Tensor) -> tuple[RandomStreams, Tensor]:
        """The random streams of the chains, and the keys of their numbers (B * K,)."""
        return rng, step

    def chains(self, x: Tensor) -> Tensor:
        """Values of the nodes (B, K * n, ...), rearranged by chain, (B * K, n, ...)."""
        return x

    def images(self, x: Tensor) -> Tensor:
        """Values of the chains (B * K, ...), rearranged by image, (B, K, ...)."""
        return x.unsqueeze(1)

    def commit(self, session: Any, verdict: Any, num_committed: Tensor, total: int) -> Tensor | None:
        """Keep the accepted path in the session's caches; `num_committed` (B,) tokens of `total` were committed before.
        Returns how many tokens of each chain are committed (B, K); None in raster order, where all tokens of the
        verdict are."""
        session.commit(verdict, self.tree, num_committed)
        return None

    def added(
        self, verdict: Any, kept: Tensor | None, num_committed: Tensor, active: Tensor, total: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The positions (B, *) of the verdict's tokens, the tokens, and which of them are committed to the `active`
        (B,) images. `kept`: what `commit` returned."""
        offsets = torch.arange(verdict.tokens.shape[1], device=num_committed.device)
        committed = active[:, None] & (offsets <= verdict.length[:, None])
        # the next step overwrites what is written after them
        return num_committed[:, None] + offsets, torch.where(active[:, None], verdict.tokens, 0), committed

    def advance(
        self,
        verdict: Any,
        kept: Tensor | None,
        images: tuple[Tensor, Tensor, Tensor],
        total: int,
        kernels: Kernels | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add the verdict's tokens to the images that are not complete: to their history, number of committed tokens
        and steps. Returns the last two from before the step, and which images these are."""
        if kernels is not None and self.fuses:
            return kernels.advance(*images, verdict.tokens, verdict.length, total)
        history, num_committed, steps = images
        before, active = (num_committed.clone(), steps.clone()), num_committed < total
        where, tokens, committed = self.added(verdict, kept, before[0], active, total)
        history.scatter_(1, where, tokens)
        num_committed += committed.sum(1)
        steps += active
        return *before, active

    def among_nodes(self, path: Tensor) -> Tensor:
        """The paths (B * K, D) of the chains, as indices (B, K * D) into all nodes of an image."""
        return path

    def inside(self, stats: Any, total: int) -> tuple[Tensor, Tensor]:
        """Draft tokens accepted and verified (B * K,) inside the image. A path that ends at a leaf has no rejection."""
        room = (total - stats.num_committed).clamp_min(0)
        length = stats.verdict.length
        return torch.minimum(length, room), torch.minimum(length + stats.rejects, room)

    def drafted(self, stats: Any, total: int) -> Tensor:
        """How many draft tokens (B,) inside the image were verified."""
        inside = self.tree.depth[:, 1:] <= (total - stats.num_committed)[:, None]
        return (stats.draft.valid[:, 1:] & inside).sum(1)


@dataclass
class ParallelPositions(Raster):
    """K chains of n nodes in each of B images.

    positions (B, K, n) int64: the image positions of their tokens, -1 for the end of the prefix.
    slots (B, K, n) int64: the cache slots of their keys, counted in the same way. Slot T + k holds a substitute for a
        token of chain k that does not exist yet. No node attends to slots T + K + k.
    sees (B, K * n, 1 + T + K) bool: the slots, from -1 on, that a node attends to.
    keys (B, K) int64: keys of the random numbers of a chain, used instead of the step.
    extends (B, K) bool: whether the tokens of a verdict count.
    recovers (B, K) bool: whether the token after the accepted draft tokens counts as well.
    owner (B * K,) int64: the image of each chain.
    """

    positions: Tensor
    slots: Tensor
    sees: Tensor
    keys: Tensor
    extends: Tensor
    recovers: Tensor
    owner: Tensor

    fuses = False

    @property
    def next_positions(self) -> Tensor:
        return (self.positions + 1).flatten(1)

    def forward(self, session: Any, tokens: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = session.forward_at_positions(tokens.view(len(self.keys), -1), self, history)
        return outputs

    def streams(self, rng: RandomStreams, step: Tensor) -> tuple[RandomStreams, Tensor]:
        return rng.rows(self.owner), self.keys.flatten().contiguous()  # fused kernels read them as an array

    def chains(self, x: Tensor) -> Tensor:
        return x.unflatten(1, self.positions.shape[1:]).flatten(0, 1)

    def images(self, x: Tensor) -> Tensor:
        return x.unflatten(0, self.keys.shape)

    def commit(self, session: Any, verdict: Any, num_committed: Tensor, total: int) -> Tensor:
        kept = self.images(verdict.length) + self.recovers
        return kept * (self.extends & (num_committed < total)[:, None])

    def added(
        self, verdict: Any, kept: Tensor | None, num_committed: Tensor, active: Tensor, total: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert kept is not None
        offsets = torch.arange(verdict.tokens.shape[1], device=kept.device)
        committed = offsets < kept.unsqueeze(-1)
        where = torch.where(committed, self.positions[:, :, :1] + 1 + offsets, total)
        return where.flatten(1), (self.images(verdict.tokens) * committed).flatten(1), committed.flatten(1)

    def among_nodes(self, path: Tensor) -> Tensor:
        chains, nodes = self.positions.shape[1:]
        first = torch.arange(chains, device=path.device)[:, None] * nodes
        return (self.images(path) + first).flatten(1)

    def inside(self, stats: Any, total: int) -> tuple[Tensor, Tensor]:
        length = stats.verdict.length  # a draft ends where its row of the image does
        return length, length + stats.rejects

    def drafted(self, stats: Any, total: int) -> Tensor:
        return self.images(stats.draft.valid[:, 1:]).sum((1, 2))


def rows_at_once(width: int, lag: int) -> int:
    """The number of rows of `width` tokens that are decoded at once if each begins when the row above has `lag` tokens.
    One chain more feeds the last token of a row while the next rows are decoded."""
    return 1 if lag >= width else width // lag + 1
