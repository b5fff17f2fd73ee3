"""Jacobi decoding and its speculative variants: the target drafts for itself, a window of positions ahead.

One drafter, after Jacobi decoding (Song et al. 2021), SJD (Teng et al. 2024, arXiv 2410.01699), SCD (arXiv 2510.24211)
and SJD-PAC (arXiv 2603.18599). Every position of the window holds a token and the distribution it was drawn from: the
target's own under the prefix of the last step. After a step the positions that were not committed are renewed from the
distributions that this step computed for them, and the positions that are new are initialised.

Why this is lossless (ERRATA, SJD 2): given the past, a position's token is independent of everything that determines
the distribution it is verified against, since that depends on earlier positions alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.loop import Drafter, Outcome, last_token
from specbench.decoding.rng import TAGS, RandomStreams, exponential
from specbench.decoding.rules.base import at, normalise, ratio
from specbench.decoding.sampling import Sampling, draw, draw_distinct
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.trees import in_order, window_paths
from specbench.decoding.verify import DRAFT, Draft, one_hot
from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers, put
from specbench.errors import check_choice

INITS = (
    "random",
    "horizontal_repeat",
    "vertical_repeat",
    "horizontal_sample",
    "vertical_sample",
    "horizontal_mode",
)
COUPLINGS = ("none", "maximal", "gumbel", "height", "threshold")
#: Tags of a step's random numbers. _KEEP: whether a token is kept or, under height coupling, a new height.
_TOKEN, _KEEP, _INIT, _SIBLING = range(DRAFT, DRAFT + 4)
_GUMBEL = TAGS - 1  # of step 0: the noise of a position is the same at every step
_REST = 1e-12  # share of the other tokens next to the residual distribution that siblings are drawn from


def renewed_heights(keep: Tensor, u: Tensor, fresh: Tensor, share: Tensor) -> Tensor:
    """Heights of tokens y after a step from distribution q to p, as shares of p(y): of those kept (`keep`, bool) the
    height u q(y); of new ones one of [q(y), p(y)), by a uniform number `fresh`. share: q(y) / p(y). All (B, H)."""
    return torch.where(keep, u * share, share + fresh * (1 - share))


def _until(plain_from: int | None, session: Any) -> int:
    """`Window`'s plain_from, counted from the start of the session's image."""
    if plain_from is None:
        return sys.maxsize
    return plain_from if plain_from >= 0 else session.length + plain_from


@dataclass
class WindowState:
    session: Any
    sampling: Sampling
    rng: RandomStreams
    side: int  # positions in a row of the image
    uniform: Tensor  # (V,): the uniform distribution over the codes
    valid: Tensor  # (B, M) bool: all nodes are
    sampled: Tensor | None  # (B, M) bool: no token is; None: all are
    behind: Tensor  # (K,): 1 .. K
    until: int  # tokens of an image from which on it is plain again
    tokens: Tensor  # (B, H): the window along the draft's first path
    probs: Tensor  # (B, H, V): the distribution each was drawn from
    heights: Tensor  # (B, H) in [0, 1): the token's height, as a share of its probability; (B, 0) without them
    past: Tensor  # (B, K, V): distributions of the K positions committed last, oldest first; K = 0 unless drawn from
    # Of the last step, where a row had one (`started` (B,) bool): the target's distributions (B, M, V) and the accepted
    # path.
    started: Tensor
    p: Tensor
    path: Tensor
    length: Tensor

    constants = ("uniform", "valid", "sampled", "behind")

    def buffers(self) -> Buffers:
        names = ("tokens", "probs", "heights", "past", "started", "p", "path", "length")
        return {name: Buffer(getattr(self, name)) for name in names}


class Window:
    """`window` draft tokens per step.

    init: how new positions are initialised. "random" is uniform over the codes; "horizontal_repeat" and
    "vertical_repeat" repeat the nearest known token to the left or above (a point mass); "..._sample" draw from its
    distribution, "horizontal_mode" takes the most probable token of it (a point mass), as SJD's code does. A position
    that has no such neighbour starts at random. fresh: the distribution of a token that starts at random, "uniform" or
    a "point" mass. refine: renew the positions that were not
    committed; without it they are initialised again (SJD, appendix H). coupling: how a position is renewed from
    distribution q to p. "none" draws again (SJD), "maximal" keeps the token with min(1, p / q) and draws from
    Norm([p - q]_+) otherwise (SJD-PAC's adaptive continuation), "gumbel" takes the arg max of log p + G with one noise
    G per position for all steps. "height" is a maximal coupling without a fresh random number a step: a position holds
    a point (y, g) that is uniform under the graph of its distribution, 0 <= g < q(y), and keeps it while g < p(y);
    else y is drawn from Norm([p - q]_+), and g from [q(y), p(y)). Verification is the same test, of the same g. So a
    token survives all steps with min_j p_j(y) / p_0(y), the most that any coupling can give. "threshold" keeps the
    token where p / q > tau and draws again from p otherwise (SJD++, arXiv 2512.07503), which is not exact: a kept token
    was not drawn from p, the distribution that it has from then on. width, depth, tree: see
    `trees.window_paths`. plain_until, plain_from: images with fewer than the first, or at least the second number of
    tokens (negative: counted from the end; None: never) have no draft, and the window begins again after it.

    Two settings are those of released codes, and not exact, either. stored: which distribution a token has that maximal
    coupling keeps, that of this step ("new") or the one that it was drawn from ("old", SCD). siblings: what a
    position's further candidates are drawn from, its distribution ("stored") or, where it had a token before, the
    residual distribution [p - q]_+ of this step ("residual", SJD-PAC); verification takes them as drawn from the
    distribution in both cases.

    branch: when the first positions have further candidates (width > 1): at every step ("always"), or only in a step
    after a rejection ("rejected", SJD-PAC's Algorithm 1), which is a step whose accepted path does not end at a leaf.
    A step without them has the tree's first path as its chain.

    match: a token is a deterministic proposal, kept with p(x), as if the target's draw had to match it (Jacobi's prefix
    match).
    """

    constants = ("tree", "main", "on_main", "offsets", "choice", "of_inner", "first_child", "ahead")

    def __init__(
        self,
        window: int,
        init: str = "random",
        refine: bool = True,
        coupling: str = "none",
        width: int = 1,
        depth: int = 3,
        tree: str = "full",
        fresh: str = "uniform",
        stored: str = "new",
        siblings: str = "stored",
        plain_until: int = 0,
        plain_from: int | None = None,
        match: bool = False,
        tau: float = 0.5,
        branch: str = "always",
    ) -> None:
        check_choice("init", init, INITS)
        check_choice("coupling", coupling, COUPLINGS)
        check_choice("fresh", fresh, ("uniform", "point"))
        check_choice("stored", stored, ("new", "old"))
        check_choice("siblings", siblings, ("stored", "residual"))
        check_choice("branch", branch, ("always", "rejected"))
        self.init, self.refine, self.coupling, self.width, self.match = init, refine, coupling, width, match
        self.fresh, self.siblings, self.tau = fresh, siblings, tau
        self.keeps_old = stored == "old" and coupling == "maximal"
        self.plain_until, self.plain_from = plain_until, plain_from
        self.after_rejection = branch == "rejected" and width > 1
        self.shape = window_shape(window, refine, coupling, width, depth, tree, stored, siblings)
        self.tree = self.shape.tree
        paths = window_paths(window, width, depth, tree)
        ordered = in_order(paths)
        number = {p: i + 1 for i, p in enumerate(ordered)}
        self.ahead = torch.arange(self.tree.height)  # of every position of the window: its offset
        self.main = torch.tensor([number[(0,) * d] for d in range(1, self.tree.height + 1)])
        self.on_main = torch.tensor([True, *(not any(p) for p in ordered)])  # whether a node is on the first path
        self.offsets = torch.tensor([len(p) - 1 for p in ordered])  # of every draft node: its offset in the window,
        self.choice = torch.tensor([p[-1] for p in ordered])  # and which of that offset's candidates it holds
        self.of_inner = self.tree.depth[0, self.tree.inner[0]]  # the offset of an inner node's children
        self.first_child = torch.tensor([number.get((*p, 0), -1) for p in ((), *ordered)])  # a node's first child
        self.branching = max((len(p) for p in paths if p[-1] > 0), default=0)  # depths with more than one candidate

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> WindowState:
        device, rows = rng.key.device, len(rng)
        put(self, device)
        size, height = session.vocab_size, self.tree.height
        keep = {"horizontal_sample": 1, "horizontal_mode": 1, "vertical_sample": session.width}.get(self.init, 0)
        uniform = (torch.arange(size, device=device) < session.codes) / session.codes
        valid = torch.ones(rows, self.tree.nodes, dtype=torch.bool, device=device)
        return WindowState(
            session,
            sampling,
            rng,
            session.width,
            uniform,
            valid,
            torch.zeros_like(valid) if self.match else None,
            torch.arange(1, keep + 1, device=device),
            _until(self.plain_from, session),
            torch.zeros(rows, height, dtype=torch.int64, device=device),
            uniform.expand(rows, height, -1).clone(),
            torch.zeros(rows, height if self.coupling == "height" else 0, device=device),
            uniform.expand(rows, keep, -1).clone(),
            torch.zeros(rows, dtype=torch.bool, device=device),
            torch.zeros(rows, self.tree.nodes, size, device=device),
            torch.zeros(rows, height, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def propose(self, state: WindowState, history: Tensor, count: Tensor, step: Tensor) -> Draft:
        valid = self._valid(state, count)
        if (kernels := state.sampling.kernels) is not None:
            tokens, heights = kernels.window(self, state, history, count, step, TAGS, _TOKEN, _GUMBEL)
            probs = state.probs if self.width == 1 else state.probs[:, self.of_inner]
            return Draft(self.tree, tokens, probs, valid, state.sampled, heights)
        before = self.replaced(state)
        noise = self._gumbel_noise(state, count)
        known, tokens, probs = self._renew(state, count, step, noise)
        new = self._initialise(state, known, tokens, probs, history, count, step, noise)
        parts = {"refill": F.pad((new & state.started[:, None])[:, self.offsets], (1, 0))}
        heights = None
        if self.coupling == "height":
            heights = F.pad(torch.where(self.choice == 0, state.heights[:, self.offsets], -1.0), (1, 0), value=-1.0)
        first = state.tokens.unsqueeze(-1)
        candidates = first.expand(-1, -1, self.width)
        if self.width > 1:
            n = self.branching
            rest = self.pool(state, before).scatter(-1, first[:, :n], 0.0)
            u = state.rng.uniform(step, _SIBLING, n, rest.shape[-1])
            others = draw_distinct(rest, u, min(self.width - 1, rest.shape[-1]))
            candidates = candidates.clone()
            candidates[:, :n, 1 : 1 + others.shape[-1]] = others
        root = last_token(history, count)
        tokens = torch.cat([root, candidates[:, self.offsets, self.choice]], 1)
        return Draft(self.tree, tokens, state.probs[:, self.of_inner], valid, state.sampled, heights, parts=parts)

    def commit(self, state: WindowState, outcome: Outcome) -> None:
        verdict = outcome.verdict
        if state.past.shape[1]:
            kept = verdict.length[:, None] + state.behind
            state.past.copy_(take(torch.cat([state.past, take(outcome.p, verdict.path_with_root)], 1), kept))
        if self.always:
            state.started.fill_(True)
        else:
            state.started.copy_(self._drafts(state, outcome.count))
        for own, new in ((state.p, outcome.p), (state.path, verdict.path), (state.length, verdict.length)):
            own.copy_(new)

    @property
    def always(self) -> bool:
        """Whether every step has a draft."""
        return self.plain_until == 0 and self.plain_from is None

    def _drafts(self, state: WindowState, count: Tensor) -> Tensor:
        """Whether images with `count` (B,) tokens get a draft."""
        return (count >= self.plain_until) & (count < state.until)

    def _valid(self, state: WindowState, count: Tensor) -> Tensor:
        """Which nodes (B, M) there are."""
        valid = state.valid
        if not self.always:
            valid = F.pad(self._drafts(state, count)[:, None].expand(-1, self.tree.nodes - 1), (1, 0), value=True)
        if self.after_rejection:
            end = torch.where(state.length > 0, state.path[:, -1], 0)
            rejected = state.started & (self.first_child[end] >= 0)
            valid = valid & (self.on_main | rejected[:, None])
        return valid

    def replaced(self, state: WindowState) -> tuple[Tensor, Tensor] | None:
        """Where siblings are drawn from a residual distribution: of the first positions, the distributions (B, n, V)
        that those of this step replace, and whether (B, n) there was one."""
        if self.siblings == "stored" or self.width == 1:
            return None
        height, offsets = state.tokens.shape[1], self.ahead[: self.branching]
        known = (height - state.length).clamp_min(0) * state.started * self.refine
        before = (state.length[:, None] + offsets + 1).clamp_max(height - 1)
        return take(state.probs, before), offsets < (known - 1)[:, None]

    def pool(self, state: WindowState, replaced: tuple[Tensor, Tensor] | None) -> Tensor:
        """What the further candidates of the first positions are drawn from (B, n, V), not normalised."""
        own = state.probs[:, : self.branching]
        if replaced is None:
            return own
        before, had = replaced
        return torch.where(had.unsqueeze(-1), (own - before).clamp_min(0) + _REST * own, own)

    def _gumbel_noise(self, state: WindowState, count: Tensor) -> Tensor | None:
        """The exponential noise (B, H, V) of the window's positions under Gumbel coupling: the token with the smallest
        e_i / p_i has distribution p."""
        if self.coupling != "gumbel":
            return None
        size = state.probs.shape[-1]
        position = count[:, None] + self.ahead
        index = position.unsqueeze(-1) * size + torch.arange(size, device=count.device)
        u = state.rng.uniform_at(torch.zeros_like(count), _GUMBEL, index.flatten(1)).view_as(state.probs)
        return exponential(u)

    def _renew(
        self, state: WindowState, count: Tensor, step: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shift the window past what was committed and renew the positions that stay: their number (B,), and the new
        window's tokens (B, H) and distributions (B, H, V). Heights are written where they belong."""
        p, path, length = state.p, state.path, state.length
        height = state.tokens.shape[1]
        committed = length + 1
        offsets = self.ahead
        previous = (committed[:, None] + offsets - 1).clamp_max(
            height - 1
        )  # in the old window, of the node before each position
        nodes = self._first_path(path, length).gather(1, previous)
        probs = take(p, nodes)
        known = (height - length).clamp_min(0) * state.started if self.refine else torch.zeros_like(count)
        if noise is not None:
            token = (probs / noise).argmax(-1)
        elif self.coupling != "none":
            before = (previous + 1).clamp_max(height - 1)
            token = state.tokens.gather(1, before)
            q = take(state.probs, before)
            had = offsets < (known - 1)[:, None]  # the last known position has a distribution, but no token yet
            fresh = state.rng.uniform(step, _KEEP, height)
            u = state.heights.gather(1, before) if self.coupling == "height" else fresh
            if self.coupling == "threshold":
                keep, source = had & (at(probs, token) / at(q, token) > self.tau), probs
            else:
                keep = had & (u < ratio(at(probs, token), at(q, token)))
                source = torch.where(had.unsqueeze(-1), normalise((probs - q).clamp_min(0), probs), probs)
            token = torch.where(keep, token, draw(source, state.rng.uniform(step, _TOKEN, height)))
            if self.keeps_old:
                probs = torch.where(keep.unsqueeze(-1), q, probs)
            if self.coupling == "height":
                share = at(q, token) / at(probs, token)
                torch.where(had, renewed_heights(keep, u, fresh, share), fresh, out=state.heights)
        else:
            token = draw(probs, state.rng.uniform(step, _TOKEN, height))
        return known, token, probs

    def _first_path(self, path: Tensor, length: Tensor) -> Tensor:
        """Per depth, (B, H), the node whose distribution is used for the position after it: beyond the accepted path
        its first descendants, then the draft's first path."""
        nodes = self.main.expand(len(path), -1).clone()
        node = torch.where(length > 0, path[:, -1], 0)
        for d in range(self.branching):
            first_child = self.first_child[node]
            beyond = length <= d
            nodes[:, d] = torch.where(beyond & (first_child >= 0), first_child, nodes[:, d])
            node = torch.where(beyond, nodes[:, d], node)
        return nodes

    def _initialise(
        self,
        state: WindowState,
        known: Tensor,
        tokens: Tensor,
        probs: Tensor,
        history: Tensor,
        count: Tensor,
        step: Tensor,
        noise: Tensor | None,
    ) -> Tensor:
        """Fill the window: `tokens` and `probs` up to position `known` (B,), initialised ones from there on. Returns
        which positions (B, H) bool were initialised."""
        rng, side = state.rng, state.side
        height, size = probs.shape[1:]
        offsets = self.ahead
        position = count[:, None] + offsets  # in the image, from 0
        last = (count + known - 1)[:, None]  # the last position that holds something
        if self.init == "random":
            source, orphan = position, torch.ones_like(position, dtype=torch.bool)
        elif self.init.startswith("horizontal"):
            start = position - position % side  # of the row
            source, orphan = torch.maximum(start, last), last < start
        else:
            up = (position - last + side - 1) // side * side
            source, orphan = torch.where(position < up, position % side, position - up), position < up
        u = rng.uniform_at(step, _INIT, source)
        codes = state.session.codes
        random_token = (u * codes).long().clamp_max(codes - 1)  # of an orphan's source
        inside = (source - count[:, None]).clamp(0, height - 1)
        earlier = source < count[:, None]
        point = torch.ones_like(orphan)  # of point masses
        if self.init.endswith(("sample", "mode")):
            at_past = (source - count[:, None] + state.past.shape[1]).clamp(0, state.past.shape[1] - 1)
            fresh = torch.where(
                earlier.unsqueeze(-1),
                take(state.past, at_past),
                take(probs, inside),
            )
            fresh = torch.where(orphan.unsqueeze(-1), state.uniform, fresh)
            token = draw(fresh, rng.uniform(step, _TOKEN, height))
            if self.init.endswith("mode"):
                token = torch.where(orphan, token, fresh.argmax(-1))
                point = ~orphan
            else:
                point = ~point
            if self.fresh == "point":
                point = point | orphan
        else:
            given = torch.where(
                earlier, history.gather(1, source.clamp(0, history.shape[1] - 1)), tokens.gather(1, inside)
            )
            token = torch.where(orphan, random_token, given)
            fresh = state.uniform.expand_as(probs)
            if self.fresh == "uniform":
                point = ~(orphan & (source == position))
        fresh = torch.where(point.unsqueeze(-1), one_hot(token, size), fresh)
        forced = state.session.forced(position)
        if forced is not None:
            fixed = forced >= 0
            token = torch.where(fixed, forced, token)
            fresh = torch.where(fixed.unsqueeze(-1), one_hot(token, size), fresh)
        new = offsets >= known[:, None]
        if noise is not None:  # a sampled position uses its own noise from the first step
            token = (fresh / noise).argmax(-1)
        torch.where(new, token, tokens, out=state.tokens)
        torch.where(new.unsqueeze(-1), fresh, probs, out=state.probs)
        return new


def window_shape(
    window: int,
    refine: bool = True,
    coupling: str = "none",
    width: int = 1,
    depth: int = 3,
    tree: str = "full",
    stored: str = "new",
    siblings: str = "stored",
) -> DraftShape:
    """The shape of a `Window`, whose parameters these are."""
    keeps_old, residual = stored == "old" and coupling == "maximal", siblings == "residual" and width > 1
    return DraftShape(
        build_tree(window_paths(window, width, depth, tree)),
        carries_over=refine or coupling in ("gumbel", "height"),
        biased=keeps_old or residual or coupling == "threshold",
    )


_SHAPE = ("window", "refine", "coupling", "width", "depth", "tree", "stored", "siblings")
_ALL = (*_SHAPE, "init", "tau", "fresh", "plain_until", "plain_from", "branch")


def shape(cfg: Mapping[str, Any]) -> DraftShape:
    """Of both choices; Jacobi decoding has few of these parameters."""
    return window_shape(**{name: cfg[name] for name in _SHAPE if name in cfg})


def build_jacobi(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return Window(cfg["window"], cfg["init"], match=True)


def build_sjd(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return Window(**{name: cfg[name] for name in _ALL})
