"""What an audit enumerates and counts in the sequences that it decodes, and the verdict that follows.

A verification rejects draft tokens, at every depth, and adds a bonus token to a draft that it accepted as a whole. A
drafter reports its own parts (`Draft.parts`). Only events inside a sequence count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.audit.levels import DOUBT, FURTHER, LEVEL, ROUNDING
from specbench.decoding.emitted import Emitted
from specbench.decoding.trace import StepStats
from specbench.engine.ops import take

#: Called with the number of sequences that were decoded since the last call.
Progress = Callable[[int], object]

_Row = Mapping[str, Any]

RECORDS = "records"  #: the column `model` of a row of records
REJECTION, _BONUS = "rejection_", "bonus_token"


class Exercised(Counter[str]):
    """Parts -> how often they were exercised; 0: never. It observes the steps of discrete tokens
    (`DecoderConfig.observer`)."""

    @classmethod
    def read(cls, text: str) -> Exercised:
        """From its text, which `str` returns."""
        pairs = (pair.rsplit("=", 1) for pair in text.split())
        return cls({part: int(count) for part, count in pairs})

    def __str__(self) -> str:
        return " ".join(f"{part}={count}" for part, count in self.items())

    def __call__(self, stats: StepStats, total: int) -> None:
        draft, verdict, tree, positions = stats.draft, stats.verdict, stats.draft.tree, stats.draft.parallel_positions
        if not tree.height:
            return
        # by depth (B, D + 1): the node before each token of the verdict, that node's valid children, and the first one
        before, depth, length = (
            verdict.path_with_root,
            torch.arange(tree.height + 1, device=draft.valid.device),
            verdict.length[:, None],
        )
        slot = tree.slot.expand(len(before), -1).gather(1, before)
        child = take(tree.children.expand(len(before), -1, -1), slot.clamp_min(0))
        valid = draft.valid.gather(1, child.clamp_min(0).flatten(1)).view_as(child)
        valid &= (child >= 0) & (slot >= 0).unsqueeze(-1)
        tried = child.gather(-1, valid.long().argmax(-1, keepdim=True)).squeeze(-1).clamp_min(0)
        accepted = (depth < length) & (torch.cat([verdict.path, tried[:, -1:]], 1) == tried)
        if positions is None:
            inside = stats.active[:, None] & (depth < (total - stats.num_committed)[:, None])
        else:  # a chain ends with its row of the image
            inside = (positions.extends & stats.active[:, None]).flatten()[:, None]
        inside = inside & (depth <= length)
        decided = inside & valid.any(-1)
        self._add_rejections((decided & ~accepted).sum(0))
        if positions is None:  # at parallel positions no token follows an accepted draft
            self[_BONUS] += int((inside & ~decided & (depth == length) & (length > 0)).sum())
        for part, nodes in draft.parts.items():
            self[part] += int((nodes.gather(1, tried) & decided).sum())

    def add_chains(self, accepted: Tensor, offered: Tensor, start: Tensor, total: int, longest: int) -> None:
        """Add chains of at most `longest` tokens in sequences of `total` tokens. accepted, offered, start, all of one
        shape: for each chain, how many tokens were accepted, how many could be verified, and how many tokens came
        before it."""
        if not longest:
            return
        drafted = offered > 0
        rejected = accepted[drafted & (accepted < offered)]
        self._add_rejections(torch.bincount(rejected, minlength=longest + 1))
        self[_BONUS] += int((drafted & (accepted == offered) & (start + accepted < total)).sum())

    def _add_rejections(self, after: Tensor) -> None:
        """after (D + 1,): rejected draft tokens by the number of tokens before them; none comes after D tokens."""
        for number, count in enumerate(after[:-1].tolist(), 1):
            self[f"{REJECTION}{number}"] += count

    @property
    def depth(self) -> int:
        """The depth of the deepest draft token."""
        return max((int(part.removeprefix(REJECTION)) for part in self if part.startswith(REJECTION)), default=0)

    def missing(self, length: int) -> list[str]:
        """The parts that were never exercised. Depths that a sequence of `length` tokens cannot have are left out; if a
        draft has such depths, no bonus token can follow it."""
        beyond = {f"{REJECTION}{depth}" for depth in range(length + 1, self.depth + 1)}
        return [part for part, count in self.items() if not count and part not in beyond]


@dataclass
class EmittedDistances:
    """Distances of the nodes' emitted distributions from the target's, over the visited nodes inside the sequences:
    the largest total variation (None as long as no exact value is known), and the sum of KL(emitted || target) in nats
    (NaN if one of them is not exact). It observes the steps of discrete tokens, of a method whose tokens are drawn from
    the distributions that its drafter reports.

    emitted: with exact values only. The distribution is the rule's, given the distributions of the node (see
    `decoding.emitted`). So this finds mistakes of the rule, whatever the drafts; whether the loop follows the rule is
    for the sampled sequences to show.
    """

    emitted: Emitted
    variation: float | None = None
    divergence: float = 0.0

    def __call__(self, stats: StepStats, total: int) -> None:
        draft, verdict = stats.draft, stats.verdict
        if not draft.tree.height or draft.unverified is not None or draft.parallel_positions is not None:
            if draft.tree.height:  # a step without a draft emits the target's own distribution
                self.divergence = math.nan
            return
        tv, kl, outside, *_ = self.emitted.step(draft, verdict, stats.target, stats.steps)
        depth = torch.arange(tv.shape[1], device=tv.device)
        inside = (depth <= verdict.length[:, None]) & (depth < (total - stats.num_committed)[:, None])
        visited = inside & stats.active[:, None]
        self.divergence += float(torch.where(outside > 0, torch.inf, kl)[visited].sum(dtype=torch.float64))
        known = tv[visited & ~tv.isnan()]
        if len(known):
            self.variation = max(self.variation or 0.0, float(known.max()))


@dataclass
class Counted:
    """Counts of decoded sequences of either kind. first (T + 1,) float64: histogram of the tokens accepted in the first
    step with a draft; per_step: mean of T / steps; columns: those that only rows of this kind have."""

    first: Tensor
    per_step: float
    exercised: Exercised
    columns: dict[str, Any]


def of_first_draft(trace: Any, length: int) -> Tensor:
    """`Counted.first` of a trace. A network has no draft before the first token."""
    step = (trace.reach > 0).long().argmax(1, keepdim=True)
    return torch.bincount(trace.accepted.gather(1, step)[:, 0], minlength=length + 1).double()


def in_stages(measure: Callable[[range], dict[str, Any]], samples: int) -> dict[str, Any]:
    """The row of sequences 0 .. samples - 1 or, if its p-value decides nothing, of FURTHER times as many sequences
    after these. measure: returns the row of some sequences, without a verdict."""
    row, first = measure(range(samples)), None
    if LEVEL <= row["p_value"] < DOUBT:
        first, row = row["p_value"], measure(range(samples, (1 + FURTHER) * samples))
    return row | {"p_first": first, "verdict": verdict([row])}


def verdict(rows: Iterable[_Row]) -> str:
    """The verdict over all rows together: a part of the method must be exercised in only one of them, and its
    distribution enumerated in only one."""
    rows = list(rows)
    known = [value for row in rows for value in exact(row)]
    if any(row["p_value"] < LEVEL for row in rows) or any(value > ROUNDING for value in known):
        return "not lossless"
    if missing(rows) or any(any(doubts(row)) for row in rows):
        return "undecided"
    return "lossless" if known else "not refuted"


def exact(row: _Row) -> list[float]:
    """The exact total variations of a row, of whole sequences and of the distributions at a node. Rows of earlier
    versions have only the first."""
    return [row[name] for name in ("tv_exact", "emitted_tv") if row.get(name) is not None]


def doubts(row: _Row) -> Iterator[str]:
    """Why the sequences of a row that is not refuted do not decide whether the method is lossless."""
    of_records = row["model"] == RECORDS
    if row["p_value"] < DOUBT:
        more = "; record more lines" if of_records else " again; draw more sequences (audit.samples=)"
        yield f"p = {row['p_value']:.2g} is below {DOUBT:g}{more}"
    limit = row["ks_high"] if row["tv_high"] is None else row["tv_high"]
    if limit > row["margin"]:
        yield (
            f"the limit {limit:.4f} exceeds audit.margin={row['margin']:g}; it falls with the square root of"
            f" {'the number of lines' if of_records else 'audit.samples'}"
        )


def missing(rows: Iterable[_Row]) -> list[str]:
    """The parts of the method that were exercised in none of the rows."""
    parts: dict[str, None] = {}
    total = exercised(rows := list(rows))
    for row in rows:
        parts |= dict.fromkeys(Exercised.read(row["exercised"] or "").missing(row["T"]))
    return [part for part in parts if not total[part]]


def exercised(rows: Iterable[_Row]) -> Exercised:
    """How often each part was exercised in all rows."""
    total = Exercised()
    for row in rows:
        for part, count in Exercised.read(row["exercised"] or "").items():
            total[part] += count
    return total
