"""Parallel Jacobi decoding of the rows of an image (PJD, arXiv 2606.05703): an interpretation of its abstract and of
second-hand accounts, since neither its text nor its code was available.

Rows of the image are decoded at once, each with its own Jacobi window. A draft attends to all committed tokens and to
the earlier positions of its own row. A row keeps its drafts up to the first that is rejected. The residual distribution
gives a token only in the topmost row, and only if the first draft is rejected. All other positions are drawn again from
the distributions of this step. So the samples do not have the target's distribution, whatever the window.

Our own choices: the length of a window; the number of rows at once (as many as are in progress if each begins `t_ctx`
tokens later than the row above); new positions (uniform); the token that replaces a missing one at the beginning of a
row (ZipAR's choice); and new lines (ordinary tokens, which the image grammar forces).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.loop import Drafter, StepResult
from specbench.decoding.parallel_positions import Lines, Roots
from specbench.decoding.rng import TAGS, RandomStreams
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.trees import chain_paths
from specbench.decoding.verify import DRAFT, Draft, one_hot
from specbench.engine.state import Buffer, Buffers, put

_TOKEN, _INIT = DRAFT, DRAFT + 1  # tags of a step's random numbers


@dataclass
class ParallelState:
    lines: Lines
    session: Any
    sampling: Sampling
    rng: RandomStreams
    uniform: Tensor  # (V,): the uniform distribution over the codes
    ahead: Tensor  # (H,): 0 .. H - 1
    tokens: Tensor  # (B, K, H): the window of each chain's line, from its first position that is not committed
    probs: Tensor  # (B, K, H, V): the distribution each was drawn from
    known: Tensor  # (B, K): how many positions of a window the last step drew

    constants = ("lines", "uniform", "ahead")

    def buffers(self) -> Buffers:
        return self.lines.buffers() | {name: Buffer(getattr(self, name)) for name in ("tokens", "probs", "known")}


class ParallelJacobi:
    """window: the most draft tokens of a row; t_ctx: tokens that a row has when the next one begins. A row never
    overtakes the row above."""

    constants = ("tree",)

    def __init__(self, window: int, t_ctx: int) -> None:
        self.window, self.t_ctx = window, t_ctx
        self.shape = shape({"window": window, "t_ctx": t_ctx})
        self.tree = self.shape.tree

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> ParallelState:
        device, size, rows = rng.key.device, session.vocab_size, len(rng)
        put(self, device)
        lines = Lines(session, rows, device, self.t_ctx)
        shape = (rows, len(lines.number), self.window)
        uniform = (torch.arange(size, device=device) < session.codes) / session.codes
        return ParallelState(
            lines,
            session,
            sampling,
            rng,
            uniform,
            torch.arange(self.window, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            uniform.expand(*shape, -1).clone(),
            torch.zeros(shape[:2], dtype=torch.int64, device=device),
        )

    def propose(self, state: ParallelState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        lines = state.lines
        at = lines.roots(history)
        keys = step[:, None] * len(lines.number) + lines.number  # no two chains share their random numbers
        if (kernels := state.sampling.kernels) is not None:
            kernels.begin_windows(state, at.position, keys, TAGS, _INIT)
        else:
            self._initialise(state, at, keys.flatten())
        room = torch.minimum(at.length, at.above) - at.done
        valid = (state.ahead < room.unsqueeze(-1)) & at.extends.unsqueeze(-1)
        valid = torch.cat([torch.ones_like(valid[..., :1]), valid], -1)
        tokens = torch.cat([at.token.unsqueeze(-1), state.tokens], -1).flatten(0, 1)
        positions = lines.parallel_positions(at, valid, keys, at.top)
        probs = state.probs.flatten(0, 1).clone()  # `commit` overwrites the window before the statistics are recorded
        return Draft(self.tree, tokens, probs, valid.flatten(0, 1), parallel_positions=positions)

    def commit(self, state: ParallelState, result: StepResult) -> None:
        """Draw the positions that were not committed from the distributions of this step."""
        draft, kept, lines = result.draft, result.kept, state.lines
        assert kept is not None
        assert draft.parallel_positions is not None
        before, keys = lines.line.clone(), draft.parallel_positions.keys.flatten()
        lines.advance(kept)
        node = (kept.unsqueeze(-1) + state.ahead).flatten(0, 1)  # the node before each position of the new window
        probs, node = state.probs.flatten(0, 1), node.clamp_max(self.window)
        torch.gather(result.p, 1, node.unsqueeze(-1).expand_as(probs), out=probs)
        u = state.rng.rows(lines.owner).uniform(keys, _TOKEN, self.window)
        state.tokens.copy_(draw(probs, u, state.sampling.kernels).view_as(state.tokens))
        nodes = draft.parallel_positions.images(draft.valid.sum(1))
        drawn = (nodes - kept) * (draft.parallel_positions.extends & (lines.line == before))
        torch.clamp(drawn, 0, self.window, out=state.known)

    def _initialise(self, state: ParallelState, at: Roots, keys: Tensor) -> None:
        """Fill the positions of the windows that the last step did not draw: uniformly over the codes, or with the
        forced token."""
        position = at.position.unsqueeze(-1) + 1 + state.ahead
        u = state.rng.rows(state.lines.owner).uniform(keys, _INIT, self.window).view_as(state.tokens)
        token = (u * state.session.codes).long().clamp_max(state.session.codes - 1)
        probs = state.uniform.expand_as(state.probs)
        forced = state.session.forced(position)
        if forced is not None:
            fixed = forced >= 0
            token = torch.where(fixed, forced, token)
            probs = torch.where(fixed.unsqueeze(-1), one_hot(token, probs.shape[-1]), probs)
        new = state.ahead >= state.known.unsqueeze(-1)
        torch.where(new, token, state.tokens, out=state.tokens)
        torch.where(new.unsqueeze(-1), probs, state.probs, out=state.probs)


def shape(cfg: Mapping[str, Any]) -> DraftShape:
    return DraftShape(build_tree(chain_paths(cfg["window"])), carries_over=True, biased=True, lag=cfg["t_ctx"])


def build(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return ParallelJacobi(cfg["window"], cfg["t_ctx"])
