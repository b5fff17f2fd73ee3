"""Records of images that a server decoded -> columns of a row. What a server does not tell stays empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specbench.rows.journal import Record
from specbench.rows.summary import by_prompt, mean, with_errors


def is_served(images: Sequence[Record]) -> bool:
    """Whether a server decoded these images."""
    return any(r.request_s is not None for r in images)


def columns(images: Sequence[Record], bound: float | None) -> dict[str, Any]:
    """The columns of some images. bound: the latency in seconds up to which a request is good, None: goodput is not
    measured."""
    failed = sum(r.failed or 0 for r in images)
    seconds = [r.request_s or 0.0 for r in images]
    found: dict[str, Any] = with_errors({"request_s_mean": mean(seconds, by_prompt(images))})
    found |= {
        "request_s_std": float(np.std(seconds, ddof=1)) if len(seconds) > 1 else None,
        "request_s_p50": float(np.percentile(seconds, 50)),
        "request_s_p95": float(np.percentile(seconds, 95)),
        "request_s_p99": float(np.percentile(seconds, 99)),
        "served_images_per_s": _per_second(images),
        "request_retries": sum((r.attempts or 1) - 1 for r in images),
        "requests_failed": failed,
    }
    if bound is not None:
        good = [float(s <= bound) for s in seconds] + [0.0] * failed
        found |= with_errors({"goodput": mean(good)})
    return found


def _per_second(images: Sequence[Record]) -> float | None:
    """Images over the seconds from the first arrival to the last answer, of each process that requested some."""
    total = 0.0
    for session in {r.session for r in images}:
        mine = [r for r in images if r.session == session]
        total += max(r.done for r in mine) - min(r.done - (r.request_s or 0.0) for r in mine)
    return len(images) / total if total > 0 else None
