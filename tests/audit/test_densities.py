"""The audit of vectors: its statistics against known answers, its models, its verdicts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from specbench.audit import densities, model_recipes, statistics, verdicts
from specbench.audit.audit import measure
from specbench.audit.audit_arguments import COLUMNS
from specbench.audit.densities import alone, assemble, built_in
from specbench.audit.levels import LEVEL
from specbench.config import configuration
from specbench.decoding import continuous
from specbench.decoding.continuous import ContinuousRule
from specbench.decoding.rng import RandomStreams

CSPD = configuration.compose(["method=cspd", "model=mar_b", "criterion=exact"])


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Energy distances from fewer samples, because they need a number for every pair."""
    monkeypatch.setattr(densities, "_ENERGY", 1500)


def row_of(model: str, samples: int, seed: int = 0, **words: Any) -> dict[str, Any]:
    return measure(assemble(CSPD.changed(**words)), built_in(model), samples, seed, margin=1.0)


def test_the_energy_distance_and_its_noise() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 2, generator=g), torch.randn(40, 2, generator=g) + 1

    def mean(a: torch.Tensor, b: torch.Tensor, pairs: int) -> float:
        return sum(math.dist(i, j) for i, j in itertools.product(a.tolist(), b.tolist())) / pairs

    wanted = 2 * mean(x, y, 1600) - mean(x, x, 40 * 39) - mean(y, y, 40 * 39)
    assert statistics.energy_distance(x, y)[0] == pytest.approx(wanted, rel=1e-5)
    # 2 integral (F - G)^2 in one dimension: 0.2646 for N(0, 1) against N(1, 1), as 2 (2 E|N(1, 2)| - 2 E|N(0, 2)|) / 2
    far = 2 * (2 * math.sqrt(1 / math.pi) * math.exp(-1 / 4) + math.erf(0.5)) - 4 / math.sqrt(math.pi)
    sets = (torch.randn(3000, 1, generator=g), torch.randn(3000, 1, generator=g) + 1)
    assert statistics.energy_distance(*sets)[0] == pytest.approx(far, rel=0.1)
    # the estimate's mean and deviation for equal distributions, over 400 repetitions: the deviation of a deviation is
    # about 1 / sqrt(800) of it where tails are normal; these are heavier on one side
    distances = [statistics.energy_distance(*torch.randn(2, 150, 3, generator=g)) for _ in range(400)]
    estimates, noises = torch.tensor(distances).unbind(1)
    assert float(estimates.std()) == pytest.approx(float(noises.mean()), rel=0.2)
    assert abs(float(estimates.mean())) < 4.5 * float(estimates.std()) / 20


def test_the_models_differ_where_a_mistake_could_hide() -> None:
    pairs = [built_in(name) for name in model_recipes.DENSITIES]
    assert sorted(p.dim for p in pairs) == [1, 1, 2, 2]
    assert [p.name for p in pairs] == [f"d{p.dim}t{p.length}" for p in pairs]
    assert {p.length for p in pairs} == {3, 4, 5}
    steps = [p.target.steps for p in pairs]
    assert len(set(steps)) == 4
    assert (min(steps), max(steps)) == (4, 8)


