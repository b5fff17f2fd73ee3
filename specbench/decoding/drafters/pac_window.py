"""The window of SJD-PAC (arXiv 2603.18599): its first positions have further candidates, which form a small tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from specbench.decoding.drafters.sjd_window import SJDWindow
from specbench.decoding.drafters.window import SIBLING, WindowState
from specbench.decoding.sampling import draw_distinct
from specbench.decoding.trees import Path, in_order, window_paths
from specbench.engine.ops import take

_REST = 1e-12  # weight of the stored distribution, added to the residual distribution that siblings are drawn from


@dataclass(eq=False)
class PACWindow(SJDWindow):
    """An `SJDWindow` whose first path continues a tree. width, depth, form: see `trees.window_paths`.

    siblings: what a position's further candidates are drawn from: its distribution ("stored") or, if it had a token
        before, the residual distribution [p - q]_+ of this step ("residual", as in SJD-PAC's code, which is not exact).
        In both cases verification treats them as drawn from the distribution.
    branch: when the first positions have further candidates: at every step ("always"), or only in a step after a
        rejection ("rejected", SJD-PAC's Algorithm 1), which is a step whose accepted path does not end at a leaf. A
        step without them has the tree's first path as its chain.
    """

    width: int = 2
    depth: int = 3
    form: str = "full"
    siblings: str = "stored"
    branch: str = "always"

    constants: ClassVar[tuple[str, ...]] = (*SJDWindow.constants, "on_main")

    def __post_init__(self) -> None:
        super().__post_init__()
        paths = self.paths()
        self.branching = max((len(p) for p in paths if p[-1] > 0), default=0)  # depths with more than one candidate
        # whether a node is on the first path
        self.on_main = torch.tensor([True, *(not any(p) for p in in_order(paths))])
        self.shape = replace(self.shape, biased=self.shape.biased or self.siblings == "residual")

    def paths(self) -> list[Path]:
        return window_paths(self.window, self.width, self.depth, self.form)

    def _valid(self, state: WindowState, num_committed: Tensor) -> Tensor:
        valid = super()._valid(state, num_committed)
        if self.branch == "rejected":
            end = torch.where(state.length > 0, state.path[:, -1], 0)
            rejected = (state.drafted > 0) & (self.first_child[end] >= 0)
            valid = valid & (self.on_main | rejected[:, None])
        return valid

    def _candidates(self, state: WindowState, replaced: tuple[Tensor, Tensor] | None, step: Tensor) -> Tensor:
        first, n = state.tokens.unsqueeze(-1), self.branching
        pool = self.pool(state, replaced).scatter(-1, first[:, :n], 0.0)
        noise = state.rng.exponential(step, SIBLING, n, pool.shape[-1])
        others = draw_distinct(pool, noise, min(self.width - 1, pool.shape[-1]))
        candidates = first.expand(-1, -1, self.width).clone()  # (B, H, W), the position's own token first
        candidates[:, :n, 1 : 1 + others.shape[-1]] = others
        return candidates[:, self.offsets, self.choice]

    def replaced(self, state: WindowState) -> tuple[Tensor, Tensor] | None:
        """If siblings are drawn from a residual distribution: for the first positions, the distributions (B, n, V) that
        this step's replace, and whether (B, n) there was one."""
        if self.siblings == "stored":
            return None
        height, offsets = state.tokens.shape[1], self.ahead[: self.branching]
        before = (state.length[:, None] + offsets + 1).clamp_max(height - 1)
        return take(state.probs, before), offsets < (self._known(state) - 1)[:, None]

    def pool(self, state: WindowState, replaced: tuple[Tensor, Tensor] | None) -> Tensor:
        """The distribution (B, n, V), not normalised, that the further candidates of the first positions are drawn
        from."""
        stored = state.probs[:, : self.branching]
        if replaced is None:
            return stored
        before, existed = replaced
        return torch.where(existed.unsqueeze(-1), (stored - before).clamp_min(0) + _REST * stored, stored)

    def _first_path(self, path: Tensor, length: Tensor) -> Tensor:
        """After the accepted path its first descendants, then the draft's first path."""
        nodes = self.main.expand(len(path), -1).clone()
        node = torch.where(length > 0, path[:, -1], 0)
        for d in range(self.branching):
            first_child = self.first_child[node]
            beyond = length <= d
            nodes[:, d] = torch.where(beyond & (first_child >= 0), first_child, nodes[:, d])
            node = torch.where(beyond, nodes[:, d], node)
        return nodes
