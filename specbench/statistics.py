"""What the steps and tokens of decoded images say: a trace -> fields of a record; records -> columns of a row, figures.

A step is one target forward pass. One that begins with c committed tokens and accepts a draft tokens commits the places
c to c + a, of which the last holds the step's own token (none where a fills the image), so that
`Record.accepted_per_step` tells how every token of an image came about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from specbench.errors import UsageError
from specbench.records import Record

if TYPE_CHECKING:
    from specbench.decoding.continuous import Trace as VectorTrace
    from specbench.decoding.loop import Trace

T = TypeVar("T")

# --- a record ---------------------------------------------------------------------------------------------------------


def of_images(trace: Trace | VectorTrace, steps: Sequence[int], passes: int) -> list[dict[str, Any]]:
    """The fields of `Record` that a batch's trace gives, a dict an image.

    steps: target forward passes of each image; passes: drafter network forward passes a step. Copies to the host, so
    not to be called while something is timed.
    """
    given = vars(trace)
    on_host = {name: value.cpu().numpy() for name, value in given.items() if hasattr(value, "cpu")}
    rows = range(len(steps))
    if "log_prob" in on_host:
        return [_of_image({k: v[b] for k, v in on_host.items()}, steps[b], passes) for b in rows]
    return [
        _of_vectors({k: v[b] for k, v in on_host.items()}, steps[b], passes)
        | {"tries": given["tries"][b], "draft_s": given["draft_s"] / len(steps)}
        for b in rows
    ]


def _of_vectors(trace: dict[str, np.ndarray], steps: int, passes: int) -> dict[str, Any]:
    accepted, offered, start, reach = (trace[name][:steps] for name in ("accepted", "offered", "start", "reach"))
    drafts = offered > 0
    kept, judged = trace["kept"], trace["judged"]
    by_depth = [(int(kept[start[reach > d] + d].sum()), int((reach > d).sum())) for d in range(int(reach.max()))]
    return {
        "accepted_per_step": accepted.tolist(),
        "accepted_by_depth": [a for a, _ in by_depth],
        "verified_by_depth": [v for _, v in by_depth],
        "first_accept": _rounded(trace["first"][:steps][drafts].mean(dtype=np.float64)) if drafts.any() else None,
        "draft_passes": passes * int(drafts.sum()),
        "order": trace["order"].tolist(),
        "drafts": "".join(np.where(kept, "1", np.where(judged, "0", ".")).tolist()),
        "fallbacks": int(trace["fallbacks"]),
        "made": int(trace["made"]),
    }


def _of_image(trace: dict[str, np.ndarray], steps: int, passes: int) -> dict[str, Any]:
    accepted, offered = trace["accepted"][:steps], trace["offered"][:steps]
    depth = np.arange(1, offered.max() + 1)
    # what lies below a rejected token is not verified
    verified = ((offered[:, None] >= depth) & (accepted[:, None] >= depth - 1)).sum(0)
    verified = verified[verified > 0]  # it falls with the depth, so these are the first ones
    log_prob, drafts = trace["log_prob"].astype(np.float64), offered > 0
    of_draft = {"draft_tv": "tv", "first_accept": "first", "draft_top1": "top1", "draft_top3": "top3"}
    return {
        "accepted_per_step": accepted.tolist(),
        "accepted_by_depth": [int((accepted >= d).sum()) for d in depth[: len(verified)]],
        "verified_by_depth": verified.tolist(),
        "log_prob_mean": _rounded(log_prob.mean()),
        "log_prob_std": _rounded(log_prob.std()),
        **{
            field: _rounded(trace[name][:steps][drafts].mean(dtype=np.float64)) if drafts.any() else None
            for field, name in of_draft.items()
        },
        "draft_passes": passes * steps,
    }


def _rounded(value: float) -> float:
    """Six significant digits: more than a mean over tokens has, and a short line."""
    return float(f"{value:.6g}")


# --- a row ------------------------------------------------------------------------------------------------------------


def columns(images: Sequence[Record]) -> dict[str, Any]:
    """The row's columns of these figures, over some images: those of drafts None where nothing was drafted; no columns
    at all where a record of an older version has no figures."""
    if any(r.accepted_per_step is None for r in images):
        return {}
    by_depth = acceptance_by_depth(images)
    told: dict[str, Any] = {}
    if images[0].drafts is None:  # a vector has a density, which is no probability
        mean, std = log_probability(images)
        told = {"perplexity": math.exp(-mean), "log_prob_mean": mean, "log_prob_std": std}
    elif tries := [n for r in images for n in r.tries or ()]:
        told = {"residual_tries": sum(tries) / len(tries), "residual_fallbacks": sum(r.fallbacks or 0 for r in images)}
    return told | {
        "acceptance_by_depth": _list(by_depth) if len(by_depth) else None,
        "accepted_histogram": _list(accepted_histogram(images)),
        "first_accept": _mean_over_drafts(images, lambda r: r.first_accept),
        "draft_tv": _mean_over_drafts(images, lambda r: r.draft_tv),
        "draft_top1": _mean_over_drafts(images, lambda r: r.draft_top1),
        "draft_top3": _mean_over_drafts(images, lambda r: r.draft_top3),
        "draft_passes": sum(r.draft_passes or 0 for r in images) / len(images),
    }


def expected_speedup(images: Sequence[Record], vanilla: Sequence[Record], gamma: int) -> dict[str, float]:
    """CSpD's Eq. 35, (1 - a^(gamma + 1)) / ((1 - a) (gamma c + 1)), with a the share of judged drafts that were
    accepted and c the time to draft a token over vanilla's time for one. With c; nothing where nothing was drafted."""
    made, judged = sum(r.made or 0 for r in images), sum(r.drafted for r in images)
    if not made or not judged or {r.batch for r in images} != {r.batch for r in vanilla}:
        return {}
    cost = sum(r.draft_s or 0.0 for r in images) / made
    cost /= sum(r.decode_s for r in vanilla) / sum(r.tokens for r in vanilla)
    accepted = sum(r.accepted for r in images) / judged
    length = gamma + 1 if accepted == 1 else (1 - accepted ** (gamma + 1)) / (1 - accepted)
    return {"draft_cost": cost, "speedup_expected": length / (gamma * cost + 1)}


