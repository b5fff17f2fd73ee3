"""An EAGLE head that drafts sampled trees. Their shape follows the acceptance at the neighbouring positions of the
image. The design is our own, since the published idea (ADT-Tree, arXiv 2512.21857) has no code.

The shape of a step's tree is chosen before anything is drafted, from distributions at committed positions. So no
sampled token is dropped because of its value, and an exact rule stays exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.drafters.eagle import EagleState, Entries
from specbench.decoding.loop import Drafter, StepResult, last_token
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling, sample_distinct
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import Path, Tree, from_parents, in_order, sized, topology
from specbench.decoding.verify import DRAFT, Draft
from specbench.engine.ops import sum_last, take
from specbench.engine.state import Buffer, Buffers, put, within
from specbench.errors import UsageError

#: Number of shapes; each covers a tenth of the range of acceptances.
SHAPES = 10
#: The most draft tokens; the attention masks of all shapes are in memory.
MOST = 256
#: Acceptance without a known neighbour.
PRIOR = 0.5

#: Like `dynamic.Expand`, but returns the distributions (B, n, V) of the children and, for greedy decoding, the logits
#: (B, n, V) that rank their tokens.
Expand = Callable[[Tensor, Tensor, int, int, Tensor], tuple[Tensor, Tensor | None]]


def best_paths(acceptance: float, nodes: int, depth: int, width: int) -> list[Path]:
    """The tree of `nodes` draft tokens, at most `depth` levels and `width` siblings, with the most accepted tokens if
    the candidates of a node, tried one after the other, are accepted with a, a / 2, a / 3, ... It consists of the
    tokens whose path is accepted most often. A high acceptance gives a chain, a low one many siblings."""
    paths: list[Path] = []
    heap: list[tuple[float, Path, float]] = [
        (-acceptance, (0,), -1.0)
    ]  # -acceptance of the path, path, -acceptance of the parent's path
    while heap and len(paths) < nodes:
        value, path, above = heapq.heappop(heap)
        paths.append(path)
        if (rank := path[-1] + 1) < width:
            tried = above * math.prod(1 - acceptance / (m + 1) for m in range(rank))
            heapq.heappush(heap, (tried * acceptance / (rank + 1), (*path[:-1], rank), above))
        if len(path) < depth:
            heapq.heappush(heap, (value * acceptance, (*path, 0), value))
    return paths


def largest_tree(nodes: int, depth: int, width: int) -> Tree:
    """A tree that is as large as every tree of `TreeShapes`. UsageError for parameters that do not fit together."""
    if nodes > MOST:
        raise UsageError(f"nodes={nodes} is too large: adaptive trees have at most {MOST} draft tokens")
    if nodes < depth:
        raise UsageError(f"nodes={nodes} is fewer than depth={depth}; a tree of that depth needs a node per level")
    most = sum(width**d for d in range(1, depth + 1)) if width > 1 else depth
    if nodes > most:
        raise UsageError(f"width={width} and depth={depth} hold {most} tokens, fewer than nodes={nodes}")
    return sized(nodes, depth)


class _Packed:
    """Tensors (K, ...) of one type in one piece of memory, so that rows of all of them are selected at once."""

    constants = ("packed",)

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.sizes = [x.shape[1:] for x in parts]
        self.packed = torch.cat([x.flatten(1) for x in parts], 1)

    def to(self, device: torch.device) -> _Packed:
        put(self, device)
        return self

    def rows(self, index: Tensor) -> list[Tensor]:
        """The rows `index` (B,) of every tensor, (B, ...) each."""
        parts = self.packed[index].split([size.numel() for size in self.sizes], 1)
        return [x.unflatten(1, size) for x, size in zip(parts, self.sizes, strict=True)]


class TreeShapes:
    """The trees of `best_paths` at `SHAPES` acceptances, and their growth; each row has its own shape.

    For the inner nodes of one depth in each of the K shapes, at most n: nodes (K, n): their numbers, 0 where a shape
    has fewer; parents (K, n): 0 for the root, else one more than the parent's index among the expanded nodes; kids (K,
    n, W): their children's numbers, or one more than the last node's where no child exists; sees (K, n, E) bool: the
    expanded nodes that each attends to, including itself. home (K, M): for an inner node, one more than its index among
    the expanded ones; rank (K, M): a node's number among its siblings.
    """

    constants = ("numbers", "flags")

    def __init__(self, nodes: int, depth: int, width: int) -> None:
        largest_tree(nodes, depth, width)
        trees = [in_order(best_paths((k + 0.5) / SHAPES, nodes, depth, width)) for k in range(SHAPES)]
        self.nodes, self.width, self.height = nodes, width, depth
        number = [{(): 0} | {path: i + 1 for i, path in enumerate(paths)} for paths in trees]
        inner = [sorted({path[:-1] for path in paths}, key=lambda p: (len(p), p)) for paths in trees]
        per_depth = [max(sum(len(p) == d for p in some) for some in inner) for d in range(depth)]
        self.expanded, self.beam = sum(per_depth[1:]), max(per_depth)
        self.first = [sum(per_depth[1:d]) for d in range(depth)]  # of every depth: the index of its first expanded node
        home = torch.zeros(SHAPES, self.nodes + 1, dtype=torch.int64)
        levels: list[Tensor] = []
        flags: list[Tensor] = []
        for d, (count, first) in enumerate(zip(per_depth, self.first, strict=True)):
            nodes_of, parents = (torch.zeros(SHAPES, count, dtype=torch.int64) for _ in range(2))
            kids = torch.full((SHAPES, count, width), self.nodes + 1)
            sees = torch.zeros(SHAPES, count, self.expanded, dtype=torch.bool)
            for k, names in enumerate(number):
                for i, path in enumerate(p for p in inner[k] if len(p) == d):
                    node = nodes_of[k, i] = names[path]
                    for rank in range(width):
                        kids[k, i, rank] = names.get((*path, rank), self.nodes + 1)
                    if d:
                        parents[k, i] = above = home[k, names[path[:-1]]]
                        home[k, node] = first + i + 1
                        if above > 0:
                            sees[k, i] = flags[-1][k, above - 1 - self.first[d - 1]]
                if d:
                    index = torch.arange(count)
                    sees[k, index, first + index] = True
            levels += [nodes_of, parents, kids]
            flags.append(sees)
        parent = torch.tensor(
            [[0, *(names[p[:-1]] for p in paths)] for names, paths in zip(number, trees, strict=True)]
        )
        ranks = torch.tensor([[0, *(p[-1] for p in paths)] for paths in trees])
        tree = from_parents(parent, ranks, width, depth, max(map(len, inner)))
        of_tree = (tree.parent, tree.depth, tree.inner, tree.slot, tree.children)
        self.numbers, self.flags = _Packed([*levels, home, ranks, *of_tree]), _Packed([*flags, tree.ancestors])

    def to(self, device: torch.device) -> TreeShapes:
        put(self, device)
        return self

    def select(self, acceptance: Tensor) -> Tensor:
        """The numbers (B,) of the shapes for acceptances (B,) in [0, 1]."""
        return (acceptance * SHAPES).long().clamp(0, SHAPES - 1)

    def grow(
        self,
        shape: Tensor,
        root: Tensor,
        candidates: tuple[Tensor, Tensor | None],
        expand: Expand,
        sampling: Sampling,
        rng: RandomStreams,
        step: Tensor,
    ) -> Draft:
        """The draft of rows with these shapes (B,). root (B, 1): the last committed token; candidates: the output of
        `Expand` for it. Siblings are sampled without replacement or, in greedy decoding, the most probable ones."""
        rows, size = len(root), candidates[0].shape[-1]
        width = min(self.width, size)
        *levels, home, rank, parent, depth, inner, slot, children = self.numbers.rows(shape)
        *sees, ancestors = self.flags.rows(shape)
        tokens = torch.cat([root, root.new_zeros(rows, self.nodes + 1)], 1)  # the last entry is no node
        probs = []
        for d, first in enumerate(self.first):
            nodes, parents, kids = levels[3 * d : 3 * d + 3]
            if d:
                candidates = expand(tokens.gather(1, nodes), parents, d, first, sees[d])
            probs.append(candidates[0])
            if candidates[1] is None:
                picks = sample_distinct(candidates[0], rng, step, DRAFT + d, width)
            else:
                picks = candidates[1].topk(width, dim=-1).indices
            tokens.scatter_(1, kids[..., :width].flatten(1), picks.flatten(1))
        tree = topology(parent, depth, ancestors, inner, slot, children, height=self.height, beam=self.beam)
        valid = torch.ones(rows, self.nodes + 1, dtype=torch.bool, device=root.device)
        if width < self.width:  # there are no more candidates than tokens in the vocabulary
            valid = ~(ancestors & (rank >= width).unsqueeze(1)).any(-1)
        of_inner = take(torch.cat(probs, 1), home.gather(1, inner))
        sampled = torch.zeros_like(valid) if sampling.temperature == 0 else None
        return Draft(tree, tokens[:, :-1], of_inner, valid, sampled)


@dataclass
class Acceptances:
    """The known acceptances at the positions of B images. rates (B, *) float32: by position, the probability that a
    token sampled from the drafter's distribution is accepted, sum min(p, q); side: positions in a row of the image."""

    rates: Tensor
    side: int

    @classmethod
    def open(cls, session: Any, rows: int, reach: int, device: torch.device) -> Acceptances:
        """For the images of a session, whose steps commit at most `reach` tokens."""
        return cls(torch.full((rows, session.length + 2 * reach), PRIOR, device=device), session.width)

    def buffers(self) -> Buffers:
        return {"rates": Buffer(self.rates)}

    def ahead(self, num_committed: Tensor) -> Tensor:
        """The expected acceptance (B,) at the next position: the average of two means, over the left and upper
        neighbours (over one of them if only one exists) and over the image so far."""
        index = torch.stack([num_committed - 1, num_committed - self.side], 1)
        known = torch.stack([num_committed % self.side > 0, num_committed >= self.side], 1)
        near = (self.rates.gather(1, index.clamp_min(0)) * known).sum(1) / known.sum(1).clamp_min(1)
        so_far = torch.arange(self.rates.shape[1], device=num_committed.device) < num_committed[:, None]
        mean = sum_last(self.rates * so_far) / num_committed.clamp_min(1)
        return torch.where(known.any(1), (near + mean) / 2, PRIOR)

    def learn(self, result: StepResult) -> None:
        """Store the rates along the accepted path. A leaf at its end has no draft distribution, so it gets the rate of
        the node before it."""
        draft, path = result.draft, result.verdict.path_with_root
        slot = draft.tree.slot.gather(1, path)
        q, p = take(draft.probs, slot.clamp_min(0)), take(result.p, path)
        rates = sum_last(torch.minimum(p, q))
        depth = torch.arange(path.shape[1], device=path.device)
        before = (torch.minimum(depth, result.verdict.length[:, None]) - 1).clamp_min(0)
        rates = torch.where(slot < 0, rates.gather(1, before), rates)
        # the next step overwrites what is written after the path
        self.rates.scatter_(1, result.num_committed[:, None] + depth, rates)


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
        acceptances = Acceptances.open(session, len(rng), self.tree.height + 1, rng.key.device)
        return AdaptiveState(**vars(state), acceptances=acceptances)

    def propose(self, state: AdaptiveState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        last, outputs = self._newest(state, history, num_committed)  # of the root, later also of the expanded nodes
        sampling, positions = state.sampling, num_committed[:, None] + self.offsets

        def children_of(features: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
            children = self._distributions(state, sampling, features, positions[:, depth])
            return children.p, children.logits if sampling.temperature == 0 else None

        def expand(
            tokens: Tensor, parents: Tensor, depth: int, first: int, sees: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            nonlocal outputs
            new = self._expand(state, num_committed, last, outputs, tokens, parents, depth, first, sees)
            outputs = torch.cat([outputs, new], 1)
            return children_of(new, depth)

        root = last_token(history, num_committed)
        shape = self.shapes.select(state.acceptances.ahead(num_committed))
        draft = self.shapes.grow(shape, root, children_of(outputs, 0), expand, sampling, state.rng, step)
        draft.valid &= self._after_first(num_committed, draft.tree.nodes)
        return draft

    def commit(self, state: EagleState, result: StepResult) -> None:
        super().commit(state, result)
        assert isinstance(state, AdaptiveState)
        state.acceptances.learn(result)


def adaptive_shape(nodes: int, depth: int, width: int) -> DraftShape:
    return DraftShape(largest_tree(nodes, depth, width), passes=depth)


def shape(cfg: Mapping[str, Any]) -> DraftShape:
    return adaptive_shape(cfg["nodes"], cfg["depth"], cfg["width"])


def build(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return AdaptiveEagle(model.drafter_network("eagle"), cfg["nodes"], cfg["depth"], cfg["width"])
