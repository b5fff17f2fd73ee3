"""Spatially speculative decoding (arXiv 2606.20543): heads on the target draft a row of the image from the row above.

This follows second-hand accounts: no official code and not the whole text was available. Heads to the right draft the
first row under the ordinary rule. Each later row is drafted whole from the row above, then improved in `rounds` passes
of the target. Such a pass keeps every cell with min(1, p / q), whatever happens to the cells before it, and otherwise
draws it again from Norm([p - q]_+). A last pass commits the row as it is. The cells on which p depends may be replaced
in the same pass, so the samples do not have the target's distribution. Under the strict rule (`rounds` null) a row ends
at its first rejection, like any chain. That is exact.

Our reading: in a later round q is the p of the round before, the distribution that each cell has by then. So the cells
up to the first rejection are the ordinary rule's, and never change again. Here they are committed at once, and a
row that is fully accepted needs no further pass. With as many rounds as a row has cells the method is exact. After the
last pass the target gives the first cell of the next row, as after every fully accepted draft. With several heads
below, as many rows are drafted at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.drafters.positions import INIT, KEEP, TOKEN
from specbench.decoding.loop import Drafter, NetworkPass, StepResult, last_token
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.base import at, normalise, ratio
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.trees import chain_paths
from specbench.decoding.verify import Draft
from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers, put
from specbench.errors import UsageError


@dataclass
class SpatialState:
    """hidden (R, S, dim): the target's hidden states; index t is the one from which token t was drawn. For the rows
    that are being improved: tokens (B, H) and their current distributions probs (B, H, V), from the first cell that is
    not committed; end (B,): the position after their last cell; passed (B,): their rounds so far.

    parts: which head drafts which positions of a draft, first to the right, then below; `outputs` (2, H): the index,
    among all outputs of the heads, that each position of the draft takes, in the first row and later; rise (H,): the
    distance to the cell above.
    """

    session: Any
    sampling: Sampling
    rng: RandomStreams
    parts: list[tuple[int, slice]]
    outputs: Tensor
    rise: Tensor
    hidden: Tensor
    tokens: Tensor
    probs: Tensor
    end: Tensor
    passed: Tensor

    constants = ("outputs", "rise")

    def buffers(self) -> Buffers:
        halves = 2 if self.sampling.guided else 1
        buffers = {name: Buffer(getattr(self, name)) for name in ("tokens", "probs", "end", "passed")}
        return buffers | {"hidden": Buffer(self.hidden, 0, halves)}


class Spatial:
    """heads: the network; `right` of its heads draft the first row, and `below` heads as many rows at once; window:
    the most drafted tokens of a step; rounds: see the module. A row that is longer than the window is drafted in parts.
    UsageError if the network has fewer heads."""

    constants = ("tree", "ahead", "offsets")

    def __init__(self, heads: Any, window: int, right: int, below: int, rounds: int | None) -> None:
        self.heads, self.right, self.below, self.rounds = heads, right, below, rounds
        for name, requested, most in (("k_h", right, heads.cfg.right), ("k_v", below, heads.cfg.below)):
            if requested > most:
                raise UsageError(f"{name}={requested}, and the network has {most} such heads: give {most} at most")
        self.shape = _shape(window, rounds)
        self.tree = self.shape.tree
        self.ahead, self.offsets = torch.arange(window), torch.arange(window + 1)

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> SpatialState:
        device, rows, height, width = rng.key.device, len(rng), self.tree.height, session.width
        put(self, device)
        right, drafted = min(self.right, height), min(height, self.below * width)
        parts = [(i, slice(i, i + 1)) for i in range(right)]
        for j, start in enumerate(range(0, drafted, width)):
            parts.append((self.heads.cfg.right + j, slice(start, min(start + width, drafted))))
        outputs = torch.stack([self.ahead.clamp_max(right - 1), right + self.ahead.clamp_max(drafted - 1)])
        before, stored = session.prefix_hidden, 0 if self.rounds is None else height
        return SpatialState(
            session,
            sampling,
            rng,
            parts,
            outputs,
            rise=(self.ahead // width + 1) * width,
            hidden=before.new_zeros(len(before), session.length + 2 * (height + 1), before.shape[-1]),
            tokens=torch.zeros(rows, stored, dtype=torch.int64, device=device),
            probs=torch.zeros(rows, stored, session.vocab_size, device=device),
            end=torch.zeros(rows, dtype=torch.int64, device=device),
            passed=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def propose(self, state: SpatialState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        kernels, end, first = state.sampling.kernels, state.end, num_committed < state.session.width
        new = num_committed >= end
        torch.where(new, self._end(state, num_committed, first), end, out=end)
        probs = self.distributions(state, history, num_committed, first[:, None])
        tokens = draw(probs, state.rng.uniform(step, INIT, self.tree.height), kernels)
        unverified = None
        if self.rounds is not None:
            torch.where(new[:, None], tokens, state.tokens, out=state.tokens)
            torch.where(new[:, None, None], probs, state.probs, out=state.probs)
            tokens, probs = state.tokens, state.probs.clone()  # the statistics read them after `commit` wrote new ones
            unverified = (~first & (state.passed >= self.rounds))[:, None].expand(-1, self.tree.nodes)
        inside = (num_committed[:, None] + self.ahead < end[:, None]) & (num_committed > 0)[:, None]
        valid, drafted = F.pad(inside, (1, 0), value=True), torch.cat([last_token(history, num_committed), tokens], 1)
        return Draft(self.tree, drafted, probs, valid, unverified=unverified)

    def _end(self, state: SpatialState, num_committed: Tensor, first: Tensor) -> Tensor:
        """The position (B,) after a draft that begins with `num_committed` (B,) tokens. first (B,) bool: in the first
        row."""
        width = state.session.width
        row = (num_committed // width + self.below) * width
        return torch.where(first, (num_committed + self.right).clamp_max(width), row).minimum(
            num_committed + self.tree.height
        )

    def distributions(self, state: SpatialState, history: Tensor, num_committed: Tensor, first: Tensor) -> Tensor:
        """The distributions (B, H, V) from which the tokens from position `num_committed` (B,) on are drafted: each
        from the nearest known cell above or, in the first row (`first` (B, 1) bool), all from the newest cell."""
        session, position = state.session, num_committed[:, None] + self.ahead
        source = torch.where(first, num_committed[:, None] - 1, position - state.rise).clamp_min(0)
        embedded = session.model.tok_embeddings(session.model.ids(history.gather(1, source)))
        cells = torch.cat([take(state.hidden, session.both(source)), session.both(embedded)], -1)
        predicted = self.heads(cells, state.parts, state.sampling.kernels)
        index = torch.where(first, *state.outputs)
        logits = session.model.head(take(predicted, session.both(index)))
        return state.sampling.distributions(logits, session, position).p

    def network_passes(self, target: Any) -> list[NetworkPass]:
        heads, right = self.heads.heads, self.heads.cfg.right
        used = *heads[: self.right], *heads[right : right + self.below], *target.head_layers
        return [NetworkPass(self.heads, "forward", [p for module in used for p in module.parameters()])]

    def commit(self, state: SpatialState, result: StepResult) -> None:
        """Store the hidden states and, in rows that are not complete, improve every cell after the committed ones."""
        length, num_committed = result.verdict.length, result.num_committed
        slots = state.session.both(num_committed[:, None] + self.offsets)
        state.hidden.scatter_(1, slots.unsqueeze(-1).expand_as(result.hidden), result.hidden)
        if self.rounds is None:
            state.end.zero_()  # the next draft is a new one
            return
        self._improve(state, result.p, length, num_committed)
        incomplete = (num_committed + length + 1 < state.end) & (num_committed >= state.session.width)
        state.passed.add_(1).mul_(incomplete)
        state.end.mul_(incomplete)

    def _improve(self, state: SpatialState, p: Tensor, length: Tensor, num_committed: Tensor) -> None:
        """Keep the token of every cell after the committed ones, or draw it again, as the rule would if it were the
        first of its draft. p (B, M, V): the target's distributions of the nodes."""
        node = (
            length[:, None] + 1 + self.ahead
        )  # the node before each cell of the new draft; in the old draft, the cell's index
        p, cell = take(p, node.clamp_max(self.tree.height)), node.clamp_max(self.tree.height - 1)
        token, q = state.tokens.gather(1, cell), take(state.probs, cell)
        # `num_committed` grows with each step, and nothing else uses these tags
        u = state.rng.uniforms(num_committed, TOKEN, KEEP - TOKEN + 1, self.tree.height)
        again = draw(normalise((p - q).clamp_min(0), p), u[:, 0], state.sampling.kernels)
        torch.where(u[:, 1] < ratio(at(p, token), at(q, token)), token, again, out=state.tokens)
        state.probs.copy_(p)


def _shape(window: int, rounds: int | None) -> DraftShape:
    relaxed = dict.fromkeys(("carries_over", "biased", "skips"), rounds is not None)
    return DraftShape(build_tree(chain_paths(window)), passes=1, by_rows=True, **relaxed)


def shape(cfg: Mapping[str, Any]) -> DraftShape:
    return _shape(cfg["window"], cfg["rounds"])


def build(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return Spatial(model.drafter_network("spatial"), *(cfg[name] for name in ("window", "k_h", "k_v", "rounds")))
