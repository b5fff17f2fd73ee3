"""Statistics of sampled sequences against a distribution.

Counts and distributions are (V**T,) over the sequences coded base V, first token most significant. A reshape to (V**t,
-1) and a sum give those of the first t tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import optimize, special, stats
from torch import Tensor

#: The probability that two-sided intervals of 95 % leave out at each end.
TAIL = 0.025
_NORMAL = special.ndtri(1 - TAIL)
_SMALLEST = 5.0  # expected counts below it are pooled


def prefixes(counts: Tensor, vocab: int, length: int) -> list[Tensor]:
    """Counts (or a distribution) of the first 1, 2 .. T tokens."""
    return [counts.view(vocab**t, -1).sum(1) for t in range(1, length + 1)]


def total_variation(counts: Tensor, probs: Tensor) -> float:
    """Between the empirical distribution of the counts and a distribution."""
    return 0.5 * float((counts / counts.sum() - probs).abs().sum())


def noise_floor(probs: Tensor, samples: int, seed: int) -> float:
    """The total variation of as many samples drawn directly from the distribution."""
    weights = probs.numpy() / probs.sum().item()
    counts = np.random.default_rng(seed).multinomial(samples, weights)
    return total_variation(torch.from_numpy(counts).double(), probs)


def true_variation(one: Tensor, other: Tensor, probs: Tensor, vocab: int, length: int) -> tuple[float, float]:
    """A 95 % confidence interval of the true total variation, from the counts of two independent halves; valid for any
    number of samples and cells.

    Lower end: the total variation is the supremum over events A of P(A) - p(A). One half chooses, among the first t
    tokens, A_t = {x : it occurred more often than p predicts}; the other half, independent of the choice, bounds its
    probability from below at level TAIL / T (`lower_bound`; Bonferroni over t, since the best of the T counts).
    Upper end: the plug-in estimate lies above the truth on average (Jensen), and one sample moves it by at most 1 / N,
    so it falls short of the truth by more than sqrt(ln(1 / TAIL) / 2N) with probability TAIL at most (McDiarmid).
    """
    low = 0.0
    parts = (prefixes(x, vocab, length) for x in (one, other, probs))
    n = float(other.sum())
    for first, second, p in zip(*parts, strict=True):
        event = first / first.sum() > p
        low = max(low, lower_bound(float(second[event].sum()), n, TAIL / length) - float(p[event].sum()))
    both = one + other
    margin = math.sqrt(math.log(1 / TAIL) / (2 * float(both.sum())))
    return low, min(1.0, total_variation(both, probs) + margin)


def lower_bound(hits: float, n: float, tail: float) -> float:
    """The least probability x under which `hits` of n or more are not rarer than `tail`, by Chernoff's bound: n KL(hits
    / n || x) <= ln(1 / tail)."""
    rate = hits / n
    if rate == 0:
        return 0.0

    def excess(x: float) -> float:
        return float(n * (special.rel_entr(rate, x) + special.rel_entr(1 - rate, 1 - x)) + math.log(tail))

    return float(optimize.brentq(excess, 1e-300, rate))


def goodness_of_fit(counts: Tensor, probs: Tensor, vocab: int, length: int) -> float:
    """p-value of the hypothesis that the counts are of independent samples of the distribution.

    A long sequence has more possible values than an audit has samples: most are pooled, and the noise of the whole
    sequence hides a clear drift in the first tokens. So the first t tokens are tested, too, for every t: T chi-square
    tests, combined by Bonferroni: T times the smallest p-value, at most 1.
    """
    tests = zip(prefixes(counts, vocab, length), prefixes(probs, vocab, length), strict=True)
    return min(1.0, length * min(chi_square(seen, p) for seen, p in tests))


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """p-value of Pearson's test. The cells of the smallest expectations are pooled: all below 5, and more until the
    pool, too, expects 5. A count in a cell of probability zero gives 0; a single cell gives 1."""
    if counts[probs == 0].any():
        return 0.0
    expected, order = (probs * (counts.sum() / probs.sum())).sort()
    seen = counts[order]
    pooled = int((expected < _SMALLEST).sum())
    if pooled:
        enough = torch.searchsorted(expected.cumsum(0), torch.tensor(_SMALLEST, dtype=expected.dtype))
        pooled = max(pooled, min(int(enough) + 1, len(expected)))
        seen, expected = (torch.cat([x[:pooled].sum()[None], x[pooled:]]) for x in (seen, expected))
    if len(expected) == 1:
        return 1.0
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(float(statistic), len(expected) - 1))


def mean(histogram: Tensor) -> tuple[float, float, float]:
    """Mean of the values 0, 1, 2 .. seen so many times, and its 95 % confidence interval (normal)."""
    n = histogram.sum()
    values = torch.arange(len(histogram), dtype=torch.float64)
    middle = (values * histogram).sum() / n
    spread = (((values - middle) ** 2 * histogram).sum() / (n - 1).clamp_min(1) / n).sqrt()
    return float(middle), float(middle - _NORMAL * spread), float(middle + _NORMAL * spread)


def energy_distance(one: Tensor, other: Tensor) -> tuple[float, float]:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'| (Szekely and Rizzo 2013), which is 0 for equal distributions and else
    positive, from samples (n, d) each; the estimate is unbiased, so it can be below 0. Returns it with its standard
    deviation if both had the distribution of `other`, to leading order.

    The latter is sqrt(8 E k(Y, Y')^2 / n (n - 1)). k is the distance less its means over either end and plus its mean:
    the estimate is then the sum of two U-statistics of -k, each of variance 2 E k^2 / n (n - 1), and of a cross term
    twice the mean of k, of variance 4 E k^2 / n^2; all are uncorrelated.
    """
    n = len(one)
    pairs = n * (n - 1)
    within, across = _distances(other, other), _distances(one, other)
    estimate = 2 * _sum(across) / n**2 - (_sum(_distances(one, one)) + _sum(within)) / pairs
    means = within.sum(1, dtype=torch.float64).float() / (n - 1)
    centred = (within - means[:, None]).sub_(means).add_(means.mean()).fill_diagonal_(0)
    return estimate, math.sqrt(8 * _sum(centred.square_()) / pairs) / math.sqrt(pairs)


def _distances(one: Tensor, other: Tensor) -> Tensor:
    return torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")


def _sum(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))
