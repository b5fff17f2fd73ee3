"""Jacobi decoding and its speculative variants: the target drafts for itself, a window of positions ahead.

One drafter covers Jacobi decoding (Song et al. 2021), SJD (Teng et al. 2024, arXiv 2410.01699), SCD (arXiv 2510.24211)
and SJD-PAC (arXiv 2603.18599). Every position of the window holds a token and the distribution it was drawn from: the
target's, under the prefix of the last step. After a step the positions that were not committed are renewed from the
distributions that this step computed for them, and the new positions are initialised.

Why this is lossless (ERRATA, SJD 2): given the past, a position's token is independent of everything that determines
the distribution it is verified against, since that distribution depends only on earlier positions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.drafters.positions import (
    GUMBEL,
    INIT,
    KEEP,
    SIBLING,
    TOKEN,
    Renewed,
    WindowTokens,
    coupled,
    gumbel_noise,
    next_heights,
    repeated,
    source_probs,
    sources,
)
from specbench.decoding.loop import Drafter, StepResult, last_token
from specbench.decoding.rng import TAGS, RandomStreams
from specbench.decoding.sampling import Sampling, draw, draw_distinct
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.trees import in_order, window_paths
from specbench.decoding.verify import Draft, one_hot
from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers, put

_REST = 1e-12  # weight of the stored distribution, added to the residual distribution that siblings are drawn from


@dataclass
class WindowState:
    session: Any
    sampling: Sampling
    rng: RandomStreams
    side: int  # positions in a row of the image
    uniform: Tensor  # (V,): the uniform distribution over the codes
    valid: Tensor  # (B, M) bool: true for all nodes
    sampled: Tensor | None  # (B, M) bool: false for all tokens; None: all are sampled
    following: Tensor  # (K,): 1 .. K
    until: int  # from this number of tokens on an image is decoded plainly again
    tokens: Tensor  # (B, H): the window along the draft's first path
    probs: Tensor  # (B, H, V): the distribution each was drawn from
    heights: Tensor  # (B, H) in [0, 1): the token's height, as a share of its probability; (B, 0) without them
    past: Tensor  # (B, K, V): distributions of the last K committed positions, oldest first; K = 0 if not used
    # of the last step: the number of positions (B,) int64 of its draft, 0 if it had none; then the distributions (B, M,
    # V) and the accepted path
    drafted: Tensor
    p: Tensor
    path: Tensor
    length: Tensor

    constants = ("uniform", "valid", "sampled", "following")

    def buffers(self) -> Buffers:
        names = ("tokens", "probs", "heights", "past", "drafted", "p", "path", "length")
        return {name: Buffer(getattr(self, name)) for name in names}


class Window:
    """`window` draft tokens per step. init, coupling, tau: how positions begin and how their tokens are drafted again,
    see `positions`.

    fresh: the distribution of a token that starts at random, "uniform" or a "point" mass.
    refine: renew the positions that were not committed; without it they are initialised again (SJD, appendix H).
    width, depth, tree: see `trees.window_paths`.
    plain_until, plain_from: images with fewer tokens than the first number, or at least the second one (negative:
        counted from the end; None: never), have no draft; after that the window begins again.
    branch: when the first positions have further candidates (width > 1): at every step ("always"), or only in a step
        after a rejection ("rejected", SJD-PAC's Algorithm 1), which is a step whose accepted path does not end at a
        leaf. A step without them has the tree's first path as its chain.
    match: a token is a deterministic proposal, kept with p(x), as if the target's draw had to match it (Jacobi's prefix
        match).

    Two parameters come from released codes, and are not exact:

    stored: the distribution of a token that maximal coupling keeps: this step's ("new") or the one that it was drawn
        from ("old", SCD).
    siblings: what a position's further candidates are drawn from: its distribution ("stored") or, if it had a token
        before, the residual distribution [p - q]_+ of this step ("residual", SJD-PAC). In both cases verification
        treats them as drawn from the distribution.
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
        self.init, self.refine, self.coupling, self.width, self.match = init, refine, coupling, width, match
        self.fresh, self.siblings, self.tau = fresh, siblings, tau
        self.keeps_old = stored == "old" and coupling == "maximal"
        self.plain_until, self.plain_from = plain_until, plain_from
        self.always = plain_until == 0 and plain_from is None  # whether every step has a draft
        self.after_rejection = branch == "rejected" and width > 1
        self.shape = window_shape(window, refine, coupling, width, depth, tree, stored, siblings)
        self.tree = self.shape.tree
        paths = window_paths(window, width, depth, tree)
        ordered = in_order(paths)
        number = {p: i + 1 for i, p in enumerate(ordered)}
        self.ahead = torch.arange(self.tree.height)  # the offset of every position of the window
        self.main = torch.tensor([number[(0,) * d] for d in range(1, self.tree.height + 1)])
        self.on_main = torch.tensor([True, *(not any(p) for p in ordered)])  # whether a node is on the first path
        self.offsets = torch.tensor([len(p) - 1 for p in ordered])  # the offset of every draft node in the window,
        self.choice = torch.tensor([p[-1] for p in ordered])  # and which of that offset's candidates it holds
        self.of_inner = self.tree.depth[0, self.tree.inner[0]]  # the offset of an inner node's children
        self.first_child = torch.tensor([number.get((*p, 0), -1) for p in ((), *ordered)])  # a node's first child
        self.branching = max((len(p) for p in paths if p[-1] > 0), default=0)  # depths with more than one candidate

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> WindowState:
        device, rows = rng.key.device, len(rng)
        put(self, device)
        size, height = session.vocab_size, self.tree.height
        past = {"horizontal_sample": 1, "horizontal_mode": 1, "vertical_sample": session.width}.get(self.init, 0)
        uniform = (torch.arange(size, device=device) < session.codes) / session.codes
        valid = torch.ones(rows, self.tree.nodes, dtype=torch.bool, device=device)
        tokens = torch.zeros(rows, height, dtype=torch.int64, device=device)
        until = sys.maxsize if self.plain_from is None else self.plain_from
        return WindowState(
            session=session,
            sampling=sampling,
            rng=rng,
            side=session.width,
            uniform=uniform,
            valid=valid,
            sampled=torch.zeros_like(valid) if self.match else None,
            following=torch.arange(1, past + 1, device=device),
            until=until if until >= 0 else session.length + until,
            tokens=tokens,
            probs=uniform.expand(rows, height, -1).clone(),
            heights=torch.zeros(rows, height if self.coupling == "height" else 0, device=device),
            past=uniform.expand(rows, past, -1).clone(),
            drafted=torch.zeros(rows, dtype=torch.int64, device=device),
            p=torch.zeros(rows, self.tree.nodes, size, device=device),
            path=torch.zeros_like(tokens),
            length=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def propose(self, state: WindowState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        valid = self._valid(state, num_committed)
        if (kernels := state.sampling.kernels) is not None:
            tokens, heights = kernels.window(self, state, history, num_committed, step, TAGS, TOKEN, GUMBEL)
            probs = state.probs if self.width == 1 else state.probs[:, self.of_inner]
            return Draft(self.tree, tokens, probs, valid, state.sampled, heights)
        replaced = self.replaced(state)  # before `_initialise` overwrites it
        noise = None
        if self.coupling == "gumbel":
            noise = gumbel_noise(state.rng, num_committed[:, None] + self.ahead, state.probs.shape[-1])
        renewed = self._renew(state, num_committed, step, noise)
        new = self._initialise(state, renewed, history, num_committed, step, noise)
        parts = {"refill": F.pad((new & (state.drafted > 0)[:, None])[:, self.offsets], (1, 0))}
        heights = None
        if self.coupling == "height":
            heights = F.pad(torch.where(self.choice == 0, state.heights[:, self.offsets], -1.0), (1, 0), value=-1.0)
        candidates = self._candidates(state, replaced, step)[:, self.offsets, self.choice]
        tokens = torch.cat([last_token(history, num_committed), candidates], 1)
        return Draft(self.tree, tokens, state.probs[:, self.of_inner], valid, state.sampled, heights, parts=parts)

    def _candidates(self, state: WindowState, replaced: tuple[Tensor, Tensor] | None, step: Tensor) -> Tensor:
        """The candidates (B, H, W) of the window's positions, the position's own token first. `replaced`: see
        `pool`."""
        first, n = state.tokens.unsqueeze(-1), self.branching
        candidates = first.expand(-1, -1, self.width)
        if self.width == 1:
            return candidates
        pool = self.pool(state, replaced).scatter(-1, first[:, :n], 0.0)
        u = state.rng.uniform(step, SIBLING, n, pool.shape[-1])
        others = draw_distinct(pool, u, min(self.width - 1, pool.shape[-1]))
        candidates = candidates.clone()
        candidates[:, :n, 1 : 1 + others.shape[-1]] = others
        return candidates

    def commit(self, state: WindowState, result: StepResult) -> None:
        verdict = result.verdict
        if state.past.shape[1]:
            last_positions = verdict.length[:, None] + state.following
            state.past.copy_(take(torch.cat([state.past, take(result.p, verdict.path_with_root)], 1), last_positions))
        if self.always:
            state.drafted.fill_(self.tree.height)
        else:
            state.drafted.copy_(self._drafts(state, result.num_committed))
        for stored, new in ((state.p, result.p), (state.path, verdict.path), (state.length, verdict.length)):
            stored.copy_(new)

    def _drafts(self, state: WindowState, num_committed: Tensor) -> Tensor:
        """The number of positions (B,) that a draft has after `num_committed` (B,) tokens."""
        return self.tree.height * ((num_committed >= self.plain_until) & (num_committed < state.until))

    def _valid(self, state: WindowState, num_committed: Tensor) -> Tensor:
        """Which nodes (B, M) exist."""
        valid = state.valid
        if not self.always:
            valid = self.tree.depth <= self._drafts(state, num_committed)[:, None]
        if self.after_rejection:
            end = torch.where(state.length > 0, state.path[:, -1], 0)
            rejected = (state.drafted > 0) & (self.first_child[end] >= 0)
            valid = valid & (self.on_main | rejected[:, None])
        return valid

    def replaced(self, state: WindowState) -> tuple[Tensor, Tensor] | None:
        """If siblings are drawn from a residual distribution: for the first positions, the distributions (B, n, V) that
        this step's replace, and whether (B, n) there was one."""
        if self.siblings == "stored" or self.width == 1:
            return None
        height, offsets = state.tokens.shape[1], self.ahead[: self.branching]
        known = (state.drafted - state.length).clamp_min(0) * self.refine
        before = (state.length[:, None] + offsets + 1).clamp_max(height - 1)
        return take(state.probs, before), offsets < (known - 1)[:, None]

    def pool(self, state: WindowState, replaced: tuple[Tensor, Tensor] | None) -> Tensor:
        """The distribution (B, n, V), not normalised, that the further candidates of the first positions are drawn
        from."""
        stored = state.probs[:, : self.branching]
        if replaced is None:
            return stored
        before, existed = replaced
        return torch.where(existed.unsqueeze(-1), (stored - before).clamp_min(0) + _REST * stored, stored)

    def _renew(self, state: WindowState, num_committed: Tensor, step: Tensor, noise: Tensor | None) -> Renewed:
        """Shift the window past the committed tokens, and draft the tokens of the remaining positions again. Heights
        are written to the state."""
        height = state.tokens.shape[1]
        # in the old window, the node before each position
        previous = (state.length[:, None] + self.ahead).clamp_max(height - 1)
        p = take(state.p, self._first_path(state.path, state.length).gather(1, previous))
        known = (state.drafted - state.length).clamp_min(0) * self.refine

        def numbers(tag: int) -> Tensor:
            return state.rng.uniform(step, tag, height)

        if noise is not None:
            return Renewed(known, (p / noise).argmax(-1), p)
        if self.coupling == "none":
            return Renewed(known, draw(p, numbers(TOKEN)), p)
        before = (previous + 1).clamp_max(height - 1)
        previous_tokens = WindowTokens(
            token=state.tokens.gather(1, before),
            q=take(state.probs, before),
            height=state.heights.gather(1, before) if self.coupling == "height" else state.heights,
            exists=self.ahead < (known - 1)[:, None],  # the last known position has a distribution, but no token yet
        )
        token, keep = coupled(self.coupling, p, previous_tokens, self.tau, numbers)
        if self.coupling == "height":
            state.heights.copy_(next_heights(token, p, previous_tokens, keep, numbers(KEEP)))
        return Renewed(known, token, torch.where(keep.unsqueeze(-1), previous_tokens.q, p) if self.keeps_old else p)

    def _first_path(self, path: Tensor, length: Tensor) -> Tensor:
        """For each depth (B, H), the node whose distribution is used for the position after it: after the accepted path
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
        renewed: Renewed,
        history: Tensor,
        num_committed: Tensor,
        step: Tensor,
        noise: Tensor | None,
    ) -> Tensor:
        """Fill the window with the `renewed` positions, followed by initialised ones. Returns which (B, H) bool are
        initialised."""
        position = num_committed[:, None] + self.ahead  # in the image, from 0
        source, orphan = sources(self.init, position, (num_committed + renewed.known - 1)[:, None], state.side)
        codes, random = state.session.codes, self.fresh == "uniform"  # whether a token without a source is a sample
        if self.init.endswith(("sample", "mode")):
            probs = source_probs(renewed, source, state.past, num_committed)
            probs = torch.where(orphan.unsqueeze(-1), state.uniform, probs)
            token = draw(probs, state.rng.uniform(step, TOKEN, probs.shape[1]))
            sampled = orphan & random if self.init.endswith("mode") else ~orphan | random
            if self.init.endswith("mode"):
                token = torch.where(orphan, token, probs.argmax(-1))
        else:
            anything = (state.rng.uniform_at(step, INIT, source) * codes).long().clamp_max(codes - 1)
            token = repeated(renewed, source, orphan, anything, history, num_committed)
            # a token without a source that repeats the random token of another position is not a sample
            sampled, probs = orphan & (source == position) & random, state.uniform.expand_as(renewed.probs)
        probs = torch.where(sampled.unsqueeze(-1), probs, one_hot(token, probs.shape[-1]))
        forced = state.session.forced(position)
        if forced is not None:
            fixed = forced >= 0
            token = torch.where(fixed, forced, token)
            probs = torch.where(fixed.unsqueeze(-1), one_hot(token, probs.shape[-1]), probs)
        if noise is not None:  # a sampled position uses its own noise from the first step
            token = (probs / noise).argmax(-1)
        new = self.ahead >= renewed.known[:, None]
        torch.where(new, token, renewed.tokens, out=state.tokens)
        torch.where(new.unsqueeze(-1), probs, renewed.probs, out=state.probs)
        return new


class BuiltIn(Window):
    """The Jacobi windows that come with models: the sampling code of Lumina-mGPT 2 and SimpleAR. Neither keeps the
    target's distribution. Lumina-mGPT 2 samples from the target's own distribution after a rejection
    (`rules.relaxed.Redraw`), and SimpleAR begins with tokens that were not sampled. Recorded runs of both are goldens.

    Drafts are drawn again at each step, and new positions hold random point masses. With `plain_from` the window
    becomes shorter towards this token, by the number of tokens before the step that has just ended, as in the released
    loop: a draft may reach beyond it.

    opening: "random" begins with new positions, as Lumina-mGPT 2 does. "greedy" is SimpleAR's beginning: the first step
    passes token 0 at every position (SimpleAR: the padding token), verifies nothing, and takes the most probable first
    token. The second step drafts the most probable token of every position, as if it had been sampled, and always
    accepts the first of them.
    """

    def __init__(
        self, window: int, opening: str = "random", plain_until: int = 0, plain_from: int | None = None
    ) -> None:
        super().__init__(window, fresh="point", plain_until=plain_until, plain_from=plain_from)
        self.greedy = opening == "greedy"
        self.shape = opened(self.shape, opening)

    def propose(self, state: WindowState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        draft = super().propose(state, history, num_committed, step)
        if self.greedy:
            first, second = (num_committed == 0)[:, None], (num_committed == 1)[:, None]
            state.tokens.masked_fill_(first, 0)
            torch.where(second, state.probs.argmax(-1), state.tokens, out=state.tokens)
            draft.tokens[:, 1:] = state.tokens
            draft.greedy = first[:, 0]
            draft.unverified = F.pad(second, (1, state.tokens.shape[1] - 1))
        return draft

    def _drafts(self, state: WindowState, num_committed: Tensor) -> Tensor:
        before = num_committed - state.length - 1
        positions = (state.until - 1 - before).clamp(0, self.tree.height)
        return positions * (num_committed >= max(self.plain_until, int(self.greedy)))

    def _valid(self, state: WindowState, num_committed: Tensor) -> Tensor:
        return self.tree.depth <= self._drafts(state, num_committed)[:, None]


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
    """The shape of a `Window` with these parameters."""
    keeps_old, residual = stored == "old" and coupling == "maximal", siblings == "residual" and width > 1
    return DraftShape(
        build_tree(window_paths(window, width, depth, tree)),
        carries_over=refine or coupling in ("gumbel", "height"),
        biased=keeps_old or residual or coupling == "threshold",
    )


def opened(shape: DraftShape, opening: str) -> DraftShape:
    return replace(shape, biased=opening == "greedy", skips=opening == "greedy")


@dataclass(frozen=True)
class JacobiWindow:
    """The parameters of conf/drafter/jacobi.yaml."""

    window: int
    init: str

    @property
    def shape(self) -> DraftShape:
        return window_shape(self.window)

    def build(self, model: Any) -> Drafter:
        return Window(self.window, self.init, match=True)


@dataclass(frozen=True)
class SJDWindow:
    """The parameters of conf/drafter/sjd.yaml."""

    window: int
    tree: str
    depth: int
    width: int
    init: str
    fresh: str
    stored: str
    siblings: str
    branch: str
    plain_until: int
    plain_from: int | None
    refine: bool
    coupling: str
    tau: float

    @property
    def shape(self) -> DraftShape:
        return window_shape(
            self.window, self.refine, self.coupling, self.width, self.depth, self.tree, self.stored, self.siblings
        )

    def build(self, model: Any) -> Drafter:
        return Window(**vars(self))


@dataclass(frozen=True)
class BuiltInWindow:
    """The parameters of conf/drafter/built_in.yaml."""

    window: int
    opening: str
    plain_until: int
    plain_from: int | None

    @property
    def shape(self) -> DraftShape:
        return opened(window_shape(self.window), self.opening)

    def build(self, model: Any) -> Drafter:
        return BuiltIn(self.window, self.opening, self.plain_until, self.plain_from)
