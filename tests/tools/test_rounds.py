"""Rounds that are replayed under relaxed rules, and the schedule of the full dynamic programme."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from specbench.config import configuration, parameters
from specbench.decoding.rules import Band, exact, uniform
from specbench.decoding.rules.band import BandRule, log_ratios
from specbench.decoding.rules.base import RuleContext
from specbench.decoding.trees import build, chain_paths
from specbench.decoding.verify import Draft, TokenWise
from specbench.decoding.verify.block import BlockVerification
from specbench.errors import UsageError
from tools import rounds
from tools.rounds import Curves, Replayed, Rounds, replayed

LENGTH = 4


@pytest.fixture(scope="module")
def chains() -> Rounds:
    """Rounds of independent nodes of different difficulty, with the same kinds at every depth, as the dynamic programme
    assumes."""
    g = torch.Generator().manual_seed(0)
    shape = (600, LENGTH, 16)
    p = (1.5 * torch.randn(shape, generator=g)).softmax(-1)
    far = 0.2 + 2 * torch.rand(*shape[:2], 1, generator=g)
    q = (p.log() + far * torch.randn(shape, generator=g)).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(shape[:2])
    return Rounds(p, q, tokens, torch.ones_like(tokens, dtype=torch.bool))


@pytest.fixture(scope="module")
def bands(chains: Rounds) -> Curves:
    return Curves.of(lambda x: Band(x, 0.0, 1), chains)


def per_round(replay: Replayed) -> tuple[float, float]:
    """Tokens per round, and divergence per token."""
    tokens, divergence = replay.totals().sum(1).tolist()
    return tokens / len(replay.keeps), divergence / tokens


def test_curves_equal_the_rule(chains: Rounds, bands: Curves) -> None:
    """Between the points of the grid, up to the error of linear interpolation."""
    values = log_ratios(0.37, 0.6, LENGTH)
    for expected, actual in zip(per_round(replayed(Band(0.37, 0.6, LENGTH), chains)), per_round(bands.at(values))):
        assert actual == pytest.approx(expected, rel=2e-3)


def test_tokens_that_do_not_exist_are_not_reached(chains: Rounds) -> None:
    live = torch.arange(LENGTH).expand_as(chains.live) < 2
    cut = replayed(uniform(1.5), Rounds(chains.p, chains.q, chains.tokens, live))
    two = replayed(uniform(1.5), Rounds(chains.p[:, :2], chains.q[:, :2], chains.tokens[:, :2], live[:, :2]))
    assert torch.equal(cut.totals(), two.totals())


def test_the_full_programme_has_the_least_divergence(bands: Curves) -> None:
    """At equal tokens per round no similar schedule has less divergence: each is changed at one depth, then scaled
    back. The second-order loss from such changes is larger than the interpolation error; 2e-3 of the divergence is
    allowed."""

    def divergence(values: list[float], tokens: float) -> float:
        """The divergence at this many tokens per round, with all values scaled by one factor."""
        low, high = 0.2, 5.0
        for _ in range(40):
            middle = math.sqrt(low * high)
            low, high = (
                (middle, high) if per_round(bands.at([middle * x for x in values]))[0] < tokens else (low, middle)
            )
        return per_round(bands.at([low * x for x in values]))[1]

    for strength in (0.2, 0.8):
        best = bands.schedule(strength)
        assert best == sorted(best, reverse=True)
        tokens, least = per_round(bands.at(best))
        for depth in range(LENGTH):
            for step in (0.8, 1.25):
                moved = [x * step if i == depth else x for i, x in enumerate(best)]
                assert divergence(moved, tokens) > least * (1 - 2e-3)
        for decay in (0.0, 0.3, 0.95):
            assert divergence(log_ratios(strength, decay, LENGTH), tokens) > least * (1 - 2e-3)
        assert divergence(log_ratios(strength, 0.0, LENGTH), tokens) > least * 1.02


def test_decays_by_depth_reproduce_the_schedule(bands: Curves) -> None:
    values = bands.schedule(0.5)
    decays = rounds.decays(values)
    assert len(decays) == LENGTH - 1
    assert all(0 < decay < 1 for decay in decays)
    assert log_ratios(0.5, decays, LENGTH) == pytest.approx(values)
    assert log_ratios(0.5, [0.6] * (LENGTH - 1), LENGTH) == pytest.approx(log_ratios(0.5, 0.6, LENGTH))
    assert rounds.decays(bands.schedule(0.0)) == [0.0] * (LENGTH - 1)
    setting = RuleContext(LENGTH, lambda: torch.zeros(0))
    rule = BandRule(0.5, decays).build(setting)
    assert isinstance(rule, Band)
    assert rule.spread[1:].log().tolist() == pytest.approx(values, rel=1e-5)
    with pytest.raises(UsageError, match="3.*2.*3"):
        BandRule(0.5, decays).build(RuleContext(3, setting.codebook))


def test_a_decay_is_a_number_or_a_list() -> None:
    assert parameters.table()["decay"].checked("decay", [0.5, 0]) == [0.5, 0.0]
    assert configuration.compose(["method=band", "decay=[0.6,0.55,0.5,0.45]"]).get("decay") == [0.6, 0.55, 0.5, 0.45]
    for wrong in ([0.5, 1.0], [[0.5]], "a", [True]):
        with pytest.raises(UsageError, match="decay.*at least 0.*0.999"):
            parameters.table()["decay"].checked("decay", wrong)


def test_the_statistics_of_images() -> None:
    """UniformRSD against itself has the ratio 1 without an error; half its divergence gives 1/2."""
    g = np.random.default_rng(0)
    count = 8
    size = g.uniform(1, 2, count)
    level = np.stack([np.stack([np.full(count, 100.0), size * (150 + 50 * x), size * x * x * 30], 1) for x in range(4)])
    same = rounds._statistics(level[2], level)
    assert same["kl_over_uniform"] == pytest.approx(1)
    assert same["kl_over_uniform_stderr"] == pytest.approx(0, abs=1e-9)
    half = rounds._statistics(level[2] * [1, 1, 0.5], level)
    assert half["kl_over_uniform"] == pytest.approx(0.5)
    # the ratio of two means of eight values: the jackknife of a mean is its standard error
    error = (level[2, :, 1] / 100).std(ddof=1) / math.sqrt(count)
    assert same["tokens_per_round_stderr"] == pytest.approx(error)
    assert rounds._statistics(level[3] * [1, 1.1, 1], level)["kl_over_uniform"] is None


def test_block_verification_by_length(chains: Rounds) -> None:
    """Against many decisions of both verifications: the expectation is the same within five standard errors."""
    image = rounds._Image.of(chains, relaxed=False)
    cells = {row["parameters"]: row for row in rounds._exact([image, image])}
    tree = build(chain_paths(LENGTH))
    p = torch.cat([chains.p, chains.p[:, :1]], 1)  # the distribution after the last token decides nothing
    valid = torch.ones(len(p), LENGTH + 1, dtype=torch.bool)
    draft = Draft(tree, torch.cat([chains.tokens[:, :1], chains.tokens], 1), chains.q, valid)
    for name, verification in (("token", TokenWise()), ("block", BlockVerification())):
        lengths = torch.stack(
            [
                verification.verify(p, draft, exact(), tiny.rng(len(p)), torch.full((len(p),), i)).length
                for i in range(40)
            ]
        ).double()
        error = float(lengths.mean(1).std() / math.sqrt(40))
        expected = cells[f"verification={name} window={LENGTH}"]["tokens_per_round"]
        assert abs(1 + float(lengths.mean()) - expected) < 5 * error
    over = [cells[f"verification=block window={i}"]["tokens_over_token"] for i in (2, 3, 4)]
    assert 1 < over[0] < over[1] < over[2]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_GRID", rounds._GRID[::10])
    out = tmp_path / "rounds.csv"
    assert rounds.main(["n=1", "drafter=eagle", "window=2", "strengths=0.3", f"out={out}"]) == 0
    rows = rounds.ROWS.read(out)
    assert [row["rule"] for row in rows] == [*["exact"] * 4, *["uniform"] * 5, *["cool"] * 5, *["band"] * 3]
    assert {(row["drafter"], row["window"], row["images"]) for row in rows} == {("eagle", "2", "1")}
    tokens = {(row["rule"], row["parameters"]): float(row["tokens_per_round"]) for row in rows}
    alone = "verification=token window=1", "verification=block window=1"
    assert tokens["exact", alone[0]] == pytest.approx(tokens["exact", alone[1]])
    assert 1 < tokens["exact", "verification=token window=2"] < tokens["uniform", "delta=1.7"]
    assert tokens["uniform", "delta=1.7"] < tokens["uniform", "delta=4"] < 3
    for drafter in ("sjd", "eagle_tree"):
        with pytest.raises(UsageError, match=f"drafter={drafter}"):
            rounds.main(["n=1", f"drafter={drafter}"])
