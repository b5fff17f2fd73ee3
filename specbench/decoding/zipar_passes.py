"""ZipAR's passes over an image, which do not depend on the samples: which tokens a pass feeds to which chain, and which
rows of the image it extends."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.parallel_positions import ParallelPositions, rows_at_once


class PlannedRows:
    """Rows of an image in parallel: every row that has begun gains a token in a pass. Chain k decodes the rows
    ("lines") k, k + K, ...

    A line begins when the line above has `lag` tokens, or is complete. With `alone` the second line always waits until
    the first is complete. When a line begins, the token before its first one does not exist yet, unless the image
    grammar forces it. The newest token of the second line above replaces it, at its position (ZipAR's released code;
    for the second line: the newest token of the first). When a line is complete, its last token is fed once more for
    the lines below.

    masked: nodes do not attend to tokens that do not exist. Otherwise they attend to the slots of these tokens, which
    hold zeros or the replacement.

    Of S passes with K chains: nodes (S, K, 4) int64: position, slot, the position whose token is fed, and the token
    that is fed instead (-1: none); extends (S, K) bool: whether the line gains a token; leads (S, K, K) bool: the
    chains whose replacement is seen; when (T,) int64: the pass in which a token is sampled. owner: see
    `ParallelPositions`.
    """

    constants = ("nodes", "extends", "leads", "when", "position", "owner")

    def __init__(self, session: Any, rows: int, device: torch.device, lag: int, alone: bool, masked: bool) -> None:
        self.masked, chains = masked, rows_at_once(session.width, lag)
        planned, when = _planned(session.length, session.width, lag, alone, masked)
        position, slot, source, extends, before, first, absent = torch.tensor(planned, device=device).unbind(-1)
        self.when = torch.tensor(when, device=device)
        self.position = torch.arange(session.length, device=device)
        self.owner = torch.arange(rows, device=device).repeat_interleave(chains)
        fixed = torch.full_like(position, -1)
        lead = absent * first
        self.forces = session.forced_tokens is not None
        if self.forces:
            forced = session.forced_tokens[before]
            fixed = torch.where(lead > 0, forced, fixed)
            lead = absent * torch.where(forced >= 0, 1, first)
        same_chain = torch.eye(chains, dtype=torch.bool, device=device)
        self.leads = (lead > 0).unsqueeze(-1) & same_chain & masked
        self.nodes = torch.stack([position, slot, source, fixed], -1)
        self.extends = extends > 0

    def parallel_positions(self, history: Tensor, step: Tensor) -> tuple[Tensor, ParallelPositions]:
        """The tokens (B, K) and the positions of the passes `step` (B,). history (B, *): the committed tokens at their
        positions."""
        number = step.clamp_max(len(self.nodes) - 1)
        position, slot, source, fixed = self.nodes[number].unbind(-1)
        token = history.gather(1, source)
        if self.forces:
            token = torch.where(fixed >= 0, fixed, token)
        image = self.position <= position.unsqueeze(-1)
        if self.masked:
            image &= (self.when < number[:, None]).unsqueeze(1)
        leads, extends = self.leads[number], self.extends[number]
        sees = torch.cat([torch.ones_like(leads[..., :1]), image, leads], -1)
        return token, ParallelPositions(
            position.unsqueeze(-1), slot.unsqueeze(-1), sees, keys=position + 1, extends=extends, recovers=extends,
            owner=self.owner,
        )  # fmt: skip


@lru_cache
def _planned(
    total: int, width: int, lag: int, alone: bool, masked: bool
) -> tuple[list[list[tuple[int, ...]]], list[int]]:
    """The table of `PlannedRows` and the pass in which each token is sampled. The table has, by pass and chain: the
    node's position and slot, the position whose token it holds, whether the line is extended, the position before the
    line, whether this is the line's first pass, and whether that position has no token yet."""
    chains, lines = rows_at_once(width, lag), [range(i, min(i + width, total)) for i in range(0, total, width)]
    starts: list[int] = []
    when: list[int] = []
    start = 0
    for number, line in enumerate(lines):
        starts.append(start)
        when += range(start, start + len(line))
        start += len(line) if alone and not number else min(lag, len(line))
    passes = max(when) + 1
    idle = [(0, total + chains + k, 0, 0, 0, 0, 0) for k in range(chains)]
    table: list[list[tuple[int, ...]]] = [list(idle) for _ in range(passes)]
    for number, line in enumerate(lines):
        chain, before, above = number % chains, max(line[0] - 1, 0), max(number - 2, 0)
        for position in line:
            now, first = when[position], position == line[0]
            absent = number > 0 and when[before] >= now
            node = slot = position - 1
            source = max(node, 0)
            if first and absent:
                newest = min(now - starts[above], len(lines[above]))
                source, slot = lines[above][newest - 1], total + chain if masked else node
            table[now][chain] = (node, slot, source, 1, before, int(first), int(absent))
        last, now = line[-1], when[line[-1]] + 1
        if number + 1 < len(lines) and starts[number + 1] < now < passes:
            table[now][chain] = (last, last, last, 0, 0, 0, 0)
    return table, when
