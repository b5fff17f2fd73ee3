"""Statistics of steps and tokens: against hand-made traces, and against the loop itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_journal import record

from specbench.audit.tabular import TabularDrafter, TabularTarget, random_tables, sequence_probs
from specbench.decoding import rules
from specbench.decoding.batch import Decoded
from specbench.decoding.continuous import ContinuousTrace
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.image_statistics import of_images
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.parallel_positions import Raster
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trace import StepStats, Trace
from specbench.decoding.trees import build, chain_paths
from specbench.decoding.verify import Draft, VerificationResult
from specbench.rows import summary
from specbench.rows.columns import _ESTIMATES, COLUMNS, NUMBERS, stderr_of
from specbench.rows.journal import Record, from_line, to_line


def trace(outside: float = 0.0, missed: float = 0.0) -> Trace:
    """Two images of 3x3 tokens. The first takes four steps: two of three tokens kept; no draft; one kept, of a draft
    whose distribution has fewer than 3 tokens; three kept, which end the image. Its last token has mass `outside` where
    the target has none, and the one before misses `missed` of the target's mass. The second image has no drafts."""
    accepted, reach, first, tv = torch.zeros(4, 2, 9)
    accepted[0, :4] = torch.tensor([2, 0, 1, 3])
    reach[0, :4] = torch.tensor([3, 0, 2, 3])
    first[0, :4] = torch.tensor([1.0, 0.0, 0.5, 0.75])
    tv[0, :4] = torch.tensor([0.25, 0.0, 0.5, 0.125])
    top1, top3 = torch.zeros(2, 2, 9)
    top1[0, 0] = top3[0, 0] = 1
    top3[0, 2] = torch.nan
    log_prob = torch.stack([-torch.arange(1.0, 10), torch.full((9,), -2.0)])
    distances = torch.zeros(7, 2, 9)
    distances[:6, 0] = torch.tensor([0.25, 0.5, 0, 0.75, 0, 0.25])[:, None]
    distances[2, 0, 8], distances[4, 0, 7] = outside, missed
    distances[6] = torch.tensor([[2.0, 4, 8, 1, 2, 4, 2, 4, 8], [1] * 9])  # two to the power of the depth
    return Trace(accepted.long(), reach.long(), first, tv, top1, top3, log_prob, *distances)


def images(batch_trace: Trace, steps: list[int], passes: int = 0) -> list[Record]:
    """The records of a batch that was decoded with this trace."""
    tokens = batch_trace.log_prob.shape[1]
    return [
        replace(record(i), tokens=tokens, steps=steps[i], **fields)
        for i, fields in enumerate(of_images(batch_trace, steps, passes))
    ]


def test_the_fields_of_a_record() -> None:
    drafted, plain = of_images(trace(), [4, 9], 5)
    assert drafted == {
        "accepted_per_step": [2, 0, 1, 3],
        "accepted_by_depth": [3, 2, 1],
        "verified_by_depth": [3, 3, 2],
        "log_prob_mean": -5.0,
        "log_prob_std": pytest.approx(math.sqrt(60 / 9), rel=1e-5),
        "draft_tv": pytest.approx(0.875 / 3, rel=1e-5),
        "first_accept": 0.75,
        "draft_top1": pytest.approx(1 / 3, rel=1e-5),
        "draft_top3": 0.5,
        "draft_top3_steps": 2,
        "emitted_tv": 0.25,
        "emitted_kl": 0.5,
        "emitted_outside": 0.0,
        "emitted_kl_reverse": 0.75,
        "emitted_missed": 0.0,
        "emitted_kl_optimal": 0.25,
        "emitted_ratio_max": 8.0,
        "emitted_log_ratio": [0.6931, 1.3863, 2.0794],
        "draft_passes": 20,
    }
    assert plain == dict.fromkeys(drafted) | {
        "accepted_per_step": [0] * 9,
        "accepted_by_depth": [],
        "verified_by_depth": [],
        "log_prob_mean": -2.0,
        "log_prob_std": 0.0,
        **dict.fromkeys(["emitted_" + name for name in "tv kl outside kl_reverse missed kl_optimal".split()], 0.0),
        "emitted_ratio_max": 1.0,
        "emitted_log_ratio": [],
        "draft_top3_steps": 0,
        "draft_passes": 45,
    }
    for fields in (drafted, plain):
        made = replace(record(0), **fields)
        assert from_line(to_line(made)) == made
    assert len(repr(drafted["log_prob_std"])) <= 8