def acceptance_by_turn(images: Sequence[Record]) -> np.ndarray:
    """Share (L,) of the judged drafts that were accepted, by the turn in which a token was drawn; nan where none was
    judged (CSpD, Figs. 8 and 11). For models of vectors."""
    drafts = np.array([list(_there(r.drafts, r)) for r in images])
    kept, judged = (drafts == "1").sum(0), (drafts != ".").sum(0)
    return np.divide(kept, judged, out=np.full(len(kept), np.nan), where=judged > 0)


def _list(values: np.ndarray) -> list[float]:
    return [round(float(v), 4) for v in values]


def _mean_over_drafts(images: Sequence[Record], figure: Callable[[Record], float | None]) -> float | None:
    """Mean over all steps with a draft, of whichever image; None where there is none, or no such figure."""
    drafts = [(r.verified_by_depth or [0])[0] for r in images]  # a draft offers a token at depth 1
    total = sum(n for n, r in zip(drafts, images) if figure(r) is not None)
    return sum(n * (figure(r) or 0.0) for n, r in zip(drafts, images)) / total if total else None


def log_probability(images: Sequence[Record]) -> tuple[float, float]:
    """Mean and standard deviation of the tokens' natural-log probabilities, over all tokens of all images."""
    total = sum(r.tokens for r in images)
    given = [(r.tokens, _there(r.log_prob_mean, r), _there(r.log_prob_std, r)) for r in images]
    mean = math.fsum(n * m for n, m, _ in given) / total
    variance = math.fsum(n * (s**2 + (m - mean) ** 2) for n, m, s in given) / total
    return mean, math.sqrt(variance)


# --- figures ----------------------------------------------------------------------------------------------------------


def accepted_histogram(images: Sequence[Record]) -> np.ndarray:
    """Shares (A + 1,) of the steps that accepted 0, 1, ..., A draft tokens, over all steps of all images."""
    steps = np.concatenate([_steps(r) for r in images])
    return np.bincount(steps) / len(steps)


def acceptance_by_depth(images: Sequence[Record]) -> np.ndarray:
    """Share (D,) of the draft tokens at depth 1, ..., D that were accepted, of those that were verified; D: the deepest
    verified, 0 where nothing was drafted.

    Conditional: of the steps that accepted the depths before. In a tree a depth is one event, whichever of its
    candidates is kept, and an accepted path that ends before the tree does counts as rejected there.
    """
    lists = [(_there(r.accepted_by_depth, r), _there(r.verified_by_depth, r)) for r in images]
    accepted, verified = np.zeros((2, max(len(v) for _, v in lists)))
    for a, v in lists:
        accepted[: len(a)] += a
        verified[: len(v)] += v
    return accepted / verified


def acceptance_by_position(images: Sequence[Record], width: int | None = None) -> np.ndarray:
    """Share (rows, width) of the images in which the token at a place was an accepted draft token, not the step's own:
    the heat maps of SJD (Fig. 13) and CSpD (Fig. 16). Row by row from the top left, as the tokens are decoded.

    width: tokens in a row, a new line included; tokens behind the last full row (an image's end) are left out. Without
    it the image is a square. Raises ValueError where the tokens are no square or less than a row, or not equally many
    in all images.
    """
    count, *others = sorted({r.tokens for r in images})
    if others:
        raise ValueError(f"the images have {', '.join(map(str, (count, *others)))} tokens; a map needs equally many")
    if width is None and math.isqrt(count) ** 2 != count:
        raise ValueError(f"{count} tokens are no square; name the tokens in a row")
    width = width or math.isqrt(count)
    if count < width:
        raise ValueError(f"{count} tokens are less than a row of {width}")
    drafted = np.mean([is_accepted_draft(r) for r in images], axis=0)
    rows = count // width
    return drafted[: rows * width].reshape(rows, width)


def is_accepted_draft(record: Record) -> np.ndarray:
    """Whether each token (T,) bool of an image was an accepted draft token."""
    if record.drafts is not None:
        drafted = np.zeros(record.tokens, dtype=bool)
        drafted[_there(record.order, record)] = np.array(list(record.drafts)) == "1"
        return drafted
    own = np.cumsum(_steps(record) + 1) - 1  # the place of each step's own token; beyond the end, the image is full
    drafted = np.ones(record.tokens, dtype=bool)
    drafted[own[own < record.tokens]] = False
    return drafted


def _steps(record: Record) -> np.ndarray:
    return np.array(_there(record.accepted_per_step, record), dtype=np.int64)


def _there(value: T | None, record: Record) -> T:
    if value is None:
        raise UsageError(
            f"{record.image} was decoded by an older specbench, which recorded nothing about its steps: decode it anew"
            " with another out="
        )
    return value
