"""The window of Jacobi decoding: the target drafts for itself, a window of positions ahead.

Jacobi decoding (Song et al. 2021) is this window alone. SJD, SCD and SJD++ renew its positions in another way
(`sjd_window`), and SJD-PAC drafts a tree at its beginning (`pac_window`). Every position holds a token and the
distribution it was drawn from: the target's, under the prefix of the last step. After a step the positions that were
not committed are renewed from the distributions that this step computed for them, and new positions begin.

Why this is lossless (ERRATA, SJD 2): given the past, a position's token is independent of everything that determines
the distribution it is verified against, since that distribution depends only on earlier positions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.loop import StepResult, last_token
from specbench.decoding.rng import TAGS, RandomStreams
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import Path, chain_paths, in_order
from specbench.decoding.trees import build as build_tree
from specbench.decoding.verify import DRAFT, Draft, one_hot
from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers, put

INITS = (
    "random",
    "horizontal_repeat",
    "vertical_repeat",
    "horizontal_sample",
    "vertical_sample",
    "horizontal_mode",
)
#: Tags of a step's random numbers. KEEP: whether a token is kept or, under height coupling, a new height.
TOKEN, KEEP, INIT, SIBLING = range(DRAFT, DRAFT + 4)
GUMBEL = TAGS - 1  # of step 0: the noise of a position is the same at every step


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

    constants: ClassVar[tuple[str, ...]] = ("uniform", "valid", "sampled", "following")

    def buffers(self) -> Buffers:
        names = ("tokens", "probs", "heights", "past", "drafted", "p", "path", "length")
        return {name: Buffer(getattr(self, name)) for name in names}


@dataclass
class Renewed:
    """A window after a step: tokens (B, H) and the distributions probs (B, H, V) that they were drawn from. Only the
    first `known` (B,) positions count."""

    known: Tensor
    tokens: Tensor
    probs: Tensor


@dataclass(eq=False)
class Window:
    """`window` draft tokens per step, each drawn again after every step.

    init: how positions begin, see `sources`. fresh: the distribution of a token that starts at random, "uniform" or a
        "point" mass.
    refine: renew the positions that were not committed; without it they are initialised again (SJD, appendix H).
    plain_until, plain_from: images with fewer tokens than the first number, or at least the second one (negative:
        counted from the end; None: never), have no draft; after that the window begins again.
    match: a token is a deterministic proposal, kept with p(x), as if the target's draw had to match it (Jacobi's prefix
        match).
    """

    window: int
    init: str = "random"
    refine: bool = True
    fresh: str = "uniform"
    plain_until: int = 0
    plain_from: int | None = None
    match: bool = False

    constants: ClassVar[tuple[str, ...]] = ("tree", "main", "offsets", "choice", "of_inner", "first_child", "ahead")
    # What the windows that build on this one change; the fused kernel reads them.
    coupling, keeps_old, tau = "none", False, 0.0
    width, branching = 1, 0

    def __post_init__(self) -> None:
        self.always = self.plain_until == 0 and self.plain_from is None  # whether every step has a draft
        paths = self.paths()
        self.shape = DraftShape(build_tree(paths), carries_over=self.refine)
        self.tree = self.shape.tree
        ordered = in_order(paths)
        number = {p: i + 1 for i, p in enumerate(ordered)}
        self.ahead = torch.arange(self.tree.height)  # the offset of every position of the window
        self.main = torch.tensor([number[(0,) * d] for d in range(1, self.tree.height + 1)])
        self.offsets = torch.tensor([len(p) - 1 for p in ordered])  # the offset of every draft node in the window,
        self.choice = torch.tensor([p[-1] for p in ordered])  # and which of that offset's candidates it holds
        self.of_inner = self.tree.depth[0, self.tree.inner[0]]  # the offset of an inner node's children
        self.first_child = torch.tensor([number.get((*p, 0), -1) for p in ((), *ordered)])  # a node's first child

    def paths(self) -> list[Path]:
        """The paths of the draft tree, whose first path is the window."""
        return chain_paths(self.window)

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
        replaced = self.replaced(state)  # before `_begin` overwrites it
        noise = self._noise(state, num_committed)
        renewed = self._renew(state, step, noise)
        new = self._begin(state, renewed, history, num_committed, step, noise)
        parts = {"refill": F.pad((new & (state.drafted > 0)[:, None])[:, self.offsets], (1, 0))}
        tokens = torch.cat([last_token(history, num_committed), self._candidates(state, replaced, step)], 1)
        probs = state.probs[:, self.of_inner]
        return Draft(self.tree, tokens, probs, valid, state.sampled, self._heights(state), parts=parts)

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
        return state.valid if self.always else self.tree.depth <= self._drafts(state, num_committed)[:, None]

    def _known(self, state: WindowState) -> Tensor:
        """The number of positions (B,) that the last step gave a distribution and did not commit."""
        return (state.drafted - state.length).clamp_min(0) * self.refine

    def _renew(self, state: WindowState, step: Tensor, noise: Tensor | None) -> Renewed:
        """Shift the window past the committed tokens, and draft the tokens of the remaining positions again. Heights
        are written to the state."""
        # in the old window, the node before each position
        previous = (state.length[:, None] + self.ahead).clamp_max(state.tokens.shape[1] - 1)
        p = take(state.p, self._first_path(state.path, state.length).gather(1, previous))
        return self._redraw(state, self._known(state), p, previous, step, noise)

    def _redraw(
        self, state: WindowState, known: Tensor, p: Tensor, previous: Tensor, step: Tensor, noise: Tensor | None
    ) -> Renewed:
        """Tokens for the distributions p (B, H, V) that the last step computed; previous (B, H): the position before
        each in the old window."""
        return Renewed(known, draw(p, state.rng.uniform(step, TOKEN, p.shape[1])), p)

    def _begin(
        self,
        state: WindowState,
        renewed: Renewed,
        history: Tensor,
        num_committed: Tensor,
        step: Tensor,
        noise: Tensor | None,
    ) -> Tensor:
        """Fill the window with the `renewed` positions, followed by new ones. Returns which (B, H) bool are new."""
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

    # --- what a window with couplings or a tree has -----------------------------------------------------------------

    def _noise(self, state: WindowState, num_committed: Tensor) -> Tensor | None:
        """The noise (B, H, V) with which a token is the arg max of log p + G; None: tokens are drawn."""
        return None

    def _heights(self, state: WindowState) -> Tensor | None:
        """The heights (B, M) of the drafted tokens; None without them."""
        return None

    def _first_path(self, path: Tensor, length: Tensor) -> Tensor:
        """For each depth (B, H), the node whose distribution is used for the position after it."""
        return self.main.expand(len(path), -1)

    def replaced(self, state: WindowState) -> tuple[Tensor, Tensor] | None:
        """What candidates from a residual distribution need, see `pac_window`; None without them."""
        return None

    def _candidates(self, state: WindowState, replaced: tuple[Tensor, Tensor] | None, step: Tensor) -> Tensor:
        """The tokens (B, M - 1) of the draft's nodes."""
        return state.tokens


