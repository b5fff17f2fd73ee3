"""The ratio test on groups of similar tokens: grouped speculative decoding (So et al. 2025, arXiv 2508.07747), and the
static grouping that its paper compares it with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.rules.base import Rule, RuleContext, normalise, ratio
from specbench.engine.ops import sum_last

#: Numbers of gathered embeddings in memory at once. On the CPU as many as fit in its cache, always in the same memory:
#: the C library returns large blocks to the system, and page faults would take three quarters of the time.
_CHUNK, _CHUNK_ON_CPU = 1 << 25, 1 << 18


class GroupRule(Rule):
    """A rule that decides by the mass of a group of tokens. `resample="vanilla"` continues from Norm([r - q]_+),
    ungrouped, `"optimal"` from Cool-SD's Eq. 10."""

    residual_by_token = False

    def __init__(self, resample: str) -> None:
        self.resample = resample

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        if self.resample == "optimal":
            q = q * self.acceptance(r, q, depth)
        return normalise((r - q).clamp_min(0), r)


class Grouped(GroupRule):
    """Accept x with min(1, r(G) / q(G)). G is x and its neighbours in the ranking of r whose probability
    differs by less than `delta` and whose embedding is nearer than `distance` (squared Euclidean).

    The ranking is by rising r, ties by token number. Neighbours are the group // 2 tokens before x in it and the (group
    - 1) // 2 after x. `edge` says what happens if fewer tokens are before x: "clip" takes those that exist; "alone"
    tests x by itself, as the released code does (its slice is empty), which resamples like "vanilla". A token without
    an embedding (a row of NaN) has no neighbour except itself. The released code skips the test of distances for groups
    with a text token; here a distribution has only image tokens.
    """

    name = "gsd"
    constants = ("table",)

    def __init__(
        self,
        table: Tensor,
        group: int = 14,
        delta: float = 0.15,
        distance: float = 0.5,
        edge: str = "alone",
        resample: str = "vanilla",
    ) -> None:
        """table (V, d): the target's input embedding of every token."""
        super().__init__(resample)
        self.table, self.delta, self.distance = table.detach(), delta, distance
        self.before, self.after, self.alone = group // 2, (group - 1) // 2, edge == "alone"

    def members(self, r: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates (N, k, G) for the groups of tokens (N, k) under distributions r (N, V), and which of them are
        members."""
        size, order = r.shape[-1], r.sort(dim=-1, stable=True).indices
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(size, device=r.device).expand_as(order))
        offset = torch.arange(-self.before, self.after + 1, device=r.device)
        rank = rank.gather(-1, token).unsqueeze(-1)
        ranks = rank + offset
        member = (ranks >= 0) & (ranks < size)
        if self.alone:
            member &= rank >= self.before
        near = order.gather(-1, ranks.clamp(0, size - 1).flatten(1)).view_as(ranks)
        mass = r.gather(-1, near.flatten(1)).view_as(near)
        member &= (mass - mass[..., self.before : self.before + 1]).abs() < self.delta
        member &= self._distances(token, near) < self.distance
        return near, member | (offset == 0)

    def _distances(self, token: Tensor, near: Tensor) -> Tensor:
        """Squared distances (N, k, G) between tokens (N, k) and others (N, k, G)."""
        most, group = _CHUNK_ON_CPU if near.device.type == "cpu" else _CHUNK, near.shape[-1]
        size = min(max(1, most // (group * self.table.shape[1])), token.numel())
        buffer, parts = self.table.new_empty(size * group, self.table.shape[1]), []
        for centres, others in zip(token.flatten().split(size), near.flatten(0, 1).split(size), strict=True):
            to = torch.index_select(self.table, 0, others.flatten(), out=buffer[: others.numel()]).float()
            to = to.view(*others.shape, -1)
            parts.append(sum_last(to.sub_(self.table[centres].float().unsqueeze(1)).square_()))
        return torch.cat(parts).view_as(near)

    def _accept(self, r: Tensor, q: Tensor, token: Tensor) -> Tensor:
        """The probability (N, k) of accepting tokens (N, k) under distributions (N, V)."""
        near, member = self.members(r, token)
        mass, drafted = (sum_last(x.gather(-1, near.flatten(1)).view_as(near) * member) for x in (r, q))
        return ratio(mass, drafted)

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        size = r.shape[-1]
        return self._accept(r.reshape(-1, size), q.reshape(-1, size), token.reshape(-1, 1)).view(token.shape)

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        size = r.shape[-1]
        rows = r.reshape(-1, size), q.reshape(-1, size)
        tokens = torch.arange(size, device=r.device).expand_as(rows[0])
        return self._accept(*rows, tokens).view_as(r)


class Neighbourhood(GroupRule):
    """Accept x with min(1, r(G) / q(G)), where the group G is x and its nearest codes.

    Groups are neighbourhoods around the candidate, not a partition of the codebook. So the rule changes even the
    distribution over groups.
    """

    name = "neighbourhood"
    constants = ("members",)

    def __init__(self, near: Tensor, resample: str = "vanilla") -> None:
        """near (V, group - 1) int64: the other members of every code's group."""
        super().__init__(resample)
        tokens = torch.arange(len(near), device=near.device)[:, None]
        self.members = torch.cat([tokens, near], 1)

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        group = self.members[token]
        return ratio(r.gather(-1, group).sum(-1), q.gather(-1, group).sum(-1))

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return ratio(r[..., self.members].sum(-1), q[..., self.members].sum(-1))


@dataclass(frozen=True)
class GSDRule:
    """The parameters of conf/rule/gsd.yaml."""

    group: int
    delta: float
    distance: float
    edge: str
    resample: str

    def build(self, context: RuleContext) -> Rule:
        return Grouped(context.embedding(), self.group, self.delta, self.distance, self.edge, self.resample)


@dataclass(frozen=True)
class NeighbourhoodRule:
    """The parameters of conf/rule/neighbourhood.yaml."""

    group: int
    proximity: str
    resample: str

    def build(self, context: RuleContext) -> Rule:
        codebook = context.codebook()
        if self.group == 1:  # every token is its own group: exact
            return Neighbourhood(torch.zeros(len(codebook), 0, dtype=torch.int64), self.resample)
        return Neighbourhood(context.neighbours(codebook, self.group - 1, self.proximity), self.resample)
