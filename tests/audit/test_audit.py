"""The audit of discrete tokens: its statistics against known answers, its verdicts, and Theorem 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from specbench.audit import audit, audit_text, densities, model_recipes, models, statistics, theorem, verdicts
from specbench.audit.audit import assemble, measure
from specbench.audit.audit_arguments import COLUMNS
from specbench.audit.levels import LEVEL
from specbench.audit.models import built_in
from specbench.audit.statistics import Marginal, of_sequence
from specbench.audit.tabular import TabularDrafter, TabularGrower, codes, random_tables, sequence_probs
from specbench.audit.verdicts import Exercised
from specbench.config import configuration
from specbench.decoding import rules
from specbench.decoding.drafters.dynamic import Grown
from specbench.decoding.loop import decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.groups import Neighbourhood
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.thresholds import Typical
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import build, parse

SD = "method=sd window=3"
COOL = "method=cool_sd drafter=draft_model window=3"
METHODS = {
    "vanilla": "method=vanilla",
    "sd": SD,
    "sd, filtered": f"{SD} temperature=0.7 top_k=2 top_p=0.9",
    "eagle1": "method=eagle1",
    "eagle2": "method=eagle2 nodes=12 depth=3 width=3",
    "sjd": "method=sjd window=3",
    "uniform": f"{SD} rule=uniform delta=1.5",
    "cool_sd": COOL,
    "cool_sd, a tree": "method=cool_sd",
    "medusa": "method=medusa tree=[[0],[1],[0,0]]",
    "gsd": "method=gsd variant=printed window=3 group=3 delta=0.9 distance=9",
}
LOSSLESS = list(METHODS)[: list(METHODS).index("uniform")]


def method_of(arguments: str, model: models.TabularModel) -> audit.Method:
    return assemble(configuration.compose(arguments.split()), model)


def drawn(probs: torch.Tensor, samples: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).multinomial(samples, probs.numpy())).double()


def test_total_variation_and_prefixes() -> None:
    counts = torch.tensor([30.0, 10.0, 0.0, 60.0]).double()
    probs = torch.tensor([0.25, 0.25, 0.25, 0.25]).double()
    assert statistics.total_variation(counts, probs) == pytest.approx(0.4)
    assert [x.tolist() for x in Marginal(2, 0, 2, probs).prefixes(counts)] == [[40.0, 60.0], [30.0, 10.0, 0.0, 60.0]]


def test_the_noise_floor_is_what_sampling_costs() -> None:
    probs = torch.full((256,), 1 / 256, dtype=torch.float64)
    # the mean of |n/N - p| is sqrt(2 p (1 - p) / pi N) for many samples: 0.5 * 256 * that; its spread over draws is
    # below 2 %, as 256 cells are averaged
    wanted = 0.5 * 256 * math.sqrt(2 / math.pi * (1 / 256) * (255 / 256) / 100_000)
    marginals = [Marginal(256, 0, 1, probs)]
    assert statistics.noise_floor(marginals, 100_000, 0) == pytest.approx(wanted, rel=0.15)
    assert statistics.noise_floor(marginals, 100_000, 0) == statistics.noise_floor(marginals, 100_000, 0)
    assert statistics.noise_floor(marginals, 100_000, 0) != statistics.noise_floor(marginals, 100_000, 1)


def test_chi_square_equals_scipys_and_pools_rare_cells() -> None:
    probs = random_tables(200, 1, seed=1, sharpness=0.5)[0][0].double()
    probs /= probs.sum()
    assert (probs * 20_000 > 5).all()  # nothing to pool
    seen = drawn(probs, 20_000, 0)
    wanted = stats.chisquare(seen, probs * 20_000).pvalue
    assert statistics.chi_square(seen, probs) == pytest.approx(wanted, rel=1e-6)
    probs = torch.tensor([0.5, 0.3, 0.196, 0.002, 0.001, 0.001], dtype=torch.float64)
    seen = torch.tensor([510.0, 290.0, 195.0, 1.0, 3.0, 1.0]).double()
    # 4 of 1,000 expected in the last three are below 5 still: the third joins them
    wanted = stats.chisquare([510, 290, 200], [500, 300, 200]).pvalue
    assert statistics.chi_square(seen, probs) == pytest.approx(wanted, rel=1e-9)
    point = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    marginals = [Marginal(2, 0, 2, point)]
    assert statistics.goodness_of_fit([1000 * point], marginals) == 1
    assert statistics.goodness_of_fit([1000 * point.flip(0)], marginals) == 0
    assert statistics.chi_square(torch.tensor([999.0, 1.0]).double(), torch.tensor([1.0, 0.0]).double()) == 0


def test_p_values_are_uniform_under_the_true_distribution() -> None:
    """Most of the 4,096 cells expect fewer than 5 of 8,000 samples. Of 300 tests, 3 are below 0.01 by chance; more than
    12 would occur in 3 of 100,000 repetitions (binomial)."""
    probs = sequence_probs(random_tables(4, 6, seed=5))
    probs /= probs.sum()
    below = sum(statistics.chi_square(drawn(probs, 8000, seed), probs) < 0.01 for seed in range(300))
    assert below <= 12


def test_a_drift_of_the_first_token_is_not_drowned_by_the_rest() -> None:
    p = random_tables(4, 7, seed=1)
    moved = [p[0] + torch.tensor([[0.012, -0.012, 0.0, 0.0]]), *p[1:]]
    probs, other = (x / x.sum() for x in (sequence_probs(p), sequence_probs(moved)))
    seen = drawn(other, 50_000, 0)
    assert statistics.chi_square(seen, probs) > LEVEL
    # chi-square of the first token has a noncentrality of 50,000 * (0.012**2 / p0 + 0.012**2 / p1), above 72
    assert statistics.goodness_of_fit([seen], [Marginal(4, 0, 7, probs)]) < LEVEL


def test_a_lower_bound_is_rarely_above_the_truth() -> None:
    assert statistics.lower_bound(0, 100, 0.025) == 0
    assert statistics.lower_bound(100, 100, 0.025) == pytest.approx(0.025 ** (1 / 100))  # x**n = tail
    for hits in (3, 50, 97):  # Clopper and Pearson's is the largest valid one
        exact = stats.beta.ppf(0.025, hits, 100 - hits + 1)
        assert 0.5 * exact < statistics.lower_bound(hits, 100, 0.025) <= exact


@pytest.mark.parametrize("far", [0.0, 0.4])
def test_the_interval_holds_the_true_variation(far: float) -> None:
    """In 200 repetitions an interval of 95 % misses 10 times; more than 24 misses have a chance of 1 in 10,000."""
    probs = sequence_probs(random_tables(4, 3, seed=1))
    probs /= probs.sum()
    other = (1 - far) * probs + far * probs.flip(0)
    true = 0.5 * float((other - probs).abs().sum())
    covered, lows = 0, []
    for seed in range(200):
        first, second = drawn(other, 1500, seed), drawn(other, 1500, 1000 + seed)
        low, high = statistics.true_variation([first], [second], [Marginal(4, 0, 3, probs)])
        covered += low <= true <= high
        lows.append(low)
    assert covered >= 200 - 24
    if far == 0.4:
        assert sum(lows) / 200 > 0.5 * true  # and it says something


def test_mean_and_its_interval() -> None:
    middle, low, high = statistics.mean(torch.tensor([50.0, 0.0, 50.0]).double())
    assert middle == 1
    assert (low, high) == (pytest.approx(1 - 1.96 * math.sqrt(100 / 99) / 10, abs=1e-4), pytest.approx(2 - low))


def test_a_built_in_model_is_a_fair_test() -> None:
    for name in model_recipes.TABLES:
        model = built_in(name)
        assert all(len(m.probs) <= 1 << 16 for m in model.marginals(Sampling()))
        assert len(model.codebook()) == model.vocab
        far = 0.0
        for t, (p, q) in enumerate(zip(model.p, model.q, strict=True)):
            even = torch.full((len(p),), 1 / len(p), dtype=torch.float64)  # of what the token depends on
            before = even if model.grams or not t else of_sequence(model.p[:t])[0].probs
            far += float((before * 0.5 * (p - q).abs().sum(-1)).sum()) / model.length
        assert 0.2 < far < 0.4  # relaxed rules have something to relax
        again = built_in(name)
        assert all(torch.equal(a, b) for a, b in zip(model.p + model.q, again.p + again.q, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_the_verdict(name: str) -> None:
    """The audit calls an exact method lossy once in 10,000 seeds; the seed is fixed."""
    model = built_in("v3t5")
    method = method_of(METHODS[name], model)
    row = measure(method, model, 15_000, margin=0.1)
    assert list(row) == list(COLUMNS)
    enumerated = row["emitted_tv"] is not None
    assert row["verdict"] == ("not lossless" if name not in LOSSLESS else "lossless" if enumerated else "not refuted")
    assert row["tv_low"] <= row["tv_high"]
    assert 1 <= row["accepted_length_low"] <= row["accepted_length"] <= row["accepted_length_high"]
    if name in LOSSLESS:
        # both are the noise of as many samples of one distribution, over 243 cells
        assert row["tv"] == pytest.approx(row["tv_noise"], rel=0.25)
        assert row["tv_low"] == 0
    else:
        assert row["tv"] > 1.5 * row["tv_noise"]
        assert row["tv_low"] > 0
    chain = method.cfg.drafter == "draft_model"
    assert (row["tv_bound"] is not None) == (row["accepted_length_expected"] is not None) == chain
    if chain:
        # the loop's probabilities are float32, the bound's are not: 1e-7 for each of five tokens
        assert row["tv_low"] <= row["tv_exact"] <= row["tv_bound"] + 5e-7
        assert row["tv_exact"] <= row["tv_high"]
        assert abs(row["tv_unbiased"] - row["tv_exact"]) < 0.02  # five standard errors of at most 0.0041
        # 1.96 standard errors to the interval's end; 4.5 of them: one run in 150,000 by chance
        error = (row["accepted_length_high"] - row["accepted_length"]) / 1.96
        assert abs(row["accepted_length"] - row["accepted_length_expected"]) < 4.5 * error
        assert (row["tv_bound"] < 1e-9) == (name in LOSSLESS)


def test_greedy_decoding_gives_the_one_sequence() -> None:
    model = built_in("v3t5")
    for name in ("sd", "sjd", "eagle2"):
        row = measure(method_of(f"{METHODS[name]} temperature=0", model), model, 1000, margin=0.1)
        assert (row["tv"], row["p_value"]) == (0, 1)
        seen = Exercised.read(row["exercised"])  # the same in every sequence
        assert row["verdict"] == ("lossless" if all(seen.values()) else "undecided")
        # Its first tokens are random.
        assert set(seen.values()) <= {1000 * times for times in range(6)} or name == "sjd"


def test_a_row_depends_on_the_seed_and_not_on_how_it_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built_in("v3t5")
    method, seen = method_of(SD, model), []
    row = measure(method, model, 1001, seed=5, progress=seen.append)
    assert seen == [1001]
    monkeypatch.setattr(audit, "_MOST_ROWS", 100)
    assert measure(method, model, 1001, seed=5, progress=seen.append) == row
    assert seen[1:] == [100] * 10 + [1]
    assert measure(method, model, 1001, seed=6)["tv"] != row["tv"]


def test_a_tree_grown_once_for_equal_rows_equals_the_tree_of_each_row() -> None:
    model = built_in("v3t5")
    grower = TabularGrower(model.q, nodes=12, depth=3, width=3)
    sampling, rng = Sampling(), RandomStreams([(0, i) for i in range(200)])
    state = grower.open(model.target.open(None, 200, False, 12), None, sampling, rng)
    g = torch.Generator().manual_seed(0)
    history, count = torch.randint(3, (200, 9), generator=g), torch.randint(7, (200,), generator=g)
    shared = grower.propose(state, history, count, torch.zeros_like(count))
    per_row = Grown.grow(grower, state, history, count)
    for name in ("tokens", "probs", "valid", "sampled"):
        assert torch.equal(getattr(shared, name), getattr(per_row, name))
    for name, value in vars(per_row.tree).items():
        shared_value = getattr(shared.tree, name)
        assert torch.equal(shared_value, value) if isinstance(value, torch.Tensor) else shared_value == value
    for row in range(20):  # and has the tables' distributions after every node
        for node, slot in enumerate(per_row.tree.slot[row].tolist()):
            path = per_row.tokens[row, per_row.tree.ancestors[row, node]][1:]
            prefix = torch.cat([history[row, : count[row]], path])
            if slot >= 0 and len(prefix) < model.length:
                torch.testing.assert_close(per_row.probs[row, slot], model.q[len(prefix)][codes(prefix[None], 3)][0])


def test_a_node_has_at_most_as_many_candidates_as_tokens() -> None:
    tables, rng = random_tables(2, 3, seed=1), RandomStreams([(0, i) for i in range(20)])
    count = torch.zeros(20, dtype=torch.int64)
    for chosen in (False, True):
        drafter = TabularDrafter(tables, parse("[[0],[1],[2]]"), chosen)
        state = drafter.open(None, None, Sampling(), rng)
        draft = drafter.propose(state, torch.zeros(20, 9, dtype=torch.int64), count, count)
        assert torch.equal(draft.valid.sum(1), torch.full_like(count, 1 + 2))
        assert torch.equal(draft.tokens[:, 1:3].sort(-1).values, torch.tensor([[0, 1]]).expand(20, 2))


@pytest.mark.parametrize("name", ["sd", "sjd"])
def test_the_parts_of_a_chain_are_counted_step_by_step(name: str) -> None:
    """Against a plain count over the trace. A window is refilled with as many tokens as the step before accepted."""
    model, height, seen = built_in("v3t5"), 3, Exercised()
    method = method_of(METHODS[name], model)
    out = decode(replace(method.config, observer=seen), None, RandomStreams([(0, i) for i in range(300)]))
    wanted = {f"rejection_{depth}": 0 for depth in (1, 2, 3)} | {"bonus_token": 0, "refill": 0}
    for row in range(300):
        count, before = 0, None
        for accepted in out.trace.accepted[row, : out.steps[row]].tolist():
            room = min(height, 5 - count)
            if accepted < room:
                wanted[f"rejection_{accepted + 1}"] += 1
            wanted["bonus_token"] += accepted == height and count + accepted < 5
            refilled = range(height - (before or 0) + 1, height + 1)
            wanted["refill"] += sum(depth <= min(accepted + 1, room) for depth in refilled)
            count, before = count + accepted + 1, accepted
    assert min(wanted.values()) > 0
    if name != "sjd":
        del wanted["refill"]
    assert seen == wanted
    assert Exercised.read(str(seen)) == seen


def test_the_parts_of_a_tree_are_counted_along_the_accepted_path() -> None:
    tree = build(parse("[[0],[1],[0,0]]"))
    fork, second, below = (tree.children[0, 0, 0].item(), tree.children[0, 0, 1].item(), tree.children[0, 1, 0].item())
    cases = (  # path, accepted tokens, tokens before the step, complete before -> what was at work; of 8 tokens
        ([fork, below], 2, 0, False, ["bonus_token"]),
        ([fork, below], 2, 6, False, []),  # the sequence ends with the draft
        ([fork, fork], 1, 0, False, ["rejection_2"]),
        ([fork, fork], 1, 7, False, []),
        ([second, second], 1, 0, False, ["rejection_1", "bonus_token"]),
        ([0, 0], 0, 0, False, ["rejection_1"]),
        ([0, 0], 0, 8, True, []),
    )
    for path, length, count, complete, wanted in cases:
        draft = SimpleNamespace(tree=tree, valid=torch.ones(1, 4, dtype=torch.bool), parallel_positions=None, parts={})
        walked = torch.tensor([[0, *path]])
        verdict = SimpleNamespace(path_with_root=walked, path=walked[:, 1:], length=torch.tensor([length]))
        step: Any = SimpleNamespace(draft=draft, verdict=verdict)
        step.num_committed, step.active = torch.tensor([count]), torch.tensor([not complete])
        seen = Exercised()
        seen(step, 8)
        assert [part for part, times in seen.items() if times] == wanted
        assert list(seen) == ["rejection_1", "rejection_2", "bonus_token"]


def test_unused_code_is_not_called_lossless() -> None:
    """The audit of README: a window that is longer than the sequence is never refilled, and so were the windows of
    CSpD. A column that is empty in one row may have a value in another."""
    model = built_in("v3t5")
    row = measure(method_of("method=sjd_pac window=24", model), model, 2000, margin=1.0)
    assert row["verdict"] == "undecided"
    assert verdicts.missing([row]) == ["refill"]
    assert "audit.model=m4t24" in audit_text.notes([row])[0]
    longer = built_in("m4t24")
    other = measure(method_of("method=sjd_pac window=24", longer), longer, 2000, margin=1.0)
    assert other["verdict"] == "lossless"
    assert audit_text.notes([other]) == []
    assert verdicts.verdict([row, other]) == "lossless"
    assert verdicts.verdict([row | {"margin": 0.0}, other]) == "undecided"
    assert verdicts.verdict([row, other | {"p_value": LEVEL / 2}]) == "not lossless"


def test_a_small_p_value_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage has new sequences; the first ones do not change."""
    model, pair = built_in("v3t5"), densities.built_in("d1t4")
    cspd = densities.assemble(configuration.compose(["method=cspd", "gamma=1", "model=mar_b", "weights=random"]))
    measures = (
        lambda seed: measure(method_of(SD, model), model, 1000, seed, margin=1.0),
        lambda seed: measure(cspd, pair, 1000, seed, margin=1.0),
    )
    for measured in measures:
        once = measured(0)
        assert (once["samples"], once["p_first"]) == (1000, None)
        assert once["verdict"] in ("lossless", "not refuted")
        monkeypatch.setattr(verdicts, "DOUBT", 1.1)  # above every p-value
        again = measured(0)
        assert len(audit_text.notes([again])) == 2
        monkeypatch.undo()
        assert (again["samples"], again["p_first"], again["verdict"]) == (10_000, once["p_value"], "undecided")
    method = method_of(SD, model)
    first, second, together = (
        method.counted(model, seeds, 0, None) for seeds in (range(1000), range(1000, 3000), range(3000))
    )
    assert torch.equal(first.first + second.first, together.first)
    assert first.exercised + second.exercised == together.exercised