@pytest.mark.parametrize("name", model_recipes.DENSITIES)
def test_a_built_in_model_is_a_fair_test(name: str) -> None:
    """The variances depend on condition and step. The conditions depend on tokens, on their positions and on the
    token's own position. The drafter is another model, and every call gives the same values."""
    pair, again = built_in(name), built_in(name)
    g = torch.Generator().manual_seed(0)
    n, length = 64, pair.length
    tokens, x = torch.randn(n, length, pair.dim, generator=g), torch.randn(n, pair.dim, generator=g)
    existing = torch.zeros(n, length, dtype=torch.bool)
    existing[:, 0] = True
    row, positions = torch.arange(n), torch.arange(length).expand(n, -1)

    def seen(model: densities.DensityNetwork, t: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return model.condition(t, k, row, positions, positions, length)

    z = seen(pair.target, tokens, existing)
    assert z.std(0).mean() > 0.2
    assert not torch.isclose(z[:, 0], z[:, 1]).all(-1).any()  # the token's own position
    assert not torch.isclose(z, seen(pair.target, tokens.flip(1), existing.flip(1))).all(-1).any()  # the others'
    # And no others.
    assert torch.equal(z, seen(pair.target, torch.where(existing[..., None], tokens, math.nan), existing))
    assert not torch.equal(z, seen(pair.target, torch.zeros_like(tokens), existing))
    spreads = []
    for t in range(pair.target.steps):
        step = torch.full((n,), t)
        mean, log_variance = pair.target.moments(x, step, z[:, 0])
        assert log_variance.std(0).min() > 0.05
        spreads.append(log_variance)
        for other in (pair.drafter, again.target):
            same = torch.equal(mean, other.moments(x, step, z[:, 0])[0])
            assert same == (other is again.target)
    assert torch.stack(spreads).mean(1).std(0).min() > 0.02
    # straight in the state, or not: the second difference of the mean
    line = [pair.target.moments(torch.full_like(x, at), torch.zeros(n).long(), z[:, 0])[0] for at in (-1.0, 0.0, 1.0)]
    bent = (line[0] - 2 * line[1] + line[2]).abs().max()
    assert (bent > 0.1) if name != "d1t4" else (bent < 1e-5)


def test_a_drafter_is_poor_and_the_others_are_not() -> None:
    rates = {name: row_of(name, 1000)["acceptance_rate"] for name in model_recipes.DENSITIES}
    assert rates.pop("d2t3") < 0.25
    assert all(0.45 < rate < 0.75 for rate in rates.values())


def test_what_the_target_draws_by_itself() -> None:
    pair = built_in("d2t3")
    reference, same, other = (alone(pair.target, ContinuousRule(), 300, seed) for seed in (1, 1, 2))
    assert torch.equal(reference.tokens, same.tokens)
    assert not torch.isclose(reference.tokens, other.tokens).all(-1).any()
    assert reference.tokens.shape == (300, 3, 2)
    assert torch.equal(reference.order.sort(-1).values, torch.arange(3).expand(300, 3))
    # the distribution of the first token in the order is the head's under an empty image: its mean and spread at
    # temperature 0 of all steps but x_T, where the linear model's token is keep**T x_T + constant
    line = built_in("d1t4").target
    drawn = alone(line, ContinuousRule(temperature=0.0), 4000, 0)
    first = drawn.tokens.gather(1, drawn.order[:, :1, None])[:, 0, 0]
    at_position = [first[drawn.order[:, 0] == position] for position in range(4)]
    for values in at_position:  # about 1,000 each: the deviation of a deviation is 2.2 % of it
        assert float(values.std()) == pytest.approx(0.7**4, rel=0.1)
    assert len({round(float(values.mean()), 2) for values in at_position}) == 4


def test_every_token_pair_and_direction_is_compared() -> None:
    for name in model_recipes.DENSITIES:
        pair = built_in(name)
        drawn = alone(pair.target, ContinuousRule(), 50, 0)
        compared = torch.stack(list(densities.numbers(drawn)))
        per_image, pairs = pair.length * pair.dim, (pair.length - 1) * pair.dim
        assert len(compared) == 2 * per_image + 2 * pairs + (pair.length if pair.dim > 1 else 0) + 16
        assert torch.equal(compared[:per_image], drawn.tokens.flatten(1).T)
        in_order = torch.stack([drawn.tokens[i][drawn.order[i]] for i in range(50)])
        assert torch.equal(compared[per_image : 2 * per_image], in_order.flatten(1).T)
        assert torch.equal(compared[2 * per_image], in_order[:, 0, 0] + in_order[:, 1, 0])
        assert torch.equal(compared[2 * per_image + pairs], in_order[:, 0, 0] * in_order[:, 1, 0])
        assert len(compared.unique(dim=0)) == len(compared)


def test_a_change_of_any_kind_is_seen() -> None:
    """Each change affects one thing that the others do not: a token, a token at one step, the dependence of two
    tokens."""
    target = built_in("d1t4").target
    first, second = (alone(target, ContinuousRule(), 20_000, seed) for seed in (0, 1))
    assert densities.compare(first, second)[1] > LEVEL
    g = torch.Generator().manual_seed(0)
    position = second.tokens + 0.1 * (torch.arange(4) == 2)[:, None]
    by_step = second.tokens + torch.zeros(20_000, 4).scatter_(1, second.order[:, :1], 0.1)[..., None]
    # The tokens of a position at a step keep their distribution and lose their neighbours.
    apart = second.tokens.clone()
    for t, at in itertools.product(range(4), repeat=2):
        rows = (second.order[:, t] == at).nonzero().flatten()
        apart[rows, at] = second.tokens[rows[torch.randperm(len(rows), generator=g)], at]
    for tokens in (position, by_step, apart):
        assert densities.compare(first, replace(second, tokens=tokens))[1] < LEVEL


KINDS: list[dict[str, Any]] = [{}, {"align": False}, {"criterion": "path"}]


@pytest.mark.usefixtures("rows_together")
@pytest.mark.parametrize("long", [False, True], ids=["gamma=1", "gamma=12"])
@pytest.mark.parametrize("kind", range(3), ids=["exact", "not aligned", "path"])
def test_an_exact_method_is_not_refuted(kind: int, long: bool) -> None:
    """An exact method is called lossy once in 10,000 seeds; the seed is fixed. Prefill and temperature alternate, so
    that each occurs with every kind and length and with the other; the models alternate, too."""
    gamma = 12 if long else 1
    words = KINDS[kind] | {"gamma": gamma, "prefill": 0.3 if (kind + long) % 2 else 0.0}
    words["temperature"] = 0.7 if long != (kind == 2) else 1.0
    row = row_of([*model_recipes.DENSITIES][(2 * kind + long) % 4], 5000, **words)
    assert row["verdict"] == ("not refuted" if gamma == 1 else "undecided")  # drafts of 12 have no bonus token here
    assert ("bonus_token" in verdicts.missing([row])) == (gamma == 12)
    assert row["ks"] < 1.8 * row["ks_noise"]  # both are the largest of the same distances for equal distributions
    assert row["energy"] < 4 * row["energy_noise"]
    assert 0 < row["acceptance_rate"] < 1
    assert row["proposals"] > 1
    assert row["fallbacks"] < 0.01 * row["samples"]


#: Name -> model, samples (the first and the last need 10,000 for a p-value that needs no second stage), arguments.
LOSSY: dict[str, tuple[str, int, dict[str, Any]]] = {
    "paper": ("d2t4", 10_000, {"criterion": "paper"}),
    "parallel": ("d1t4", 3000, {"verify": "parallel"}),
    "continue": ("d2t3", 3000, {"on_reject": "continue"}),
    "softened": ("d1t5", 3000, {"inner_temperature": 42.0}),
    "released": (
        "d1t4",
        5000,
        {"criterion": "paper", "verify": "parallel", "on_reject": "continue", "inner_temperature": 42.0}
        | {"prefill": 0.05, "final_noise": False},
    ),
    "MAR's last step": ("d1t5", 10_000, {"final_noise": False}),
}


@pytest.mark.usefixtures("rows_together")
@pytest.mark.parametrize("name", LOSSY)
def test_a_biased_method_is_caught(name: str) -> None:
    model, samples, words = LOSSY[name]
    row = row_of(model, samples, **words)
    assert row["verdict"] == "not lossless"
    assert row["p_value"] < LEVEL / 10
    assert row["ks"] > 1.5 * row["ks_noise"]
    assert row["energy"] > 3 * row["energy_noise"]


@pytest.mark.parametrize("name", ["d1t5", "d2t3"])
def test_an_acceptance_without_the_ratio_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log_ratios = continuous.verify.Verifier.log_ratios

    def always(self, *args):
        gain, own_ratio, sigma = log_ratios(self, *args)
        return torch.zeros_like(gain), own_ratio, sigma

    monkeypatch.setattr(continuous.verify.Verifier, "log_ratios", always)
    row = row_of(name, 5000)
    assert row["acceptance_rate"] == 1
    assert row["p_value"] < 1e-12


@pytest.mark.usefixtures("rows_together")
@pytest.mark.parametrize("criterion", ["exact", "path"])
def test_a_residual_that_forgets_the_draft_is_caught(criterion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic mistake: after a rejection the target's own distribution instead of Norm([p - q]_+)."""
    residual = continuous.verify.Verifier.residual

    def forgetful(self, *args):
        self.rule = replace(self.rule, proposals=1)  # the first proposal is taken, whatever it is
        return residual(self, *args)

    monkeypatch.setattr(continuous.verify.Verifier, "residual", forgetful)
    row = row_of("d2t4", 6000, criterion=criterion)
    assert row["p_first"] is None  # a second stage would draw ten times as many
    assert row["p_value"] < LEVEL / 10


def test_a_row_of_vectors() -> None:
    row = row_of("d2t4", 1000, seed=5, gamma=2, prefill=0.3)
    assert list(row) == list(COLUMNS)
    of_tables = set("V tv tv_low tv_high tv_noise tv_bound tv_exact tv_unbiased kl_exact kl_bound".split())
    of_tables |= {"emitted_tv", "emitted_kl_sum", "kl"}
    of_tables |= set("p_enumerated p_first accepted_length_expected same_as variant plugins".split())
    of_tables |= set("acceptance_expected p_acceptance p_drafted".split())
    assert {name for name, value in row.items() if value is None} == of_tables
    columns = ("method", "model", "T", "dim", "samples", "seed")
    assert [row[name] for name in columns] == ["cspd", "d2t4", 4, 2, 1000, 5]
    assert 1 < row["accepted_length_low"] < row["accepted_length"] < row["accepted_length_high"] < 3
    assert row_of("d2t4", 1000, seed=5, gamma=2, prefill=0.3) == row
    assert row_of("d2t4", 1000, seed=6, gamma=2, prefill=0.3)["ks"] != row["ks"]


def test_the_first_draft_is_counted_wherever_it_begins() -> None:
    """With gamma=1 its length is one more than the probability to keep the first drafted token."""
    for prefill in (0.0, 0.5):
        method, pair = assemble(CSPD.changed(gamma=1, prefill=prefill)), built_in("d1t4")
        row = measure(method, pair, 1000, margin=1.0)
        rng = RandomStreams([(0, i) for i in range(1000)])
        out = continuous.decode(pair.target, pair.drafter, method.rule, None, rng)
        step = round(4 * prefill)
        assert row["accepted_length"] == pytest.approx(1 + float(out.trace.accepted[:, step].double().mean()))
        assert row["tokens_per_step"] == pytest.approx(float((4 / out.steps.double()).mean()))
        assert row["acceptance_rate"] == pytest.approx(float(out.accepted.sum() / out.trace.verified.sum()))
    row = row_of("d1t4", 1000, prefill=1.0)
    assert (row["accepted_length"], row["tokens_per_step"], row["fallbacks"]) == (1, 1, 0)
    assert row["acceptance_rate"] is row["proposals"] is None


def test_vanilla_decoding_of_vectors() -> None:
    cfg = configuration.compose(["method=vanilla", "model=mar_b", "temperature=0.7"])
    row = measure(assemble(cfg), built_in("d1t5"), 4000, margin=1.0)
    assert (row["verdict"], row["accepted_length"], row["tokens_per_step"]) == ("not refuted", 1, 1)
    assert row["acceptance_rate"] is row["proposals"] is row["fallbacks"] is None
    assert row["parameters"] == "temperature=0.7 final_noise=false"


def test_further_sequences_are_compared_with_further_ones_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second stage of an audit would repeat the errors of the first stage's sample of the target."""
    method, pair, seeds = (
        assemble(configuration.compose(["method=cspd", "gamma=1", "model=mar_b", "weights=random"])),
        built_in("d1t4"),
        [],
    )
    monkeypatch.setattr(
        densities, "alone", lambda model, rule, n, seed: seeds.append(seed) or alone(model, rule, n, seed)
    )
    for sequences in (range(100), range(100, 300)):
        for seed in (0, 1):
            method.counted(pair, sequences, seed, None)
    assert len(set(seeds)) == len(seeds) == 8
