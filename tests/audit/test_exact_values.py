"""Enumerated values refute mistakes that are too small for samples, and tables of round numbers refute nothing."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Call
from torch import Tensor

from specbench.audit import audit, audit_text
from specbench.audit.levels import LEVEL, ROUNDING
from specbench.audit.models import TabularModel, built_in, load
from specbench.audit.statistics import divergence, filtered
from specbench.config import configuration
from specbench.decoding.rules.base import at, normalise, ratio
from specbench.decoding.rules.relaxed import Relaxed
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify.token import TokenWise


class Planted(Relaxed):
    """Speculative sampling with a mistake: the residual (p - share q)+, the acceptance min(1, factor p / q), or a top-k
    filter of p without renormalisation."""

    def __init__(self, share: float = 1.0, factor: float = 1.0, k: int | None = None) -> None:
        super().__init__("planted", [1.0])
        self.share, self.factor, self.k = share, factor, k

    def kept(self, r: Tensor) -> Tensor:
        return r if self.k is None else torch.where(r >= r.topk(self.k, dim=-1).values[..., -1:], r, 0.0)

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return ratio(self.factor * at(self.kept(r), token), at(q, token))

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return ratio(self.factor * self.kept(r), q)

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return normalise((self.kept(r) - self.share * q).clamp_min(0), r)


CHAIN, WINDOW, TREE = "method=sd window=2", "method=sjd window=3", "method=eagle1 tree=[[0],[1],[0,0]]"


def method_of(words: str, model: TabularModel, rule: Relaxed | None = None) -> audit.Method:
    method = audit.assemble(configuration.compose(words.split()), model)
    assert isinstance(method, audit.Method)
    return method if rule is None else replace(method, config=replace(method.config, rule=rule))


@pytest.mark.parametrize("mistake", [{"share": 0.98}, {"share": 0.995}, {"share": 0.999}, {"factor": 0.999}, {"k": 2}])
def test_a_small_mistake_of_a_rule_is_refuted(mistake: dict[str, float]) -> None:
    """2,000 sequences do not show a total variation of some thousandths; `audit.margin` lets them pass."""
    for words, name in ((CHAIN, "v3t5"), (WINDOW, "v4t8"), (TREE, "v8t4"), (CHAIN, "m64t8")):
        model = built_in(name)
        row = audit.measure(method_of(words, model, Planted(**mistake)), model, 2000, margin=0.5)
        assert row["verdict"] == "not lossless", (words, name)
        assert row["emitted_tv"] > 1e-4
        assert "k" in mistake or row["p_value"] > LEVEL
        if words == CHAIN and not model.grams:
            assert row["tv_exact"] > ROUNDING


def test_without_a_mistake_the_rule_is_lossless() -> None:
    for words, name in ((CHAIN, "v3t5"), (WINDOW, "v4t8"), (TREE, "m4t24"), (CHAIN, "m64t8")):
        model = built_in(name)
        row = audit.measure(method_of(words, model, Planted()), model, 2000, margin=1)
        assert row["emitted_tv"] < ROUNDING
        assert row["verdict"] == "lossless", row["exercised"]


def test_what_is_not_enumerated_is_not_called_lossless() -> None:
    model = built_in("v3t5")
    for words in ("method=vanilla", "method=eagle_block window=2", "method=eagle_traversal tree=[[0],[1],[0,0]]"):
        row = audit.measure(method_of(words, model), model, 2000, margin=0.5)
        assert (row["emitted_tv"], row["verdict"]) == (None, "not refuted"), words


def test_the_sequences_of_an_inexact_method_follow_its_own_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is replaced by one that verifies with another strength: as lossy, but not what the rule defines."""
    model = built_in("v3t5")
    method = method_of("method=cool_sd delta=2 drafter=eagle window=3", model)
    row = audit.measure(method, model, 20_000)
    assert row["verdict"] == "not lossless"
    assert row["p_enumerated"] > 0.001  # the seed is fixed
    rule, decide = method.config.rule, TokenWise.decide
    weaker = method_of("method=cool_sd delta=1.5 drafter=eagle window=3", model).config.rule
    monkeypatch.setattr(TokenWise, "decide", lambda self, case: decide(self, replace(case, rule=weaker)))
    other = audit.measure(method, model, 20_000)
    assert method.config.rule is rule
    assert other["p_enumerated"] < LEVEL
    assert len(audit_text.notes([other])) == len(audit_text.notes([row])) + 1