# How a position begins


def sources(init: str, position: Tensor, last: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The image position (B, H) from which a new position takes its token or distribution, and whether no such position
    exists, so that the position starts at random. last (B, 1): the last position that holds something; side: positions
    in a row of the image.

    "random" is uniform over the codes. "horizontal_..." and "vertical_..." take the nearest known position to the left
    or above: "_repeat" its token (a point mass), "_sample" a token drawn from its distribution, and "_mode" the most
    probable token of its distribution (a point mass), as in SJD's code.
    """
    if init == "random":
        return position, torch.ones_like(position, dtype=torch.bool)
    if init.startswith("horizontal"):
        start = position - position % side
        return torch.maximum(start, last), last < start
    up = (position - last + side - 1) // side * side
    return torch.where(position < up, position % side, position - up), position < up


def repeated(
    renewed: Renewed, source: Tensor, orphan: Tensor, anything: Tensor, history: Tensor, num_committed: Tensor
) -> Tensor:
    """Tokens (B, H) that repeat the tokens of their sources; positions without a source get `anything` (B, H). history
    (B, *): the committed tokens, `num_committed` (B,) of them."""
    begin = num_committed[:, None]
    inside = (source - begin).clamp(0, renewed.tokens.shape[1] - 1)
    earlier = history.gather(1, source.clamp(0, history.shape[1] - 1))
    tokens = torch.where(source < begin, earlier, renewed.tokens.gather(1, inside))
    return torch.where(orphan, anything, tokens)


def source_probs(renewed: Renewed, source: Tensor, past: Tensor, num_committed: Tensor) -> Tensor:
    """The distributions (B, H, V) of the source positions. past (B, K, V): the distributions of the last K committed
    positions."""
    offset, size = source - num_committed[:, None], past.shape[1]
    earlier = take(past, (offset + size).clamp(0, size - 1))
    inside = take(renewed.probs, offset.clamp(0, renewed.probs.shape[1] - 1))
    return torch.where(offset.unsqueeze(-1) < 0, earlier, inside)
