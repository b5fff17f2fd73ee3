"""From logits to distributions, and from distributions to tokens. The code for other devices runs here on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specbench.audit.statistics import filtered
from specbench.decoding.rng import BITS
from specbench.decoding.sampling import Sampling, draw, draw_exactly, top_exactly

#: A session whose grammar allows every token.
FREE = SimpleNamespace(constrain=lambda logits, positions: logits)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [3.0, 7.5])
def test_guidance_of_rounded_logits_is_mixed_in_float32(scale: float) -> None:
    """With bfloat16 arithmetic the distribution used to change by 0.003 to 0.012."""
    cond = 2 * normal(64, 1, 16384)
    logits = torch.cat([cond, cond + 0.5 * normal(64, 1, 16384, seed=1)]).bfloat16()
    conditional, unconditional = logits.double().chunk(2)
    expected = (unconditional + scale * (conditional - unconditional)).softmax(-1)
    actual = Sampling(cfg_scale=scale).distributions(logits, FREE, torch.zeros(64, 1).long()).p
    assert actual.dtype == torch.float32
    assert (0.5 * (actual - expected).abs().sum(-1)).max() < 1e-5


def test_top_p_keeps_the_token_at_which_the_share_is_reached() -> None:
    """Four equal logits: softmax gives 1/4 each, without any rounding. A token stays if the tokens before it have at
    most the share, so three stay at 1/2 and at 5/8. The audit's own definition agrees."""
    for top_p, count in ((0.5, 3), (0.625, 3), (0.25, 2), (0.75, 4)):
        sampling = Sampling(top_p=top_p)
        for probs in (sampling.probs(torch.zeros(1, 4)), filtered(torch.zeros(1, 4), sampling)):
            assert int((probs > 0).sum()) == count
            assert probs.max() == pytest.approx(1 / count)


def test_the_log_probabilities_are_computed_before_the_filters() -> None:
    logits, nodes = 2 * normal(3, 4, 50), torch.tensor([[0, 2, 3], [0, 1, 1], [0, 3, 2]])
    tokens = torch.randint(50, nodes.shape, generator=torch.Generator().manual_seed(0))
    full = (logits / 0.7).log_softmax(-1)[torch.arange(3)[:, None], nodes, tokens]
    for sampling in (Sampling(0.7), Sampling(0.7, top_k=3), Sampling(0.7, top_p=0.5)):
        actual = sampling.distributions(logits, FREE, nodes)
        torch.testing.assert_close(actual.log_prob(nodes, tokens), full)
        torch.testing.assert_close(actual.unfiltered(), (logits / 0.7).softmax(-1))
    greedy = Sampling(0.0).distributions(logits, FREE, nodes)
    assert torch.equal(greedy.p.sum(-1), torch.ones(3, 4))
    torch.testing.assert_close(greedy.unfiltered(), logits.softmax(-1))
    forbidden = Sampling().distributions(torch.tensor([[[0.0, -torch.inf]]]), FREE, nodes[:1, :1])
    assert forbidden.log_prob(nodes[:1, :1], torch.tensor([[1]])).item() == pytest.approx(-87.498, abs=1e-3)


def test_an_exact_draw_gives_every_token_its_share_of_all_uniforms() -> None:
    """Counts all 2**23 uniforms, without sampling: the number that gives each token follows from where each token
    begins. A share may be rounded up or down."""
    size = 400
    probs = (3 * normal(size)).softmax(-1)
    probs[::3] = 0
    probs /= probs.sum()
    low, high, token = torch.zeros(size).long(), torch.full((size,), 1 << BITS), torch.arange(size)
    for _ in range(BITS + 1):  # the first uniform that gives this token or a later one
        middle = (low + high) // 2
        reached = draw_exactly(probs.expand(size, -1), middle.clamp_max((1 << BITS) - 1) * 2.0**-BITS) >= token
        low, high = torch.where(reached, low, middle + 1).clamp_max(1 << BITS), torch.where(reached, middle, high)
    shares = torch.cat([high[1:], torch.tensor([1 << BITS])]) - high
    # float32 rounding scales all shares by the distribution's sum, which is 1 within 2**-24 per token
    assert (shares - probs.double() * 2**BITS).abs().max() < 1 + probs.max() * size / 2
    assert (shares[::3] == 0).all()


@pytest.mark.parametrize("size", [1000, 200_000])
def test_an_exact_draw_gives_no_token_of_probability_zero(size: int) -> None:
    """A floating-point sum would do so at its end: it continues to grow, or shrinks, where no probability is left to
    add."""
    at = torch.arange(size)
    rows = torch.stack([
        torch.where(at < size // 2, 1.0, 0.0),  # half of all, then nothing
        torch.where(at >= size - 2, 1.0, 0.0),
        torch.where(at % 997 == 0, (3 * normal(size)).exp(), 0.0),  # islands
        torch.where(at == 7, 1.0, 1e-13),  # one token, and others that are rounded to nothing
        torch.where(at < 3, 0.0, normal(size, seed=2).square()),
    ])  # fmt: skip
    rows /= rows.double().sum(-1, keepdim=True).float()
    u = torch.cat(
        [torch.tensor([0.0, 2.0**-23, 0.5, 1 - 2.0**-23]), torch.rand(60, generator=torch.Generator().manual_seed(1))]
    )
    u = (u * 2**BITS).floor() * 2.0**-BITS
    tokens = torch.stack([draw_exactly(rows, uniform.expand(5)) for uniform in u], 1)
    assert (rows.gather(1, tokens) > 0).all()
    assert (tokens[3] == 7).all()
    mass = rows.double().cumsum(1)
    below = mass.gather(1, tokens) - rows.gather(1, tokens)
    # inversion: u is in the token's interval, within the error of sums of `size` probabilities that are rounded down
    slack = size * 2.0**-37
    assert (below <= u * mass[:, -1:] + slack).all()
    assert (u * mass[:, -1:] <= mass.gather(1, tokens) + slack).all()


def test_an_exact_draw_does_not_depend_on_the_batch_and_agrees_with_the_sum_on_the_cpu() -> None:
    probs = (3 * normal(30, 5, 700)).softmax(-1)
    u = (torch.rand(30, 5, generator=torch.Generator().manual_seed(0)) * 2**BITS).floor() * 2.0**-BITS
    tokens = draw_exactly(probs, u)
    assert torch.equal(torch.cat([draw_exactly(probs[i : i + 1], u[i : i + 1]) for i in range(30)]), tokens)
    assert torch.equal(tokens, draw(probs, u))


def test_an_exact_draw_from_an_invalid_distribution_stays_in_range() -> None:
    """The image stops with an error later. Until then its token is a valid index."""
    rows = torch.tensor([[torch.nan] * 3, [0.0] * 3, [-1.0, 0.0, 0.0], [torch.inf, 0.0, 1.0]])
    tokens = draw_exactly(rows, torch.full((4,), 0.5))
    assert ((tokens >= 0) & (tokens < 3)).all()


def test_of_equal_scores_the_first_come_first() -> None:
    """The noise of a race has 2**23 values: of 8,192 equal probabilities, the two largest scores are often equal."""
    score = torch.tensor([[0.0, 3.0, 1.0, 3.0, torch.nan, 3.0, 7.5], [1.0, 0.0, 0.0, 0.0, 0.0, -1.0, 2.0]])
    assert top_exactly(score, 5).tolist() == [[6, 1, 3, 5, 2], [6, 0, 1, 2, 3]]
    score = normal(20, 300).abs()
    assert torch.equal(top_exactly(score, 9), score.topk(9).indices)
