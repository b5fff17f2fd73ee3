"""Which codes are near which: neighbour tables of a target's codebook, computed once and kept by its hash."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.errors import UsageError
from specbench.storage import home

_WORTH_KEEPING = 256  # codes
MEASURES = ("l2", "cosine", "random")


def neighbours(codebook: Tensor, k: int, proximity: str = "l2") -> Tensor:
    """The k nearest other codes of every code, (V, min(k, C - 1)) int64, nearest first, ties by code number.

    codebook (V, d), of which C rows hold codes; a token that is none (a row of NaN) is near to nothing but itself. "l2"
    and "cosine" measure in it; "random" is LANTERN's control (Table 4), a fixed shuffle. The table of a codebook of any
    size is read from the cache where that codebook has been there before.
    """
    if proximity not in MEASURES:
        raise UsageError(f"proximity={proximity} is unknown (choose from: {', '.join(MEASURES)})")
    if k < 1:
        raise UsageError(f"k must be a whole number of at least 1 (got {k})")
    codes = codebook.detach().to("cpu", torch.float32).contiguous()
    k = min(k, int((~codes.isnan().any(-1)).sum()) - 1)
    if len(codes) < _WORTH_KEEPING:
        return _compute(codes, k, proximity).to(codebook.device)
    digest = hashlib.sha256(codes.numpy().tobytes() + str(tuple(codes.shape)).encode()).hexdigest()[:16]
    path = home.home() / "neighbours" / f"{digest}-{proximity}-{k}.npy"
    try:
        with path.open("rb") as f:
            found = np.lib.format.read_array(f, allow_pickle=False)
        if found.shape == (len(codes), k) and found.dtype == np.int32 and 0 <= found.min() <= found.max() < len(codes):
            return torch.from_numpy(found).long().to(codebook.device)
    except (OSError, ValueError):
        pass  # not there, or damaged: computed anew
    table = _compute(codes, k, proximity)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            np.save(Path(scratch, path.name), table.int().numpy())
            os.replace(Path(scratch, path.name), path)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
    return table.to(codebook.device)


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
