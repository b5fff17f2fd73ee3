"""The row of a run whose images a server decoded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specbench.rows.journal import Record
from specbench.rows.remarks import degenerate_remarks
from specbench.rows.summary import served_columns

#: Columns that describe what decoded here.
_UNKNOWN = ("drafter", "rule", "weights", "device", "timing")


def columns(cfg: Mapping[str, Any], images: Sequence[Record]) -> dict[str, Any]:
    """The columns of the images of a run."""
    sides = {side for record in images for side in record.size or ()}
    found: dict[str, Any] = {"resolution": sides.pop() if len(sides) == 1 else None}  # square and equal
    return found | dict.fromkeys(_UNKNOWN) | served_columns(images, cfg["latency_bound"])


def remarks(
    cfg: Mapping[str, Any],
    sessions: Mapping[str, Mapping[str, Any]],
    row: Mapping[str, Any],
    images: Sequence[Record],
) -> list[str]:
    """Remarks on how the row was measured, and on what the server returned."""
    found = []
    if not row["server"]:
        found.append("the server does not tell its version, and server= is not given")
    if "seed" in (fields := json.loads(cfg["extra_body"] or "{}")) and fields["seed"] is None:
        found.append("the requests had no seed: another run has other images")
    if len(sessions) > 1:
        found.append(f"requested by {len(sessions)} processes: their latencies are mixed")
    if row["resolution"] is None:
        found.append("the images are not squares of one size")
    sizes = [(r.size[0], r.size[1]) if r.size and len(r.size) == 2 else None for r in images]
    digests, contrasts = [r.sha256 for r in images], [r.contrast for r in images]
    return found + degenerate_remarks([r.prompt for r in images], digests, contrasts, sizes, cfg["image_size"])