def test_two_stages_refute_hardly_more_often_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """p-values of a lossless method are uniform. With a level of 0.05 and a doubt of 0.3, two stages refute at most a
    share of 0.05 * 1.3 = 0.065; a share of 0.072 of 20,000 audits is four standard errors more."""
    monkeypatch.setattr(verdicts, "LEVEL", 0.05)
    monkeypatch.setattr(verdicts, "DOUBT", 0.3)
    rng, ranges = np.random.default_rng(0), []

    def uniform(seeds: range) -> dict[str, Any]:
        ranges.append(seeds)
        return {"p_value": rng.random(), "tv_high": 0.0, "margin": 0.1, "exercised": None, "T": 5, "model": "v3t5"}

    results = [verdicts.in_stages(uniform, 100) for _ in range(20_000)]
    assert sum(row["verdict"] == "not lossless" for row in results) < 0.072 * 20_000
    assert set(ranges) == {range(100), range(100, 1100)}
    for level in (0.01, 0.05, 0.1, 0.5):
        error = 4 * math.sqrt(level * (1 - level) / 20_000)
        assert sum(row["p_value"] < level for row in results) < (1.3 * level + error) * 20_000
    assert all(row["verdict"] == "undecided" for row in results if 0.05 <= row["p_value"] < 0.3)


