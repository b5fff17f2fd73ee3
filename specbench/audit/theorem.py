"""Cool-SD's Theorem 2 on tabular models, by enumeration: the expected accepted length (Eq. 7) and the bound on the
total variation (Eq. 8), for one round and for a whole sequence, for any rule on a chain sampled from the draft tables.

In the theorem the residual G depends only on the prefix. A rule whose residual also depends on the rejected token has
the same output distribution as one that draws from the mean of its residuals over the rejected tokens, and that mean is
a G of the theorem's form.

From one round to a sequence of many: let P_t be the distribution of T tokens, the first t from the method and the
others from the target. P_0 is the target's distribution, P_T the method's. P_t and P_{t-1} differ only in token t, so

    TV(P_t, P_{t-1}) <= sum over prefixes and depths d of  Pr(prefix, token t is verified at depth d)
                        * 1/2 sum_x |Q(x) f_d(x) - P(x) + G_d(x) Pr(rejection)|,

by the triangle inequality over d. The bonus token after a fully accepted chain comes from the target and adds nothing.
The sum over t bounds TV(P_T, P_0). Sorted by the round in which a token is verified, it is the sum over rounds of Eq.
8's right-hand side, each from the prefix where its round began; for a single round it is Eq. 8 itself. Tokens after the
end of the sequence are cut off and do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.audit.tabular import Tables
from specbench.decoding.rules import Rule

_AT_ONCE = 1 << 22  # entries of (prefixes, rejected token, V)


@dataclass(frozen=True)
class ChainStatistics:
    """expected: E[min(tau, T) + 1] of the first round (Eq. 7 if the draft is not longer than the sequence).
    first: Eq. 8 of the first round.
    bound: its sum over all rounds.
    probs (V**T,) float64: the distribution of the sequences themselves.
    kl_bound: by convexity and the chain rule KL(method || target) is at most the sum over positions of the mean of
        log(largest e / p), where e is the distribution emitted after a prefix, at the depth at which the token is
        verified.
    """

    expected: float
    first: float
    bound: float
    probs: Tensor
    kl_bound: float


def chain_statistics(
    p: Tables, q: Tables, rule: Rule, window: int, pre_argmax: Tables | None = None
) -> ChainStatistics:
    """The statistics of decoding with chains of `window` drafts. p, q: the distributions after the filters; pre_argmax:
    the distributions by which the rule decides, if not p (`Verification.verify`)."""
    expected, first, bound, kl_bound = 1.0, 0.0, 0.0, 0.0
    # by the depth at which the next token will be verified: the probability of every prefix; window + 1 is the bonus
    # token after a fully accepted chain
    reach = {1: torch.ones(1, dtype=torch.float64)}
    for t, target in enumerate(p):
        p_t, q_t, pre_argmax_t = (precise(x) for x in (target, q[t], target if pre_argmax is None else pre_argmax[t]))
        following: dict[int, Tensor] = {}
        for depth, weight in reach.items():
            if depth > window:
                accepted, recovered = torch.zeros_like(p_t), p_t
            else:
                accepted, recovered = _verified(rule, p_t, q_t, pre_argmax_t, depth)
                off = 0.5 * float((weight * (accepted + recovered - p_t).abs().sum(-1)).sum())
                bound += off
                emitted = accepted + recovered
                largest = torch.where(emitted > 0, emitted / p_t, 0.0).amax(-1)
                kl_bound += float(torch.xlogy(weight, largest.clamp_min(1)).sum())
                if depth == t + 1:  # only the first round is as deep as that
                    first += off
                    expected += float((weight[:, None] * accepted).sum())
            for below, part in ((1, recovered), (depth + 1, accepted)):
                if below > 1 and depth > window:
                    continue
                if t == len(p) - 1:
                    below = 1  # the end: only the sequence counts
                mass = (weight[:, None] * part).flatten()
                following[below] = following[below] + mass if below in following else mass
        reach = following
    return ChainStatistics(expected, first, min(bound, 1.0), reach[1], kl_bound)


def precise(table: Tensor) -> Tensor:
    """The table in float64, with rows that sum to 1 in float64, so that float32 rounding does not count as a bias."""
    return table.double() / table.double().sum(-1, keepdim=True)


def _verified(rule: Rule, p: Tensor, q: Tensor, pre_argmax: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The probabilities (n, V) of a token at a depth, by its source: accepted, q f; or recovered after a rejection, G
    times the probability of rejection."""
    size = p.shape[1]
    parts = []
    for p_n, q_n, r_n in zip(*(x.split(max(1, _AT_ONCE // size**2)) for x in (p, q, pre_argmax)), strict=True):
        shape = (len(p_n), size)
        token = torch.arange(size).expand(shape)
        level = torch.full(shape, depth)
        r, q_each = (x.unsqueeze(1).expand(*shape, size) for x in (r_n, q_n))
        accepted = q_n * rule.accept(r, q_each, token, level)
        rejected = q_n - accepted
        if rule.deterministic:
            recovered = p_n * rejected.sum(-1, keepdim=True)
        else:
            recovered = (rejected.unsqueeze(-1) * rule.residual(r, q_each, token, level)).sum(1)
        parts.append((accepted, recovered))
    accepted, recovered = (torch.cat(x) for x in zip(*parts, strict=True))
    return accepted, recovered
