"""The row and the report of a run whose images a server decoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specbench.rows import degenerate, serving
from specbench.rows.journal import Record

#: Columns that describe what decoded here.
_UNKNOWN = ("drafter", "rule", "weights", "device", "timing")


def columns(cfg: Mapping[str, Any], images: Sequence[Record]) -> dict[str, Any]:
    """The columns of the images of a run."""
    sides = {side for record in images for side in record.size or ()}
    found: dict[str, Any] = {"resolution": sides.pop() if len(sides) == 1 else None}  # square and equal
    return found | dict.fromkeys(_UNKNOWN) | serving.columns(images, cfg["latency_bound"])


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
    return found + degenerate.remarks([r.prompt for r in images], digests, contrasts, sizes, cfg["image_size"])


def describe(cfg: Mapping[str, Any]) -> str:
    """How a server was asked: "served (4 requests at a time)"."""
    limit = cfg["concurrency"]
    if cfg["request_rate"] is None:
        return f"served ({limit or 1} request{'s' * (limit not in (None, 1))} at a time)"
    return f"served ({cfg['request_rate']:g} requests/s" + (f", at most {limit} at a time)" if limit else ")")


def report_lines(row: Mapping[str, Any], value: Callable[..., str]) -> list[tuple[str, str]]:
    """Name -> text of what was measured of a server; value: the text of a column, see `harness.row.report`."""
    tail = ", ".join(f"p{p} {value(f'request_s_p{p}', digits=3)}" for p in (50, 95, 99))
    lines = [
        ("request latency", f"{value('request_s_mean', ' s', 3)}; {tail}"),
        ("throughput", value("served_images_per_s", " images/s", 3)),
    ]
    if row["latency_bound"] is not None:
        lines.append(("goodput", f"{value('goodput')} of the requests within {row['latency_bound']:g} s"))
    lines.append(("requests", f"{row['request_retries']} attempts repeated, {row['requests_failed']} failed before"))
    return lines
