"""Medusa: heads on the target's last hidden state propose the most probable tokens of each position (Cai et al.
2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.loop import Drafter, NetworkPass, StepResult, last_token
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import Path, StaticTree, in_order
from specbench.decoding.trees import build as build_tree
from specbench.decoding.verify import Draft
from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers, put
from specbench.errors import UsageError


@dataclass
class MedusaState:
    session: Any  # the target's
    sampling: Sampling
    hidden: Tensor  # (R, dim): the target's hidden state from which the root's token was drawn
    halves: int
    sampled: Tensor  # (B, M) bool: false for all tokens

    constants = ("sampled",)

    def buffers(self) -> Buffers:
        return {"hidden": Buffer(self.hidden, 0, self.halves)}


class Medusa:
    """A static tree: child c of a node of depth d is the c-th most probable token of head d, whatever the path to it.
    The tokens are deterministic, not sampled."""

    constants = ("tree", "level", "choice", "of_inner", "depths", "root")

    def __init__(self, heads: Any, paths: Sequence[Path]) -> None:
        self.heads, self.shape = heads, _shape(paths)
        self.tree = self.shape.tree
        if self.tree.height > heads.cfg.heads:
            raise UsageError(f"the tree is {self.tree.height} deep, but there are {heads.cfg.heads} Medusa heads")
        ordered = in_order(paths)
        self.level = torch.tensor([len(p) - 1 for p in ordered])
        self.choice = torch.tensor([p[-1] for p in ordered])
        self.most = 1 + max(p[-1] for p in ordered)
        self.of_inner = self.tree.depth[0, self.tree.inner[0]]  # the head of an inner node's children
        self.depths = torch.arange(self.tree.height)
        self.root = torch.arange(self.tree.nodes) == 0

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> MedusaState:
        put(self, rng.key.device)
        if self.most > session.vocab_size:
            raise UsageError(f"the tree tries more tokens than the vocabulary of {session.vocab_size} has")
        sampled = torch.zeros(len(rng), self.tree.nodes, dtype=torch.bool, device=rng.key.device)
        hidden = session.prefix_hidden[:, -1].clone()
        return MedusaState(session, sampling, hidden, 2 if sampling.guided else 1, sampled)

    def propose(self, state: MedusaState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        positions = num_committed[:, None] + self.depths
        logits = self.heads(state.hidden, self.tree.height)  # (R, D, V)
        heads = state.sampling.distributions(logits, state.session, positions)
        top = heads.logits.topk(self.most, dim=-1).indices
        root = last_token(history, num_committed)
        tokens = torch.cat([root, top[:, self.level, self.choice]], 1)
        valid = (num_committed > 0)[:, None] | self.root  # no hidden state before the first token
        return Draft(self.tree, tokens, heads.p[:, self.of_inner], valid, state.sampled)

    def network_passes(self, target: Any) -> list[NetworkPass]:
        used = self.heads.medusa_head[: self.tree.height]
        return [NetworkPass(self.heads, "forward", list(used.parameters()))]

    def commit(self, state: MedusaState, result: StepResult) -> None:
        verdict, hidden = result.verdict, result.hidden
        last = state.session.both(verdict.path_with_root.gather(1, verdict.length[:, None]))
        state.hidden.copy_(take(hidden, last).squeeze(1))


def _shape(paths: Sequence[Path]) -> DraftShape:
    return DraftShape(build_tree(paths), passes=1)


class Choice(StaticTree):
    """conf/drafter/medusa.yaml."""

    @property
    def shape(self) -> DraftShape:
        return _shape(self.paths)

    def build(self, model: Any) -> Drafter:
        return Medusa(model.drafter_network("medusa"), self.paths)
