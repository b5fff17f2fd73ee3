"""Timings of a method against vanilla AR, prompt by prompt: the speed-up, its standard error, and its validity.

The speed of a machine changes while a run decodes: other processes, clock rates, temperature. A timed run therefore
decodes each prompt with the method and with vanilla AR one directly after the other, in ABBA order (method, vanilla,
vanilla, method, ...), so that both see the same machine and a linear drift cancels over two prompts. Only such
neighbours form a pair.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specbench.config.run_config import RunConfig
from specbench.rows.columns import SHIFT_BOUND, Columns
from specbench.rows.journal import Record

FEWEST = 10  # pairs: for N without noise, half of them slower, R / (s sqrt(N)) is 1.7 for N = 8 and 2.2 for N = 10
REPLICATES = 2000  # of the bootstrap: its standard error is then exact to 1 / sqrt(2 * 2000) = 1.6 %


class Estimate(NamedTuple):
    """A statistic over images and its standard error; None: a zero denominator, or too few images."""

    value: float | None
    stderr: float | None


class Pair(NamedTuple):
    """A batch of images of the method and the same batch of vanilla AR, decoded one directly after the other; at batch
    1 one image each. images: positions in the arguments of `pairs`; steps: target passes of the method over target
    passes of vanilla AR, each for the image that needs the most."""

    method_s: float
    vanilla_s: float
    images: tuple[int, ...]
    steps: float = 1.0


def is_timed(cfg: RunConfig) -> bool:
    """Whether a run measures its seconds: as `timing` says; by default, if one process decodes one image at a time."""
    if cfg.timing is not None:
        return bool(cfg.timing)
    return cfg.batch == 1 and cfg.workers == 1 and not cfg.ray_address


def was_timed(images: Sequence[Record]) -> bool:
    """Whether all of these images were timed."""
    return all(r.timed is not None for r in images)


def pairs(images: Sequence[Record], vanilla: Sequence[Record]) -> list[Pair]:
    """The pairs of some images and vanilla AR's images of the same prompts, in the order in which they were decoded.

    Two batches are a pair if they contain the same prompts and one process decoded one directly after the other
    (`Record.timed`). Images whose partner was decoded later, such as after an interruption, are in no pair. Vanilla AR
    is its own partner.
    """
    batches: dict[tuple[Any, ...], list[int]] = {}
    for i, (image, other) in enumerate(zip(images, vanilla, strict=True)):
        if neighbours(image, other):
            batches.setdefault((image.session, image.timed, other.timed), []).append(i)
    sizes = [_sizes(side) for side in (images, vanilla)]
    result = []
    for (session, number, vanilla_number), indices in batches.items():
        complete = {len(indices)} == {sizes[0][session, number], sizes[1][session, vanilla_number]}
        if complete and {images[i].batch for i in indices} == {vanilla[i].batch for i in indices}:
            method_s, vanilla_s = (sum(side[i].decode_s for i in indices) for side in (images, vanilla))
            done = max(images[i].done for i in indices)
            steps = [max(side[i].steps for i in indices) for side in (images, vanilla)]
            result.append((done, Pair(method_s, vanilla_s, tuple(indices), steps[0] / steps[1])))
    return [pair for _, pair in sorted(result)]


def neighbours(a: Record, b: Record) -> bool:
    """Whether one process timed two images one directly after the other; an image is its own neighbour."""
    if a.timed is None or b.timed is None or a.session != b.session:
        return False
    return a is b or abs(a.timed - b.timed) == 1


def _sizes(images: Sequence[Record]) -> dict[tuple[str, int | None], int]:
    """Images per timed decode: (session, number) -> count."""
    sizes: dict[tuple[str, int | None], int] = {}
    for r in images:
        sizes[r.session, r.timed] = sizes.get((r.session, r.timed), 0) + 1
    return sizes


def speedup(pairs: Sequence[Pair]) -> Estimate:
    """Vanilla's seconds over the method's, summed over the pairs (N), and its standard error.

    It is the ratio of means, not the mean ratio: the factor by which the whole set of prompts is done sooner. It weighs
    a prompt by its cost, and it is the same statistic as `speedup_step`, so that the two can be compared.

    The error has two parts, added in squares: noise, and the shift of the value that `steadiness` detects. Noise is
    estimated by the circular block bootstrap (Politis and Romano 1992): blocks of `block_length(N)` consecutive pairs
    are resampled, so that neighbours, which saw the same machine, stay together. A block's mean is taken around the
    sample's own, which loses N - L of N parts of the variance; sqrt(N / (N - L)) corrects it. The random numbers are
    always the same. The error is None for fewer than two blocks.
    """
    method, vanilla = (np.array([pair[side] for pair in pairs], dtype=np.float64) for side in (0, 1))
    if not len(pairs) or not method.sum():
        return Estimate(None, None)
    value = float(vanilla.sum() / method.sum())
    n, length = len(pairs), block_length(len(pairs))
    if n < 2 * length:
        return Estimate(value, None)
    # A sum over a block is a difference of cumulative sums over the circle; the last block is cut so that each
    # replicate has n pairs.
    starts = np.random.default_rng(0).integers(n, size=(REPLICATES, -(-n // length)))
    ends = starts + length
    ends[:, -1] -= ends.shape[1] * length - n
    sums = [np.cumsum(np.concatenate([[0.0], side, side])) for side in (vanilla, method)]
    above, below = ((total[ends] - total[starts]).sum(1) for total in sums)
    noise = float(np.std(above / below, ddof=1) * np.sqrt(n / (n - length)))
    seen = steadiness(pairs)
    return Estimate(value, math.hypot(noise, value * seen.shift) if seen else noise)


def block_length(n: int) -> int:
    """Pairs in a block of the bootstrap: n^(1/3), the rate that minimises the error of the estimated variance
    (Kuensch 1989), as an even number, so that a block contains whole ABBA cycles."""
    return max(2, 2 * round(n ** (1 / 3) / 2))


class Steadiness(NamedTuple):
    """shift: the share of the speed-up by which a slowdown of one side alone, in a stretch of the pairs, moves it,
    without the part that noise explains; steady: whether the timing is valid."""

    shift: float
    steady: bool


def steadiness(pairs: Sequence[Pair]) -> Steadiness | None:
    """Whether the ratio of the two sides stays the same over the pairs (N, N >= 3), in the order of decoding. None for
    fewer than three pairs, and for seconds that are not positive.

    It examines x, the logarithm of vanilla's seconds per step over the method's seconds per step: the part of the
    speed-up that does not come from the steps, which are known and differ from prompt to prompt. A slowdown of both
    sides, such as a drift of the whole machine, does not change x.

    Let R be the range of the cumulative sums of x less its mean: the largest |sum| over any block of consecutive pairs
    (or over the pairs outside of it). A stretch with the share f <= 1/2 of the pairs in which one side is d slower has
    R = N f (1 - f) d, and moves the mean of x by f d: by at most 2 R / N.

    Noise of standard deviation s has a range, too. For independent normal x and large N, R / (s sqrt(N)) is the range
    of a Brownian bridge (Kuiper's distribution): above 2.0 with a probability of 1 %, its square 1.645 on average. With
    N points a range is 2 * 0.5826 s smaller (Siegmund 1985: the maximum of a random walk). s comes from differences of
    pairs with one pair between them: a step changes two of these differences, and the ABBA order none.

    A timing is not valid if the change moves the speed-up by more than `SHIFT_BOUND` and is not noise (R > 2.0 s
    sqrt(N)). Fewer than `FEWEST` pairs cannot show that it is noise, and count as not valid. From `FEWEST` pairs on, a
    steady machine is rejected in at most 1 % of the runs, whatever its noise. A smaller shift, and one that noise
    hides, is part of the speed-up's standard error. A load that lasts for the whole run is not detected.
    """
    seconds = np.array([pair[:2] for pair in pairs], dtype=np.float64).reshape(-1, 2)
    n = len(pairs)
    if n < 3 or not (seconds > 0).all():
        return None
    x = np.log(seconds[:, 1] / seconds[:, 0] * [pair.steps for pair in pairs])
    sums = np.concatenate([[0.0], np.cumsum(x - x.mean())])
    total, noise = float(np.ptp(sums)), float(np.sqrt(np.square(x[2:] - x[:-2]).sum() / (2 * (n - 2))))
    short = 2 * 0.5826
    expected = noise**2 * (n * math.pi**2 / 6 - 2 * short * math.sqrt(n * math.pi / 2) + short**2)
    shift = 2 / n * math.sqrt(max(0.0, total**2 - expected))
    is_noise = n >= FEWEST and total <= 2.0 * noise * math.sqrt(n)
    return Steadiness(shift, shift <= SHIFT_BOUND or is_noise)


def drift(pairs: Sequence[Pair]) -> float | None:
    """Vanilla's mean seconds in the second half of the pairs over its mean seconds in the first, minus 1. Every image
    of vanilla AR has the same work, so that only the machine can have changed. None for fewer than two pairs."""
    halves = np.array_split(np.array([pair.vanilla_s / len(pair.images) for pair in pairs], dtype=np.float64), 2)
    if len(pairs) < 2 or not halves[0].mean():
        return None
    return float(halves[1].mean() / halves[0].mean() - 1)


def columns(pairs: Sequence[Pair], further: int = 0) -> Columns:
    """The columns of a row on the validity of its timings; {} without pairs. further: see `COLUMNS`."""
    if not pairs:
        return {}
    seen = steadiness(pairs)
    return {
        "timed_pairs": len(pairs),
        "further_pairs": further,
        "drift": drift(pairs),
        "speedup_shift": seen and seen.shift,
        "timing_valid": seen is not None and seen.steady and speedup(pairs).stderr is not None,
    }


def is_unsteady(images: Sequence[Record], vanilla: Sequence[Record], again: Sequence[Record]) -> bool:
    """Whether further pairs must be measured."""
    seen = steadiness(pairs(*extended(images, vanilla, again)))
    return seen is not None and not seen.steady


def shift(images: Sequence[Record], vanilla: Sequence[Record], again: Sequence[Record] = ()) -> float | None:
    """`Steadiness.shift` if the timing is valid, else None."""
    row = columns(pairs(*extended(images, vanilla, again)))
    return row["speedup_shift"] if row.get("timing_valid") else None


def extended(
    images: Sequence[Record], vanilla: Sequence[Record], again: Sequence[Record]
) -> tuple[list[Record], list[Record]]:
    """The images and vanilla AR's images, followed by the same images in pairs that were measured again; again: the
    records of both passes in the order of decoding (`journal.TimingJournal`)."""
    known, seen = {r.index for r in images}, Counter[tuple[bool, str, int]]()
    sides: tuple[dict[Any, Record], dict[Any, Record]] = ({}, {})
    for record in again:
        if record.index in known:
            which = record.is_baseline, record.session, record.index
            sides[record.is_baseline][record.session, record.index, seen[which]] = record
            seen[which] += 1
    keys = [key for key in sides[0] if key in sides[1]]  # a kill leaves one side of a pair
    method, baseline = (
        [*records, *(side[key] for key in keys)] for records, side in zip((images, vanilla), sides, strict=True)
    )
    return method, baseline