NEAR = torch.tensor([[1, 2], [0, 2], [1, 0]])
RULES: dict[str, Callable[[int], rules.Rule]] = {
    "exact": lambda window: rules.exact(),
    "uniform": lambda window: rules.uniform(1.5),
    "cool": lambda window: rules.cool(1.1, window),
    "band": lambda window: rules.Band(0.5, 0.5, window),
    "mentored": lambda window: rules.Mentored(0.05),
    "cool, vanilla residual": lambda window: rules.cool(1.1, window, resample="vanilla"),
    "lantern": lambda window: Lantern("lantern", NEAR, 1, "tvd", 0.3),
    "lantern, released": lambda window: Lantern("lantern", NEAR, 1, "tvd", 0.3, "released"),
    "lantern, optimal": lambda window: Lantern("lantern", NEAR, 1, "tvd", 0.3, "optimal"),
    "neighbourhood": lambda window: Neighbourhood(NEAR[:, :1]),
    "typical": lambda window: Typical(0.3, 0.9),
}


class Enumeration:
    """All ways in which chains of `window` drafts can make a sequence: the distribution of the sequences, E[min(tau, T)
    + 1] of the first round, and Eq. 8's terms of every round."""

    def __init__(self, p, q, rule, window):
        self.p, self.q, self.rule, self.window = p, q, rule, window
        self.vocab, self.length = p[0].shape[1], len(p)
        self.probs = torch.zeros(self.vocab**self.length, dtype=torch.float64)
        self.expected, self.bound = 1.0, 0.0
        self._follow(0, 0, 1, 1.0)

    def _follow(self, t, code, depth, chance):
        """Follow the sequence of t tokens with this code (base vocab) and this probability."""
        if chance == 0:
            return
        if t == self.length:
            self.probs[code] += chance
            return
        p, q, after_this = self.p[t][code], self.q[t][code], code * self.vocab
        if depth > self.window:
            for x in range(self.vocab):
                self._follow(t + 1, after_this + x, 1, chance * float(p[x]))
            return
        level = torch.tensor(depth)
        emitted = torch.zeros(self.vocab)
        for x in range(self.vocab):
            token = torch.tensor(x)
            keep = float(self.rule.accept(p, q, token, level))
            after = p if self.rule.deterministic else self.rule.residual(p, q, token, level)
            emitted[x] += q[x] * keep
            emitted += q[x] * (1 - keep) * after
            if depth == t + 1:
                self.expected += chance * float(q[x]) * keep
            self._follow(t + 1, after_this + x, depth + 1, chance * float(q[x]) * keep)
            for y in range(self.vocab):
                self._follow(t + 1, after_this + y, 1, chance * float(q[x]) * (1 - keep) * float(after[y]))
        self.bound += chance * 0.5 * float((emitted - p).abs().sum())


