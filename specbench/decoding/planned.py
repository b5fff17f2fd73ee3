"""Passes over an image that do not depend on the samples: which tokens a pass feeds, and which tokens it asks for.

ZipAR decodes rows in parallel. A model with its own order (ARPG, LPD) fills an image group by group: a pass feeds the
tokens of the last group and asks for the next group. Both are plans of the same kind. The loop, the caches and the
verification use only their `ParallelPositions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from specbench.decoding.parallel_positions import ParallelPositions, rows_at_once
from specbench.decoding.rng import TAGS, RandomStreams
from specbench.engine.state import Buffer, Buffers

#: The tag, at step 0, of the random number that selects one of the model's orders for an image.
ORDER = TAGS - 3


class TokenOrder(Protocol):
    """The order of a model that does not use raster order. orders (O, T) int64 on the CPU: permutations of the image's
    positions; one is selected per image; sizes: of the groups that are sampled pass by pass; whole: the model knows no
    other groups, so it cannot decode token by token."""

    @property
    def orders(self) -> Tensor: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def whole(self) -> bool: ...


class PlannedPasses:
    """Passes that do not depend on the samples: which tokens are fed, and which are sampled next to each other.

    A subclass plans them for O orders of an image in S passes with K chains; each image of a batch uses one order.
    nodes (S, O, K, 5) int64: position, slot, the position whose token is fed, the token that is fed instead (-1: none),
    and the position that is asked for; extends (S, O, K) bool: whether one is asked for; when (O, T) int64: the pass in
    which a token is sampled. order_index (B,) int64: the order of each image. owner: see `ParallelPositions`.
    """

    constants: tuple[str, ...] = ("nodes", "extends", "when", "owner")

    nodes: Tensor
    extends: Tensor
    when: Tensor
    owner: Tensor
    order_index: Tensor
    forces = False  # some tokens are fed instead of others

    def buffers(self) -> Buffers:
        """The tensors that steps read or write (see `engine.state`)."""
        return {"order_index": Buffer(self.order_index)}

    def parallel_positions(self, history: Tensor, step: Tensor) -> tuple[Tensor, ParallelPositions]:
        """The tokens (B, K) and the positions of the passes `step` (B,). history (B, *): the committed tokens at their
        positions."""
        number = step.clamp_max(len(self.nodes) - 1)
        position, slot, source, fixed, target = self.nodes[number, self.order_index].unbind(-1)
        token = history.gather(1, source)
        if self.forces:
            token = torch.where(fixed >= 0, fixed, token)
        extends = self.extends[number, self.order_index]
        positions = ParallelPositions(
            positions=position.unsqueeze(-1),
            slots=slot.unsqueeze(-1),
            sees=self.sees(number, position),
            keys=target,
            extends=extends,
            recovers=extends,
            owner=self.owner,
            targets=target.unsqueeze(-1),
            progress=self.progress(number),
        )
        return token, positions

    def progress(self, number: Tensor) -> Tensor | None:
        """`ParallelPositions.progress` of the passes `number` (B,)."""
        return None

    def existing(self, number: Tensor) -> Tensor:
        """The positions (B, 1, T) bool whose tokens exist before the passes `number` (B,)."""
        return (self.when[self.order_index] < number[:, None]).unsqueeze(1)

    def sees(self, number: Tensor, position: Tensor) -> Tensor:
        """`ParallelPositions.sees` of nodes at `position` (B, K) in the passes `number` (B,)."""
        raise NotImplementedError


class PlannedRows(PlannedPasses):
    """Rows of an image in parallel: every row that has begun gains a token in a pass. Chain k decodes the rows
    ("lines") k, k + K, ...

    A line begins when the line above has `lag` tokens, or is complete. With `alone` the second line always waits until
    the first is complete. When a line begins, the token before its first one does not exist yet, unless the image
    grammar forces it. The newest token of the second line above replaces it, at its position (ZipAR's released code;
    for the second line: the newest token of the first). When a line is complete, its last token is fed once more for
    the lines below.

    masked: nodes do not attend to tokens that do not exist. Otherwise they attend to the slots of these tokens, which
    hold zeros or the replacement.
    """

    constants = (*PlannedPasses.constants, "leads", "position")

    def __init__(self, session: Any, rows: int, device: torch.device, lag: int, alone: bool, masked: bool) -> None:
        self.masked, chains = masked, rows_at_once(session.width, lag)
        planned, when = _planned(session.length, session.width, lag, alone, masked)
        table = torch.tensor(planned, device=device)  # (S, K, 7)
        position, slot, source, extends, before, first, absent = table.unbind(-1)
        self.when = torch.tensor([when], device=device)
        self.position = torch.arange(session.length, device=device)
        self.owner = torch.arange(rows, device=device).repeat_interleave(chains)
        self.order_index = torch.zeros(rows, dtype=torch.int64, device=device)
        fixed = torch.full_like(position, -1)
        lead = absent * first
        if session.forced_tokens is not None:
            forced = session.forced_tokens[before]
            fixed = torch.where(lead > 0, forced, fixed)
            lead = absent * torch.where(forced >= 0, 1, first)
        same_chain = torch.eye(chains, dtype=torch.bool, device=device)
        self.leads = (lead > 0).unsqueeze(-1) & same_chain & masked  # (S, K, K): chains that see the replacement
        self.nodes = torch.stack([position, slot, source, fixed, position + 1], -1).unsqueeze(1)
        self.extends = (extends > 0).unsqueeze(1)
        self.forces = session.forced_tokens is not None

    def sees(self, number: Tensor, position: Tensor) -> Tensor:
        image = self.position <= position.unsqueeze(-1)
        if self.masked:
            image = image & self.existing(number)
        leads = self.leads[number]
        return torch.cat([torch.ones_like(leads[..., :1]), image, leads], -1)


class PlannedGroups(PlannedPasses):
    """The groups of a model with its own order. A pass feeds the last group (the first pass: the end of the prefix),
    asks for the next one, and attends to everything that exists by then. Group sizes differ: a chain beyond the size of
    a group does nothing. sizes: of the groups; sizes of 1 give the same order token by token."""

    constants = (*PlannedPasses.constants, "shares")

    def __init__(self, order: TokenOrder, rng: RandomStreams, sizes: Sequence[int]) -> None:
        device = rng.key.device
        orders, chains = order.orders.to(device), max(sizes)
        number, length = orders.shape
        ends = list(accumulate(sizes))
        index = torch.full((len(sizes), chains), -1, dtype=torch.int64)  # of the tokens in the order, by pass and chain
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            index[i, :size] = torch.arange(end - size, end)
        index = index.to(device)
        chain = torch.arange(chains, device=device)
        sampled = index >= 0
        fed = torch.cat([torch.full_like(index[:1], -1), index[:-1]])
        first = (torch.arange(len(sizes), device=device)[:, None] == 0) & (chain == 0)  # the end of the prefix
        position = torch.where(fed >= 0, orders[:, fed.clamp_min(0)], torch.where(first, -1, 0))  # (O, S, K)
        slot = torch.where((fed >= 0) | first, position, length + chains + chain)
        target = torch.where(sampled, orders[:, index.clamp_min(0)], 0)
        nodes = (position, slot, position.clamp_min(0), torch.full_like(position, -1), target)
        self.nodes = torch.stack(nodes, -1).transpose(0, 1).contiguous()
        self.extends = sampled.unsqueeze(1).expand(-1, number, -1).contiguous()
        passes = torch.tensor([i for i, size in enumerate(sizes) for _ in range(size)], device=device)
        self.when = torch.zeros_like(orders).scatter_(1, orders, passes.expand_as(orders))
        after = torch.tensor(ends, device=device)[:, None].expand_as(index)
        self.shares = torch.stack([index.clamp_min(0), after], -1).float() / length  # (S, K, 2)
        self.owner = torch.arange(len(rng), device=device).repeat_interleave(chains)
        u = rng.uniform(torch.zeros_like(rng.key), ORDER, 1)[:, 0]
        self.order_index = (u * number).long()

    def sees(self, number: Tensor, position: Tensor) -> Tensor:
        image = self.existing(number)
        leads = torch.zeros_like(image[..., :1]).expand(-1, -1, position.shape[1])
        return torch.cat([torch.ones_like(image[..., :1]), image, leads], -1).expand(-1, position.shape[1], -1)

    def progress(self, number: Tensor) -> Tensor:
        return self.shares[number]


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
