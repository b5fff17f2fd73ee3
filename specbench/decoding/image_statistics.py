"""Converts the trace of a batch into the statistics of its images, under the names that records use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from specbench.decoding.continuous import ContinuousTrace
    from specbench.decoding.trace import Trace


def of_images(trace: Trace | ContinuousTrace, steps: Sequence[int], passes: int) -> list[dict[str, Any]]:
    """The fields of `Record` from a batch's trace, one dict per image.

    steps: target forward passes of each image; passes: drafter network forward passes per step, for discrete tokens.
    Copies to the host, so do not call it while something is timed.
    """
    fields = vars(trace)
    on_host = {name: value.cpu().numpy() for name, value in fields.items() if hasattr(value, "cpu")}
    rows = range(len(steps))
    if "log_prob" in on_host:
        return [_of_image({k: v[b] for k, v in on_host.items()}, steps[b], passes) for b in rows]
    return [
        _of_continuous({k: v[b] for k, v in on_host.items()}, steps[b])
        | {"tries": fields["proposals"][b], "draft_s": fields["draft_s"] / len(steps)}
        for b in rows
    ]


def _of_continuous(trace: dict[str, np.ndarray], steps: int) -> dict[str, Any]:
    accepted, offered, start, reach = (trace[name][:steps] for name in ("accepted", "offered", "start", "reach"))
    drafts = offered > 0
    kept, verified = trace["kept"], trace["verified"]
    by_depth = [(int(kept[start[reach > d] + d].sum()), int((reach > d).sum())) for d in range(int(reach.max()))]
    return {
        "accepted_per_step": accepted.tolist(),
        "accepted_by_depth": [a for a, _ in by_depth],
        "verified_by_depth": [v for _, v in by_depth],
        "first_accept": _rounded(trace["first"][:steps][drafts].mean(dtype=np.float64)) if drafts.any() else None,
        "draft_passes": int(offered.sum()),  # one pass drafts the tokens of all tries at a position
        "order": trace["order"].tolist(),
        "drafts": "".join(np.where(kept, "1", np.where(verified, "0", ".")).tolist()),
        "fallbacks": int(trace["fallbacks"]),
        "made": int(trace["made"]),
    }


def _of_image(trace: dict[str, np.ndarray], steps: int, passes: int) -> dict[str, Any]:
    accepted, reach = trace["accepted"][:steps], trace["reach"][:steps]
    depth = range(1, reach.max() + 1)
    log_prob, drafts = trace["log_prob"].astype(np.float64), reach > 0
    of_draft = {"draft_tv": "tv", "first_accept": "first", "draft_top1": "top1"}
    top3 = trace["top3"][:steps][drafts]
    top3 = top3[~np.isnan(top3)]
    return {
        "accepted_per_step": accepted.tolist(),
        "accepted_by_depth": [int((accepted >= d).sum()) for d in depth],
        "verified_by_depth": [int((reach >= d).sum()) for d in depth],
        "log_prob_mean": _rounded(log_prob.mean()),
        "log_prob_std": _rounded(log_prob.std()),
        **{
            field: _rounded(trace[name][:steps][drafts].mean(dtype=np.float64)) if drafts.any() else None
            for field, name in of_draft.items()
        },
        "draft_top3": _rounded(top3.mean(dtype=np.float64)) if len(top3) else None,
        "draft_top3_steps": len(top3),
        "draft_passes": passes * steps,
        **_emitted(trace, accepted, reach),
    }


def _emitted(trace: dict[str, np.ndarray], accepted: np.ndarray, reach: np.ndarray) -> dict[str, Any]:
    """The measures of an image's emitted distributions: None if they were not computed, and for an infinite divergence.
    accepted, reach: the values of each step."""
    names = tuple("emitted_" + name for name in "tv kl outside kl_reverse missed kl_optimal".split())
    tv, kl, outside, reverse, missed, least = (
        float(trace[name].mean(dtype=np.float64)) if trace[name].size else np.nan for name in names
    )
    more = ("emitted_ratio_max", "emitted_log_ratio")
    if np.isnan(tv):
        return dict.fromkeys((*names, *more))
    means = [tv, np.nan if outside > 0 else kl, outside, np.nan if missed > 0 else reverse, missed, least]
    depth = np.concatenate([np.arange(1, a + 2) for a in accepted])[: len(trace["emitted_ratio"])]
    drafted = depth <= np.repeat(reach, accepted + 1)[: len(depth)]  # a bonus token has no draft
    logs = np.log(trace["emitted_ratio"].astype(np.float64))
    by_depth = [logs[drafted & (depth == d)].mean() for d in range(1, depth[drafted].max(initial=0) + 1)]
    return {
        **{name: None if np.isnan(mean) else _rounded(mean) for name, mean in zip(names, means, strict=True)},
        more[0]: _rounded(trace["emitted_ratio"].max()),
        more[1]: [round(float(x), 4) for x in by_depth],
    }


def _rounded(value: float) -> float:
    """Six significant digits: more precise than a mean over tokens is, and short."""
    return float(f"{value:.6g}")
