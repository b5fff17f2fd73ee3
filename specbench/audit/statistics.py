"""Exact distributions of parts of a sequence, and statistics that compare sampled sequences with them.

A short sequence is one part. A longer sequence of a Markov model has too many values to be counted, but its n-grams at
every position have few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import optimize, special, stats
from torch import Tensor

from specbench.audit.tabular import Tables, codes, sequence_probs
from specbench.decoding.sampling import Sampling

#: The probability that a two-sided 95 % interval leaves out at each end.
TAIL = 0.025
_NORMAL = special.ndtri(1 - TAIL)
SMALLEST = 5.0  # expected counts below it are pooled
_RARE = 0.01  # share of a cell's mean probability; rarer cells have the same weight in `quadratic_limit`


@dataclass(frozen=True)
class Marginal:
    """The distribution probs (V**length,) float64 of the tokens from position `start` on, coded in base V, first token
    most significant."""

    vocab: int
    start: int
    length: int
    probs: Tensor

    def counts(self, tokens: Tensor) -> Tensor:
        """How often each value (V**length,) occurs in sequences (N, T)."""
        part = tokens[:, self.start : self.start + self.length]
        return torch.bincount(codes(part, self.vocab), minlength=len(self.probs)).double()

    def prefixes(self, counts: Tensor) -> list[Tensor]:
        """Counts (or a distribution) of the part's first 1, 2 .. tokens."""
        return [counts.view(self.vocab**t, -1).sum(1) for t in range(1, self.length + 1)]


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities (n, V) float64 that `sampling` should give for guided logits (n, V). This is a second
    implementation of the definition, so that a mistake in `Sampling` does not change its reference.

    Which tokens stay is decided in float32, in the sampler's order of operations: in tables of round numbers, shares
    and logits are often equal to a bound up to rounding.
    """
    size = logits.shape[-1]
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), size).double()
    curve = sampling.entropy_temperature
    scaled = logits.float() / (sampling.temperature if curve is None else 1)
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    stays = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k is not None:  # tokens that tie with the last one stay
        stays = ordered >= ordered[:, [min(sampling.top_k, size) - 1]]
    if sampling.top_p < 1:  # the token that reaches the share stays
        share = ordered.masked_fill(~stays, -torch.inf).softmax(-1)
        stays = stays & (share.cumsum(-1) - share <= sampling.top_p)
    stays = torch.zeros_like(stays).scatter(-1, index, stays)
    if sampling.top_n_sigma is not None:
        sigma = torch.where(stays & scaled.isfinite(), scaled, torch.nan).square().nanmean(-1, keepdim=True).sqrt()
        stays &= scaled >= scaled.amax(-1, keepdim=True) - sampling.top_n_sigma * sigma
    exponents = logits.double() / (sampling.temperature if curve is None else 1)
    probabilities = exponents.masked_fill(~stays, -torch.inf).softmax(-1)
    if curve is None:
        return probabilities
    a, b, c = curve
    entropy = -torch.xlogy(probabilities, probabilities).sum(-1, keepdim=True)
    probabilities = probabilities ** (1 / (sampling.temperature * (a * (-entropy / b).exp() + c)))
    return probabilities / probabilities.sum(-1, keepdim=True)


def of_sequence(tables: Tables) -> list[Marginal]:
    """The sequence as a whole."""
    return [Marginal(tables[0].shape[1], 0, len(tables), sequence_probs(tables))]


def of_grams(tables: Tables, n: int) -> list[Marginal]:
    """For a Markov model: the n tokens from every position on, and the shorter parts at the end."""
    vocab, contexts = tables[0].shape[1], max(map(len, tables))
    before = torch.ones(1, dtype=torch.float64)  # the distribution of the context of the token at `start`
    grams = []
    for start in range(len(tables)):
        length = min(n, len(tables) - start)
        # (context, tokens so far, context of the next token)
        context, probs = torch.arange(len(before)), before[:, None]
        for t in range(start, start + length):
            following = tables[t].double()[context]  # (context of the next token, V)
            probs = (probs.unsqueeze(-1) * following.view(*probs.shape, vocab)).flatten(1)
            context = ((context[:, None] * vocab + torch.arange(vocab)) % contexts).flatten()
        grams.append(Marginal(vocab, start, length, probs.sum(0)))
        joint = before[:, None] * tables[start].double()
        after = ((torch.arange(len(before))[:, None] * vocab + torch.arange(vocab)) % contexts).flatten()
        before = torch.zeros(min(contexts, len(before) * vocab), dtype=torch.float64)
        before.scatter_add_(0, after, joint.flatten())
    return grams


def total_variation(counts: Tensor, probs: Tensor) -> float:
    """The total variation between the empirical distribution of the counts and a distribution."""
    return 0.5 * float((counts / counts.sum().clamp_min(1) - probs).abs().sum())


def excess(counts: Tensor, probs: Tensor, event: Tensor) -> float:
    """How much more often the counted samples are in `event` (bool) than under `probs`. Unbiased, with a standard error
    of at most 1 / (2 sqrt(N)). The total variation is the largest excess of all events."""
    return float(counts[event].sum() / counts.sum() - probs[event].sum())


def divergence(even: Tensor, odd: Tensor, probs: Tensor) -> float | None:
    """KL(samples' distribution || probs) in nats, from the counts of two halves of the samples; None if a sample is
    impossible. The divergence of counts is too large, by about (values - 1) / 2N: the halves show by how much."""
    if bool(((even + odd) > 0)[probs == 0].any()):
        return None
    whole, a, b = (
        float(torch.special.xlogy(f, f / probs).nansum()) for f in (x / x.sum() for x in (even + odd, even, odd))
    )
    return 2 * whole - (a + b) / 2


def largest_variation(counts: Sequence[Tensor], marginals: Sequence[Marginal]) -> float:
    """The largest total variation of all marginals."""
    return max(total_variation(part, m.probs) for part, m in zip(counts, marginals, strict=True))


def noise_floor(marginals: Sequence[Marginal], samples: int, seed: int) -> float:
    """The largest total variation of as many samples drawn directly from the distribution of each marginal."""
    rng = np.random.default_rng(seed)
    samples_of = [rng.multinomial(samples, m.probs.numpy() / m.probs.sum().item()) for m in marginals]
    return largest_variation([torch.from_numpy(x).double() for x in samples_of], marginals)


def true_variation(
    first_half: Sequence[Tensor], second_half: Sequence[Tensor], marginals: Sequence[Marginal]
) -> tuple[float, float]:
    """A 95 % confidence interval of the largest true total variation of all marginals, from the counts of two
    independent halves.

    Lower end: the total variation is the supremum over events A of P(A) - p(A). One half chooses, among the first t
    tokens of a marginal, A_t = {x : it occurred more often than p predicts}. The other half, independent of the choice,
    bounds its probability from below at level TAIL / tests (`lower_bound`; Bonferroni over t and marginals, since the
    best of them counts).

    Upper end: the largest `upper_limit` of the marginals. Only the limit of the largest true variation must hold, so no
    correction for their number is needed; nor is it for the largest over several audits.
    """
    low, tests = 0.0, sum(m.length for m in marginals)
    for first, second, m in zip(first_half, second_half, marginals, strict=True):
        n = max(1.0, float(second.sum()))
        for a, b, p in zip(m.prefixes(first), m.prefixes(second), m.prefixes(m.probs), strict=True):
            event = a / a.sum().clamp_min(1) > p
            low = max(low, lower_bound(float(b[event].sum()), n, TAIL / tests) - float(p[event].sum()))
    limits = [upper_limit(a + b, m.probs) for a, b, m in zip(first_half, second_half, marginals, strict=True)]
    return low, max(limits)


def upper_limit(counts: Tensor, probs: Tensor) -> float:
    """A one-sided upper confidence limit, at level 1 - TAIL, of the total variation between the distribution of the
    counted samples and `probs`: the smaller of two limits at level 1 - TAIL / 2."""
    tail = TAIL / 2
    return min(1.0, plug_in_limit(counts, probs, tail), quadratic_limit(counts, probs, tail))


def plug_in_limit(counts: Tensor, probs: Tensor, tail: float) -> float:
    """Valid for any number of samples and cells, but wide if there are many cells. The plug-in estimate is above the
    truth on average (Jensen), and one sample moves it by at most 1 / N. So it is below the truth by more than sqrt(ln(1
    / tail) / 2N) with probability at most `tail` (McDiarmid)."""
    return total_variation(counts, probs) + math.sqrt(math.log(1 / tail) / (2 * max(1.0, float(counts.sum()))))


def quadratic_limit(counts: Tensor, probs: Tensor, tail: float) -> float:
    """A limit from a quadratic distance, which does not grow with the noise of many cells.

    With d = P - p, P the true distribution, and weights w that sum to 1, TV = 1/2 sum |d| <= 1/2 sqrt(S) with S = sum
    d^2 / w (Cauchy and Schwarz). A U-statistic over pairs of samples estimates S without bias. Its variance is 2 / N^2
    sum P^2 / w^2, minus terms that are left out, plus at most 4 S / N max(P / w) (Hoeffding's decomposition). The limit
    is the S for which the estimate is z standard deviations too small; the degenerate part has a shorter lower tail
    than the normal distribution. An estimate below 0 counts as 0, so that the limit is never smaller than the
    resolution of the samples. w ~ p^(2/3) gives the smallest limit for P = p (Valiant and Valiant 2017).
    """
    n, z = max(2.0, float(counts.sum())), float(special.ndtri(1 - tail))
    weights = (probs + _RARE / len(probs)) ** (2 / 3)
    weights = weights / weights.sum()
    pairs = counts * (counts - 1)
    terms = pairs - 2 * (n - 1) * counts * probs + n * (n - 1) * probs**2
    estimate = max(0.0, float((terms / weights).sum()) / (n * (n - 1)))
    spread = max(float((probs / weights).square().sum()), float((pairs / weights**2).sum()) / (n * (n - 1)))
    variance, slope = 2 * spread / n**2, 4 * float((counts / weights).max()) / n**2
    middle = estimate + z * z * slope / 2
    # the larger root of (S - estimate)^2 = z^2 (variance + slope S)
    most = middle + math.sqrt(max(0.0, middle**2 - estimate**2 + z * z * variance))
    return 0.5 * math.sqrt(most)


def lower_bound(hits: float, n: float, tail: float) -> float:
    """The smallest probability x for which `hits` or more of n are not rarer than `tail`, by Chernoff's bound: n
    KL(hits / n || x) <= ln(1 / tail)."""
    rate = hits / n
    if rate == 0:
        return 0.0

    def excess(x: float) -> float:
        return float(n * (special.rel_entr(rate, x) + special.rel_entr(1 - rate, 1 - x)) + math.log(tail))

    return float(optimize.brentq(excess, 1e-300, rate))


def goodness_of_fit(counts: Sequence[Tensor], marginals: Sequence[Marginal]) -> float:
    """p-value of the hypothesis that the counts come from independent samples of the marginals' distributions.

    A long part has more possible values than an audit has samples: most are pooled, and the noise of the whole hides a
    clear drift in its first tokens. So the first t tokens of every marginal are tested too, for every t. The chi-square
    tests are combined by Bonferroni: their number times the smallest p-value, at most 1.
    """
    values = [
        chi_square(prefix_counts, p)
        for part, m in zip(counts, marginals, strict=True)
        for prefix_counts, p in zip(m.prefixes(part), m.prefixes(m.probs), strict=True)
    ]
    return min(1.0, len(values) * min(values))


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """p-value of Pearson's test. The cells with the smallest expectations are pooled: all below 5, and more until the
    pool, too, expects 5. A count in a cell of probability zero gives 0; a single cell gives 1."""
    if counts[probs == 0].any():
        return 0.0
    expected, order = (probs * (counts.sum() / probs.sum())).sort()
    observed = counts[order]
    pooled = int((expected < SMALLEST).sum())
    if pooled:
        enough = torch.searchsorted(expected.cumsum(0), torch.tensor(SMALLEST, dtype=expected.dtype))
        pooled = max(pooled, min(int(enough) + 1, len(expected)))
        observed, expected = (torch.cat([x[:pooled].sum()[None], x[pooled:]]) for x in (observed, expected))
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(float(statistic), len(expected) - 1))


def mean(histogram: Tensor) -> tuple[float, float, float]:
    """The mean of values 0, 1, 2 .., given the number of times that each occurred, and its 95 % confidence interval
    (normal)."""
    n = histogram.sum()
    values = torch.arange(len(histogram), dtype=torch.float64)
    middle = (values * histogram).sum() / n
    spread = (((values - middle) ** 2 * histogram).sum() / (n - 1).clamp_min(1) / n).sqrt()
    return float(middle), float(middle - _NORMAL * spread), float(middle + _NORMAL * spread)


def energy_distance(x: Tensor, y: Tensor) -> tuple[float, float]:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'| (Szekely and Rizzo 2013), which is 0 for equal distributions and positive
    otherwise, from samples x, y (n, d). The estimate is unbiased, so it can be below 0. Also returns its standard
    deviation, to leading order, if both had the distribution of y.

    This is sqrt(8 E k(Y, Y')^2 / n (n - 1)). k is the distance minus its means over either end, plus its mean. Then the
    estimate is the sum of two U-statistics of -k, each of variance 2 E k^2 / n (n - 1), and of a cross term, twice the
    mean of k, of variance 4 E k^2 / n^2; all are uncorrelated.
    """
    n = len(x)
    pairs = n * (n - 1)
    within, across = _distances(y, y), _distances(x, y)
    estimate = 2 * _sum(across) / n**2 - (_sum(_distances(x, x)) + _sum(within)) / pairs
    means = within.sum(1, dtype=torch.float64).float() / (n - 1)
    centred = (within - means[:, None]).sub_(means).add_(means.mean()).fill_diagonal_(0)
    return estimate, math.sqrt(8 * _sum(centred.square_()) / pairs) / math.sqrt(pairs)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _sum(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))
