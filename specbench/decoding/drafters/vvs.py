"""VVS (arXiv 2511.13587): in some rounds a path of EAGLE-2's tree is committed without verification. Not lossless.

This follows the released code. There a round either verifies a tree, or commits one of its paths without a pass of the
target; the next round's pass has the committed tokens as a chain in front of its tree. Here both rounds are one step:
its draft is that chain, whose nodes are always accepted, followed by the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.drafters.dynamic import Grower, Grown, largest_tree
from specbench.decoding.drafters.eagle import EagleState
from specbench.decoding.loop import Drafter
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import from_parents, sized
from specbench.decoding.verify import DRAFT, Draft
from specbench.decoding.verify.traversal import path_to
from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers


class Skips:
    """Decides which rounds commit a path of a grown tree without verification, and which path, and builds the draft
    that has the path in front of the next tree.

    Round r, counted from 0, commits a path if r mod `interval` is 1. The path leads to one of the tree's leaves, each
    with the same probability. It is cut to L - 1 tokens, where L is the mean number of nodes of such paths, including
    the root, rounded down. (The released code cuts to min(path, L - 1) nodes and takes the token after them, which a
    path shorter than the mean does not have. Here such a path is committed as a whole.)
    """

    #: Up to this number of tokens of an image, nothing is committed without verification.
    first = 5

    def __init__(self, interval: int, grower: Grower) -> None:
        self.interval, self.depth, self.nodes, self.expanded = interval, grower.depth, grower.nodes, grower.expanded

    def due(self, rounds: Tensor, num_committed: Tensor, length: int) -> Tensor:
        """Whether images (B,) with `num_committed` tokens of `length` commit a path without verification. Also counts
        the rounds."""
        due = (rounds % self.interval == 1) & (num_committed > self.first) & (num_committed < length)
        rounds += 1 + due
        return due

    def path(self, draft: Draft, due: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The path's nodes by depth (B, D), and how many of them are committed (B,): 0 for images that are not `due`
        (B,). u (B,): uniforms that choose the leaf."""
        tree, exists = draft.tree, draft.valid
        kids = torch.zeros_like(tree.parent).scatter_add_(1, tree.parent, exists.long())
        leaf = exists & (kids == 0)
        leaves = leaf.sum(1)
        number = (u * leaves).long()[:, None] + 1
        nodes, length = path_to(tree, (leaf & (leaf.cumsum(1) == number)).long().argmax(1, keepdim=True))
        mean = ((tree.depth + 1) * leaf).sum(1) // leaves.clamp_min(1)
        return nodes, torch.where(due & (leaves > 0), torch.minimum(length[:, 0], mean - 1), 0)

    def extended(self, history: Tensor, num_committed: Tensor, tokens: Tensor, length: Tensor) -> Tensor:
        """The history (B, *) followed by the first `length` (B,) of these tokens (B, D)."""
        index = torch.arange(self.depth, device=num_committed.device)
        at = num_committed[:, None] + index
        return history.scatter(1, at, torch.where(index < length[:, None], tokens, history.gather(1, at)))

    @staticmethod
    def reused(fresh: Tensor, length: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the last verdict's `fresh` (B,) + 1 hidden states the tree after a path of `length` (B,) tokens
        begins with, by offsets (n,): (B, n); and how many these are, minus one (B,)."""
        available, skipped = fresh[:, None] + 1, length[:, None]
        reused = torch.minimum((available - skipped).clamp_min(0) + offsets, available - 1)
        return torch.where(skipped > 0, reused, offsets), torch.where(length > 0, length - 1, fresh)

    def joined(self, first: Draft, nodes: Tensor, length: Tensor, second: Draft) -> Draft:
        """A draft with `length` (B,) of the nodes (B, D) of `first` as a chain, followed by the tree of `second`."""
        depth, width, tree = self.depth, second.tree.width, second.tree
        index = torch.arange(1, depth + 1, device=length.device)
        chain, tree_parent = index <= length[:, None], tree.parent[:, 1:]
        parent = torch.cat(
            [(index - 1).expand_as(chain), torch.where(tree_parent > 0, tree_parent + depth, length[:, None])], 1
        )
        siblings = take(tree.children, tree.slot.gather(1, tree_parent).clamp_min(0))
        ranks = (siblings == torch.arange(1, tree.nodes, device=index.device)[:, None]).long().argmax(-1)
        # the first node after the chain is one more child of the chain's end
        rank = torch.cat([torch.where(index == length[:, None] + 1, width, 0), ranks], 1)
        inner = 1 + depth + self.expanded
        joined = from_parents(F.pad(parent, (1, 0)), F.pad(rank, (1, 0)), width + 1, 2 * depth, inner, width + 1)
        above = F.pad(nodes[:, :-1], (1, 0))  # of the chain's nodes
        probs = torch.cat([take(first.probs, first.tree.slot.gather(1, above).clamp_min(0)), second.probs], 1)
        source = torch.where(
            joined.inner < length[:, None], joined.inner, depth
        )  # the distributions of the chain, or of the tree
        of_tree = depth + tree.slot.gather(1, (joined.inner - depth).clamp_min(0)).clamp_min(0)
        source = torch.where(joined.inner > depth, of_tree, source)
        tokens = torch.cat([first.tokens[:, :1], first.tokens.gather(1, nodes), second.tokens[:, 1:]], 1)
        valid = torch.cat([first.valid[:, :1], chain, second.valid[:, 1:]], 1)
        unverified = F.pad(chain, (1, tree.nodes - 1))
        return Draft(joined, tokens, take(probs, source), valid, torch.zeros_like(valid), unverified=unverified)


@dataclass
class VVSState(EagleState):
    """rounds (B,): the number of rounds so far."""

    rounds: Tensor

    def buffers(self) -> Buffers:
        return {**super().buffers(), "rounds": Buffer(self.rounds)}


class VVS(Grown):
    """EAGLE-2 whose every `interval`-th round commits a path without verification (see `Skips`). The target has not
    computed hidden states for the tokens of this path. The head reads the last existing hidden states instead, as many
    as there are such tokens; if there are fewer, it repeats the last one. Both trees are grown in every step, so a step
    that needs only one takes the time of two."""

    def __init__(self, head: Any, nodes: int, depth: int, width: int, ranking: str, interval: int) -> None:
        grower = Grower(nodes, depth, width, ranking)
        self.choice = Skips(interval, grower)
        super().__init__(head, grower, skipping_shape(nodes, depth, width))

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> VVSState:
        opened = super().open(session, conditioning, sampling, rng)
        return VVSState(**vars(opened), rounds=torch.zeros_like(opened.fresh))

    def propose(self, state: VVSState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        first = self.grow(state, history, num_committed)
        due = self.choice.due(state.rounds, num_committed, state.session.length)
        nodes, length = self.choice.path(first, due, state.rng.uniform(step, DRAFT, 1)[:, 0])
        index, fresh = self.choice.reused(state.fresh, length, self.offsets)
        longer_state = replace(state, pending=take(state.pending, state.session.both(index)), fresh=fresh)
        longer = self.choice.extended(history, num_committed, first.tokens.gather(1, nodes), length)
        return self.choice.joined(first, nodes, length, self.grow(longer_state, longer, num_committed + length))


def skipping_shape(nodes: int, depth: int, width: int) -> DraftShape:
    """A committed path of `depth` tokens, followed by a tree."""
    grown = largest_tree(nodes, depth, width).nodes - 1
    return DraftShape(sized(grown + depth, 2 * depth), passes=2 * depth, biased=True, skips=True)


@dataclass(frozen=True)
class Choice:
    """The parameters of conf/drafter/vvs.yaml."""

    nodes: int
    depth: int
    width: int
    ranking: str
    interval: int

    @property
    def shape(self) -> DraftShape:
        return skipping_shape(self.nodes, self.depth, self.width)

    def build(self, model: Any) -> Drafter:
        return VVS(model.drafter_network("eagle"), self.nodes, self.depth, self.width, self.ranking, self.interval)
