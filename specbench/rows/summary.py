"""Computes columns of a row, with their standard errors, from the records of decoded images.

A step is one target forward pass. A step that starts with c committed tokens and accepts a draft tokens commits the
positions c to c + a. The last one is the step's own token (unless the a tokens fill the image).
`Record.accepted_per_step` therefore determines how every token of an image was produced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from specbench.config import indices
from specbench.rows import timing
from specbench.rows.columns import FLOAT32, Columns, stderr_of
from specbench.rows.journal import Record
from specbench.rows.timing import Estimate


def ratio(above: Sequence[float], below: Sequence[float], groups: Sequence[int] | None = None) -> Estimate:
    """sum(above) / sum(below) of N independent images, (N,) each, and its standard error by the delta method.

    To first order, image i moves the ratio r by e_i / sum(below), e_i = above_i - r below_i, so that

        stderr = sqrt(G / (G - 1) sum_g (sum of e_i in g)^2) / |sum(below)|

    over the G groups (N,) of images that are not independent of each other (None: each image is a group; Cochran 1977,
    chapter 6). With below = 1 that is the standard deviation over sqrt(N), the standard error of a mean. Images with
    above = below = 0 are ignored. If fewer than two groups remain, the error is unknown.
    """
    y, x = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    group = np.arange(len(x)) if groups is None else np.asarray(groups)
    used = (x != 0) | (y != 0)
    total = float(x.sum())
    if not total:
        return Estimate(None, None)
    value = float(y.sum()) / total
    names, members = np.unique(group[used], return_inverse=True)
    if len(names) < 2:
        return Estimate(value, None)
    moved = np.bincount(members, (y - value * x)[used])
    return Estimate(value, float(np.sqrt(len(names) / (len(names) - 1) * np.square(moved).sum())) / abs(total))


def mean(values: Sequence[float], groups: Sequence[int] | None = None) -> Estimate:
    """Mean of values (N,) and its standard error, see `ratio`."""
    return ratio(values, np.ones(len(values)).tolist(), groups)


def with_error(value: float, stderr: float | None, digits: int) -> str:
    """ "1.858 ± 0.014": `digits` decimals, or more if the error needs them for two significant digits; without the
    error if it is unknown or only rounding."""
    if stderr is None or stderr <= 1e-12 * abs(value):
        return f"{value:.{digits}f}"
    decimals = min(9, max(digits, 1 - math.floor(math.log10(stderr))))
    return f"{value:.{decimals}f} ± {stderr:.{decimals}f}"


def with_errors(estimates: Mapping[str, Estimate]) -> dict[str, float | None]:
    """Columns of estimates, each with its standard error."""
    return {name: cell for k, e in estimates.items() for name, cell in ((k, e.value), (stderr_of(k), e.stderr))}


def speed(images: Sequence[Record]) -> Columns:
    """The speed columns of some images; the columns in seconds only if all images were timed.

    Images that were decoded together share their seconds, so that a batch counts once in the standard errors of
    timings.
    """
    lengths, prompts = [r.accepted_length for r in images], by_prompt(images)
    tokens, steps = [r.tokens for r in images], [r.steps for r in images]
    columns: Columns = with_errors(
        {
            "accepted_length_mean": mean(lengths, prompts),
            "steps": mean(steps, prompts),
            "step_compression": ratio(tokens, steps, prompts),
            "acceptance_rate": ratio([r.accepted for r in images], [r.verified for r in images], prompts),
            "draft_acceptance_rate": ratio([r.accepted for r in images], [r.all_drafted for r in images], prompts),
        }
    )
    columns |= {
        "accepted_length_std": _std(lengths),
        "draft_tokens": sum(r.drafted for r in images) / sum(steps) if any(r.drafted for r in images) else None,
        "peak_memory_mib": max(r.peak_memory_mib for r in images),
    }
    if not timing.was_timed(images):
        return columns
    seconds, batches = [r.decode_s for r in images], together(images)
    columns |= with_errors(
        {
            "tokens_per_s": ratio(tokens, seconds, batches),
            "images_per_s": ratio([1] * len(images), seconds, batches),
            "text_s": mean([r.text_s for r in images], batches),
            "pixels_s": mean([r.pixels_s for r in images], batches),
        }
    )
    spent = _seconds_of_batches(images)
    columns |= {f"batch_s_p{p}": float(np.percentile(spent, p)) for p in (50, 95)}
    latency = [r.latency_s for r in images if r.latency_s is not None]
    if len(latency) == len(images):
        columns |= with_errors({"latency_s_mean": mean(latency, prompts)})
        columns |= {
            "latency_s_std": _std(latency),
            "latency_s_p50": float(np.percentile(latency, 50)),
            "latency_s_p95": float(np.percentile(latency, 95)),
        }
    return columns


def _seconds_of_batches(images: Sequence[Record]) -> list[float]:
    """Decode seconds of every timed batch."""
    # Some images of a batch may be missing: after a kill, or with a smaller n.
    return list({(r.session, r.timed): r.decode_s * r.batch for r in images}.values())


def versus(images: Sequence[Record], vanilla: Sequence[Record], again: Sequence[Record] = ()) -> Columns:
    """The columns that compare images with vanilla AR on the same prompts, in the same order. Columns in seconds are
    over the timed pairs (see `timing.pairs`), the latency of vanilla over all its images. again: see
    `timing.extended`."""
    prompts = by_prompt(images)
    estimates = {"speedup_step": ratio([r.steps for r in vanilla], [r.steps for r in images], prompts)}
    latency = [r.latency_s for r in vanilla if r.latency_s is not None]
    if len(latency) == len(images):
        estimates["baseline_latency_s"] = mean(latency, prompts)
    pairs = timing.pairs(*timing.extended(images, vanilla, again))
    if pairs:
        faster = timing.speedup(pairs)
        estimates["speedup_throughput"] = faster
        if len(latency) == len(images):
            estimates["speedup_latency"] = faster
    return with_errors(estimates) | timing.columns(pairs, len(pairs) - len(timing.pairs(images, vanilla)))


def by_prompt(images: Sequence[Record]) -> list[int] | None:
    """The prompt index of each image if some prompts have several images, which are not independent; else None."""
    prompts = [indices.prompt_of(r.index) for r in images]
    return prompts if len(set(prompts)) < len(prompts) else None


def together(*passes: Sequence[Record]) -> list[int]:
    """The group number of each image. Images of one prompt, and images that any of the passes decoded in one batch, are
    in one group. The passes have the same images in the same order."""
    parent = list(range(len(passes[0])))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for images in passes:
        first: dict[object, int] = {}
        for i, r in enumerate(images):
            # A batch divides its times evenly, and no two batches take exactly equally long.
            batch = (r.session, r.decode_s, r.text_s, r.pixels_s) if r.batch > 1 else i
            for group in (batch, ("prompt", indices.prompt_of(r.index))):
                parent[root(i)] = root(first.setdefault(group, i))
    return [root(i) for i in range(len(parent))]


def _std(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def columns(images: Sequence[Record], raster: bool = True) -> Columns:
    """The row's columns of the steps and tokens of some images. Columns of drafts are None if nothing was drafted.

    raster: a step's tokens follow each other, so the position and the depth of every accepted token are known.
    """
    by_depth = acceptance_by_depth(images) if raster else np.zeros(0)
    columns: Columns = {}
    if images[0].drafts is None:  # a continuous token has a density, not a probability
        log_prob, std = log_probability(images)
        assert log_prob.value is not None
        perplexity = math.exp(-log_prob.value)
        error = None if log_prob.stderr is None else perplexity * log_prob.stderr  # delta method, d exp(-m) / dm
        columns = with_errors(
            {
                "perplexity": Estimate(perplexity, error),
                "log_prob_mean": log_prob,
                "emitted_tv": _over_tokens(images, [r.emitted_tv for r in images]),
                "emitted_kl": _over_tokens(images, [r.emitted_kl for r in images]),
                "emitted_kl_reverse": _over_tokens(images, [r.emitted_kl_reverse for r in images]),
                "emitted_kl_optimal": _over_tokens(images, [r.emitted_kl_optimal for r in images]),
            }
        )
        columns |= _frontier(images, columns)
        columns["log_prob_std"] = std
    elif any(r.tries for r in images):
        counts, prompts = [len(r.tries or ()) for r in images], by_prompt(images)
        tried, verified = [sum(r.tries or ()) for r in images], [sum(r.verified_by_depth) for r in images]
        columns = with_errors({"residual_tries": ratio(tried, counts, prompts)})
        columns |= with_errors({"proposals_mean": ratio(tried, verified, prompts)})
        columns["proposals_max"] = max(max(r.tries or (0,)) for r in images)
        columns["residual_fallbacks"] = sum(r.fallbacks or 0 for r in images)
    drafted = np.mean([is_accepted_draft(r) for r in images], 0) if len(by_depth) else None
    # A draft offers a token at depth 1, so that the first entry counts the drafts.
    drafts = [(r.verified_by_depth or [0])[0] for r in images]
    means = {name: _mean_over(images, name, drafts) for name in ("first_accept", "draft_tv", "draft_top1")}
    means["draft_top3"] = _mean_over(images, "draft_top3", [r.draft_top3_steps or 0 for r in images])
    return (
        columns
        | with_errors({**means, "draft_passes": mean([r.draft_passes for r in images], by_prompt(images))})
        | {
            "acceptance_by_depth": _list(by_depth) if len(by_depth) else None,
            "accepted_histogram": _list(accepted_histogram(images)),
            "drafted_by_position": None if drafted is None else _list(drafted),
            "acceptance_by_step": _list(acceptance_by_step(images)) if images[0].drafts is not None else None,
        }
    )


def _frontier(images: Sequence[Record], means: Mapping[str, Any]) -> Columns:
    """The columns that compare the emitted divergence with the minimum, and the largest ratios. means: the columns of
    means."""
    columns: Columns = {}
    if means["emitted_kl"] is not None and (means["emitted_kl_optimal"] or 0) > FLOAT32:
        spent = [r.tokens * (r.emitted_kl or 0) for r in images]
        least = [r.tokens * (r.emitted_kl_optimal or 0) for r in images]
        columns |= with_errors({"emitted_kl_ratio": ratio(spent, least, by_prompt(images))})
    largest = [r.emitted_ratio_max for r in images]
    if None not in largest and not any(r.emitted_outside for r in images):  # else it is infinite
        columns["emitted_ratio_max"] = max(x for x in largest if x is not None)
        depths = [r.emitted_log_ratio or [] for r in images]
        by_depth = [[x for x in values if x is not None] for values in zip_longest(*depths)]
        columns["emitted_log_ratio"] = _list(np.array([np.mean(values) for values in by_depth]))
    return columns


def expected_speedup(images: Sequence[Record], vanilla: Sequence[Record], gamma: int) -> dict[str, float]:
    """CSpD's Eq. 35, (1 - a^(gamma + 1)) / ((1 - a) (gamma c + 1)), with a the share of verified drafts that were
    accepted, and c the time to draft a token over vanilla's time for one, both in the timed pairs. The result includes
    c; it is empty if nothing was drafted, or without pairs. The equation is of chains that are verified token by
    token."""
    paired = [i for pair in timing.pairs(images, vanilla) for i in pair.images]
    drafted, verified = sum(images[i].made or 0 for i in paired), sum(r.verified for r in images)
    if not drafted or not verified:
        return {}
    cost = sum(images[i].draft_s or 0.0 for i in paired) / drafted
    cost /= sum(vanilla[i].decode_s for i in paired) / sum(vanilla[i].tokens for i in paired)
    accepted = sum(r.accepted for r in images) / verified
    length = gamma + 1 if accepted == 1 else (1 - accepted ** (gamma + 1)) / (1 - accepted)
    return {"draft_cost": cost, "speedup_expected": length / (gamma * cost + 1)}


def acceptance_by_step(images: Sequence[Record]) -> np.ndarray:
    """Share (L,) of the verified drafts that were accepted, by order of generation of the token; nan if no draft was
    verified (CSpD, Figs. 8 and 11). For models with continuous tokens."""
    drafts = np.array([list(r.drafts or "") for r in images])
    accepted, verified = (drafts == "1").sum(0), (drafts != ".").sum(0)
    return np.divide(accepted, verified, out=np.full(len(accepted), np.nan), where=verified > 0)


def _list(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(v) else round(float(v), 4) for v in values]


def _mean_over(images: Sequence[Record], statistic: str, counts: Sequence[int]) -> Estimate:
    """Mean over the drafts of all images, of which each has `counts`; None without drafts, or without this
    statistic."""
    values = [getattr(r, statistic) for r in images]
    weights = [0 if f is None else n for n, f in zip(counts, values, strict=True)]
    return ratio([n * (f or 0.0) for n, f in zip(counts, values, strict=True)], weights, by_prompt(images))


def _over_tokens(images: Sequence[Record], means: Sequence[float | None]) -> Estimate:
    """Mean over all tokens of all images, from the means of the images; None if one of them is missing."""
    tokens = [r.tokens for r in images]
    known = [n * m for n, m in zip(tokens, means, strict=True) if m is not None]
    return ratio(known, tokens, by_prompt(images)) if len(known) == len(tokens) else Estimate(None, None)


def log_probability(images: Sequence[Record]) -> tuple[Estimate, float]:
    """Mean and standard deviation of the tokens' natural-log probabilities, over all tokens of all images. The error of
    the mean is over images, as the tokens of one image are not independent."""
    tokens = [r.tokens for r in images]
    means = [r.log_prob_mean or 0.0 for r in images]
    average = ratio([n * m for n, m in zip(tokens, means)], tokens, by_prompt(images))
    assert average.value is not None
    squares = [n * ((r.log_prob_std or 0.0) ** 2 + (m - average.value) ** 2) for n, m, r in zip(tokens, means, images)]
    return average, math.sqrt(math.fsum(squares) / sum(tokens))


def accepted_histogram(images: Sequence[Record]) -> np.ndarray:
    """Shares (A + 1,) of the steps that accepted 0, 1, ..., A draft tokens, over all steps of all images."""
    steps = np.concatenate([_steps(r) for r in images])
    return np.bincount(steps) / len(steps)


def acceptance_by_depth(images: Sequence[Record]) -> np.ndarray:
    """Share (D,) of the verified draft tokens at depth 1, ..., D that were accepted; D: the deepest verified depth, 0
    if nothing was drafted.

    Conditional on the depths before: they were accepted. In a tree a depth is one event, whichever candidate is kept.
    A path that ends at a leaf has no rejection.
    """
    lists = [(r.accepted_by_depth, r.verified_by_depth) for r in images]
    accepted, verified = np.zeros((2, max(len(v) for _, v in lists)))
    for a, v in lists:
        accepted[: len(a)] += a
        verified[: len(v)] += v
    return accepted / verified


def is_accepted_draft(record: Record) -> np.ndarray:
    """Whether each token (T,) bool of an image was an accepted draft token, not a step's own token: the heat maps of
    SJD (Fig. 13) and CSpD (Fig. 16)."""
    if record.drafts is not None:
        drafted = np.zeros(record.tokens, dtype=bool)
        drafted[record.order] = np.array(list(record.drafts)) == "1"
        return drafted
    last = np.cumsum(_steps(record) + 1) - 1  # positions of the steps' own tokens; a full image has none at its end
    drafted = np.ones(record.tokens, dtype=bool)
    drafted[last[last < record.tokens]] = False
    return drafted


def _steps(record: Record) -> np.ndarray:
    return np.array(record.accepted_per_step, dtype=np.int64)
