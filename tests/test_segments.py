"""SJD-SV's segments: runs of rising probability, computed by hand, and their effect on the distribution of
sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor

from specbench.audit import models, sizes
from specbench.config import configuration
from specbench.decoding import rules
from specbench.decoding.trees import build, chain_paths
from specbench.decoding.verify import Case, Draft, TokenWise, VerificationResult
from specbench.decoding.verify.segment import Segment

#: Random numbers of the first node of a run, one per row.
GRID = torch.arange(20) / 20 + 0.025


def chain(t: Sequence[float], ratio: Sequence[float], rows: int) -> tuple[Tensor, Draft]:
    """A chain of tokens 0 from a vocabulary of three. The target gives each with probability t, the drafter with t /
    ratio."""
    p, q = torch.tensor([*t, 0.2]), torch.tensor(t) / torch.tensor(ratio)
    p, q = (torch.stack([x, 0.75 * (1 - x), 0.25 * (1 - x)], -1).expand(rows, -1, -1) for x in (p, q))
    valid = torch.ones(rows, len(t) + 1, dtype=torch.bool)
    return p, Draft(build(chain_paths(len(t))), torch.zeros(rows, len(t) + 1, dtype=torch.int64), q, valid)


def decide(p: Tensor, draft: Draft, alpha: float = 0.8) -> VerificationResult:
    """Verifies with the numbers of the grid for every node of a row."""
    numbers = GRID[: len(p), None, None].expand(-1, 2, p.shape[1])
    return Segment(alpha).decide(Case(p, draft, rules.exact(), numbers, p, None))


@pytest.mark.parametrize(
    ("t", "ratio", "alpha", "limits"),
    [
        # runs of two tokens each: 0.3 / 0.4 is below alpha, so both are tested; so is 0.4 / 0.6, where 0.5 * 2 = 1
        ([0.1, 0.3, 0.2, 0.4], [0.5, 0.5, 2.0, 0.5], 0.8, {0.25: 4, 0.5: 1, 1.0: 0}),
        # 0.3 / 0.4 is enough: the first token is kept untested
        ([0.1, 0.3, 0.2, 0.4], [0.5, 0.5, 2.0, 0.5], 0.7, {0.5: 4, 1.0: 0}),
        # one run: the last two tokens have 0.8 of its 0.9, which is enough; of the first two, with 0.3, both are tested
        ([0.1, 0.2, 0.6], [1.0, 0.9, 0.4], 0.8, {0.36: 3, 0.9: 2, 1.0: 1}),
        # only the last token decides on each part: the first part is kept if the longer ones are not
        ([0.1, 0.2, 0.6], [0.8, 0.6, 0.4], 0.0, {0.4: 3, 0.6: 2, 0.8: 1, 1.0: 0}),
        # falling: one run per token, as token-wise
        ([0.6, 0.2, 0.1], [0.9, 0.5, 2.0], 0.8, {0.5: 3, 0.9: 1, 1.0: 0}),
    ],
)
def test_a_chain_by_hand(t: list[float], ratio: list[float], alpha: float, limits: dict[float, int]) -> None:
    p, draft = chain(t, ratio, len(GRID))
    result = decide(p, draft, alpha)
    wanted = [next(length for limit, length in limits.items() if u < limit) for u in GRID.tolist()]
    assert result.length.tolist() == wanted
    for row, length in enumerate(wanted):
        expected = p[row, length]
        if length < len(t):
            rest = (expected - draft.probs[row, length]).clamp_min(0)
            expected = rest / rest.sum()
        torch.testing.assert_close(result.next_probs[row], expected)
        assert result.path[row].tolist() == [min(i, length) for i in range(1, len(t) + 1)]
    of_first = max(limit for limit, length in limits.items() if length)  # where the first token is kept
    torch.testing.assert_close(result.first, torch.full_like(result.first, of_first))


def test_a_shortened_draft_is_a_shorter_chain() -> None:
    p, draft = chain([0.1, 0.3, 0.4], [0.5, 0.5, 0.5], len(GRID))
    result = decide(p, replace(draft, valid=torch.arange(4).expand(len(GRID), -1) < 3))
    shorter = decide(p[:, :3], chain([0.1, 0.3], [0.5, 0.5], len(GRID))[1])
    assert torch.equal(result.length, shorter.length)
    torch.testing.assert_close(result.next_probs[result.length == 2], p[result.length == 2, 2])
    none = decide(p, replace(draft, valid=torch.arange(4).expand(len(GRID), -1) < 1))
    assert torch.equal(none.next_probs, p[:, 0])
    assert none.length.eq(0).all() & none.first.eq(0).all()


def test_a_chain_of_one_is_verified_token_by_token() -> None:
    p, draft = chain([0.3], [0.45], 400)
    step = torch.zeros(400, dtype=torch.int64)
    segment, token_wise = (
        verification.verify(p, draft, rules.exact(), tiny.rng(400), step) for verification in (Segment(), TokenWise())
    )
    assert tiny.equal(vars(segment), vars(token_wise))
    assert 0 < segment.length.float().mean() < 1


def test_a_token_that_the_target_never_gives_can_be_kept() -> None:
    """It is not tested if the end of its run has the share alpha: our interpretation of the paper."""
    p, draft = chain([0.0, 0.9], [1.0, 1.0], 1)
    draft.probs[:, 0] = torch.tensor([0.5, 0.25, 0.25])
    assert decide(p, draft).length.tolist() == [2]


@pytest.mark.parametrize("engine", ["graph", "triton"])
def test_a_step_can_be_recorded(engine: str) -> None:
    with pytest.importorskip("test_capture").Case("sjd", engine) as case:
        assert not case.lint(rules.exact(), way=Segment())


def test_the_audit_refutes_segments() -> None:
    """Total variation 0.29 to 0.35 at 20,000 samples (results/audit.csv); drafts of one token have none."""
    model = models.built_in("v2t10")
    assert tiny.verdict("method=sjd_sv window=5", model, 3000) == "not lossless"
    assert tiny.verdict("method=sjd_sv window=1", model, 3000) != "not lossless"
    assert not sizes.is_exact(configuration.compose(["method=sjd_sv"]))
    assert sizes.is_exact(configuration.compose(["method=sjd"]))
