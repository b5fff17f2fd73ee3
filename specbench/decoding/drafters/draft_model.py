"""An independent, smaller model of the same vocabulary that drafts a chain (Leviathan et al. 2023; Chen et al.
2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.loop import Drafter, NetworkPass, StepResult, last_token
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import Chain
from specbench.decoding.trees import build as build_tree
from specbench.decoding.verify import DRAFT, Draft
from specbench.engine.state import Buffers, put, within


@dataclass
class ChainState:
    session: Any
    sampling: Sampling
    rng: RandomStreams
    valid: Tensor  # (B, M) bool: true for all nodes

    constants = ("session", "valid")

    def buffers(self) -> Buffers:
        return within("session", self.session.buffers())


class DraftModel:
    """`model` opens sessions like a target. It must share the target's prefix length and vocabulary."""

    constants = ("tree",)

    def __init__(self, model: Any, window: int) -> None:
        self.model, self.shape = model, Choice(window).shape
        self.tree = self.shape.tree

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> ChainState:
        put(self, rng.key.device)
        draft_session = self.model.open(conditioning, len(rng), sampling.guided, self.tree.nodes)
        if sampling.kernels is not None:
            draft_session.use(sampling.kernels)
        valid = torch.ones(len(rng), self.tree.nodes, dtype=torch.bool, device=rng.key.device)
        return ChainState(draft_session, sampling, rng, valid)

    def propose(self, state: ChainState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        session, sampling = state.session, state.sampling
        root = num_committed[:, None] + (session.prefix_length - 1)
        token = last_token(history, num_committed)
        # the position before the root is fed again: it is new to this cache when the last draft was fully accepted
        earlier = history.gather(1, (num_committed - 2).clamp_min(0)[:, None])
        logits = session.feed_chain(torch.cat([earlier, token], 1), torch.cat([root - 1, root], 1))[:, -1:]
        tokens, probs = [token], []
        for d in range(1, self.tree.nodes):
            position = num_committed[:, None] + (d - 1)
            q = sampling.distributions(logits, session, position).p[:, 0]
            probs.append(q)
            tokens.append(draw(q, state.rng.uniform(step, DRAFT + d, 1)[:, 0], sampling.kernels)[:, None])
            if d + 1 < self.tree.nodes:
                logits = session.feed_chain(tokens[-1], root + d)
        return Draft(self.tree, torch.cat(tokens, 1), torch.stack(probs, 1), state.valid)

    def network_passes(self, target: Any) -> list[NetworkPass]:
        model, times = self.model, self.shape.passes
        read = [p for module in model.pass_weights for p in module.parameters()]
        return [NetworkPass(model, "hidden", read, times), NetworkPass(model, "head", [], times)]

    def commit(self, state: ChainState, result: StepResult) -> None:
        pass  # its cache is indexed by position: rejected entries are overwritten


class Choice(Chain):
    """conf/drafter/draft_model.yaml."""

    @property
    def shape(self) -> DraftShape:
        return DraftShape(build_tree(self.paths), passes=self.window)

    def build(self, model: Any) -> Drafter:
        return DraftModel(model.drafter_network("draft_model"), self.window)