def test_the_bound_of_a_sequence_against_enumeration() -> None:
    p = random_tables(3, 3, seed=1, sharpness=1.5)
    q = random_tables(3, 3, seed=2, sharpness=1.5, near=p, distance=0.6)
    for number, (name, rule_of) in enumerate(RULES.items()):
        for window in (5, 1 + number % 2):
            rule = rule_of(window)
            wanted = Enumeration(p, q, rule, window)
            statistics = theorem.chain_statistics(p, q, rule, window)
            # float32 on the side of the enumeration
            assert statistics.expected == pytest.approx(wanted.expected, abs=1e-5), name
            assert statistics.bound == pytest.approx(min(1.0, wanted.bound), abs=1e-5), name
            assert float((statistics.probs - wanted.probs).abs().max()) < 1e-5, name
            true = 0.5 * float((statistics.probs - sequence_probs(p)).abs().sum())
            assert true <= statistics.bound + 1e-6, name
            assert statistics.first <= statistics.bound + 1e-12, name  # the first round is one of them
            assert (statistics.bound < 1e-12) == (name == "exact"), name


def test_the_first_rounds_bound_is_none_of_a_sequence() -> None:
    """Why the rounds are summed: the sequence as a whole exceeds Eq. 8 for one round."""
    p = random_tables(3, 6, seed=1, sharpness=1.5)
    q = random_tables(3, 6, seed=2, sharpness=1.5, near=p, distance=0.6)
    statistics = theorem.chain_statistics(p, q, rules.uniform(1.5), 1)
    true = 0.5 * float((statistics.probs - sequence_probs(p)).abs().sum())
    assert statistics.first < true < statistics.bound


