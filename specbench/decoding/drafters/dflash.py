"""DFlash: one pass of a small network over masks drafts a block of tokens (arXiv 2602.06036).

The tokens of a step are independent given the committed ones: slot k of the block has one distribution, whatever the
tokens before it are. So a chain draws one token per slot, and in a tree the children of all nodes of a depth are drawn
from the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specbench.decoding.loop import Drafter, NetworkPass, StepResult, last_token
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Distributions, Sampling, draw, sample_distinct
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import Chain, Path, StaticTree
from specbench.decoding.trees import build as build_tree
from specbench.decoding.verify import DRAFT, Draft
from specbench.engine.masks import TreeMask
from specbench.engine.state import Buffer, Buffers, put, within
from specbench.errors import UsageError


@dataclass
class DFlashState:
    session: Any  # the target's
    sampling: Sampling
    rng: RandomStreams
    cache: Any  # keys and values of the context; a block is written after them, and overwritten
    start: Tensor  # (R,): the first position that may be attended to
    pending: Tensor  # (R, K, width): the target's hidden states at the last committed positions, oldest first
    fresh: Tensor  # (B,): how many of them are valid, minus one
    halves: int

    def buffers(self) -> Buffers:
        return {
            "start": Buffer(self.start, 0, self.halves),
            "pending": Buffer(self.pending, 0, self.halves),
            "fresh": Buffer(self.fresh),
            **within("cache", self.cache.buffers(self.halves)),
        }


class DFlash:
    """A chain or a static tree. deterministic: child c of a node is the c-th most probable token of its depth, not a
    sample.

    A slot of the cache is a position. With the root at position b, a step writes the context of the newly committed
    positions up to b - 1, and the block from b on. So entries that an earlier block left at positions of rejected
    tokens are overwritten before anything attends to them.
    """

    constants = ("tree", "offsets", "among", "depths", "kids", "picks", "depth_of_inner", "root")

    def __init__(self, network: Any, paths: Sequence[Path], deterministic: bool = False) -> None:
        self.network, self.deterministic, self.shape = network, deterministic, _shape(paths)
        self.tree = tree = self.shape.tree
        self.slots = tree.height + 1
        if self.slots > network.cfg.block_size:
            raise UsageError(
                f"the draft is {tree.height} tokens deep, but the DFlash network drafts {network.cfg.block_size - 1}:"
                f" give window={network.cfg.block_size - 1} or less, or train one with heads={tree.height}"
            )
        self.aux_hidden_layers: tuple[int, ...] = network.cfg.aux_hidden_layers
        self.offsets = torch.arange(self.slots)
        self.depths = self.offsets[:-1]
        # All slots of a block attend to each other.
        self.among = torch.ones(1, self.slots, self.slots, dtype=torch.bool)
        self.depth_of_inner = tree.depth[0, tree.inner[0]]
        candidates = tree.children[0].flatten()
        self.picks = (candidates >= 0).nonzero().flatten()
        self.kids = candidates[self.picks]
        self.root = torch.arange(tree.nodes) == 0

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> DFlashState:
        device = rng.key.device
        put(self, device)
        dim = session.model.block.dim  # the hidden states after it belong to `aux_hidden_layers`
        hidden = session.prefix_hidden[..., dim:]  # (R, P - 1, width)
        rows, prefix, width = hidden.shape
        cache = self.network.new_cache(rows, prefix + 1 + session.length + 2 * self.slots)
        pending = hidden.new_zeros(rows, self.slots, width)
        pending[:, 0] = hidden[:, -1]  # the last prefilled position is fed with the first step
        halves, fresh = 2 if sampling.guided else 1, torch.zeros(len(rng), dtype=torch.int64, device=device)
        start = session.padding[:, 0].clone()
        state = DFlashState(session, sampling, rng, cache, start, pending, fresh, halves)
        if prefix > 1:
            positions = torch.arange(prefix - 1, device=device).expand(rows, -1)
            self._write_context(state, hidden[:, :-1], positions)
        cache.kernels = sampling.kernels
        return state

    def _write_context(self, state: DFlashState, hidden: Tensor, positions: Tensor) -> None:
        """Write the context's keys and values for hidden states (R, n, width) at `positions` (R, n)."""
        session, cache = state.session, state.cache
        features = self.network.features(hidden, cache.kernels)
        rope = session.model.rope_at(session.rope, positions, session.padding)
        for layer, (k, v) in enumerate(self.network.context(features, rope)):
            cache.write(layer, positions, k, v)

    def _block(self, state: DFlashState, history: Tensor, num_committed: Tensor) -> Tensor:
        """Outputs (R, K, dim) of the block whose first token is the last committed one."""
        session, cache = state.session, state.cache
        root = num_committed[:, None] + (session.prefix_length - 1)
        positions = session.both(root + self.offsets)
        x = self.network.blocks(session.embed(last_token(history, num_committed), root), self.slots)
        rope = session.model.rope_at(session.rope, positions, session.padding)
        mask = TreeMask(state.start, positions[:, 0].contiguous(), self.among)
        return self.network.hidden(x, rope, mask, cache, positions)

    def distributions(self, state: DFlashState, history: Tensor, num_committed: Tensor) -> Distributions:
        """The distributions (B, height, V) of the tokens after the last committed one."""
        session = state.session
        earlier = (session.prefix_length - 2) + num_committed[:, None] - state.fresh[:, None]
        self._write_context(state, state.pending, session.both(earlier + self.offsets))
        logits = session.model.head(self._block(state, history, num_committed)[:, 1:])
        return state.sampling.distributions(logits, session, num_committed[:, None] + self.depths)

    def propose(self, state: DFlashState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        tree, sampling = self.tree, state.sampling
        slots = self.distributions(state, history, num_committed)
        valid = (num_committed > 0)[:, None] | self.root  # before the first token nothing is drafted
        root, probs = last_token(history, num_committed), slots.p
        if tree.is_chain and not self.deterministic:
            u = state.rng.uniforms(step, DRAFT, tree.height, 1)[..., 0]
            return Draft(tree, torch.cat([root, draw(probs, u, sampling.kernels)], 1), probs, valid)
        drafted = history.new_empty(len(num_committed), tree.nodes)  # every node is a child, or the root
        drafted[:, :1] = root
        probs = probs[:, self.depth_of_inner]
        deterministic = self.deterministic or sampling.temperature == 0  # a point mass has one token
        if deterministic:
            tokens = slots.logits.topk(tree.width, dim=-1).indices[:, self.depth_of_inner]
        else:
            tokens = sample_distinct(probs, state.rng, step, DRAFT, tree.width)
        drafted[:, self.kids] = tokens.flatten(1)[:, self.picks]
        return Draft(tree, drafted, probs, valid, torch.zeros_like(valid) if deterministic else None)

    def network_passes(self, target: Any) -> list[NetworkPass]:
        net = self.network
        block = [p for module in (net.layers, net.norm, *target.head_layers) for p in module.parameters()]
        return [
            NetworkPass(net, "features", [net.fc.weight, net.hidden_norm.weight]),
            NetworkPass(net, "context", net.context_weights()),
            NetworkPass(net, "hidden", block),
        ]

    def commit(self, state: DFlashState, result: StepResult) -> None:
        hidden = result.hidden[..., state.session.model.block.dim :]
        index = state.session.both(result.verdict.path_with_root).unsqueeze(-1).expand_as(state.pending)
        torch.gather(hidden, 1, index, out=state.pending)
        state.fresh.copy_(result.verdict.length)


def _shape(paths: Sequence[Path]) -> DraftShape:
    return DraftShape(build_tree(paths), passes=1)


@dataclass(frozen=True)
class _Drafted:
    """The parameters of conf/drafter/base/dflash.yaml. paths: of the draft."""

    paths: ClassVar[Any]
    draft_sampling: str

    @property
    def shape(self) -> DraftShape:
        return _shape(self.paths)

    def build(self, model: Any) -> Drafter:
        return DFlash(model.drafter_network("dflash"), self.paths, self.draft_sampling == "deterministic")


@dataclass(frozen=True)
class DFlashChain(Chain, _Drafted):
    """The parameters of conf/drafter/dflash.yaml."""


@dataclass(frozen=True)
class DFlashTree(StaticTree, _Drafted):
    """The parameters of conf/drafter/dflash_tree.yaml."""
