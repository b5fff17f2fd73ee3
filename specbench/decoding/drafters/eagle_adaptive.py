"""An EAGLE head that drafts deep or wide trees by the acceptance at neighbouring positions; see `drafters.adaptive`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.drafters.adaptive import Acceptances, TreeShapes, largest_tree
from specbench.decoding.drafters.eagle import EagleState, Entries
from specbench.decoding.loop import Drafter, Outcome
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.verify import Draft
from specbench.engine.state import Buffers, within


@dataclass
class AdaptiveState(EagleState):
    acceptances: Acceptances

    def buffers(self) -> Buffers:
        return {**super().buffers(), **within("acceptances", self.acceptances.buffers())}


class AdaptiveEagle(Entries):
    """Trees of `nodes` tokens, at most `depth` levels and `width` siblings."""

    constants = (*Entries.constants, "shapes")

    def __init__(self, head: Any, nodes: int, depth: int, width: int) -> None:
        self.shapes = TreeShapes(nodes, depth, width)
        super().__init__(head, adaptive_shape(nodes, depth, width), self.shapes.expanded)

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> AdaptiveState:
        state = super().open(session, conditioning, sampling, rng)
        known = Acceptances.open(session, len(rng), self.tree.height + 1, rng.key.device)
        return AdaptiveState(**vars(state), acceptances=known)

    def propose(self, state: AdaptiveState, history: Tensor, count: Tensor, step: Tensor) -> Draft:
        last, outputs = self._newest(state, history, count)  # of the root and, further on, of the expanded nodes
        sampling, positions = state.sampling, count[:, None] + self.offsets

        def given(features: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
            found = self._distributions(state, sampling, features, positions[:, depth])
            return found.p, found.logits if sampling.temperature == 0 else None

        def expand(
            tokens: Tensor, parents: Tensor, depth: int, first: int, sees: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            nonlocal outputs
            new = self._grown(state, count, last, outputs, tokens, parents, depth, first, sees)
            outputs = torch.cat([outputs, new], 1)
            return given(new, depth)

        root = history.gather(1, (count - 1).clamp_min(0)[:, None])
        shape = self.shapes.of(state.acceptances.ahead(count))
        draft = self.shapes.grow(shape, root, given(outputs, 0), expand, sampling, state.rng, step)
        draft.valid &= self._after_first(count, draft.tree.nodes)
        return draft

    def commit(self, state: EagleState, outcome: Outcome) -> None:
        super().commit(state, outcome)
        assert isinstance(state, AdaptiveState)
        state.acceptances.learn(outcome)


def adaptive_shape(nodes: int, depth: int, width: int) -> DraftShape:
    return DraftShape(largest_tree(nodes, depth, width), passes=depth)


def shape(cfg: Mapping[str, Any]) -> DraftShape:
    return adaptive_shape(cfg["nodes"], cfg["depth"], cfg["width"])


def build(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return AdaptiveEagle(model.drafter_network("eagle"), cfg["nodes"], cfg["depth"], cfg["width"])
