"""Which codes are near which: neighbour tables of a target's codebook."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.errors import UsageError, check_choice

MEASURES = ("l2", "cosine", "random")


def neighbours(codebook: Tensor, k: int, proximity: str = "l2") -> Tensor:
    """The k nearest other codes of every code, (V, min(k, C - 1)) int64, nearest first, ties by code number.

    codebook (V, d), of which C rows hold codes; a token without a code (a row of NaN) is near to nothing but itself.
    "l2" and "cosine" are distances in the codebook; "random" is LANTERN's control (Table 4), a fixed shuffle.
    """
    check_choice("proximity", proximity, MEASURES)
    if k < 1:
        raise UsageError(f"k must be an integer of at least 1 (got {k})")
    codes = codebook.detach().to("cpu", torch.float32).contiguous()
    k = min(k, int((~codes.isnan().any(-1)).sum()) - 1)
    return _compute(codes, k, proximity).to(codebook.device)


def _compute(codebook: Tensor, k: int, proximity: str, chunk: int = 1024) -> Tensor:
    which = (~codebook.isnan().any(-1)).nonzero().flatten()
    table = torch.arange(len(codebook))[:, None].repeat(1, k)
    codes, size = codebook[which], len(which)
    if proximity == "cosine":
        codes = F.normalize(codes, dim=-1)
    rng = torch.Generator().manual_seed(0)
    rows = []
    for start in range(0, size, chunk):
        block = codes[start : start + chunk].double()
        if proximity == "random":
            far = torch.rand(len(block), size, generator=rng, dtype=torch.float64)
        elif proximity == "cosine":
            far = 1 - block @ codes.double().T
        else:
            far = torch.cdist(block, codes.double(), compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.arange(start, start + len(block))
        far[torch.arange(len(block)), own] = torch.inf  # last
        rows.append(far.sort(dim=-1, stable=True).indices[:, :k])
    table[which] = which[torch.cat(rows)]
    return table
