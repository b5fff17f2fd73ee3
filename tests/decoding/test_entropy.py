"""The temperature by entropy, and the acceptance by entropy, of arXiv 2510.09012."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import Call, row_of

from specbench.audit.audit import assemble, measure
from specbench.audit.models import SAMPLING, built_in
from specbench.audit.statistics import filtered
from specbench.config import configuration, parameters
from specbench.decoding.rules.thresholds import EntropyAware
from specbench.decoding.sampling import Sampling
from specbench.errors import UsageError

CURVE = (2.5, 3.0, 0.6)
CFG = "entropy_temperature=[2.5,3,0.6]"


def test_the_temperature_of_a_distribution_of_two_tokens() -> None:
    """p = (1/4, 3/4) has 0.562335 nats, so T = 1.4 (2.5 exp(-0.187445) + 0.6) = 3.741761, and its odds of 3 become
    3 ** (1 / T) = 1.341258."""
    probs = Sampling(1.4, entropy_temperature=CURVE).probs(torch.tensor([0.0, math.log(3)]))
    assert probs.tolist() == pytest.approx([1 / 2.341258, 1.341258 / 2.341258], abs=1e-6)


def test_the_filters_come_first_and_the_entropy_is_of_what_they_leave() -> None:
    """The third token is outside of top_k, so it does not count for the entropy either. At entropy 0 nothing
    changes."""
    logits = torch.tensor([[0.0, math.log(3), -0.1], [5.0, -torch.inf, -torch.inf]])
    probs = Sampling(1.4, top_k=2, entropy_temperature=CURVE).probs(logits)
    assert probs[0].tolist() == pytest.approx([1 / 2.341258, 1.341258 / 2.341258, 0], abs=1e-6)
    assert probs[1].tolist() == [1, 0, 0]
    assert torch.equal(Sampling(0.0, entropy_temperature=CURVE).probs(logits), Sampling(0.0).probs(logits))


def test_the_filtered_distribution_follows_from_the_unfiltered_one() -> None:
    logits = 3 * torch.randn(40, 9, generator=torch.Generator().manual_seed(0))
    for sampling in (
        Sampling(1.4, entropy_temperature=CURVE),
        Sampling(0.7, 4, 0.9, entropy_temperature=(2.0, 0.5, 0.3)),
    ):
        full = sampling.unfiltered.probs(logits)
        torch.testing.assert_close(full, logits.softmax(-1))
        torch.testing.assert_close(sampling.filtered_probs(full), sampling.probs(logits))


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("method=eagle1 tree=[[0],[1],[0,0]]", CFG),
        ("method=sjd window=2", CFG),
        ("method=eagle2 variant=released nodes=3 depth=2 width=2 top_k=2", CFG),
        ("method=sjd window=2", "top_n_sigma=0.7"),
    ],
)
def test_every_exact_method_stays_exact(words: str, more: str) -> None:
    """Against the distribution by its definition; without the setting the distance is 0.07 or more."""
    model = built_in("v3t5")
    method = assemble(configuration.compose([*words.split(), more]), model)
    row = measure(method, model, 4000, margin=1)
    assert row["verdict"] == "lossless"
    assert row["parameters"].endswith(more.replace("2.5,3", "2.5,3.0"))
    sampling = method.config.sampling
    filtered, plain = (
        model.marginals(s)[0].probs for s in (sampling, replace(sampling, entropy_temperature=None, top_n_sigma=None))
    )
    assert 0.5 * (filtered - plain).abs().sum() > 0.07


def test_a_list_has_three_numbers() -> None:
    for value in ("2", "[1,2]", "[1,0,1]", "[[1],2,3]"):
        with pytest.raises(UsageError, match="entropy_temperature.*3.*0"):
            configuration.compose([f"entropy_temperature={value}"])


def test_a_row_states_the_temperature_of_its_likelihoods(call: Call, tmp_path: Path) -> None:
    """It used to state 1.4, the factor of the temperature by entropy."""
    assert call("run", "method=sjd", "temperature=1.4", CFG, "n=2", "warmup=0", "metrics=none", "out=a")[0] == 0
    row = row_of(tmp_path / "a")
    assert row["perplexity_backend"].endswith("cfg_scale 3, temperature 1")
    assert row["entropy_temperature"] == "[2.5,3.0,0.6]"


def test_the_acceptance_of_a_distribution_of_two_tokens() -> None:
    """Entropy ln 2 = 0.693147, p / q = 0.5 / 0.9. With E = 1 the threshold is 0.693147 (0.5 + (u - 0.5) 0.956678), and
    u = 0.815150 where it is 0.555556; with E = 8 it is at most 0.084767."""
    r, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    acceptance = EntropyAware(1.0).accept(r, q, torch.tensor(0), torch.tensor(1))
    assert float(acceptance) == pytest.approx(0.815150, abs=1e-5)
    assert EntropyAware().acceptance(r, q, torch.tensor(1)).tolist() == [1, 1]
    assert EntropyAware(1.0).residual(r, q, torch.tensor(0), torch.tensor(1)).tolist() == [0, 1]
    sure = torch.tensor([1.0, 0.0])  # entropy 0: every token that the target can give
    assert EntropyAware().acceptance(sure, torch.tensor([1e-30, 1.0]), torch.tensor(1)).tolist() == [1, 0]


def test_every_model_takes_every_parameter_of_the_sampling() -> None:
    """lumina_mgpt2 had no top_n_sigma, which its own Jacobi mode needs."""
    for name in parameters.choices("model"):
        if not parameters.is_continuous("model", name):
            assert set(SAMPLING) <= parameters.declared("model", name), name


def test_the_filter_of_sigma_by_hand() -> None:
    """Logits 4, 2, 0, -4: their root mean square is 3, so those below 1 go; with the top three, 2.58 and 1.42."""
    logits = torch.tensor([[4.0, 2.0, 0.0, -4.0], [1.0, -torch.inf, -torch.inf, -torch.inf]])
    odds = math.exp(2)
    two = [odds / (1 + odds), 1 / (1 + odds), 0, 0]
    for sampling in (Sampling(top_n_sigma=1.0), Sampling(0.5, top_n_sigma=1.0), Sampling(1.0, 3, top_n_sigma=1.0)):
        probs = sampling.probs(logits)
        if sampling.temperature == 1:
            assert probs[0].tolist() == pytest.approx(two, abs=1e-6)
        assert (probs[0] > 0).tolist() == [True, True, False, False]
        assert probs[1].tolist() == [1, 0, 0, 0]
        torch.testing.assert_close(filtered(logits, sampling), probs.double())
    assert (Sampling(top_n_sigma=1.4).probs(logits)[0] > 0).tolist() == [True, True, True, False]