def test_the_enumerated_distribution_is_the_decoded_one() -> None:
    """Goodness of fit of the real loop to the enumerated distribution of a lossy method."""
    model = built_in("v3t5")
    lantern = f"{SD} rule=lantern k=1 delta=0.3 bound=tvd proximity=l2 resample=paper"
    for arguments in (lantern, COOL, f"{lantern} temperature=0"):
        method = method_of(arguments, model)
        config = method.config
        sampling, rule = config.sampling, config.rule
        p, q = ([sampling.probs(t.log()) for t in tables] for tables in (model.p, model.q))
        enumerated = theorem.chain_statistics(p, q, rule, 3, model.p if rule.uses_pre_argmax_probs else None)
        rng = RandomStreams([(0, i) for i in range(20_000)])
        out = decode(config, None, rng)
        seen = torch.bincount(codes(out.tokens, 3), minlength=3**5).double()
        probs = enumerated.probs / enumerated.probs.sum()
        assert statistics.goodness_of_fit([seen], [Marginal(3, 0, 5, probs)]) > 1e-4  # one seed in 10,000
        first = 1 + out.trace.accepted[:, 0].double()
        assert abs(float(first.mean()) - enumerated.expected) <= 4.5 * float(first.std()) / 20_000**0.5 + 1e-9
