"""Medusa: heads on the target's last hidden state propose the most probable tokens of each position (Cai et al.
2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.loop import Outcome
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import Path, build, in_order
from specbench.decoding.verify import Draft
from specbench.engine.ops import take
from specbench.errors import UsageError


@dataclass
class MedusaState:
    session: Any  # the target's
    sampling: Sampling
    hidden: Tensor  # (R, dim): the target's hidden state from which the root's token was drawn


class Medusa:
    """A static tree: child c of a node of depth d is the c-th most probable token of head d, whatever the path to it.
    The tokens are deterministic, not sampled."""

    passes = 1

    def __init__(self, heads: Any, paths: list[Path]) -> None:
        """heads: the networks; None where only the topology is wanted."""
        self.heads = heads
        self.tree = build(paths)
        if heads is not None and self.tree.height > heads.cfg.heads:
            raise UsageError(f"the tree is {self.tree.height} deep, but there are {heads.cfg.heads} Medusa heads")
        ordered = in_order(paths)
        self.level = torch.tensor([len(p) - 1 for p in ordered])
        self.choice = torch.tensor([p[-1] for p in ordered])
        self.most = 1 + max(p[-1] for p in ordered)
        self.of_inner = self.tree.depth[0, self.tree.inner[0]]  # the head of an inner node's children

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> MedusaState:
        device = rng.key.device
        self.tree = self.tree.to(device)
        for name in ("level", "choice", "of_inner"):
            setattr(self, name, getattr(self, name).to(device))
        if self.most > session.vocab_size:
            raise UsageError(f"the tree tries more tokens than the vocabulary of {session.vocab_size} has")
        return MedusaState(session, sampling, session.prefix_hidden[:, -1])

    def propose(self, state: MedusaState, history: Tensor, count: Tensor, step: Tensor) -> Draft:
        positions = count[:, None] + torch.arange(self.tree.height, device=count.device)
        logits = self.heads(state.hidden, self.tree.height)  # (R, D, V)
        found = state.sampling.distributions(logits, state.session, positions)
        top = found.logits.topk(self.most, dim=-1).indices
        root = history.gather(1, (count - 1).clamp_min(0)[:, None])
        tokens = torch.cat([root, top[:, self.level, self.choice]], 1)
        valid = (count > 0)[:, None].expand_as(tokens).clone()  # no hidden state before the first token
        valid[:, 0] = True
        return Draft(self.tree, tokens, found.p[:, self.of_inner], valid, torch.zeros_like(valid))

    def commit(self, state: MedusaState, outcome: Outcome) -> None:
        verdict, hidden = outcome.verdict, outcome.hidden
        last = state.session.both(verdict.path_with_root.gather(1, verdict.length[:, None]))
        state.hidden = take(hidden, last).squeeze(1)
