"""The Jacobi modes of Lumina-mGPT 2 and SimpleAR, computed by hand. test_models compares them with recorded runs of
their codes."""

from __future__ import annotations

import pytest
import tiny
import torch

from specbench.audit import models
from specbench.audit.tabular import TabularTarget, random_tables
from specbench.decoding.drafters.built_in import BuiltIn
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rules import exact
from specbench.decoding.rules.relaxed import Redraw
from specbench.decoding.sampling import Sampling


def test_the_residual_by_hand() -> None:
    """Where q is below p the exact residual has no mass; here it has the target's mass. Log p = -0.69, -1.20, -1.61 has
    the root mean square 1.23, and log p of 0.97 .. 0.01 has 3.26, so that only the first token stays."""
    r, q = torch.tensor([[0.5, 0.3, 0.2], [0.97, 0.02, 0.01]]), torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.4, 0.4]])
    depth, token = torch.ones(2, dtype=torch.int64), torch.tensor([1, 1])
    target, vanilla = Redraw(), Redraw("vanilla")
    torch.testing.assert_close(target.accept(r, q, token, depth), torch.tensor([0.6, 0.05]))
    assert torch.equal(target.residual(r, q, token, depth), r)
    assert vanilla.residual(r, q, token, depth).tolist() == [[1, 0, 0], [1, 0, 0]]
    torch.testing.assert_close(vanilla.residual(r, q, token, depth), exact().residual(r, q, token, depth))
    again = Redraw("target", 1.0).residual(r, q, token, depth)
    assert again[0].tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert again[1].tolist() == [1, 0, 0]
    # the emitted tokens: 0.2 stay of the first token, 0.3 and 0.2 of the others, and 0.3 are drawn again from r
    torch.testing.assert_close(target.output_distribution(r[:1], q[:1], depth[:1]), torch.tensor([[0.35, 0.39, 0.26]]))


@torch.inference_mode()
def test_the_greedy_opening_by_hand() -> None:
    """The first token is the most probable one. The second is the most probable one after token 0 at every position,
    whatever the first token was."""
    tables = random_tables(4, 12, 3, order=1)
    steps = Decoding(
        DecoderConfig(TabularTarget(tables), BuiltIn(11, opening="greedy"), exact(), Sampling()), None, tiny.rng(60)
    )
    steps.step()
    steps.record_stats()
    assert steps.num_committed.eq(1).all()
    assert (steps.history[:, 0] == tables[0][0].argmax()).all()
    steps.step()
    draft = steps.step_stats.draft if steps.step_stats else None
    assert draft is not None
    likely = torch.stack([tables[i][0].argmax() for i in range(1, 12)])
    assert (draft.tokens[:, 1:] == likely).all()
    torch.testing.assert_close(draft.probs[0], torch.stack([tables[i][0] for i in range(1, 12)]))
    assert (steps.history[:, 1] == likely[0]).all()
    assert steps.num_committed.ge(3).all()
    steps.record_stats()
    steps.step()
    assert steps.step_stats is not None
    assert not (
        steps.step_stats.draft.unverified if steps.step_stats.draft.unverified is not None else torch.ones(1)
    ).any()


def test_a_window_becomes_shorter_by_the_tokens_before_the_last_step() -> None:
    """As in the released loop: after a step with several tokens, a draft reaches beyond `plain_from`."""
    drafter = BuiltIn(4, plain_until=1, plain_from=-3)
    config = DecoderConfig(TabularTarget(random_tables(3, 12, 3, order=1)), drafter, exact(), Sampling())
    with torch.inference_mode():
        steps, last, beyond = Decoding(config, None, tiny.rng(40)), torch.full((40,), -1), 0
        for _ in range(12):
            before = steps.num_committed.clone()
            steps.step()
            draft = steps.step_stats.draft if steps.step_stats else None
            assert draft is not None
            wanted = torch.where(before >= 1, (8 - last).clamp(0, 4), 0)
            unfinished = before < 12
            assert torch.equal(draft.valid[unfinished, 1:].sum(1), wanted[unfinished])
            beyond += int((wanted > (9 - before).clamp(0, 4))[unfinished].sum())
            last = torch.where(unfinished, before, last)
            steps.record_stats()
    assert beyond > 0


@pytest.mark.parametrize("variant", ["lumina_mgpt2", "simplear"])
def test_the_audit_refutes_both(variant: str) -> None:
    """With the exact rule and without the greedy opening, the windows are lossless."""
    model, words = models.built_in("v2t10"), f"method=jacobi_built_in variant={variant} window=4 plain_from=-2"
    assert tiny.verdict(words, model, 4000) == "not lossless"
    assert tiny.verdict(f"{words} rule=exact opening=random", model, 4000) != "not lossless"
