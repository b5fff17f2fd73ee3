"""A vocabulary of 8,192, as the tokenizers of real models have: sampling, drafts and verification keep the target's
distribution, and logits in bfloat16 are sampled as they are."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.audit import audit
from specbench.audit.models import TabularModel
from specbench.audit.statistics import filtered
from specbench.audit.tabular import random_tables
from specbench.config import configuration
from specbench.decoding.loop import decode
from specbench.decoding.sampling import Sampling, draw, draw_exactly

VOCAB, LENGTH, IMAGES = 8192, 4, 400
#: Independent positions: a table of one row each. At sharpness 3 the most probable token has 0.02 to 0.2, as in real
#: models; the drafter is 0.3 away in total variation.
P = random_tables(VOCAB, LENGTH, seed=1, sharpness=3.0, order=0)
Q = random_tables(VOCAB, LENGTH, seed=2, sharpness=3.0, near=P, distance=0.4, order=0)
MODEL = TabularModel("8192 codes", P, Q, torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(3)), grams=1)
GROUPS = 24


def groups(position: int) -> Tensor:
    """Group (V,) int64 of each token: by the ratio of target and drafter, so that a draft that is accepted too often
    shows; of about equal probability."""
    order = (P[position][0] / Q[position][0]).argsort()
    mass = P[position][0].double()[order].cumsum(0)
    out = torch.empty(VOCAB, dtype=torch.int64)
    out[order] = (mass * GROUPS).long().clamp_max(GROUPS - 1)
    return out


def fits(tokens: Tensor, tables: list[Tensor] = P) -> float:
    """The smallest p-value of the positions' chi-square tests, times their number (Bonferroni)."""
    values = []
    for t in range(LENGTH):
        group = groups(t)
        probs = torch.zeros(GROUPS, dtype=torch.float64).index_add_(0, group, tables[t][0].double())
        values.append(tiny.fit(group[tokens[:, t]], probs))
    return min(values) * LENGTH


def decoded(words: str) -> Any:
    method = audit.assemble(configuration.compose(words.split()), MODEL)
    return decode(method.config, None, tiny.rng(IMAGES))


@pytest.mark.parametrize(
    "words",
    [
        "method=vanilla",
        "method=sjd window=3",
        "method=scd window=3",
        "method=sjd_pac window=3 width=2 depth=1 tree=comb",
        "method=eagle_chain window=2 verification=block",
        "method=eagle1 tree=[[0],[1],[0,0]]",
        "method=eagle1 tree=[[0],[1],[0,0]] verification=traversal",
    ],
)
def test_exact_methods_keep_the_distribution(words: str) -> None:
    out = decoded(words)
    # One test in ten thousand would fail by chance; the seeds are fixed, so none does by accident.
    assert fits(out.tokens) > 1e-4
    assert (out.steps.float().mean() < LENGTH) != (words == "method=vanilla")  # drafts are accepted, or there are none


def test_a_relaxed_rule_is_seen() -> None:
    assert fits(decoded("method=sjd window=3 rule=uniform delta=4").tokens) < 1e-4


def test_draws_have_their_distribution_to_the_rarest_tokens() -> None:
    """By a float32 sum over 8,192 tokens, and by integers: each token has its share, however small."""
    probs = P[0].expand(64, -1)
    u = (torch.arange(64 * 4096).view(64, 4096) + 0.5) / (64 * 4096)
    for way in (draw, draw_exactly):
        tokens = torch.stack([way(probs, u[:, i]) for i in range(0, 4096, 16)], -1).flatten()
        share = torch.bincount(tokens, minlength=VOCAB).double() / len(tokens)
        # Evenly spaced uniforms give each token its probability, up to one value of the grid at either end.
        assert (share - P[0][0].double()).abs().max() < 2 / len(tokens) + 1e-6


def test_logits_in_bfloat16_are_sampled_as_they_are() -> None:
    logits = (3 * torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(5))).to(torch.bfloat16)
    for sampling in (Sampling(), Sampling(temperature=0.9, top_k=1000)):
        probs = sampling.probs(logits)
        assert probs.dtype == torch.float32
        wanted = filtered(logits.float(), sampling)
        ties = logits.float().eq(logits.float().topk(1000).values[:, -1:])  # of the 1000th: all are kept
        assert ties.sum() > 16  # bfloat16 has three digits
        assert (probs - wanted).abs().max() < 1e-5
