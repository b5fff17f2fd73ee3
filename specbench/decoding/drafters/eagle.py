"""EAGLE-1: a one-layer drafter over the target's hidden states, as a chain or a static tree (Li et al. 2024b)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.sampling import Sampling, Streams, draw, draw_distinct
from specbench.decoding.trees import Path, Tree, build
from specbench.decoding.verify import DRAFT, Draft, Verdict


@dataclass
class _State:
    session: Any  # the target's
    sampling: Sampling
    streams: Streams
    cache: Any
    keys: Tensor
    pending: Tensor  # (R, D + 1, dim): target hidden states of the places committed last, oldest first
    fresh: Tensor  # (B,): how many of them count, less one


@dataclass(frozen=True)
class _Level:
    """The inner nodes of one depth. nodes (n,): their numbers; parents (n,): 0 for the root, else one more than the
    parent's place among the expanded nodes; sees (n, expanded) bool: which expanded nodes they see, themselves
    included; first: the place of the first among the expanded; kids (K,): their children's numbers, and picks (K,)
    where each child's token stands in the flattened (n, W) candidates."""

    nodes: Tensor
    parents: Tensor
    sees: Tensor
    kids: Tensor
    picks: Tensor
    first: int

    def to(self, device: torch.device) -> _Level:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def _levels(tree: Tree) -> list[_Level]:
    """The root, then the expanded nodes depth by depth."""
    inner = tree.inner[0].tolist()
    expanded = inner[1:]  # the root's own law needs no expansion
    place = {0: 0} | {n: i + 1 for i, n in enumerate(expanded)}
    levels = []
    for d in range(tree.height):
        nodes = [n for n in inner if int(tree.depth[0, n]) == d]
        candidates = tree.children[0][[inner.index(n) for n in nodes]].flatten()
        picks = (candidates >= 0).nonzero().flatten()
        levels.append(
            _Level(
                nodes=torch.tensor(nodes),
                parents=torch.tensor([place[int(tree.parent[0, n])] for n in nodes]),
                sees=tree.ancestors[0][nodes][:, expanded],
                kids=candidates[picks],
                picks=picks,
                first=place[nodes[0]] - 1,
            )
        )
    return levels


