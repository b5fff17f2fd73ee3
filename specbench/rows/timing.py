"""Timings of a method against vanilla AR, prompt by prompt: the speed-up, its standard error, and the drift.

The speed of a machine changes while a run decodes: other processes, clock rates, temperature. A timed run therefore
decodes each prompt by the method and by vanilla AR one directly after the other, in ABBA order (method, vanilla,
vanilla, method, ...), so that both see the same machine and a linear drift cancels over two prompts. Only such
neighbours are a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specbench.rows.columns import DRIFT_BOUND
from specbench.rows.journal import Record

REPLICATES = 2000  # of the bootstrap: its standard error is then exact to 1 / sqrt(2 * 2000) = 1.6 %


class Estimate(NamedTuple):
    """A statistic over images and its standard error; None: a zero denominator, or too few images."""

    value: float | None
    stderr: float | None


class Pair(NamedTuple):
    """A batch of images of the method and of vanilla AR, decoded one directly after the other; at batch 1 an image
    each. Seconds of the batch, and the indices of its images among those given to `pairs`."""

    method_s: float
    vanilla_s: float
    images: tuple[int, ...]


def is_timed(cfg: Mapping[str, Any]) -> bool:
    """Whether a run measures its seconds: as `timing` says, else where one process decodes one image at a time."""
    if cfg.get("timing") is not None:
        return bool(cfg["timing"])
    if "batch" not in cfg:  # a server decodes
        return False
    return cfg["batch"] == 1 and cfg["workers"] == 1 and not cfg["ray_address"]


def was_timed(images: Sequence[Record]) -> bool:
    """Whether all of these images were timed. (Older records have a latency but no number.)"""
    return all(r.timed is not None or r.latency_s is not None for r in images)


def pairs(images: Sequence[Record], vanilla: Sequence[Record]) -> list[Pair]:
    """The pairs of some images and those of vanilla AR on the same prompts, in the order in which they were decoded.

    Two batches are a pair if they hold the same prompts and one process decoded one directly after the other
    (`Record.timed`). Images whose partner was decoded later, such as after an interruption, are in none. Vanilla AR is
    its own partner.
    """
    batches: dict[tuple[Any, ...], list[int]] = {}
    for i, (mine, theirs) in enumerate(zip(images, vanilla, strict=True)):
        if neighbours(mine, theirs):
            batches.setdefault((mine.session, mine.timed, theirs.timed), []).append(i)
    sizes = [_sizes(some) for some in (images, vanilla)]
    found = []
    for (session, mine_n, theirs_n), indices in batches.items():
        complete = {len(indices)} == {sizes[0][session, mine_n], sizes[1][session, theirs_n]}
        if complete and {images[i].batch for i in indices} == {vanilla[i].batch for i in indices}:
            mine_s, theirs_s = (sum(some[i].decode_s for i in indices) for some in (images, vanilla))
            done = max(images[i].done for i in indices)
            found.append((done, Pair(mine_s, theirs_s, tuple(indices))))
    return [pair for _, pair in sorted(found)]


def neighbours(a: Record, b: Record) -> bool:
    """Whether one process timed two images one directly after the other; an image is its own neighbour."""
    if a.timed is None or b.timed is None or a.session != b.session:
        return False
    return a is b or abs(a.timed - b.timed) == 1


def _sizes(images: Sequence[Record]) -> dict[tuple[str, int | None], int]:
    """Images per timed decode: (session, number) -> how many there are."""
    sizes: dict[tuple[str, int | None], int] = {}
    for r in images:
        sizes[r.session, r.timed] = sizes.get((r.session, r.timed), 0) + 1
    return sizes


def speedup(found: Sequence[Pair]) -> Estimate:
    """Vanilla's seconds over the method's, summed over the pairs (N), and its standard error.

    The ratio of means, not the mean ratio: it is the factor by which the whole set of prompts is done sooner, it weighs
    a prompt by its cost, and it is the same statistic as `speedup_step`, so that the two can be compared.

    The error is that of the circular block bootstrap (Politis and Romano 1992): blocks of `block_length(N)` consecutive
    pairs are resampled, so that neighbours, which saw the same machine, stay together. A block's mean is taken around
    the sample's own, which loses N - L of N parts of the variance; sqrt(N / (N - L)) returns it. The random numbers are
    always the same. None below two blocks.
    """
    method, vanilla = (np.array([pair[side] for pair in found], dtype=np.float64) for side in (0, 1))
    if not len(found) or not method.sum():
        return Estimate(None, None)
    value = float(vanilla.sum() / method.sum())
    n, length = len(found), block_length(len(found))
    if n < 2 * length:
        return Estimate(value, None)
    # A sum over a block is a difference of cumulative sums over the circle; the last block is cut so that each
    # replicate has n pairs.
    starts = np.random.default_rng(0).integers(n, size=(REPLICATES, -(-n // length)))
    ends = starts + length
    ends[:, -1] -= ends.shape[1] * length - n
    sums = [np.cumsum(np.concatenate([[0.0], side, side])) for side in (vanilla, method)]
    above, below = ((total[ends] - total[starts]).sum(1) for total in sums)
    return Estimate(value, float(np.std(above / below, ddof=1) * np.sqrt(n / (n - length))))


def block_length(n: int) -> int:
    """Pairs in a block of the bootstrap: n^(1/3), the rate that minimises the error of the estimated variance
    (Kuensch 1989), as an even number, so that a block holds whole ABBA cycles."""
    return max(2, 2 * round(n ** (1 / 3) / 2))


def drift(found: Sequence[Pair]) -> float | None:
    """Vanilla's mean seconds in the second half of the pairs over those in the first, minus 1: every image of vanilla
    AR has the same work, so that only the machine can have changed. None below two pairs."""
    halves = np.array_split(np.array([pair.vanilla_s / len(pair.images) for pair in found], dtype=np.float64), 2)
    if len(found) < 2 or not halves[0].mean():
        return None
    return float(halves[1].mean() / halves[0].mean() - 1)


def columns(found: Sequence[Pair]) -> dict[str, Any]:
    """The columns of a row that tell whether its timings hold; empty without pairs."""
    if not found:
        return {}
    seen = drift(found)
    valid = seen is not None and abs(seen) <= DRIFT_BOUND and speedup(found).stderr is not None
    return {"timed_pairs": len(found), "drift": seen, "timing_valid": valid}
