"""Cool-SD's Theorem 2 on tabular models, by enumeration: expected accepted length (Eq. 7) and the bound on the total
variation (Eq. 8) of one round, for any rule on a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.audit.tabular import Tables
from specbench.decoding.rules import Rule


def round_figures(p: Tables, q: Tables, rule: Rule, window: int) -> tuple[float, float]:
    """(E[tau + 1], bound on TV) of one round with a chain of `window` drafts from the empty prefix; needs p, q of
    `window` tables."""
    vocab = p[0].shape[1]
    reach = torch.ones(1, dtype=torch.float64)  # Q(x_1:i) prod f over all prefixes of length i
    expected, bound = 1.0, 0.0
    for i in range(window):
        n = len(p[i])
        token = torch.arange(vocab).expand(n, vocab)
        depth = torch.full((n, vocab), i + 1)
        laws = [t[i].unsqueeze(1).expand(n, vocab, vocab) for t in (p, q)]
        f = rule.accept(laws[0], laws[1], token, depth).double()  # (n, V)
        g = _residual(rule, p[i], q[i], i + 1)
        kept = q[i].double() * f
        rejected = (q[i].double() * (1 - f)).sum(-1, keepdim=True)
        off = (kept - p[i].double() + g * rejected).abs().sum(-1)
        bound += 0.5 * float((reach * off).sum())
        reach = (reach[:, None] * kept).flatten()
        expected += float(reach.sum())
    return expected, bound


def _residual(rule: Rule, p: Tensor, q: Tensor, depth: int) -> Tensor:
    """G (n, V) in float64. Rules whose residual depends on the rejected token are outside Theorem 2's form."""
    token = torch.zeros(len(p), dtype=torch.int64)
    return rule.residual(p, q, token, torch.full_like(token, depth)).double()
