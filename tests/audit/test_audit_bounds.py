"""The power of an audit: the upper limit of a distance, n-grams of long sequences, drafts shorter than a sequence, and
models of real classes."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import mutants
import pytest
import torch
from test_audit import drawn

from specbench.audit import densities, model_recipes, sizes, statistics, tiny
from specbench.audit.audit import assemble, measure
from specbench.audit.levels import LEVEL
from specbench.audit.models import Subject, built_in
from specbench.audit.statistics import filtered, of_grams, of_sequence
from specbench.audit.tabular import random_tables, sequence_probs
from specbench.audit.verdicts import verdict
from specbench.config import configuration
from specbench.decoding import rules
from specbench.decoding.sampling import Sampling

ROOT = Path(__file__).resolve().parents[2]


def row_of(arguments: str, model: Subject, samples: int, margin: float = 1.0) -> dict:
    return measure(assemble(configuration.compose(arguments.split()), model), model, samples, margin=margin)


@pytest.mark.parametrize(
    ("limit", "cells"),
    [(statistics.plug_in_limit, 2), (statistics.quadratic_limit, 64), (statistics.quadratic_limit, 4096)],
)
def test_a_limit_is_rarely_below_the_true_variation(limit, cells: int) -> None:
    """At level 0.975 a limit misses 5 of 200 times; more than 15 misses have a chance of 1 in 10,000."""
    for far in (0.0, 0.01, 0.1, 0.5):
        g = torch.Generator().manual_seed(cells)
        probs, other = (torch.randn(2, cells, generator=g, dtype=torch.float64) * 1.5).softmax(-1)
        moved = (1 - far) * probs + far * other
        moved, even = moved / moved.sum(), probs / probs.sum()
        true = 0.5 * float((moved - even).abs().sum())
        missed = sum(limit(drawn(moved, 3000, seed), even, statistics.TAIL) < true for seed in range(200))
        assert missed <= 15, far


def test_the_quadratic_limit_is_not_raised_by_many_cells() -> None:
    probs = sequence_probs(random_tables(4, 8, seed=3, sharpness=1.5))
    probs /= probs.sum()
    seen = drawn(probs, 200_000, 0)
    plug_in = statistics.plug_in_limit(seen, probs, statistics.TAIL)
    assert statistics.upper_limit(seen, probs) < 0.03 < 0.08 < plug_in


def test_many_cells_bias_the_variation_of_counts_but_not_of_one_event() -> None:
    """With 65,536 sequences and 200,000 samples, the counts of a relaxed method look farther away than the method is.
    The event's standard error is at most 0.0011; five standard errors are exceeded once in two million seeds."""
    probs, moved = (sequence_probs(random_tables(4, 8, seed=seed, sharpness=1.5)) for seed in (3, 4))
    moved = 0.8 * probs + 0.2 * moved
    probs, moved = probs / probs.sum(), moved / moved.sum()
    true = 0.5 * float((moved - probs).abs().sum())
    seen = drawn(moved, 200_000, 0)
    assert statistics.total_variation(seen, probs) > true + 0.01
    assert abs(statistics.excess(seen, probs, moved > probs) - true) < 0.0056


def test_grams_of_a_markov_model_are_marginals_of_its_sequences() -> None:
    tables = random_tables(3, 6, seed=5, order=2)
    tables = [t.double() / t.double().sum(-1, keepdim=True) for t in tables]
    full = sequence_probs([table[torch.arange(3**t) % len(table)] for t, table in enumerate(tables)]).view(*[3] * 6)
    grams = of_grams(tables, 3)
    assert [(m.start, m.length) for m in grams] == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 2), (5, 1)]
    for m in grams:
        others = [d for d in range(6) if not m.start <= d < m.start + m.length]
        assert torch.allclose(full.sum(others).flatten(), m.probs, atol=1e-12)
    again = of_sequence([table[torch.arange(3**t) % len(table)] for t, table in enumerate(tables)])
    assert torch.equal(again[0].probs, full.flatten())


def test_the_samplings_definition_is_what_sampling_does() -> None:
    logits = torch.randn(500, 6, generator=torch.Generator().manual_seed(1)) * 2
    for sampling in (
        Sampling(),
        Sampling(0.7, 3),
        Sampling(1.3, None, 0.8),
        Sampling(0.9, 4, 0.7),
        Sampling(0.0),
        Sampling(1, 9),
        Sampling(1.4, entropy_temperature=(2.5, 3.0, 0.6)),
        Sampling(0.9, 4, 0.7, entropy_temperature=(2.5, 0.5, 0.2)),
    ):
        assert torch.allclose(sampling.probs(logits).double(), filtered(logits, sampling), atol=1e-6), sampling


def test_a_verdict_needs_a_bound() -> None:
    model = built_in("v3t5")
    assert row_of("method=sd window=2", model, 1000, margin=0.03)["verdict"] == "undecided"
    row = row_of("method=sd window=2", model, 20_000, margin=0.05)
    assert row["verdict"] == "lossless"
    assert row["tv_high"] <= 0.05
    assert verdict([row | {"p_value": LEVEL / 2}]) == "not lossless"