def test_no_largest_ratio_is_given_where_it_is_infinite() -> None:
    """If a token is emitted that the target never gives."""
    first, *others = images(trace(), [4, 9], 5)
    made = [replace(first, emitted_outside=0.01), *others]
    assert summary.columns(made).get("emitted_ratio_max") is None


def test_the_columns_of_a_row() -> None:
    made = images(trace(), [4, 9], 5)
    row = summary.columns(made)
    every = [*(-np.arange(1.0, 10)), *[-2.0] * 9]
    expected: dict[str, Any] = {
        "perplexity": math.exp(3.5),
        "log_prob_mean": -3.5,
        "log_prob_std": np.std(every),
        "emitted_tv": 0.125,
        "emitted_kl": 0.25,
        "emitted_kl_reverse": 0.375,
        "emitted_kl_optimal": 0.125,
        "emitted_kl_ratio": 2.0,
        "emitted_ratio_max": 8.0,
        "first_accept": 0.75,  # over the three steps with a draft; the second image has no draft
        "draft_tv": 0.875 / 3,
        "draft_top1": 1 / 3,
        "draft_top3": 1 / 2,  # over two of them
        "draft_passes": 32.5,
    }
    assert {k: row[k] for k in expected} == pytest.approx(expected, rel=1e-5)
    assert row["acceptance_by_depth"] == [1.0, 0.6667, 0.5]
    assert row["accepted_histogram"] == [0.7692, 0.0769, 0.0769, 0.0769]  # over thirteen steps
    errors: dict[str, float | None] = {
        "log_prob_stderr": 1.5,  # for -5 and -2
        "perplexity_stderr": 1.5 * math.exp(3.5),
        "emitted_tv_stderr": 0.125,
        "emitted_kl_stderr": 0.25,
        "emitted_kl_reverse_stderr": 0.375,
        "emitted_kl_optimal_stderr": 0.125,
        "draft_passes_stderr": 12.5,  # for 20 and 45
    }
    of_drafts = "emitted_kl_ratio first_accept draft_tv draft_top1 draft_top3".split()
    errors |= {f"{name}_stderr": None for name in of_drafts}  # only one image has drafts
    assert {k: row[k] for k in errors} == pytest.approx(errors)
    assert row["drafted_by_position"] == [0.5, 0.5, 0, 0, 0.5, 0, 0.5, 0.5, 0.5]  # all from the first image
    in_rows = summary.columns(made, raster=False)
    assert {k for k, v in in_rows.items() if v != row[k]} == {"drafted_by_position", "acceptance_by_depth"}
    assert in_rows["acceptance_by_depth"] is in_rows["drafted_by_position"] is None
    assert row["acceptance_by_step"] is None  # discrete tokens are generated in the order of their positions
    assert row["emitted_log_ratio"] == [0.6931, 1.3863, 2.0794]
    others = "emitted_log_ratio acceptance_by_depth accepted_histogram drafted_by_position acceptance_by_step".split()
    assert {*expected, *errors, *others} == set(row) <= set(COLUMNS)


def test_where_drafts_are_accepted() -> None:
    accepted = np.array([[1, 1, 0], [0, 1, 0], [1, 1, 1]])  # in raster order; 0: a token from a step, not from a draft
    first, second = images(trace(), [4, 9])
    assert summary.is_accepted_draft(first).reshape(3, 3).tolist() == accepted.astype(bool).tolist()
    assert not summary.is_accepted_draft(second).any()
    # means are over steps, not over images
    seldom = replace(first, verified_by_depth=[1], accepted_by_depth=[0], first_accept=0.15)
    assert summary.columns([first, seldom])["first_accept"] == pytest.approx((3 * 0.75 + 0.15) / 4)
    assert summary.acceptance_by_depth([first, seldom]).tolist() == [3 / 4, 2 / 3, 1 / 2]
    # two rounding errors have no ratio
    exact = [replace(image, emitted_kl=1e-14, emitted_kl_optimal=2e-7) for image in (first, second)]
    assert "emitted_kl_ratio" not in summary.columns(exact)


def timed(i: int, seconds: float, batch: int = 1, **changes: Any) -> Record:
    """The record of an image that took these seconds, alone or as its share of a batch."""
    latency = seconds if batch == 1 else None
    return replace(record(i), decode_s=seconds, latency_s=latency, text_s=seconds / 10, batch=batch, **changes)


