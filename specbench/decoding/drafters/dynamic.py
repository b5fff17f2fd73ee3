"""EAGLE-2 (Li et al. 2024a): a new tree at each step, grown along its most probable paths, then cut to its most
probable nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specbench.decoding.drafters.eagle import EagleState, Entries
from specbench.decoding.loop import Drafter, last_token
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import Tree, from_parents, sized, topology
from specbench.decoding.verify import Draft
from specbench.engine.ops import Kernels, take
from specbench.errors import UsageError

#: expand(tokens (B, n), parents (B, n), depth, first, sees (B, n, E)) -> distributions (B, n, V) of the children of n
#: nodes. Expanded nodes are numbered in order. `first` is the number of the first of the n nodes, `parents` is one more
#: than the parent's number (0 for the root), and `sees` marks the expanded nodes that each attends to, including
#: itself.
Expand = Callable[[Tensor, Tensor, int, int, Tensor], Tensor]


#: The most candidates of a step, from which a tree's nodes are selected; their scores and ancestor matrix are in
#: memory.
MOST = 100_000


def largest_tree(nodes: int, depth: int, width: int) -> Tree:
    """The largest tree that a `Grower` can give."""
    most = width + (depth - 1) * width * width
    if most > MOST:
        raise UsageError(
            f"depth={depth} and width={width} make {most} candidates a step, more than {MOST}; give smaller ones"
        )
    if nodes < depth:
        raise UsageError(f"nodes={nodes} is fewer than depth={depth}; a tree of that depth needs a node per level")
    return sized(min(nodes, most), depth)


class Grower:
    """Grows `depth` levels: the `width` most probable children of each of the `width` most probable nodes of the level
    before. The `nodes` most probable of all candidates stay. A node's score is the drafter's probability of the path to
    it, before top-k and top-p (ranking "full") or after them ("filtered", as in LANTERN's code; the same at temperature
    0).

    The tokens are deterministic, not sampled: each is a point mass.
    """

    def __init__(self, nodes: int, depth: int, width: int, ranking: str = "full") -> None:
        self.filtered = ranking == "filtered"
        self.depth, self.width, self.nodes = depth, width, largest_tree(nodes, depth, width).nodes - 1
        self.expanded = width * (depth - 1)

    def ranks_filtered(self, sampling: Sampling) -> bool:
        """Whether the nodes are ranked by the distributions after top-k and top-p."""
        return self.filtered and sampling.temperature > 0

    def grow_fused(
        self,
        kernels: Kernels,
        history: Tensor,
        num_committed: Tensor,
        probs: Tensor,
        expand: Expand,
        sampling: Sampling | None,
    ) -> Draft:
        """`grow` with kernels, for the trees that they support, after `num_committed` (B,) tokens of the history (B,
        *). Before the first token no node is valid. `sampling` None: the distributions are already the draft's."""
        growth = kernels.growth(self, len(num_committed), probs.shape[-1], probs.device)
        growth.add(probs)
        all_probs = [probs]
        for depth in range(1, self.depth):
            all_probs.append(expand(*growth.beam(depth)))
            growth.add(all_probs[-1])
        tensors, tokens, valid, of_inner = growth.draft(history, num_committed)
        tree = topology(*tensors, height=self.depth, beam=growth.width)
        draft_probs = take(torch.cat(all_probs, 1), of_inner)
        draft_probs = draft_probs if sampling is None else sampling.filtered_probs(draft_probs)
        return Draft(tree, tokens, draft_probs, valid, torch.zeros_like(valid))

    def grow(self, root: Tensor, probs: Tensor, expand: Expand, sampling: Sampling) -> Draft:
        """root (B, 1): the last committed token; probs (B, 1, V): the distribution of its children. Distributions are
        those before top-k, top-p and arg max, which rank the nodes. `sampling` computes the draft's distributions from
        them."""
        filtered = self.ranks_filtered(sampling)
        rows, _, size = probs.shape
        probs = sampling.filtered_probs(probs) if filtered else probs
        width = min(self.width, size)
        device = probs.device
        beam = torch.arange(width, device=device).expand(rows, -1)

        def candidates(probs: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
            top = probs.topk(width, dim=-1)
            return (score.unsqueeze(-1) + top.values.log().clamp_max(0)).flatten(1), top.indices.flatten(1)

        score, token = candidates(probs, probs.new_zeros(rows, 1))
        all_probs, scores, tokens = [probs], [score], [token]
        above = [torch.full((rows, width), -1, device=device)]  # per candidate, its parent among the candidates
        # per candidate, the index in `all_probs` of its children's distribution; 0: none
        home = torch.full((rows, width), 0, device=device)
        homes = [home]
        chosen, parents = beam, torch.zeros_like(beam)  # the beam among the candidates, its parents' distributions
        begin, best, pick = 0, score, token
        lineage = torch.zeros(rows, width, self.expanded, dtype=torch.bool, device=device)
        for d in range(1, self.depth):
            first = (d - 1) * width
            numbers = torch.arange(first, first + width, device=device)
            lineage = lineage | (torch.arange(self.expanded, device=device) == numbers[:, None])
            homes[-1].scatter_(1, chosen - begin, (numbers + 1).expand(rows, -1))
            probs = expand(pick, parents, d, first, lineage)
            probs = sampling.filtered_probs(probs) if filtered else probs
            score, token = candidates(probs, best)
            all_probs.append(probs)
            scores.append(score)
            tokens.append(token)
            above.append(chosen.repeat_interleave(width, 1))
            homes.append(torch.zeros_like(token))
            begin = width + (d - 1) * width * width
            best, index = score.topk(width, dim=-1)
            pick, from_beam = token.gather(1, index), index // width
            parents = numbers[0] + 1 + from_beam
            lineage = lineage.gather(1, from_beam.unsqueeze(-1).expand_as(lineage))
            chosen = begin + index
        score, token = torch.cat(scores, 1), torch.cat(tokens, 1)
        count = min(self.nodes, score.shape[1])
        kept = score.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values  # parents first
        number = torch.zeros(rows, score.shape[1] + 1, dtype=torch.int64, device=device)
        number.scatter_(1, kept, torch.arange(1, count + 1, device=device).expand(rows, -1))
        # -1: the last column, the root.
        parent = number.gather(1, torch.cat(above, 1).gather(1, kept) % number.shape[1])
        rank = torch.where(kept < width, kept, (kept - width) % width)
        zero = torch.zeros_like(root)
        tree = from_parents(
            torch.cat([zero, parent], 1), torch.cat([zero, rank], 1), width, self.depth, 1 + self.expanded, width
        )
        of_node = torch.cat([zero, torch.cat(homes, 1).gather(1, kept)], 1)
        draft_probs = take(torch.cat(all_probs, 1), of_node.gather(1, tree.inner))
        valid = score.gather(1, kept) > -torch.inf
        valid = torch.cat([torch.ones_like(root, dtype=torch.bool), valid], 1)
        drafted = torch.cat([root, token.gather(1, kept)], 1)
        draft_probs = draft_probs if filtered else sampling.filtered_probs(draft_probs)
        return Draft(tree, drafted, draft_probs, valid, torch.zeros_like(valid))


class Grown(Entries):
    """Base class of the drafters of dynamic trees."""

    def __init__(self, head: Any, grower: Grower, shape: DraftShape) -> None:
        super().__init__(head, shape, grower.expanded)
        self.grower = grower

    def grow(self, state: EagleState, history: Tensor, num_committed: Tensor) -> Draft:
        """The tree after `num_committed` (B,) tokens of the history (B, *). Before the first token its nodes are not
        valid."""
        last, feature = self._newest(state, history, num_committed)
        sampling, kernels = state.sampling, state.cache.kernels
        fused = kernels is not None and kernels.grows(self.grower)
        # the draft's distributions rank the nodes, and depend on the logits only as plain sampling does
        ranked_by_draft = fused and self.grower.ranks_filtered(sampling) and sampling.top_n_sigma is None
        ranking = sampling if ranked_by_draft else sampling.unfiltered
        positions = num_committed[:, None] + self.offsets[: self.grower.depth]
        outputs = feature  # of the root and the expanded nodes, in order

        def probs(features: Tensor, depth: int) -> Tensor:
            return self._distributions(state, ranking, features, positions[:, depth]).p

        def expand(tokens: Tensor, parents: Tensor, depth: int, first: int, sees: Tensor) -> Tensor:
            nonlocal outputs
            new = self._expand(state, num_committed, last, outputs, tokens, parents, depth, first, sees)
            outputs = torch.cat([outputs, new], 1)
            return probs(new, depth)

        if fused:
            begin = probs(feature, 0)
            return self.grower.grow_fused(
                kernels, history, num_committed, begin, expand, None if ranked_by_draft else sampling
            )
        root = last_token(history, num_committed)
        draft = self.grower.grow(root, probs(feature, 0), expand, sampling)
        draft.valid &= self._after_first(num_committed, draft.tree.nodes)
        return draft


class Eagle2(Grown):
    """EAGLE-2: a new tree of the `nodes` most probable draft tokens at each step (see `Grower`)."""

    def __init__(self, head: Any, nodes: int, depth: int, width: int, ranking: str = "full") -> None:
        super().__init__(head, Grower(nodes, depth, width, ranking), dynamic_shape(nodes, depth, width))

    def propose(self, state: EagleState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        return self.grow(state, history, num_committed)


def dynamic_shape(nodes: int, depth: int, width: int) -> DraftShape:
    return DraftShape(largest_tree(nodes, depth, width), passes=depth)


@dataclass(frozen=True)
class GrownTree:
    """The parameters of conf/drafter/eagle2.yaml."""

    nodes: int
    depth: int
    width: int
    ranking: str
    network: ClassVar = "eagle"

    @property
    def shape(self) -> DraftShape:
        return dynamic_shape(self.nodes, self.depth, self.width)

    def build(self, model: Any) -> Drafter:
        return Eagle2(model.drafter_network(self.network), self.nodes, self.depth, self.width, self.ranking)


class Eagle3GrownTree(GrownTree):
    network = "eagle3"