def test_a_window_that_is_refilled_wrongly_is_caught() -> None:
    """A window longer than the sequence is never refilled. A sampler with a wrong refill had the same row as the
    correct one, because the audit covered only windows of 16 and 64."""
    model = built_in("v3t5")
    intact = row_of("method=sjd", model, 4000)
    assert intact["verdict"] == "undecided"
    with mutants.applied(mutants.NAMED["refill_with_token_0"]):
        assert row_of("method=sjd", model, 4000) == intact
        for model in (built_in("v3t5"), built_in("m4t24")):
            for method in ("sjd", "sjd_pac"):
                cfg = configuration.compose([f"method={method}"])
                further = next(sizes.variants(cfg, {"method"}, model))
                assert row_of(f"method={method} {' '.join(further)}", model, 4000)["verdict"] == "not lossless"


def test_mutants_are_caught_and_undone() -> None:
    """One mutant of every group; `make mutants` runs all."""
    before = rules.Relaxed.accept.__code__, rules.Relaxed.residual.__code__
    for name, model in (
        ("residual_is_target", built_in("v8t4")),
        ("p_of_the_wrong_depth", built_in("v8t4")),
        ("coarse_numbers", built_in("v8t4")),
        ("cache_not_compacted", tiny.built_in("llamagen_tiny")),
        ("bonus_under_the_condition_before", densities.built_in("d1t4")),
    ):
        mutant = mutants.NAMED[name]
        jobs = mutants.jobs(mutant.method, [model])[:2]
        row = mutants.caught(mutant, jobs, [mutants.decoded(job) for job in jobs], 4000)
        assert row["samples"] <= 4000
    assert (rules.Relaxed.accept.__code__, rules.Relaxed.residual.__code__) == before
    harmless = replace(mutant, changes={})
    with pytest.raises(RuntimeError, match="bites"):
        mutants.caught(harmless, jobs, [mutants.decoded(job) for job in jobs], 1000)


@pytest.mark.parametrize("name", mutants.NAMED)
def test_a_mutant_still_has_a_place(name: str) -> None:
    """Its old text is in the code exactly once, and the change affects code that is executed."""
    with mutants.applied(mutants.NAMED[name]) as changed:
        assert changed


def test_a_mistake_with_continuous_tokens_changes_the_decoded_sequences() -> None:
    """Three such mutants no longer matched the code that they patch."""
    audits, mistakes = {}, [mutant for mutant in mutants.NAMED.values() if mutant.method.startswith("cspd")]
    for method in {mutant.method for mutant in mistakes}:
        names = model_recipes.DENSITIES if method == "cspd" else ("d2t3",)
        jobs = mutants.jobs(method, [densities.built_in(name) for name in names])
        audits[method] = [(job, mutants.decoded(job)) for job in jobs]
    for mutant in mistakes:
        with mutants.applied(mutant):
            assert any(not torch.equal(mutants.decoded(job)[0], before[0]) for job, before in audits[mutant.method]), (
                mutant
            )


def test_the_committed_mutants_match_the_script() -> None:
    with (ROOT / "results/mutants.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert [(row["mutant"], row["mistake"]) for row in rows] == [(m.name, m.mistake) for m in mutants.MUTANTS]
    assert all(bool(row["samples"]) != bool(row["test"]) for row in rows)
    assert [row["test"] for row in rows] == [m.test or "" for m in mutants.MUTANTS]
    assert sum(row["ks"] == "" for row in rows) >= 20
    assert sum(row["ks"] != "" for row in rows) >= 5


@pytest.mark.parametrize("name", ["m4t24", "m64t8"])
def test_long_sequences_are_lossless(name: str) -> None:
    row = row_of("method=scd window=3", built_in(name), 3000)
    assert row["verdict"] == "lossless"
    assert row["tv_low"] == 0
    assert row["tv_exact"] is row["tv_bound"] is None
    lossy = row_of("method=cool_sd drafter=eagle window=3 delta=2", built_in(name), 3000)
    assert lossy["verdict"] == "not lossless"
    assert lossy["tv_low"] > 0.02


@pytest.mark.usefixtures("rows_together")
@pytest.mark.parametrize("name", model_recipes.TINY)
def test_a_real_model_has_the_distribution_that_it_is_compared_with(name: str) -> None:
    model = tiny.built_in(name)
    [whole] = model.marginals(Sampling(cfg_scale=2.0))
    assert len(whole.probs) == model.vocab**model.length
    assert float(whole.probs.sum()) == pytest.approx(1)
    [other] = model.marginals(Sampling())
    assert 0.5 * float((whole.probs - other.probs).abs().sum()) > 0.1  # guidance matters
    row = row_of("method=vanilla cfg_scale=2", model, 2000)
    assert row["verdict"] == "not refuted"
    assert row_of("method=vanilla cfg_scale=1", model, 2000)["verdict"] == "not refuted"


@pytest.mark.usefixtures("rows_together")
@pytest.mark.parametrize("method", ["sd window=3", "eagle1 tree=[[0],[1],[0,0]]", "medusa rule=exact tree=[[0],[1]]"])
def test_real_drafters_on_real_models(method: str) -> None:
    row = row_of(f"method={method} cfg_scale=2", tiny.built_in("chameleon_tiny"), 2000)
    assert row["verdict"] == "lossless"
    assert row["accepted_length"] > 1.2


def test_what_the_grammar_forbids_is_counted() -> None:
    model = tiny.built_in("chameleon_tiny")
    tokens = torch.tensor([[0, 1, 2, 4, 3, 0, 1, 4, 5], [0, 1, 4, 4, 3, 0, 1, 4, 5], [0, 1, 2, 4, 3, 0, 1, 4, 4]])
    codes, allowed = model.free(tokens)
    assert codes[0].tolist() == [0, 1, 2, 3, 0, 1]
    assert allowed.tolist() == [True, False, False]
