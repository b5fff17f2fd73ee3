"""Parallel Jacobi decoding of the rows of an image (PJD, Liao et al. 2026, arXiv 2606.05703), as its code does it
(boyaliao/PJD@e7b93ad3, for Lumina-mGPT).

Rows of the image are decoded at once, each with its own Jacobi window. A row commits its drafts up to the first
failure. Only the topmost row gets a token there, from the residual distribution, or a bonus token after the last draft.
A draft after the failure is kept, with its old distribution, if its probability has not fallen too much: this is not
exact, not even in a single row. All other positions are drawn from the target's distributions of this step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.drafters.window import INIT, TOKEN
from specbench.decoding.loop import Drafter, StepResult
from specbench.decoding.pjd_rows import Fed, Lines, Roots
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.base import at as prob_at
from specbench.decoding.rules.base import ratio
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.trees import chain_paths
from specbench.decoding.verify import Draft, one_hot
from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers, put


@dataclass
class ParallelState:
    """tokens, probs: the windows (B, K, H) of the chains' rows, from the first position that is not committed, and the
    distributions (B, K, H, V) that they were drawn from; known (B, K): how many of them exist; latest (B, K, V): the
    distribution that a row's last token was drawn from, once it has one; (B, K, 0) if it is not used."""

    lines: Lines
    session: Any
    sampling: Sampling
    rng: RandomStreams
    tokens: Tensor
    probs: Tensor
    known: Tensor
    latest: Tensor

    constants = ("lines",)

    def buffers(self) -> Buffers:
        names = ("tokens", "probs", "known", "latest")
        return self.lines.buffers() | {name: Buffer(getattr(self, name)) for name in names}


class ParallelJacobi:
    """window: the most inputs of a row, its last committed token included. lead: tokens of a row when the next one
    begins; both numbers count the token before the row. tau: the probability p / q above which a draft after a failure
    is kept.

    mask, tested: see conf/drafter/pjd.yaml.
    """

    constants = ("tree", "ahead")

    def __init__(self, window: int, lead: int, tau: float, mask: str = "meant", tested: str = "drafts") -> None:
        self.tau, self.released, self.shifted = tau, mask == "released", tested == "shifted"
        self.shape = _shape(window, lead)
        self.tree, self.ahead = self.shape.tree, torch.arange(self.shape.height)

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> ParallelState:
        device, size, rows = rng.key.device, session.vocab_size, len(rng)
        put(self, device)
        assert self.shape.lag is not None
        chains = self.shape.num_chains(session)
        shape = rows, chains, self.tree.height
        return ParallelState(
            lines=Lines(session, rows, device, self.shape.lag, chains),
            session=session,
            sampling=sampling,
            rng=rng,
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            probs=torch.zeros(*shape, size, device=device),
            known=torch.zeros(shape[:2], dtype=torch.int64, device=device),
            latest=torch.zeros(*shape[:2], size if self.shifted else 0, device=device),
        )

    def propose(self, state: ParallelState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        lines = state.lines
        at = lines.roots(history)
        keys = step[:, None] * len(lines.number) + lines.number  # no two chains share their random numbers
        drafts, probs = self._windows(state, at, keys.flatten())
        # the image's first token has no draft, and a row stays behind the one above
        room = torch.where(at.position < 0, 0, at.room - 1)
        valid = (self.ahead < room.unsqueeze(-1)) & at.extends.unsqueeze(-1)
        valid = F.pad(valid, (1, 0), value=True)
        fed = tokens = torch.cat([at.token.unsqueeze(-1), drafts], -1)
        positions = lines.parallel_positions(at, valid, keys, self.released)
        if self.shifted:
            late = at.last.any(1)[:, None, None]
            tokens = torch.where(late, torch.cat([fed[:, :, :1], fed[:, :, :-1]], -1), fed)
            begins = ((at.position + 1) % lines.width == 0).unsqueeze(-1)
            latest = torch.where(begins, one_hot(at.token, probs.shape[-1]), state.latest)
            earlier = torch.cat([latest.unsqueeze(2), probs[:, :, :-1]], 2)
            probs = torch.where(late.unsqueeze(-1), earlier, probs)
            positions = Fed(**vars(positions), fed=fed.flatten(1))
        tokens, probs, valid = (x.flatten(0, 1) for x in (tokens, probs, valid))
        return Draft(self.tree, tokens, probs, valid, parallel_positions=positions)

    def _windows(self, state: ParallelState, at: Roots, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens (B, K, H) of the windows and their distributions. A new position has a random code, or the forced
        token, with a point mass as its distribution."""
        session, rng = state.session, state.rng.rows(state.lines.owner)
        u = rng.uniform(keys, INIT, len(self.ahead)).view_as(state.tokens)
        token = (u * session.codes).long().clamp_max(session.codes - 1)
        forced = session.forced((at.position.unsqueeze(-1) + 1 + self.ahead).flatten(1))
        if forced is not None:
            forced = forced.view_as(token)
            token = torch.where(forced >= 0, forced, token)
        new = self.ahead >= state.known.unsqueeze(-1)
        token = torch.where(new, token, state.tokens)
        return token, torch.where(new.unsqueeze(-1), one_hot(token, session.vocab_size), state.probs)

    def commit(self, state: ParallelState, result: StepResult) -> None:
        """Renew the positions that were not committed. A draft after the first failure is kept if its probability has
        not fallen to `tau` times its old one; all others are drawn from the distributions of this step."""
        draft, verdict, lines, height = result.draft, result.verdict, state.lines, self.tree.height
        layout = draft.parallel_positions
        assert layout is not None
        assert result.kept is not None
        before, kept = lines.line.clone(), result.kept.flatten().unsqueeze(1)
        lines.advance(result.kept)
        node = kept + self.ahead  # the node before each position of the new window
        old = node.clamp_max(height - 1)  # the draft for that position is its child
        p, q = take(result.p, node.clamp_max(height)), take(draft.probs, old)
        token, exists = draft.tokens.gather(1, old + 1), draft.valid.gather(1, old + 1) & (node < height)
        after = exists & (node > verdict.length.unsqueeze(1))
        keep = after & (ratio(prob_at(p, token), prob_at(q, token)) > self.tau)
        u = state.rng.rows(lines.owner).uniform(layout.keys.flatten(), TOKEN, height)
        state.tokens.copy_(torch.where(keep, token, draw(p, u, state.sampling.kernels)).view_as(state.tokens))
        state.probs.copy_(torch.where(keep.unsqueeze(-1), q, p).view_as(state.probs))
        drawn = (layout.images(draft.valid.sum(1)) - result.kept) * (layout.extends & (lines.line == before))
        torch.clamp(drawn, 0, height, out=state.known)
        if self.shifted:
            accepted = take(draft.probs, (kept - 1).clamp(0, height - 1)).squeeze(1)
            latest = torch.where(kept > verdict.length.unsqueeze(1), verdict.next_probs, accepted)
            latest = torch.where(kept > 0, latest, state.latest.flatten(0, 1))
            state.latest.copy_(layout.images(latest))


def _shape(window: int, lead: int) -> DraftShape:
    return DraftShape(build_tree(chain_paths(window - 1)), carries_over=True, biased=True, lag=lead - 1)


@dataclass(frozen=True)
class Choice:
    """The parameters of conf/drafter/pjd.yaml."""

    window: int
    lead: int
    tau: float
    mask: str
    tested: str

    @property
    def shape(self) -> DraftShape:
        return _shape(self.window, self.lead)

    def build(self, model: Any) -> Drafter:
        return ParallelJacobi(self.window, self.lead, self.tau, self.mask, self.tested)
