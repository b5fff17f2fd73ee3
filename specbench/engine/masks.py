"""The keys of a cache that the positions of a decode pass attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: For CUDA's attention the strides of a mask should be a multiple of this.
_ALIGNED = 8


@dataclass(frozen=True)
class TreeMask:
    """The mask of R rows of n positions: the root and the draft nodes that a pass computes.

    start (R,) int64: a row's first valid slot, after the padding at the left; root (R,) int64: the slot of node 0;
    among (1, B or R, n, E) bool, where R is a multiple of B. Position i of row r attends to the slots start .. root -
    1, and to the slots root + j for which among[r % B, i, j] is true.
    """

    start: Tensor
    root: Tensor
    among: Tensor

    @classmethod
    def chain(cls, start: Tensor, positions: Tensor) -> TreeMask:
        """The mask of consecutive `positions` (R, n) int64, which are their own slots: each attends to itself and to
        all valid positions before it."""
        order, root = torch.arange(positions.shape[1], device=positions.device), positions[:, 0].contiguous()
        query = order[:, None]
        valid = (positions >= start[:, None]).unsqueeze(1)  # (R, 1, n)
        return cls(start, root, ((order <= query) & valid) | (order == query))

    def bias(self, keys: int, dtype: torch.dtype) -> Tensor:
        """The values that attention adds to the scores of the first `keys` slots of a cache, (R, 1, n, keys) of
        `dtype`: 0 where a position attends, else minus infinity. PyTorch would compute them from a bool mask in every
        layer. Rows in memory are a multiple of `_ALIGNED` numbers; otherwise CUDA's kernels would copy them in every
        layer."""
        wide = -(-keys // _ALIGNED) * _ALIGNED
        mask = self.dense(torch.arange(wide, device=self.root.device))
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)[..., :keys]

    def dense(self, keys: Tensor) -> Tensor:
        """The mask (R, 1, n, slots) bool over the slots of a cache, whose numbers are keys (slots,) int64."""
        rows, nodes, wide = len(self.root), *self.among.shape[1:]
        before = (keys >= self.start[:, None]) & (keys < self.root[:, None])
        among = self.among  # (`repeat` takes several times as long as the rest of this function)
        if len(among) > 1:
            among = torch.cat([among] * (rows // len(among)))
        slots = self.root[:, None] + keys[:wide]
        mask = before.unsqueeze(1).expand(-1, nodes, -1).contiguous()
        index = slots.unsqueeze(1).expand(rows, nodes, wide)
        return mask.scatter_(2, index, among.expand(rows, nodes, wide)).unsqueeze(1)
