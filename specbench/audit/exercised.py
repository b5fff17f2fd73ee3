"""Which parts of a method an audit has seen at work, and how often.

A verification rejects draft tokens, at every depth, and adds a bonus token to a draft that it accepted as a whole. A
drafter reports its own parts (`Draft.parts`). Only what happens inside a sequence counts.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from specbench.decoding.trace import Taken
from specbench.engine.ops import take

REJECTION, _BONUS = "rejection_", "bonus_token"


class Exercised(Counter[str]):
    """Parts -> how often they were at work; 0: never. It observes the steps of discrete tokens
    (`DecoderConfig.observer`)."""

    @classmethod
    def read(cls, text: str) -> Exercised:
        """From its text."""
        pairs = (pair.rsplit("=", 1) for pair in text.split())
        return cls({part: int(count) for part, count in pairs})

    def __str__(self) -> str:
        return " ".join(f"{part}={count}" for part, count in self.items())

    def __call__(self, taken: Taken, total: int) -> None:
        draft, verdict, tree, fronts = taken.draft, taken.verdict, taken.draft.tree, taken.draft.fronts
        if not tree.height:
            return
        # by depth (B, D + 1): the node before each token of the verdict, that node's valid children, and the first one
        before, depth, length = verdict.path_with_root, torch.arange(tree.height + 1), verdict.length[:, None]
        slot = tree.slot.expand(len(before), -1).gather(1, before)
        child = take(tree.children.expand(len(before), -1, -1), slot.clamp_min(0))
        valid = draft.valid.gather(1, child.clamp_min(0).flatten(1)).view_as(child)
        valid &= (child >= 0) & (slot >= 0).unsqueeze(-1)
        tried = child.gather(-1, valid.long().argmax(-1, keepdim=True)).squeeze(-1).clamp_min(0)
        accepted = (depth < length) & (torch.cat([verdict.path, tried[:, -1:]], 1) == tried)
        if fronts is None:
            inside = taken.active[:, None] & (depth < (total - taken.count)[:, None])
        else:  # a chain ends with its row of the image
            inside = (fronts.extends & taken.active[:, None]).flatten()[:, None]
        inside = inside & (depth <= length)
        decided = inside & valid.any(-1)
        self._add_rejections((decided & ~accepted).sum(0))
        if fronts is None:  # elsewhere no token follows an accepted draft
            self[_BONUS] += int((inside & ~decided & (depth == length) & (length > 0)).sum())
        for part, nodes in draft.parts.items():
            self[part] += int((nodes.gather(1, tried) & decided).sum())

    def add_chains(self, accepted: Tensor, offered: Tensor, start: Tensor, total: int, longest: int) -> None:
        """Of chains of at most `longest` tokens in sequences of `total`: how many tokens of each were accepted and
        could be verified, and how many tokens there were before it, all of one shape."""
        if not longest:
            return
        drafted = offered > 0
        rejected = accepted[drafted & (accepted < offered)]
        self._add_rejections(torch.bincount(rejected, minlength=longest + 1))
        self[_BONUS] += int((drafted & (accepted == offered) & (start + accepted < total)).sum())

    def _add_rejections(self, after: Tensor) -> None:
        """after (D + 1,): rejected draft tokens by the number of tokens before them; none follows D tokens."""
        for number, count in enumerate(after[:-1].tolist(), 1):
            self[f"{REJECTION}{number}"] += count

    @property
    def depth(self) -> int:
        """Of the deepest draft token."""
        return max((int(part.removeprefix(REJECTION)) for part in self if part.startswith(REJECTION)), default=0)

    def missing(self, length: int) -> list[str]:
        """The parts that were never at work. Depths that a sequence of `length` tokens cannot have are left out: where
        a draft has some, no bonus token can follow it."""
        beyond = {f"{REJECTION}{depth}" for depth in range(length + 1, self.depth + 1)}
        return [part for part, count in self.items() if not count and part not in beyond]
