"""EAGLE: a drafter on the target's hidden states. EAGLE-1 drafts a chain or a static tree (Li et al. 2024b)."""

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
from specbench.decoding.trees import Chain, Path, StaticTree, Tree
from specbench.decoding.trees import build as build_tree
from specbench.decoding.verify import DRAFT, Draft
from specbench.engine.masks import TreeMask
from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers, put, with_tensors, within


@dataclass
class EagleState:
    session: Any  # the target's
    sampling: Sampling
    rng: RandomStreams
    cache: Any
    rope: Tensor  # the table that steps read, even if the network has a longer one by now
    start: Tensor  # (R,): the first entry that may be attended to
    pending: Tensor  # (R, D + 1, dim): the target's hidden states at the last committed positions, oldest first
    fresh: Tensor  # (B,): how many of them are valid, minus one
    halves: int

    constants = ("rope",)

    def buffers(self) -> Buffers:
        return {
            "start": Buffer(self.start, 0, self.halves),
            "pending": Buffer(self.pending, 0, self.halves),
            "fresh": Buffer(self.fresh),
            **within("cache", self.cache.buffers(self.halves)),
        }


@dataclass(frozen=True)
class _Level:
    """The inner nodes of one depth. nodes (n,): their numbers; parents (n,): 0 for the root, else one more than the
    parent's index among the expanded nodes (always 0 in a chain, since only its last outputs are stored); first: the
    index of the first node among the expanded ones; kids (K,): their children's numbers; picks (K,): the index of each
    child's token in the flattened (n, W) candidates."""

    nodes: Tensor
    parents: Tensor
    kids: Tensor
    picks: Tensor
    first: int

    def to(self, device: torch.device) -> _Level:
        return with_tensors(self, lambda x: x.to(device))


def _levels(tree: Tree) -> list[_Level]:
    """The root, then the expanded nodes depth by depth."""
    inner = tree.inner[0].tolist()
    expanded = inner[1:]  # the root needs no expansion
    number = {0: 0} | {n: i + 1 for i, n in enumerate(expanded)}
    levels = []
    for d in range(tree.height):
        nodes = [n for n in inner if int(tree.depth[0, n]) == d]
        candidates = tree.children[0][[inner.index(n) for n in nodes]].flatten()
        picks = (candidates >= 0).nonzero().flatten()
        levels.append(
            _Level(
                nodes=torch.tensor(nodes),
                parents=torch.tensor([0 if tree.is_chain else number[int(tree.parent[0, n])] for n in nodes]),
                kids=candidates[picks],
                picks=picks,
                first=number[nodes[0]] - 1,
            )
        )
    return levels