def test_the_exit_code_is_1_for_a_refuted_method(call: Call) -> None:
    words = ("audit", "audit.samples=2000", "audit.margin=0.5", "audit.model=v3t5")
    assert call(*words, "method=cool_sd", "drafter=eagle", "window=2", "delta=1.1")[0] == 1
    assert call(*words, "method=sd", "window=2")[0] == 0


# --- tables of round numbers ------------------------------------------------------------------------------------------


def round_rows() -> Tensor:
    """All distributions over three tokens in tenths, (n, 3) float32."""
    tenths = [(a, b, 10 - a - b) for a in range(11) for b in range(11 - a)]
    return torch.tensor(tenths, dtype=torch.float64).div(10).float()


@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(top_p=share / 10) for share in range(1, 10)),
        *(Sampling(top_k=k) for k in (1, 2)),
        Sampling(temperature=0),
        Sampling(temperature=0.7, top_k=2),
        Sampling(temperature=1.3, top_p=0.6),
        Sampling(top_k=2, top_p=0.5),
        Sampling(top_n_sigma=0.5),
        Sampling(top_p=0.8, entropy_temperature=(2.5, 3.0, 0.6)),
    ],
)
def test_the_reference_keeps_the_tokens_that_the_sampler_keeps(sampling: Sampling) -> None:
    """Shares that reach a bound exactly, equal probabilities, and probabilities of zero."""
    logits = round_rows().log()
    expected, actual = filtered(logits, sampling), sampling.probs(logits)
    assert torch.equal(expected > 1e-12, actual > 1e-12)
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0.7, 0.2, 0.1], "top_p=0.7"),
        ([0.7, 0.2, 0.1], "top_p=0.9"),
        ([0.2, 0.6, 0.2], "top_p=0.6"),
        ([0.2, 0.6, 0.2], "top_p=0.8"),
        ([0.5, 0.3, 0.2], "top_p=0.5"),
        ([0.5, 0.3, 0.2], "top_p=0.8"),
        ([0.4, 0.2, 0.4], "top_k=1"),
        ([0.4, 0.2, 0.4], "temperature=0"),
        ([0.25, 0.5, 0.25], "top_p=0.5"),
        ([0.3, 0.3, 0.4], "top_k=2 top_p=0.4"),
    ],
)
def test_no_method_is_refuted_on_a_table_of_round_numbers(tmp_path: Path, row: list[float], words: str) -> None:
    tables = {f"{name}{t}": np.tile(row, (3**t, 1)) for name, t in itertools.product("pq", range(4))}
    np.savez(tmp_path / "mine.npz", **tables)
    model = load(str(tmp_path / "mine.npz"))
    for method in ("method=vanilla", "method=sjd window=2", "method=eagle1 tree=[[0],[1]]", "method=sd window=2"):
        measured = audit.measure(method_of(f"{method} {words}", model), model, 2000, margin=0.5)
        assert measured["verdict"] != "not lossless", method


def test_the_divergence_of_nodes_bounds_that_of_sequences() -> None:
    """40,000 sequences of 243: the estimate has a standard error of about sqrt(2 KL / N), and 1,024 sequences give the
    sum of the nodes to some percent. The relaxed windows see more than the prefix, so that their sum is larger."""
    model = built_in("v3t5")
    for words in (CHAIN + " rule=cool delta=2", WINDOW + " rule=uniform delta=2", CHAIN, "method=vanilla"):
        row = audit.measure(method_of(words, model), model, 40_000, margin=1)
        near = 5 * math.sqrt(2 * max(row["kl"], 1e-4) / row["samples"])
        if words == "method=vanilla":
            assert row["emitted_kl_sum"] is None
        else:
            assert row["emitted_kl_sum"] > 0.9 * row["kl"] - near
        assert (row["kl"] > near) == ("rule" in words)
        if row["kl_exact"] is not None:
            assert abs(row["kl"] - row["kl_exact"]) < near
    impossible = torch.tensor([0.5, 0.5, 0.0]).double()
    assert divergence(torch.tensor([2.0, 1, 1]), torch.tensor([1.0, 2, 0]), impossible) is None
