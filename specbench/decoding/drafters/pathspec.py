"""Several Jacobi chains from one root: PathSpec (arXiv 2606.10492)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.drafters.window import Window, WindowState
from specbench.decoding.loop import Drafter, StepResult
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build
from specbench.decoding.verify import Draft
from specbench.engine.state import Buffer, Buffers


@dataclass
class PathState(WindowState):
    """A `WindowState` with a row for each of the K chains of an image, (B * K, ...). `rng` has a row for each image.
    owner, number (B * K,) int64: the image of a chain, and the chain's number there."""

    owner: Tensor
    number: Tensor

    constants: ClassVar[tuple[str, ...]] = (*WindowState.constants, "owner", "number")

    def buffers(self) -> Buffers:
        return {name: Buffer(b.tensor.unflatten(0, (len(self.rng), -1))) for name, b in super().buffers().items()}


@dataclass(eq=False)
class PathWindow(Window):
    """`chains` windows of an image, each drawn with its own random numbers; they are the branches of a tree.

    After a step every chain is shifted by the number of committed tokens, the chains that were not chosen too, and is
    drawn again from the distributions that this step computed for its own tokens.

    Why this is lossless with an exact verification: as for one window. Given the past, the tokens of all chains are
    independent of each other and of everything that determines the distributions they are verified against, because
    each has a distribution and random numbers of its own. A chain whose past was not committed drafts badly, no more.
    """

    chains: int = 2

    constants: ClassVar[tuple[str, ...]] = (*Window.constants, "branches")

    def __post_init__(self) -> None:
        super().__post_init__()
        paths = [(chain, *(0,) * depth) for chain in range(self.chains) for depth in range(self.window)]
        self.shape = DraftShape(build(paths), carries_over=True, independent=True)
        self.branches = self.shape.tree

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> PathState:
        owner = torch.arange(len(rng), device=rng.key.device).repeat_interleave(self.chains)
        opened = super().open(session, conditioning, sampling, rng.rows(owner))
        number = torch.arange(self.chains, device=owner.device).repeat(len(rng))
        return PathState(**vars(opened) | {"rng": rng}, owner=owner, number=number)

    def propose(self, state: Any, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        owner = state.owner
        keys = step[owner] * self.chains + state.number  # no two chains share their random numbers
        of_chains = replace(state, rng=state.rng.rows(owner))
        draft = super().propose(of_chains, history[owner], num_committed[owner], keys)
        probs = self._by_depth(draft.probs)
        first_children = torch.cat([probs[:, :1], probs[:, self.chains :]], 1)
        parts = {name: F.pad(self._by_depth(nodes[:, 1:]), (1, 0)) for name, nodes in draft.parts.items()}
        tokens, valid = (
            torch.cat([x[:: self.chains, :1], self._by_depth(x[:, 1:])], 1) for x in (draft.tokens, draft.valid)
        )
        return Draft(self.branches, tokens, first_children, valid, node_probs=probs, parts=parts)

    def commit(self, state: Any, result: StepResult) -> None:
        owner, verdict = state.owner, result.verdict
        p = result.p[:, 1:].unflatten(1, (self.window, self.chains)).transpose(1, 2).flatten(0, 1)
        of_chains = replace(verdict, path=verdict.path[owner], length=verdict.length[owner])
        p = torch.cat([result.p[owner, :1], p], 1)
        super().commit(state, replace(result, p=p, verdict=of_chains, num_committed=result.num_committed[owner]))

    def _by_depth(self, x: Tensor) -> Tensor:
        """Values (B * K, L, ...) of the nodes of chains, in the order of the tree's nodes (B, L * K, ...)."""
        return x.unflatten(0, (-1, self.chains)).transpose(1, 2).flatten(1, 2)


@dataclass(frozen=True)
class Choice:
    """The parameters of conf/drafter/pathspec.yaml."""

    window: int
    chains: int
    fresh: str

    @property
    def shape(self) -> DraftShape:
        return self.build(None).shape

    def build(self, model: Any) -> Drafter:
        return PathWindow(self.window, fresh=self.fresh, chains=self.chains)