class Entries:
    """The part that all EAGLE drafters share. `head` is the network; entry e of its cache pairs the target's hidden
    state at position e with the token at e + 1.

    With c committed tokens and the root at position b = P - 1 + c, entries up to b - 1 are known. A step feeds the
    entries that became known with the last verdict, takes the distribution of the root's children from the last of
    them, and expands the draft depth by depth. The nodes of a depth share one position. The draft's entries are dropped
    after the step.
    """

    constants: tuple[str, ...] = ("tree", "offsets", "numbers", "root")

    def __init__(self, head: Any, shape: DraftShape, expanded: int) -> None:
        """expanded: draft nodes that pass through the network."""
        self.head, self.shape, self.tree, self.expanded = head, shape, shape.tree, expanded
        self.offsets, self.numbers = torch.arange(shape.height + 1), torch.arange(expanded)
        self.root = torch.arange(self.tree.nodes) == 0
        self.aux_hidden_layers: tuple[int, ...] = head.cfg.aux_hidden_layers

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> EagleState:
        device = rng.key.device
        put(self, device)
        hidden = session.prefix_hidden  # (R, P - 1, dim)
        rows, prefix, dim = hidden.shape
        slots = prefix + session.length + 2 * (self.tree.height + 1) + self.expanded
        rope = self.head.rope(slots)
        cache = self.head.new_cache(rows, slots)
        start = session.padding[:, 0].clone() if self.head.cfg.line else session.padding.new_zeros(rows)
        pending = hidden.new_zeros(rows, self.tree.height + 1, dim)
        pending[:, 0] = hidden[:, -1]  # the entry of the last prefilled position is fed with the first step
        state = EagleState(
            session,
            sampling,
            rng,
            cache,
            rope,
            start,
            pending,
            torch.zeros(len(rng), dtype=torch.int64, device=device),
            2 if sampling.guided else 1,
        )
        if prefix > 1:
            entries = torch.arange(prefix - 1, device=device).expand(rows, -1)
            keys, queries = torch.arange(slots, device=device), entries.unsqueeze(-1)
            mask = ((keys <= queries) & (keys >= start[:, None, None])) | (keys == queries)
            self._feed(state, session.prefix.ids[:, 1:prefix], hidden[:, :-1], entries, mask.unsqueeze(1))
        cache.kernels = sampling.kernels
        return state

    def network_passes(self, target: Any) -> list[NetworkPass]:
        head, fused = self.head, [self.head.fuse, self.head.norm] if self.aux_hidden_layers else []
        read = [p for module in (head.fc, head.layers, *fused[1:], *target.head_layers) for p in module.parameters()]
        fuse_pass = [NetworkPass(head, "", list(fused[0].parameters()))] if fused else []
        return [NetworkPass(head, "hidden", read, self.shape.passes), *fuse_pass]

    def _feed(self, state: EagleState, ids: Tensor, hidden: Tensor, entries: Tensor, mask: Tensor | TreeMask) -> Tensor:
        """Outputs (R, n, dim) of `entries` (R, n)."""
        rope = self.head.rope_at(entries, state.session.padding)
        return self.head.hidden(ids, hidden, rope, mask, state.cache, entries)

    def _newest(self, state: EagleState, history: Tensor, num_committed: Tensor) -> tuple[Tensor, Tensor]:
        """Feed the entries that became known with the last verdict. Returns the newest entry's position (B, 1) and
        output (R, 1, dim)."""
        session = state.session
        last = num_committed[:, None] + (session.prefix_length - 2)  # (B, 1): the newest entry, b - 1
        if state.cache.kernels is not None:
            reduced = self.head.reduced(state.pending)
            x, rope, slots, root, among = state.cache.kernels.newest(
                session, self.head, history, num_committed, state.fresh, reduced, state.start
            )
            out = self.head.hidden_of_joined(x, rope, TreeMask(state.start, root, among), state.cache, slots)
            return last, take(out, session.both(state.fresh)[:, None])
        positions = last - state.fresh[:, None] + self.offsets  # (B, D + 1); those beyond `last` are padding
        entries = session.both(positions)
        mask = TreeMask.chain(state.start, entries)
        out = self._feed(state, session.ids_at(positions + 1, history), state.pending, entries, mask)
        return last, take(out, session.both(state.fresh)[:, None])

    def _expand(
        self,
        state: EagleState,
        num_committed: Tensor,
        last: Tensor,
        outputs: Tensor,
        tokens: Tensor,
        parents: Tensor,
        depth: int,
        first: int,
        sees: Tensor,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Outputs (R, n, dim) of draft nodes of one depth: of all tokens (B, n), or of those at `chosen` (n,) among
        tokens (B, *). parents (n,) or (B, n): the indices of their parents' outputs in outputs (R, *, dim); first: the
        number of the first node among the expanded ones; sees (1 or B, n, expanded) bool: the expanded nodes that each
        attends to, including itself."""
        session, head, cache = state.session, self.head, state.cache
        if cache.kernels is not None:
            x, rope, slots, root = cache.kernels.level(
                session, head, num_committed, tokens, chosen, outputs, parents, depth, first
            )
            return head.hidden_of_joined(x, rope, TreeMask(state.start, root, sees), cache, slots)
        n, base = sees.shape[1], session.both(last) + 1
        above = outputs[:, parents] if parents.dim() == 1 else take(outputs, session.both(parents))
        ids = session.both(session.model.ids(tokens if chosen is None else tokens[:, chosen]))
        rope = head.rope_at(session.both(last + depth).expand(-1, n), session.padding)  # one position for all
        mask = TreeMask(state.start, base[:, 0], sees).dense(torch.arange(cache.slots, device=base.device))
        return head.hidden(ids, above, rope, mask, cache, base + self.numbers[first : first + n])

    def _distributions(
        self, state: EagleState, sampling: Sampling, features: Tensor, position: Tensor
    ) -> Distributions:
        """The distributions at features (R, n, dim), for tokens at one image position (B,) per row."""
        logits = state.session.model.head(self.head.readable(features, state.cache.kernels))
        return sampling.distributions(logits, state.session, position[:, None].expand(-1, features.shape[1]))

    def _after_first(self, num_committed: Tensor, nodes: int | None = None) -> Tensor:
        """Validity (B, M): before the first token no hidden state exists to draft from, so nothing is drafted."""
        return (num_committed > 0)[:, None] | self.root[:nodes]

    def commit(self, state: EagleState, result: StepResult) -> None:
        index = state.session.both(result.verdict.path_with_root).unsqueeze(-1).expand_as(state.pending)
        torch.gather(result.hidden, 1, index, out=state.pending)
        state.fresh.copy_(result.verdict.length)


class Eagle(Entries):
    """EAGLE-1 with a chain or a static tree."""

    constants = (*Entries.constants, "levels", "sees")

    def __init__(self, head: Any, paths: Sequence[Path]) -> None:
        shape = static_shape(paths)
        tree = shape.tree
        super().__init__(head, shape, tree.inner.shape[1] - 1)
        self.levels = _levels(tree)
        nodes = tree.inner[0, 1:]  # the expanded ones
        self.sees = tree.ancestors[:, nodes][:, :, nodes]

    def propose(self, state: EagleState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        tree = self.tree
        last, feature = self._newest(state, history, num_committed)
        drafted = history.new_empty(len(num_committed), tree.nodes)  # every node is a child, or the root
        drafted[:, :1] = last_token(history, num_committed)
        # a chain takes one number per depth, all of them at once
        u = state.rng.uniforms(step, DRAFT, tree.height, 1) if tree.is_chain else None
        probs = [self._children(state, 0, feature, drafted, num_committed, step, u)]
        features = feature  # of the root and the expanded nodes, in order; a chain uses only the last one
        for number, level in enumerate(self.levels[1:], start=1):
            sees = self.sees[:, level.first : level.first + len(level.nodes)]
            out = self._expand(
                state, num_committed, last, features, drafted, level.parents, number, level.first, sees, level.nodes
            )
            features = out if tree.is_chain else torch.cat([features, out], 1)
            probs.append(self._children(state, number, out, drafted, num_committed, step, u))
        valid = self._after_first(num_committed)
        sampled = torch.zeros_like(valid) if self._chosen(state.sampling) else None
        return Draft(tree, drafted, torch.cat(probs, 1), valid, sampled)

    def _chosen(self, sampling: Sampling) -> bool:
        """Whether the tokens are deterministic. At temperature 0 the distribution is a point mass, so the siblings are
        the next most probable tokens."""
        return sampling.temperature == 0 and not self.tree.is_chain

    def _children(
        self,
        state: EagleState,
        number: int,
        features: Tensor,
        drafted: Tensor,
        num_committed: Tensor,
        step: Tensor,
        u: Tensor | None,
    ) -> Tensor:
        """Draw the children of a level from the distributions (B, n, V) at its features (R, n, dim), and write their
        tokens to `drafted`. u: the numbers (B, height, 1) for the tokens of a chain."""
        sampling, level = state.sampling, self.levels[number]
        children = self._distributions(state, sampling, features, num_committed + number)
        probs = children.p
        if u is not None:
            drafted[:, number + 1 : number + 2] = draw(probs, u[:, number], sampling.kernels)
            return probs
        width = self.tree.width
        if self._chosen(sampling):
            tokens = children.logits.topk(width, dim=-1).indices
        else:
            tokens = sample_distinct(probs, state.rng, step, DRAFT + number, width)
        drafted[:, level.kids] = tokens.flatten(1)[:, level.picks]
        return probs


def static_shape(paths: Sequence[Path]) -> DraftShape:
    tree = build_tree(paths)
    return DraftShape(tree, passes=tree.height)


class _Drafted:
    """EAGLE on a static draft. paths: of the draft; network: the drafter whose file declares the network."""

    paths: ClassVar[Any]
    network: ClassVar = "eagle"

    @property
    def shape(self) -> DraftShape:
        return static_shape(self.paths)

    def build(self, model: Any) -> Drafter:
        return Eagle(model.drafter_network(self.network), self.paths)


class EagleChain(Chain, _Drafted):
    """conf/drafter/eagle.yaml."""


class EagleTree(StaticTree, _Drafted):
    """conf/drafter/eagle_tree.yaml."""


class Eagle3Chain(EagleChain):
    network = "eagle3"


class Eagle3Tree(EagleTree):
    network = "eagle3"