class Eagle:
    """`head` is the drafter network; entry e of its cache pairs the target's hidden state at place e with the token at
    e + 1.

    With c committed tokens and the root at place b = P - 1 + c, entries up to b - 1 are known. A step feeds the entries
    that the last verdict made known, takes the law of the root's children from the last of them, and expands the tree
    depth by depth; the nodes of a depth share one position. Those entries are forgotten after the step.
    """

    def __init__(self, head: Any, paths: list[Path]) -> None:
        self.head = head
        self.tree = build(paths)
        self.levels = _levels(self.tree)
        self.expanded = self.tree.inner.shape[1] - 1

    def open(self, session: Any, conditioning: Any, sampling: Sampling, streams: Streams) -> _State:
        device = streams.key.device
        self.tree = self.tree.to(device)
        self.levels = [level.to(device) for level in self.levels]
        hidden = session.prefix_hidden  # (R, P - 1, dim)
        rows, known, dim = hidden.shape
        slots = known + session.length + 2 * (self.tree.height + 1) + self.expanded
        self.head.rope(slots - known - session.length)
        cache = self.head.new_cache(rows, slots)
        keys = torch.arange(slots, device=device)
        pending = hidden.new_zeros(rows, self.tree.height + 1, dim)
        pending[:, 0] = hidden[:, -1]  # the entry of the last prefilled place is fed with the first step
        if known > 1:
            places = torch.arange(known - 1, device=device).expand(rows, -1)
            mask = (keys <= places.unsqueeze(-1)).unsqueeze(1)
            self.head.hidden(torch.zeros_like(places), hidden[:, :-1], places, mask, cache, places)
        return _State(
            session,
            sampling,
            streams,
            cache,
            keys,
            pending,
            torch.zeros(len(streams), dtype=torch.int64, device=device),
        )

    def propose(self, state: _State, history: Tensor, count: Tensor, step: Tensor) -> Draft:
        session, tree = state.session, self.tree
        both = session.both
        prefix = session.prefix_length
        last = count[:, None] + (prefix - 2)  # (B, 1): the newest entry, b - 1
        lane = torch.arange(tree.height + 1, device=count.device)
        places = last - state.fresh[:, None] + lane  # (B, D + 1); those beyond `last` are padding
        held = (places + 1 - prefix).clamp_min(0)
        tokens = torch.where(places + 1 < prefix, 0, history.gather(1, held))
        at = both(places)
        mask = (state.keys <= at.unsqueeze(-1)).unsqueeze(1)
        out = self.head.hidden(both(tokens), state.pending, at, mask, state.cache, at)
        newest = both(state.fresh)[:, None, None].expand(-1, 1, out.shape[-1])
        feature = out.gather(1, newest)  # (R, 1, dim)

        drafted = history.new_zeros(len(count), tree.nodes)
        drafted[:, :1] = history.gather(1, (count - 1).clamp_min(0)[:, None])
        laws = [self._children(state, 0, feature, drafted, step)]
        features = feature  # of the root and the expanded nodes, in order
        base = both(last) + 1
        offset = state.keys - base  # (R, slots): a slot's place among the expanded nodes, negative for known entries
        for number, level in enumerate(self.levels[1:], start=1):
            n = len(level.nodes)
            slots = base + torch.arange(level.first, level.first + n, device=base.device)
            turn = both(last + number).expand(-1, n)  # all nodes of one depth turn with the same place
            sees = level.sees[:, offset.clamp(0, self.expanded - 1)].transpose(0, 1)  # (R, n, slots)
            mask = (offset < 0).unsqueeze(1) | (sees & ((offset >= 0) & (offset < self.expanded)).unsqueeze(1))
            tokens = both(drafted[:, level.nodes])
            out = self.head.hidden(tokens, features[:, level.parents], turn, mask.unsqueeze(1), state.cache, slots)
            features = torch.cat([features, out], 1)
            laws.append(self._children(state, number, out, drafted, step))
        valid = (
            (count > 0)[:, None].expand(-1, tree.nodes).clone()
        )  # before the first token there is no hidden state to go by
        valid[:, 0] = True
        chosen = torch.zeros_like(valid) if state.sampling.temperature == 0 and not tree.is_chain else None
        return Draft(tree, drafted, torch.cat(laws, 1), valid, chosen)

    def _children(self, state: _State, number: int, features: Tensor, drafted: Tensor, step: Tensor) -> Tensor:
        """Draw the children of a level from the laws (B, n, V) at its features (R, n, dim); writes their tokens to
        `drafted`."""
        sampling, level = state.sampling, self.levels[number]
        logits = sampling.mix(state.session.model.head(features)).float()
        law = sampling.law(logits)
        n, vocab = law.shape[1:]
        if self.tree.is_chain:
            tokens = draw(law, state.streams.uniform(step, DRAFT + number, n)).unsqueeze(-1)
        elif sampling.temperature == 0:  # a point mass has one token: the runners-up come as chosen candidates
            tokens = logits.topk(self.tree.width, dim=-1).indices
        else:
            tokens = draw_distinct(law, state.streams.uniform(step, DRAFT + number, n, vocab), self.tree.width)
        drafted[:, level.kids] = tokens.flatten(1)[:, level.picks]
        return law

    def commit(self, state: _State, hidden: Tensor, verdict: Verdict, count: Tensor) -> None:
        both = state.session.both
        walked = torch.cat([torch.zeros_like(count)[:, None], verdict.path], 1)  # the root and the accepted path
        state.pending = hidden.gather(1, both(walked).unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        state.fresh = verdict.length