def test_the_error_of_a_mean_agrees_with_the_textbook() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    estimate = summary.mean(values)
    assert estimate == pytest.approx((2.8, np.std(values, ddof=1) / math.sqrt(5)))
    assert summary.mean([3.0]) == (3.0, None)
    assert summary.ratio([0.0, 0.0], [0, 0]) == (None, None)
    # images with a zero denominator do not count as evidence
    assert summary.ratio([*values, 0.0, 0.0], [1] * 5 + [0, 0]) == pytest.approx(estimate)
    assert summary.ratio([1.0, 0.0], [2, 0]) == (0.5, None)
    # five pairs of the same value are five values, not ten
    assert summary.mean([v for v in values for _ in "ab"], [i for i in range(5) for _ in "ab"]) == pytest.approx(
        estimate
    )
    assert summary.mean(values, [7] * 5) == (2.8, None)


def calibration(draw: Any, estimate: Any, truth: float, sets: int = 1500) -> tuple[float, float]:
    """(mean squared standard error / variance of the estimate, coverage of its 95 % intervals) over simulated sets."""
    rng = np.random.default_rng(0)
    estimates = np.array([estimate(*draw(rng)) for _ in range(sets)])
    covered = np.abs(estimates[:, 0] - truth) <= 1.96 * estimates[:, 1]
    return float(np.square(estimates[:, 1]).mean() / estimates[:, 0].var()), float(covered.mean())


def test_the_error_of_an_acceptance_rate_is_calibrated() -> None:
    """Images differ in how many drafts they verify, and those with many accept fewer of them. Counting drafts as
    independent would be far off.

    Over 1500 sets a variance is known to sqrt(2 / 1500) = 3.7 %, and four of those are 15 %. A coverage of 95 % is
    known to sqrt(0.95 * 0.05 / 1500) = 0.56 %, and four of those are 2.3 %. The delta method itself is off by about 1 /
    images.
    """

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        share = rng.beta(4, 4, 120)
        drafted = np.round(50 + 300 * (1 - share)).astype(int)
        return rng.binomial(drafted, share), drafted

    big = np.random.default_rng(1).beta(4, 4, 4_000_000)
    drafted = np.round(50 + 300 * (1 - big))
    truth = float((drafted * big).sum() / drafted.sum())
    near, covered = calibration(draw, lambda a, d: summary.ratio(a.tolist(), d.tolist()), truth)
    assert (near, covered) == (pytest.approx(1, abs=0.16), pytest.approx(0.95, abs=0.03))

    def as_if_tokens_were_independent(a: np.ndarray, d: np.ndarray) -> tuple[float, float]:
        rate = a.sum() / d.sum()
        return rate, math.sqrt(rate * (1 - rate) / d.sum())

    assert calibration(draw, as_if_tokens_were_independent, truth)[0] < 0.2


def test_the_errors_of_speed_count_pairs_and_batches() -> None:
    """The latencies of method and vanilla depend on the prompt in the same way. The images of a batch share its
    seconds: 20 batches of 8 are 20 measurements, not 160."""
    rng = np.random.default_rng(2)
    hard = rng.gamma(20, 1 / 20, 60)
    latencies = hard * rng.gamma(50, 1 / 50, 60), 3 * hard * rng.gamma(200, 1 / 200, 60)
    row = summary.versus(
        *(
            [timed(i, s, timed=2 * i + k) for i, s in enumerate(seconds_of_side)]
            for k, seconds_of_side in enumerate(latencies)
        )
    )
    value, stderr = summary.ratio(latencies[1].tolist(), latencies[0].tolist())
    for name in ("latency", "throughput"):
        assert row[f"speedup_{name}"] == pytest.approx(value)
        # for independent prompts the block bootstrap gives the same, see test_timing
        assert row[f"speedup_{name}_stderr"] == pytest.approx(stderr, rel=0.25)
    assert row["baseline_latency_s"] == pytest.approx(latencies[1].mean())
    assert row["baseline_latency_s_stderr"] == pytest.approx(latencies[1].std(ddof=1) / math.sqrt(60))

    seconds = np.repeat(rng.gamma(30, 1 / 30, 20), 8)
    row = summary.speed([timed(i, s, 8, timed=1 + i // 8) for i, s in enumerate(seconds)])
    throughput = summary.ratio([1] * 160, seconds.tolist(), np.repeat(range(20), 8).tolist())
    assert (row["images_per_s"], row["images_per_s_stderr"]) == pytest.approx(throughput)
    assert row["tokens_per_s_stderr"] == pytest.approx(16 * row["images_per_s_stderr"])
    assert row["text_s_stderr"] == pytest.approx(seconds[::8].std(ddof=1) / 10 / math.sqrt(20))
    assert row["steps_stderr"] == 0  # this does not depend on the clock
    # A batch takes the seconds of all its images; its percentiles are over batches.
    assert row["batch_s_p50"] == pytest.approx(8 * np.median(seconds[::8]))
    assert row["batch_s_p95"] == pytest.approx(8 * np.percentile(seconds[::8], 95))
    alone = summary.speed([timed(i, s, timed=1 + i) for i, s in enumerate(seconds)])
    assert (alone["batch_s_p50"], alone["batch_s_p95"]) == (alone["latency_s_p50"], alone["latency_s_p95"])


def test_images_that_were_decoded_together() -> None:
    batches = [(0.5, 2), (0.5, 2), (0.25, 3), (0.25, 3), (0.25, 3), (0.5, 1)]
    images = [timed(i, s, b) for i, (s, b) in enumerate(batches)]
    first = summary.together(images)
    assert [first[i] == first[j] for i, j in ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5))] == [1, 0, 1, 1, 0, 0]
    assert len(set(summary.together([timed(i, 0.5) for i in range(4)]))) == 4  # equally long, but alone
    # another pass of the same images, interrupted and in other batches: images that share a batch in either pass form
    # one group
    other = [timed(i, s, b) for i, (s, b) in enumerate([(0.1, 1), (0.2, 2), (0.2, 2), (0.3, 2), (0.3, 2), (0.4, 1)])]
    grouped = summary.together(images, other)
    assert grouped[:5] == [grouped[0]] * 5
    assert grouped[5] != grouped[0]
    again = [replace(r, session="another") for r in images]
    assert sorted(summary.together(images, again)) == sorted(first)


def test_every_estimate_has_its_error_in_the_next_column() -> None:
    names = list(COLUMNS)
    for name in _ESTIMATES:
        assert names[names.index(name) + 1] == stderr_of(name) != name
    images = [timed(i, 1.0 + i) for i in range(3)]
    estimates = summary.speed(images) | summary.versus(images, images) | summary.columns(images)
    assert set(estimates) <= set(names)
    for name, value in estimates.items():
        if name.endswith("_stderr"):
            assert value is None or name in NUMBERS


def test_values_with_their_errors() -> None:
    for value, stderr, digits, shown in (
        (1.8580, 0.0141, 2, "1.858 ± 0.014"),
        (0.65, 0.4, 2, "0.65 ± 0.40"),
        (633.6, 21.0, 1, "633.6 ± 21.0"),
        (1.0, 0.0, 2, "1.00"),
        (1.0, None, 2, "1.00"),
        (3.0, 1e-16, 2, "3.00"),
    ):
        assert summary.with_error(value, stderr, digits) == shown


P = random_tables(4, 4, seed=1, sharpness=1.5)
Q = random_tables(4, 4, seed=2, sharpness=1.5, near=P, distance=0.6)
COUNT = 3000


def run(drafter: Any) -> tuple[Decoded, list[Record]]:
    rng = RandomStreams([(0, i) for i in range(COUNT)])
    out = decode(DecoderConfig(TabularTarget(P), drafter, rules.exact(), Sampling()), None, rng)
    return out, [
        replace(record(0), tokens=4, steps=n, **fields)
        for n, fields in zip(out.steps.tolist(), of_images(out.trace, out.steps.tolist(), 0))
    ]


def test_the_statistics_of_a_chain_agree_with_each_other() -> None:
    out, made = run(TabularDrafter(Q, chain_paths(3)))
    assert [sum(r.accepted_per_step) for r in made] == out.accepted.tolist()
    assert [len(r.accepted_per_step) for r in made] == out.steps.tolist()
    assert [int(summary.is_accepted_draft(r).sum()) for r in made] == out.accepted.tolist()
    for image in made:
        assert sum(image.accepted_by_depth) == sum(image.accepted_per_step)
        assert all(
            verified <= num_accepted
            for num_accepted, verified in zip(image.accepted_by_depth, image.verified_by_depth[1:])
        )
        assert all(
            num_accepted <= verified for num_accepted, verified in zip(image.accepted_by_depth, image.verified_by_depth)
        )
    histogram = summary.accepted_histogram(made)
    assert histogram.sum() == pytest.approx(1)
    assert histogram @ np.arange(len(histogram)) == pytest.approx(int(out.accepted.sum()) / int(out.steps.sum()))
    row = summary.columns(made)
    # Under the exact rule the first candidate is kept with probability 1 - TV, and a chain's first depth is this
    # candidate.
    # Five standard errors of a share over some 5000 steps:
    near = 5 * 0.5 / sum(r.steps for r in made) ** 0.5
    assert row["first_accept"] == pytest.approx(1 - row["draft_tv"], abs=near)
    assert row["acceptance_by_depth"][0] == pytest.approx(row["first_accept"], abs=near)
    assert len(row["acceptance_by_depth"]) == 3
    assert 0.2 < row["draft_tv"] < 0.8
    assert 0 < row["draft_top1"] < row["draft_top3"] <= 1


def test_a_path_that_ends_at_a_leaf_has_no_rejection() -> None:
    """Token 1 has the child token 3, token 2 has none. (Such a leaf once counted as rejected at depth 2.)"""
    tree = build([(0,), (1,), (0, 0)])
    cases = {  # the accepted path, the room in the image, the valid nodes -> tokens accepted and verified
        ((), 4, (1, 2, 3)): (0, 1),
        ((1,), 4, (1, 2, 3)): (1, 2),
        ((2,), 4, (1, 2, 3)): (1, 1),
        ((1, 3), 4, (1, 2, 3)): (2, 2),
        ((1,), 1, (1, 2, 3)): (1, 1),  # token 3 is outside the image
        ((1, 3), 1, (1, 2, 3)): (1, 1),
        ((1,), 4, (1, 2)): (1, 1),
        ((), 4, ()): (0, 0),
    }
    rows, total = len(cases), 10
    paths = torch.tensor([[*path, *[(0, *path)[-1]] * (2 - len(path))] for path, _, _ in cases])
    valid = torch.tensor([[node in (0, *nodes) for node in range(4)] for _, _, nodes in cases])
    tokens, nothing = torch.zeros(rows, 4, dtype=torch.int64), torch.zeros(rows, 0)
    length = torch.tensor([len(path) for path, _, _ in cases])
    committed = torch.tensor([total - room for _, room, _ in cases])
    verdict = VerificationResult(paths, length, tokens, nothing, nothing)
    layout, draft = Raster(tree, committed), Draft(tree, tokens, nothing, valid)
    stats = StepStats(draft, layout, verdict, None, committed, length, length > 0)  # type: ignore[arg-type]
    assert torch.stack(layout.inside(stats, total), 1).tolist() == [list(counts) for counts in cases.values()]


def test_three_likely_tokens_are_asked_only_of_distributions_that_have_them() -> None:
    """At temperature 0 a draft's distribution is a point mass, and two more tokens would be arbitrary."""
    config = DecoderConfig(TabularTarget(P), TabularDrafter(Q, chain_paths(3)), rules.exact(), Sampling(temperature=0))
    out = decode(config, None, RandomStreams([(0, 0)]))
    [image] = images(out.trace, out.steps.tolist())
    assert (image.draft_top3, image.draft_top3_steps) == (None, 0)
    row = summary.columns([image])
    assert row["draft_top1"] is not None
    assert row["draft_top3"] is None


def test_the_perplexity_is_the_entropy_of_the_target() -> None:
    probs = sequence_probs(P).double()
    surprise = -probs.clamp_min(1e-300).log()
    entropy, spread = float((probs * surprise).sum()), float((probs * surprise**2).sum())
    stderr = math.sqrt((spread - entropy**2) / COUNT)
    for drafter in (NoDraft(), TabularDrafter(Q, chain_paths(3))):  # the exact rule has the target's distribution
        row = summary.columns(run(drafter)[1])
        assert -4 * row["log_prob_mean"] == pytest.approx(entropy, abs=5 * stderr)
        assert row["perplexity"] == pytest.approx(math.exp(-row["log_prob_mean"]))


def vector_trace() -> ContinuousTrace:
    """One image of nine continuous tokens, gamma = 3, the first without a draft. Step 1 drafts tokens 1 to 3 and
    accepts two, step 2 drafts 4 to 6 and accepts all (7 is the bonus token), step 3 drafts 8 and rejects it."""
    by_step = torch.zeros(5, 1, 9)
    by_step[:, 0, 1] = torch.tensor([2.0, 3.0, 0.5, 1.0, 3.0])
    by_step[:, 0, 2] = torch.tensor([3.0, 3.0, 1.0, 4.0, 3.0])
    by_step[:, 0, 3] = torch.tensor([0.0, 1.0, 0.25, 8.0, 1.0])
    accepted, verified = torch.zeros(1, 9, dtype=torch.bool), torch.zeros(1, 9, dtype=torch.bool)
    accepted[0, [1, 2, 4, 5, 6]] = True
    verified[0, [1, 2, 3, 4, 5, 6, 8]] = True
    order = torch.tensor([[4, 0, 8, 1, 7, 2, 6, 3, 5]])
    first, second, _, fourth, fifth = by_step.long()
    tries, fallbacks, made = [[2, 5]], torch.tensor([1]), torch.tensor([7])
    steps = (first, second, by_step[2], fourth, fifth)
    return ContinuousTrace(*steps, order, accepted, verified, tries, fallbacks, 0.75, made)


LIKELIHOOD = ("log_prob_mean", "log_prob_std", "draft_top1", "draft_top3")


def vector_record(**changes: object) -> Record:
    [fields] = of_images(vector_trace(), [4], 3)
    made = replace(record(0), tokens=9, steps=4, drafted=7, accepted=5, accepted_length=9 / 4, decode_s=3.0, batch=1)
    return replace(made, **(dict.fromkeys(LIKELIHOOD) | fields | changes))  # type: ignore[arg-type]


def test_the_record_of_an_image_of_vectors() -> None:
    [fields] = of_images(vector_trace(), [4], 3)
    assert fields["accepted_per_step"] == [0, 2, 3, 0]
    assert fields["verified_by_depth"] == [3, 2, 2]  # token 8 is at depth 1
    assert fields["accepted_by_depth"] == [2, 2, 1]
    assert fields["drafts"] == ".110111.0"
    assert fields["first_accept"] == pytest.approx((0.5 + 1 + 0.25) / 3, rel=1e-5)
    assert (fields["draft_passes"], fields["tries"], fields["fallbacks"], fields["made"]) == (7, [2, 5], 1, 7)
    assert fields["draft_s"] == 0.75
    row = summary.columns([vector_record(), replace(vector_record(), index=1)])
    assert (row["residual_tries"], row["residual_fallbacks"]) == (3.5, 2)
    assert row["residual_tries_stderr"] == 0  # the two images are the same image
    assert "perplexity" not in row  # a density is not a probability
    assert row["draft_tv"] is None
    # a block decides with the tokens after the rejection, and none of them is verified by itself
    assert summary.speed([vector_record(drafted=12)])["acceptance_rate"] == 5 / 7
    assert row["acceptance_by_depth"] == [round(2 / 3, 4), 1.0, 0.5]
    assert row["drafted_by_position"] == [1, 0, 1, 0, 0, 0, 1, 1, 1]
    assert row["acceptance_by_step"] == [None, 1, 1, 0, 1, 1, 1, None, 0]


def test_the_expected_speed_up_is_equation_35() -> None:
    """a = 5/7, c = (0.75 s / 7) / (6 s / 9)."""
    vanilla = replace(vector_record(), decode_s=6.0, timed=2)
    columns = summary.expected_speedup([vector_record(timed=1)], [vanilla], 3)
    a, c = 5 / 7, (0.75 / 7) / (6 / 9)
    assert columns["draft_cost"] == pytest.approx(c)
    assert columns["speedup_expected"] == pytest.approx((1 - a**4) / ((1 - a) * (3 * c + 1)))
    all_kept = summary.expected_speedup([vector_record(accepted=7, timed=1)], [vanilla], 3)
    assert all_kept["speedup_expected"] == pytest.approx(4 / (3 * c + 1))
    assert summary.expected_speedup([vector_record(timed=1)], [replace(vanilla, batch=2)], 3) == {}
    assert summary.expected_speedup([vector_record(timed=1)], [replace(vanilla, timed=3)], 3) == {}  # no neighbours
    assert summary.expected_speedup([vector_record(timed=1, made=0)], [vanilla], 3) == {}
