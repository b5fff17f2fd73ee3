"""Two runs, image by image: the statistics against scipy and simulation, the pairs, the text, and damaged folders."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Call, cells_of, checked, refused
from omegaconf import OmegaConf
from scipy import stats
from test_journal import record

from specbench import cli, data, metrics
from specbench.compare import passes, wording
from specbench.compare.comparison import Comparison, compare, over_seeds, pair
from specbench.compare.passes import read
from specbench.config import configuration, indices
from specbench.config.run_config import PromptSelection
from specbench.data import scenes
from specbench.errors import UsageError
from specbench.metrics import frechet
from specbench.metrics.outputs import image_key
from specbench.rows import shown
from specbench.rows.journal import Record, to_line
from specbench.rows.paired import Paired, PairedTest, by_influence, distribution_test, holm, paired, size
from specbench.rows.provenance import DecodingProcess, RunMetadata

N = 40
PROCESS = DecodingProcess(
    "1", "c" * 40, "cpu", "A", "2", "", "3.11", 1, "embedded:1+2", 64, 256, 1, "", 7, "2026-11-29T00:00:00", 0.5
)


def image(index: int, steps: int, **changes: Any) -> Record:
    """The record of an image of 256 tokens, with one second per step."""
    values = {"tokens": 256, "steps": steps, "drafted": 5 * steps, "accepted": 256 - steps}
    values |= {"accepted_length": 256 / steps, "latency_s": float(steps), "decode_s": float(steps)}
    values |= {"emitted_kl": 0.0, "emitted_tv": 0.0, "emitted_outside": 0.0}
    values |= changes
    values |= {"accepted_by_depth": [values["accepted"]], "verified_by_depth": [values["drafted"]]}
    return replace(record(index), id=str(index), **values)


@cache
def composed(*words: str) -> str:
    """The config.yaml of a run with these overrides."""
    return str(OmegaConf.to_yaml(OmegaConf.create(configuration.compose(list(words)).plain())))


@dataclass
class Folders:
    """Makes folders of runs with the given records."""

    root: Path

    def make(self, name: str, images: list[Record], *words: str, baseline: list[Record] | None = None,
             process: DecodingProcess = PROCESS) -> str:  # fmt: skip
        folder = self.root / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(composed(*words or ["method=eagle_chain"]))
        RunMetadata(f"run-{name}", sessions={"s": process}).write(folder / "run.json")
        for file, records in (("records.jsonl", images), ("baseline.jsonl", baseline)):
            if records is not None:
                (folder / file).write_bytes(b"".join(map(to_line, records)))
        return str(folder)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def steps(seed: int, low: int = 100, high: int = 140) -> list[int]:
    return np.random.default_rng(seed).integers(low, high, N).tolist()


#: Images of one run; the other runs of these tests differ from it.
MINE = [image(i, s) for i, s in enumerate(steps(0))]


@pytest.fixture
def two(folders: Folders) -> tuple[str, str]:
    b = [image(i, s - d) for i, (s, d) in enumerate(zip(steps(0), steps(1, 0, 20)))]
    return folders.make("a", MINE), folders.make("b", b[::-1], "method=cool_sd")  # the order of lines does not matter


def between(a: str, b: str) -> Comparison:
    return compare(read(a), read(b))


def paired_test(pair: Paired) -> PairedTest:
    assert pair.test is not None
    return pair.test


def of(comparison: Comparison, name: str) -> Paired:
    [result] = [r for r in comparison.results if r.statistic.name == name]
    return result.paired


def test_the_tests_are_scipys() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(2, 1, 50)
    b = a + rng.normal(0.3, 0.5, 50)
    result, wanted = paired(a, b), stats.ttest_rel(b, a)
    test = paired_test(result)
    assert (test.statistic, test.p, test.df) == (wanted.statistic, wanted.pvalue, 49)
    assert test.wilcoxon == pytest.approx(stats.wilcoxon(b, a).pvalue)
    assert (test.low, test.high) == pytest.approx(wanted.confidence_interval(0.95))
    assert test.d_z == pytest.approx((b - a).mean() / (b - a).std(ddof=1))
    assert result.difference == pytest.approx((b - a).mean()) == pytest.approx(result.mean_b - result.mean_a)
    swapped = paired(b, a)
    assert (swapped.difference, paired_test(swapped).low) == pytest.approx((-result.difference, -test.high))
    # ranks ignore rounding: seconds that are a tenth of the steps have the same ties as the steps, and the same zeros
    a, b = np.array(steps(0)), np.array(steps(1))
    plain, scaled = paired_test(paired(a, b)), paired_test(paired(a * 0.1 + 7, b * 0.1 + 7))
    assert scaled.wilcoxon == plain.wilcoxon == pytest.approx(stats.wilcoxon(b - a).pvalue)


def test_equal_differences_leave_nothing_to_test() -> None:
    a = np.random.default_rng(0).normal(size=30)
    for shift in (0.0, 3.0, -0.1):
        result = paired(a, a + shift)
        assert result.test is None, shift
        assert result.difference == pytest.approx(shift)
        assert (result.difference == 0) == (shift == 0)
        assert by_influence(2.0, 2.0 + shift, a, a).test is None, shift
    assert paired([0.0, 0.0], [0.0, 0.0]) == Paired(2, 0.0, 0.0, 0.0, None)


def test_means_by_influence_are_the_paired_t_test() -> None:
    """With normal quantiles and sums over n instead of n - 1, intervals of 24 pairs were 8 % too narrow."""
    a, b = np.random.default_rng(0).normal(size=(2, 24))
    means, whole = paired(a, b), by_influence(a.mean(), b.mean(), a - a.mean(), b - b.mean())
    result, wanted = paired_test(whole), paired_test(means)
    assert whole.difference == pytest.approx(means.difference)
    for name in ("low", "high", "statistic", "df", "p"):
        assert getattr(result, name) == pytest.approx(getattr(wanted, name), rel=1e-12)


def test_rounding_is_no_difference(folders: Folders) -> None:
    """An exact method emits 1e-14 nats by its float32 sums, vanilla 0: this used to be "a large effect" with p = 0.014.
    If one image differs by more, the test is done and is not significant."""
    rng = np.random.default_rng(0)
    zeros, tiny = np.zeros(24), 1e-14 * (1 + rng.random(24))
    assert paired_test(paired(zeros, tiny)).p < 1e-6
    rounding = paired(zeros, tiny, 1e-6)
    assert (rounding.test, rounding.difference) == (None, 0.0)
    assert by_influence(0.0, 1e-7, zeros, tiny, 1e-6) == Paired(24, 0.0, 1e-7, 0.0, None)
    noise = tiny + 1e-5 * (np.arange(24) == 3)
    assert paired_test(paired(zeros, noise, 1e-6)).p == pytest.approx(
        stats.ttest_1samp(noise * (noise > 1e-6), 0).pvalue
    )
    vanilla = [image(i, 100, emitted_kl=0.0, emitted_tv=0.0) for i in range(8)]
    exact = [image(i, 100, emitted_kl=1e-14 * (1 + i % 3), emitted_tv=4e-8 + 1e-9 * i) for i in range(8)]
    comparison = between(folders.make("a", vanilla), folders.make("b", exact, "method=sjd"))
    assert [of(comparison, name).test for name in ("emitted_kl", "emitted_tv")] == [None, None]
    assert "rounding" in sentences(comparison)["emitted_kl"]


def test_adjustments_and_names_of_effects_are_the_textbooks() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert (holm([0.02]), holm([])) == ([0.02], [])
    sizes = [size(d) for d in (0.0, 0.19, -0.2, 0.5, -0.79, 0.8, 9)]
    assert sizes == ["negligible", "negligible", "small", "medium", "medium", "large", "large"]


def distance(features: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor) -> float:
    """Fréchet distance between the Gaussian of these features and the Gaussian of these moments (Heusel et al. 2017,
    Eq. 6)."""
    moments = frechet.Moments.of(features)
    product = torch.linalg.eigvals(moments.covariance @ covariance).real.clamp_min(0).sqrt().sum()
    return float((moments.mean - mean).square().sum() + moments.covariance.trace() + covariance.trace() - 2 * product)


def test_the_error_of_a_difference_of_distances_is_calibrated() -> None:
    """Features of paired images, correlated between A and B: the influences give how much the difference of their two
    Fréchet distances varies from sample to sample. From 600 draws a standard deviation is known to 1 / sqrt(1200) = 2.9
    %; four times this is 12 %. To first order the distance is not exact either: at 400 images for 3 features it is off
    by a few per cent. If the two distances were independent, their difference would vary at least a third more."""
    rng = np.random.default_rng(0)
    mean, covariance = torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    shift_a, shift_b, n = np.array([0.5, 0.0, 0.0]), np.array([0.6, 0.2, 0.0]), 400

    differences, errors, apart = [], [], []
    for _ in range(600):
        common, separate = rng.normal(size=(n, 3)), rng.normal(size=(2, n, 3))
        x, y = (torch.from_numpy(s + 0.8 * common + 0.6 * o) for s, o in zip((shift_a, shift_b), separate))
        moved = [frechet.influences(z, mean, covariance) for z in (x, y)]
        assert moved[0] is not None
        assert moved[1] is not None
        values = [distance(z, mean, covariance) for z in (x, y)]
        result = by_influence(*values, moved[0].numpy(), moved[1].numpy())
        differences.append(result.difference)
        errors.append(paired_test(result).high - result.difference)
        apart.append(math.sqrt(sum(float(i.square().sum()) for i in moved if i is not None) / (n * (n - 1))))
    spread = float(np.std(differences))
    assert np.mean(errors) / 1.959964 == pytest.approx(spread, rel=0.16)
    assert np.mean(apart) > 1.33 * spread
    covered = np.abs(np.array(differences) - np.mean(differences)) <= errors
    assert covered.mean() == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 600) + 0.01)


def test_a_difference_of_biased_distances_has_the_wrong_sign() -> None:
    """A has the distribution of the real features, B a smaller variance: its distance is (1 - 0.9)^2 * 64 = 0.64. With
    48 images B measures lower, significantly in most draws. With 16 images per feature it does not. The mean difference
    is known to its standard error: four of them are not chance."""
    mean, covariance = torch.zeros(64, dtype=torch.float64), torch.eye(64, dtype=torch.float64)
    for n, draws in ((48, 20), (16 * 64, 4)):
        rng, results = np.random.default_rng(0), []
        for _ in range(draws):
            two = torch.from_numpy(rng.normal(size=(2, n, 64)) * np.array([1, 0.9])[:, None, None])
            moved = [frechet.influences(x, mean, covariance) for x in two]
            assert moved[0] is not None
            assert moved[1] is not None
            results.append(by_influence(*(distance(x, mean, covariance) for x in two), *(m.numpy() for m in moved)))
        found = np.array([r.difference for r in results])
        error = 4 * found.std(ddof=1) / math.sqrt(draws)
        is_marked = bool(shown.bias_of_difference({"fid_backend": "scenes-classifier@1", "images": n}, "fid"))
        if n == 48:
            assert found.mean() + error < 0
            assert sum(paired_test(r).p < 0.05 for r in results) > draws / 2
        else:
            assert found.mean() - error > 0
        assert is_marked == (n == 48)


def test_every_statistic_of_the_records(two: tuple[str, str]) -> None:
    comparison = between(*two)
    a, b = steps(0), [s - d for s, d in zip(steps(0), steps(1, 0, 20))]
    expected: dict[str, Callable[[int], float]] = {
        "accepted_length": lambda s: 256 / s,
        "steps": float,
        "acceptance_rate": lambda s: (256 - s) / (5 * s),
        "latency_s": float,
    }
    assert [r.statistic.name for r in comparison.results] == [*expected, "log_prob_mean", "emitted_kl", "emitted_tv"]
    for name, value in expected.items():
        assert of(comparison, name) == paired([value(s) for s in a], [value(s) for s in b])
    assert comparison.tests == 4  # the others are identical
    tests = [(r, r.paired.test) for r in comparison.results if r.paired.test]
    assert [r.p_holm for r, _ in tests] == holm([test.p for _, test in tests])
    assert [r.wilcoxon_holm for r, _ in tests] == holm([test.wilcoxon or 0 for _, test in tests])


def test_images_without_a_partner_are_left_out_and_named(folders: Folders) -> None:
    values = steps(0)
    first = [image(i, s) for i, s in enumerate(values)]
    second = [image(i, s + i % 3) for i, s in enumerate(values) if i not in (1, 4)] + [image(N, 77)]
    second[5] = replace(second[5], prompt="something else")
    second[6] = replace(second[6], id="elsewhere")
    comparison = between(folders.make("a", first), folders.make("b", second))
    assert comparison.pairs == N - 4
    for remark, ending in zip(comparison.remarks, ("2 of A (index 1, 4).", f"1 of B (index {N}).", "2 (index 7, 8).")):
        assert remark.endswith(ending)
    left = [i for i in range(N) if i not in (1, 4, 7, 8)]
    assert of(comparison, "steps") == paired([values[i] for i in left], [values[i] + i % 3 for i in left])


def test_other_seeds_may_order_their_prompts_otherwise(folders: Folders) -> None:
    """The seed gives the order of the classes: the first circle is paired with the first circle."""
    names = ["circle", "square", "cross"]
    first = [image(i, 100 + i, prompt=names[i % 3]) for i in range(9)]
    two = [image(i, 200 + i, prompt=names[(8 - i) % 3], seed=1) for i in range(9)]
    a, b = folders.make("a", first), folders.make("b", two, "method=eagle_chain", "seed=1")
    pairs, remarks = pair(read(a), read(b))
    assert len(remarks) == 1
    assert "order" in remarks[0]
    assert all(x.prompt == y.prompt for x, y in pairs)
    assert [x.index for x, _ in pairs] == list(range(9))
    assert [y.index for _, y in pairs] == [2, 1, 0, 5, 4, 3, 8, 7, 6]
    more = folders.make("c", [*two, image(9, 210, prompt="star", seed=1)], "method=eagle_chain", "seed=1")
    assert pair(read(a), read(more))[1][-1].endswith(": 1 of B.")
    same = folders.make("d", [replace(r, seed=0) for r in two])  # one seed: an index is a prompt
    assert len(pair(read(a), read(same))[0]) == 3


def test_too_few_pairs_are_an_error(folders: Folders) -> None:
    a = folders.make("a", MINE)
    others = folders.make("b", [replace(r, prompt="other") for r in MINE])
    with pytest.raises(UsageError, match="0.*40.*3"):
        between(a, others)
    with pytest.raises(UsageError, match="2.*3"):
        between(a, folders.make("f", [*MINE[:2], *(replace(r, index=r.index + N) for r in MINE[:2])]))
    few = between(a, folders.make("d", [replace(r, steps=r.steps + r.index) for r in MINE[:3]]))
    assert any("3 pairs" in remark and "t-test" in remark for remark in few.remarks)


def test_runs_of_few_images_get_the_advice_to_decode_more(call: Call, folders: Folders) -> None:
    """Runs of the same two prompts fit each other: n is too small; the data and the split are correct."""
    folders.make("many", MINE)
    for n in range(3):
        few = f"few{n}"
        folders.make(few, MINE[:n])
        for words in ([few, few], [few, "many"], ["many", few]):
            err = refused(call, "compare", *words)
            assert ("n=20" in err, f"{n} in {few}" in err, "split" in err) == (True, True, False)
    several = [replace(r, index=r.index % 2 + (r.index // 2) * indices.STRIDE) for r in MINE[:8]]
    comparison = between(folders.make("c", several), folders.make("d", several))
    assert (comparison.pairs, comparison.results) == (8, ())
    assert all("larger n" in left_out for left_out in comparison.untested if "pairs of prompts" in left_out)


def test_identical_runs_have_no_test_and_no_nan(folders: Folders) -> None:
    """Two exact methods that share their random streams, such as greedy ones, give the same images."""
    comparison = between(folders.make("a", MINE), folders.make("b", MINE, "method=sjd"))
    assert comparison.tests == 0
    text = wording.report(comparison)
    assert all("identical in all 40 images" in told for told in sentences(comparison).values())
    assert re.search("- the same .*: accepted_length, steps, acceptance_rate", text)
    assert len(re.findall("^- ", text, re.MULTILINE)) == 1 + len(comparison.untested)
    assert "40 of 40 pairs" in text
    assert "nan" not in (text + wording.to_csv(comparison)).lower()
    longer = [replace(r, latency_s=(r.latency_s or 0) + 3) for r in MINE]
    constant = between(folders.make("c", MINE), folders.make("d", longer, "method=sjd"))
    assert re.match("sjd .* 3.0000 s .* eagle_chain.* 40 images", sentences(constant)["latency_s"])


def test_a_batch_counts_once(folders: Folders) -> None:
    """Images of a batch share its seconds; all other values are counted per image."""
    rng = np.random.default_rng(0)

    def batched(size: int, seconds: np.ndarray) -> list[Record]:
        shares = [(float(seconds[i // size]), i) for i in range(N)]
        more = {"latency_s": None, "batch": size}
        return [image(i, 100 + i % 7, decode_s=s, text_s=s / 9, timed=1 + i // size, **more) for s, i in shares]

    a, b = rng.gamma(9, 1, N // 4), rng.gamma(9, 1, N // 8)
    comparison = between(folders.make("a", batched(4, a)), folders.make("b", batched(8, b), "batch=8"))
    batches, wanted = of(comparison, "decode_s"), paired(a.reshape(-1, 2).mean(1), b)
    by_batch, other = paired_test(batches), paired_test(wanted)
    assert (batches.n, by_batch.df) == (5, 4)
    assert (batches.difference, by_batch.p, by_batch.wilcoxon) == pytest.approx(
        (wanted.difference, other.p, other.wilcoxon)
    )
    assert of(comparison, "steps").n == N
    assert "latency_s" not in [r.statistic.name for r in comparison.results]
    alone = folders.make("c", [image(i, 100 + i % 5) for i in range(N)])
    mixed = between(alone, folders.make("d", batched(20, a), "batch=20"))
    assert re.match(r"decode_s: .*\b2 pairs of batches", mixed.untested[0])
    untimed = [replace(r, timed=None) for r in batched(4, a)]
    without = between(folders.make("e", untimed), folders.make("f", untimed, "batch=8"))
    assert re.match("decode_s: eagle_chain .*cool_sd", without.untested[0])


def test_seconds_of_separate_passes_are_pointed_out(folders: Folders) -> None:
    """Not for a run and its own baseline, which alternate."""
    separate = "separate passes"
    comparison = between(
        folders.make("a", MINE), folders.make("b", [replace(r, latency_s=9.0) for r in MINE], "method=sjd")
    )
    assert len([remark for remark in comparison.remarks if separate in remark and "latency_s" in remark]) == 1
    passes = [[replace(r, timed=2 * r.index + k) for r in MINE] for k in range(2)]
    comparison = between(folders.make("c", passes[0]), folders.make("d", passes[1], "method=sjd"))
    assert not [remark for remark in comparison.remarks if separate in remark]


def test_seconds_of_a_timing_that_does_not_hold_are_not_compared(folders: Folders) -> None:
    """Vanilla's part of B's pairs becomes slower after half of them; A has no pairs."""
    a = folders.make("a", MINE)
    records = [image(i, s, timed=2 * i + 1, done=i) for i, s in enumerate(steps(0))]
    for slower in (1.0, 1.5):
        seconds = [256 * (slower if i >= N // 2 else 1) for i in range(N)]
        vanilla = [image(i, 256, timed=2 * i + 2, latency_s=s, decode_s=s, done=i) for i, s in enumerate(seconds)]
        b = folders.make(f"b{slower}", records, "method=cool_sd", baseline=vanilla)
        for comparison in (between(a, b), between(f"{b}/baseline", b)):
            tested = {r.statistic.name for r in comparison.results}
            assert ("latency_s" in tested) == (slower == 1)
            assert any(re.match("latency_s: .*40 pairs", text) for text in comparison.untested) == (slower != 1)
            assert "steps" in tested


def test_missing_parts_of_a_run_are_reported(folders: Folders) -> None:
    vanilla = [image(i, 256, drafted=0, accepted=0) for i in range(N)]
    older = [replace(r, log_prob_mean=None if r.index else -1.0) for r in MINE]
    run = folders.make("a", older, baseline=vanilla)
    comparison = between(f"{run}/baseline", run)
    rate, log_prob = comparison.untested
    assert rate.startswith("acceptance_rate: vanilla ")
    assert re.match(r"log_prob_mean: .*\b1 pairs", log_prob)


def test_a_baseline_is_named_as_its_folder(folders: Folders) -> None:
    run = folders.make("cool", MINE, "method=cool_sd", baseline=[image(i, 256) for i in range(N)])
    other = folders.make("other", MINE, "method=cool_sd", "delta=2")
    (Path(run) / "baseline").mkdir()  # where its images are
    assert between(f"{run}/baseline", run).names == ("vanilla", "cool_sd")
    assert between(f"{run}/baseline.jsonl", f"{run}/records.jsonl").names == ("vanilla", "cool_sd")
    assert between(f"{run}/baseline/", run).remarks[0].startswith("In 40 of 40 pairs")  # nothing else differs
    assert between(run, other).names == ("cool_sd delta=1.1", "cool_sd delta=2.0")
    assert between(run, run).names == ("cool_sd (A)", "cool_sd (B)")
    twin = folders.make("twin", MINE, "method=cool_sd")
    assert [name.split("/")[-1] for name in between(run, twin).names] == ["cool)", "twin)"]
    with pytest.raises(UsageError, match="baseline=true"):
        between(f"{other}/baseline", other)


def test_other_differences_than_the_method_are_reported(folders: Folders) -> None:
    a = folders.make("a", MINE)
    assert not any("differ" in r for r in between(a, folders.make("b", MINE, "method=cool_sd", "delta=2")).remarks)
    words = ["method=cool_sd", "cfg_scale=5", "seed=1", "batch=4", "n=99", "metrics=none"]
    process = replace(PROCESS, device_name="B\x1b[31m", weights="embedded:3", commit="d" * 40)
    other = folders.make("c", [replace(r, seed=1) for r in MINE], *words, process=process)
    [remark] = [r for r in between(a, other).remarks if "differ" in r]
    listed = remark.partition(": ")[2].partition(". ")[0].rstrip(".")
    assert set(listed.split(", ")) == {
        *("cfg_scale 3.0 / 5.0", "batch 1 / 4", "weights embedded:1 / embedded:3"),
        *("commit cccccccc / dddddddd", "device_name A / B?[31m", "seed 0 / 1"),
    }
    assert "data scenes / scenes_classes" in between(a, folders.make("d", MINE, "data=scenes_classes")).remarks[0]


def sentences(comparison: Comparison) -> dict[str, str]:
    return {r.statistic.name: wording.sentence(r, comparison) for r in comparison.results}


def accepted(folders: Folders, shift: Callable[[int], float]) -> str:
    """The sentence on two runs whose accepted lengths differ by `shift` of the index, and in nothing else."""
    first = [image(i, 100) for i in range(N)]
    second = [replace(r, accepted_length=r.accepted_length + shift(r.index)) for r in first]
    count = str(len(list(folders.root.iterdir())))
    comparison = between(folders.make(f"a{count}", first), folders.make(f"b{count}", second, "method=cool_sd"))
    return sentences(comparison)["accepted_length"]


def test_a_sentence_has_the_difference_its_interval_and_its_test(folders: Folders) -> None:
    # 0.3 or 0.4: mean 0.35, standard deviation 0.05 sqrt(40 / 39), t = 0.35 sqrt(39) / 0.05
    more, fewer = (accepted(folders, lambda i, sign=sign: sign * (0.3 + 0.1 * (i % 2))) for sign in (1, -1))
    assert more.startswith("cool_sd accepts 0.350 more tokens ")
    assert fewer.startswith("cool_sd accepts 0.350 fewer tokens ")
    for text, t, d_z in ((more, "43.7", "6.91"), (fewer, "-43.7", "-6.91")):
        assert f"(95 % interval 0.334 to 0.366, paired t(39) = {t}, p = 1e-34, d_z = {d_z}: a large" in text
    # +-1, +-2 ... +-20, and 1 more
    none = accepted(folders, lambda i: (-1) ** i * (i // 2 + 1) / 100 + 0.01)
    assert "no significant difference in accepted_length" in none
    assert "cool_sd - eagle_chain = +0.01 (95 % interval -0.03 to 0.05, paired t(39) = 0.52, p = 0.61" in none


def test_a_sentence_names_tests_that_disagree(folders: Folders, two: tuple[str, str]) -> None:
    # one wild image: the t-test sees nothing, the ranks do
    wild = accepted(folders, lambda i: -2.5 if i == 0 else 0.05 + 0.001 * i)
    assert "no significant difference in accepted_length" in wild
    assert re.search(r"Wilcoxon[a-z -]+\(p = ", wild)
    # p = 0.03 alone is little among four tests
    comparison = between(*two)
    result = comparison.results[0]
    test = replace(paired_test(result.paired), p=0.03, wilcoxon=0.5)
    weak = replace(result, paired=replace(result.paired, test=test), p_holm=0.12, wilcoxon_holm=1.0)
    assert re.match("cool_sd accepts 0.*, but p = 0.12 .* 4 tests", wording.sentence(weak, comparison))
    tiny = replace(result, paired=replace(result.paired, test=replace(test, p=0.0)), p_holm=0.0, wilcoxon_holm=0.0)
    assert "p < 1e-300" in wording.sentence(tiny, comparison)


def test_few_pairs_are_no_disagreement(folders: Folders) -> None:
    """Four pairs with one sign: p of the ranks is 2 / 2^4 = 0.125, and never smaller. Six have 0.03, but 0.06 after the
    adjustment for accepted_length and acceptance_rate. Nine have 0.004, 0.008 after it: ranks that disagree then, since
    one image has the other sign and the largest size, are named."""
    for n, wild, named in ((4, False, False), (6, False, False), (9, False, False), (9, True, True)):
        first = [image(i, 100) for i in range(n)]
        second = [
            replace(r, accepted_length=r.accepted_length + 1 + 0.001 * r.index, accepted=r.accepted + 7 + r.index % 3)
            for r in first
        ]
        comparison = between(folders.make(f"a{n}{wild}", first), folders.make(f"b{n}{wild}", second, "method=sjd"))
        if wild:  # the t-test's p is set apart from the ranks'
            results = [replace(r, p_holm=1e-6, wilcoxon_holm=0.5) for r in comparison.results if r.paired.test]
            comparison = replace(comparison, results=tuple(results))
        told = sentences(comparison)["accepted_length"]
        assert ("disagrees" in told) == named, n
        assert of(comparison, "accepted_length").test is not None
        assert ("no Wilcoxon test can" in " ".join(wording.report(comparison).split())) == (n < 9)


def test_the_report_says_a_and_b_and_one_line_for_the_rest(folders: Folders) -> None:
    """Labels that repeat in each sentence, and a line for each statistic without a difference, hid what differs."""
    words = ["method=sjd", "window=8"]
    first = folders.make("a", MINE, *words)
    noisy = [image(i, s + (-1) ** i) for i, s in enumerate(steps(0))]
    other = [replace(r, accepted=r.accepted + 40 + r.index % 2) for r in noisy]
    comparison = between(first, folders.make("b", other, "method=sjd", "plain_from=200"))
    assert comparison.names == ("sjd window=8", "sjd plain_from=200 window=16")  # plain_from=null is no setting of A
    text = wording.report(comparison)
    assert text.count("window=8") == text.count("plain_from=200") == 1
    [told, rest, *_] = [line for line in text.splitlines() if line.startswith("- ")]
    assert told.startswith("- the acceptance rate of B is")
    assert re.fullmatch("- no significant difference in accepted_length, steps, latency_s; the same .*", rest)


def test_the_screen_is_120_wide(folders: Folders) -> None:
    wide = {"tokens": 10**9, "accepted": 0, "latency_s": 1e5 / 3}
    first = [image(i, 10**8 + s, **wide) for i, s in enumerate(steps(0))]
    second = [image(i, s, log_prob_mean=-1e7 / s) for i, s in enumerate(steps(1))]
    long = "{a}{}%s" + "x" * 90  # a folder's name may hold what a format string would fill in
    text = wording.report(between(folders.make(f"{long}/a", first), folders.make(f"{long}/b", second)))
    assert f"/{long}/a" in text
    assert max(len(line) for line in text.splitlines() if long not in line) <= 120
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_the_csv_has_its_columns(two: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "delta=1.csv"
    assert cli.main(["compare", *two, f"out={out}"]) == 0
    *_, tests, wrote = capsys.readouterr().out.splitlines()
    assert (tests[:2], "Holm" in tests, wrote) == ("4 ", True, f"wrote {out}")
    rows = cells_of(out)
    assert list(rows[0]) == list(wording.COLUMNS)
    comparison = between(*two)
    for row, result in zip(rows, comparison.results, strict=True):
        assert row["statistic"] == result.statistic.name
        assert float(row["difference"]) == result.paired.difference
        assert (row["a"], row["b"], row["run_a"], row["run_b"]) == ("eagle_chain", "cool_sd", "run-a", "run-b")
        if result.paired.test is None:
            assert {row[name] for name in ("low", "p", "p_holm", "p_wilcoxon", "d_z", "effect")} == {""}
            continue
        assert (float(row["p"]), float(row["p_wilcoxon_holm"])) == (result.paired.test.p, result.wilcoxon_holm)
        assert row["effect"] == size(float(row["d_z"]))


def test_each_family_has_its_own_number() -> None:
    """Rows of a table: three t-tests, of which two have ranks. The last row is not shown by the table."""
    values = (("0.01", "0.02"), ("0.02", "0.03"), ("0.03", ""), ("0.04", "0.05"))
    rows = [dict.fromkeys(wording.COLUMNS, "") | {"p": p, "p_wilcoxon": ranks} for p, ranks in values]
    names = ("p_holm", "tests", "p_wilcoxon_holm", "tests_wilcoxon")
    adjusted = [tuple(row[name] for name in names) for row in wording.readjusted(rows, range(3))]
    assert adjusted == [
        ("0.03", "3", "0.04", "2"), ("0.04", "3", "0.04", "2"), ("0.04", "3", "", ""), ("", "", "", "")
    ]  # fmt: skip


def test_the_energy_distance_is_the_papers() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(9, 3)), rng.normal(size=(9, 3)) + 1
    together = np.concatenate([x, y])
    a, b = (x - 5) / together.std(0), (y - 5) / together.std(0)
    mean = lambda u, v: np.mean([np.linalg.norm(p - q) for p in u for q in v])  # noqa: E731
    result = distribution_test(x, y)
    assert result is not None
    assert result.distance == pytest.approx(2 * mean(a, b) - mean(a, a) - mean(b, b), rel=1e-5)
    still = np.concatenate([x, np.ones((9, 2))], 1), np.concatenate([y, np.ones((9, 2))], 1)
    assert distribution_test(*still) == result  # numbers that never change say nothing
    assert distribution_test(*(part[::-1] for part in still)).distance == pytest.approx(result.distance, rel=1e-5)  # type: ignore[union-attr]


def test_p_values_of_equal_distributions_are_uniform() -> None:
    """Pairs have in common only a part that depends on their prompt. p <= 0.2 in a fifth of 300 cases, within four
    standard errors, 4 * sqrt(0.2 * 0.8 / 300) = 0.092, and half a swap of 99."""
    rng, n, hits = np.random.default_rng(0), 25, 0
    for _ in range(300):
        shared = rng.normal(size=(n, 4))
        first, second = (shared + rng.exponential(size=(n, 4)) for _ in "ab")
        result = distribution_test(first, second, swaps=99)
        assert result is not None
        hits += result.p <= 0.2
    assert abs(hits / 300 - 0.2) < 0.1


def test_other_distributions_are_detected() -> None:
    """Another mean, another spread, and other dependences between the same numbers."""
    x, y = np.random.default_rng(2).normal(size=(2, 200, 4))
    for what, other in (("mean", y + 0.5), ("spread", 1.5 * y), ("dependence", np.sort(y, 1))):
        result = distribution_test(x, other)
        assert result is not None
        assert result.p == 0.001, what  # none of the 999 swaps
        assert result.distance > 3 * result.swapped, what


def test_distributions_of_features_are_compared(scored: tuple[str, str, np.ndarray, np.ndarray]) -> None:
    a, b, x, y = scored
    for folder, outputs in ((a, x), (b, y + 2)):
        score(folder, "scenes_fid", "features@1", outputs, prompts=False)
        score(folder, "scenes_reward", "reader@1", outputs)  # no feature extractor
    comparison = between(a, b)
    energy = distribution_test(x, y + 2)
    assert energy is not None
    assert comparison.distribution_tests == {"features@1": energy}
    text = wording.report(comparison)
    assert re.search(r"features@1 .* A and B .* 40 pairs", " ".join(text.split()))
    row = list(csv.DictReader(io.StringIO(wording.to_csv(comparison))))[-1]
    assert (row["statistic"], row["scorer"], float(row["p"])) == ("distribution", "features@1", 0.001)
    # it is one of two tests
    reward = paired_test(of(comparison, "scenes_reward")).p
    assert (row["tests"], float(row["p_holm"])) == ("2", holm([reward, 0.001])[1])
    assert "2 statistics were tested, 1 " in text
    [scored_row] = [r for r in csv.DictReader(io.StringIO(wording.to_csv(comparison))) if r["p_wilcoxon"]]
    assert (scored_row["tests"], scored_row["tests_wilcoxon"]) == ("2", "1")
    assert scored_row["p_wilcoxon"] == scored_row["p_wilcoxon_holm"]
    assert [r.p_holm for r in comparison.results if r.paired.test] == [2 * reward]
    assert "cool_sd differ significantly: " in wording.distribution_sentence("features@1", energy, comparison)
    weak = replace(comparison, distribution_holm={"features@1": 0.06})
    sentence = wording.distribution_sentence("features@1", replace(energy, p=0.03), weak)
    assert " do not differ significantly: " in sentence
    assert re.search(r"\(p = 0\.03, .*p = 0\.06 .*Holm.* 2 tests\)\.$", sentence)


def score(folder: str, metric: str, scorer: str, outputs: np.ndarray, prompts: bool = True) -> None:
    """Caches the scorer outputs of a run's images, as scoring does."""
    records = read(folder).records
    cached = metrics.Outputs(Path(folder))
    keys = [image_key(records[i].sha256, records[i].prompt if prompts else None) for i in range(len(outputs))]
    cached.cache(scorer).add(keys, outputs)
    cached.name(metric, scorer)


@pytest.fixture
def scored(folders: Folders) -> tuple[str, str, np.ndarray, np.ndarray]:
    """Two runs, and scorer outputs (N, 3) for their images: the first number is the reward."""
    rng = np.random.default_rng(0)
    first = [image(i, 100, sha256=f"a{i}") for i in range(N)]
    second = [replace(r, sha256=f"b{r.index}") for r in first]
    x = rng.normal(size=(N, 3)).astype(np.float32)
    y = (x + 0.1 * rng.normal(size=x.shape)).astype(np.float32)
    return folders.make("a", first), folders.make("b", second, "method=cool_sd"), x, y


def test_scores_per_image_are_compared(scored: tuple[str, str, np.ndarray, np.ndarray]) -> None:
    a, b, x, y = scored
    score(a, "scenes_reward", "reader@1", x)
    score(b, "scenes_reward", "reader@1", y[:30])  # ten were not scored
    comparison = between(a, b)
    assert of(comparison, "scenes_reward") == paired(x[:30, 0].astype(np.float64), y[:30, 0].astype(np.float64))
    assert comparison.results[-1].scorer == "reader@1"
    assert comparison.tests == 1
    assert "scenes_reward" in sentences(comparison)["scenes_reward"]


def test_a_prompt_of_several_seeds_counts_once(folders: Folders) -> None:
    """Seeds with the same prompts used to count as independent. Prompts of one seed alone are further prompts."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(100, 140, (2, 2, N))  # steps: of two seeds, of each prompt
    rewards = rng.normal(size=(2, 2, N, 3)).astype(np.float32)
    methods = ("sjd", "gsd")
    for shared in (True, False):
        runs = []
        for seed in range(2):
            two = []
            for side, values in enumerate((a, b)):
                ids = [str(i if shared else 2 * i + seed) for i in range(N)]
                made = [image(i, int(s), seed=seed, sha256=f"{side}{seed}{i}") for i, s in enumerate(values[seed])]
                images = [replace(r, id=name) for r, name in zip(made, ids)]
                two.append(folders.make(f"{shared}{side}{seed}", images[:: 1 - 2 * side], f"method={methods[side]}"))
                score(two[-1], "scenes_reward", "reader@1", rewards[side, seed])
            runs.append((read(two[0]), read(two[1])))
        comparison = over_seeds(runs)
        assert comparison.b.run_id == f"run-{shared}10 / run-{shared}11"
        for name, (x, y) in {"steps": (a, b), "scenes_reward": rewards[..., 0].astype(np.float64)}.items():
            result, wanted = (
                of(comparison, name),
                paired(x.mean(0), y.mean(0)) if shared else paired(x.ravel(), y.ravel()),
            )
            assert (result.n, result.difference) == (wanted.n, pytest.approx(wanted.difference, rel=1e-4))
            assert paired_test(result).p == pytest.approx(paired_test(wanted).p, rel=1e-4)  # scores are float32
            assert sentences(comparison)[name]
    with pytest.raises(UsageError, match="prompts"):
        over_seeds([(runs[0][0], runs[1][1])])


def test_scores_that_do_not_compare_are_named(scored: tuple[str, str, np.ndarray, np.ndarray]) -> None:
    a, b, x, y = scored
    score(a, "scenes_reward", "reader@1", x)
    [unscored] = between(a, b).untested
    assert re.match("scenes_reward: B .*specbench evaluate", unscored)
    score(b, "scenes_reward", "reader@2\x1b", y)
    [untested] = between(a, b).untested
    assert re.fullmatch(r"scenes_reward: .* reader@1 in A .* reader@2\? in B", untested)
    score(b, "scenes_reward", "reader@1", y[:2])
    assert "only 2 pairs" in between(a, b).untested[0]
    score(a, "gone", "reader@1", x)
    assert "gone" in [line.split(":")[0] for line in between(a, b).untested]


def test_damaged_scores_are_named(scored: tuple[str, str, np.ndarray, np.ndarray]) -> None:
    a, b, x, y = scored
    for number, damage in enumerate((math.nan, math.inf)):
        y[3, 0] = damage
        score(a, "scenes_reward", f"reader@{number}", x)
        score(b, "scenes_reward", f"reader@{number}", y)
        for folder in (a, b):  # no number per image
            score(folder, "scenes_clip", f"towers@{number}", np.zeros((N, 0), np.float32))
        untested = between(a, b).untested
        assert [line.split(":")[0] for line in untested] == ["scenes_clip", "scenes_reward"], damage
        assert all("damaged" in line and "scores/" in line for line in untested)


def test_a_frechet_distance_is_compared_by_influence(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A has features with the distribution of the real images, B with a wider one."""
    from specbench.metrics import scenes_reference

    metric = metrics.metric("scenes_fid", metrics.ScoringContext(metrics.ASSETS, Path()))
    reference = scenes_reference.whole_world(scenes.WORLD, metric.path, metric.cache_key, "cpu")
    monkeypatch.setattr(shown, "IMAGES_PER_FEATURE", 1)  # so that 100 images are enough
    # torchmetrics takes seconds to import, and test_metrics looks at the value
    here = reference.mean, reference.covariance
    monkeypatch.setattr(frechet, "distance", lambda features, *_: distance(features, *here))
    n, rng = 140, np.random.default_rng(0)
    values, vectors = torch.linalg.eigh(reference.covariance)
    noise = rng.normal(size=(2, n, 64)) * values.clamp_min(0).sqrt().numpy()
    real = reference.mean.numpy()
    x = real + noise[0] @ vectors.numpy().T
    y = real + (0.9 * noise[0] + 0.9 * noise[1]) @ vectors.numpy().T  # of larger variance, and paired with x
    prompts = [scenes.sample("validation", i).caption for i in range(n)]
    records = [image(i, 100, sha256=f"a{i}", prompt=prompt) for i, prompt in enumerate(prompts)]
    a = folders.make("a", records)
    b = folders.make("b", [replace(r, sha256=f"b{r.index}") for r in records], "method=cool_sd")
    for folder, outputs in ((a, x), (b, y)):
        score(folder, "scenes_fid", metric.cache_key, outputs.astype(np.float32), prompts=False)
    comparison = between(a, b)
    paired_values = of(comparison, "scenes_fid")
    test = paired_test(paired_values)
    assert (test.df, test.wilcoxon, test.d_z) == (n - 1, None, None)
    assert (comparison.results[-1].remark, over_seeds([(read(a), read(b))]).results[-1].remark) == ("", "")
    # the two values are in two rows, and the difference is surer than of two runs that are not paired
    alone = [
        metric.score(outputs.astype(np.float32), data.load(PromptSelection(read(a).data, n, own=read(a).cfg)))[0]
        for outputs in (x, y)
    ]
    assert (paired_values.mean_a, paired_values.mean_b) == pytest.approx((alone[0].value, alone[1].value))
    unpaired = 1.96 * math.hypot(alone[0].stderr or 0, alone[1].stderr or 0)
    assert test.high - paired_values.difference < 0.95 * unpaired
    text = sentences(comparison)["scenes_fid"]
    assert re.search(
        r"scenes_fid.* higher \(worse\) with cool_sd than with eagle_chain \(95 % interval .*, paired t\(139\) = ", text
    )
    assert "effect" not in text
    monkeypatch.setattr(shown, "IMAGES_PER_FEATURE", 16)
    biased = between(a, b)
    assert of(biased, "scenes_fid") == paired_values
    for told in (sentences(biased)["scenes_fid"], wording.report(biased)):
        assert "16 x 64 features" in " ".join(told.split())
        assert not re.search("better|worse|scenes_fid [0-9]|in scenes_fid", told)  # no verdict
    row = list(csv.DictReader(io.StringIO(wording.to_csv(biased))))[-2]
    assert (row["statistic"], float(row["p"]), float(row["low"])) == ("scenes_fid", test.p, test.low)
    assert ("16 x 64" in row["remark"], row["pairs_needed"]) == (True, "")
    assert "16 x 64" in over_seeds([(read(a), read(b))]).results[-1].remark
    monkeypatch.setattr(shown, "IMAGES_PER_FEATURE", 1)
    few = between(a, folders.make("c", [replace(r, sha256=f"b{r.index}") for r in records[:100]]))
    assert re.match("scenes_fid: B .*specbench evaluate", few.untested[-1])
    score(few.b.argument, "scenes_fid", metric.cache_key, y[:100].astype(np.float32), prompts=False)
    assert paired_test(of(between(a, few.b.argument), "scenes_fid")).df == 99
    monkeypatch.setattr(type(metric), "influences", lambda *_: None)  # as of a metric without them
    assert re.match(r"scenes_fid: .*\b100 pairs\b", between(a, few.b.argument).untested[-1])


def test_the_prompts_of_a_real_data_set_are_those_of_the_records(folders: Folders) -> None:
    """Its files need not be here. The prompts of an embedded world are drawn again, with their labels."""
    photograph = image(4, 100, prompt="a photograph")
    real = read(folders.make("real", [photograph], "model=llamagen_xl", "data=parti", "metrics=none"))
    assert passes.items(real, [photograph]) == [data.Item(4, "a photograph", None, "4")]
    sample, world = scenes.sample("validation", 4), read(folders.make("drawn", MINE))
    [item] = passes.items(world, [image(4, 100, prompt=sample.caption)])
    assert (item.index, item.prompt, item.labels) == (4, sample.caption, tuple(sample.scene.labels()))
    with pytest.raises(UsageError, match="prompts are not the present ones of data=scenes"):
        passes.items(world, [photograph])


def test_a_damaged_record_is_named(folders: Folders) -> None:
    good = [image(i, 100) for i in range(5)]
    a, b = folders.make("a", good), folders.make("b", good)
    path = Path(b) / "records.jsonl"
    lines = path.read_text().splitlines()
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"decode_s": math.nan}, r"line 1 of .* \(has no number as decode_s \(nan\)\)"),
        ({"accepted_length": 1e200}, "no number as accepted_length"),
        ({"steps": 1.5}, r"no integer as steps \(1.5\)"),
        ({"drafted": -1}, "has drafted -1"),
        ({"accepted": 10**6}, "accepted 1000000 of 500 drafts"),
        ({"emitted_log_ratio": [0.5, "x"]}, "no list of numbers as emitted_log_ratio"),
        ({"prompt": None}, "no text as prompt"),
        ({"index": "\x1b[2J"}, "line 1 of .*records.jsonl is not a record"),
        ({"index": 1}, "two records of index 1"),
    )
    for change, sentence in changes:
        first = {k: v for k, v in json.loads(lines[0]).items() if k != "check"} | change
        path.write_text("\n".join([checked(first), *lines[1:], ""]))
        with pytest.raises(UsageError, match=sentence) as raised:
            between(a, b)
        assert str(raised.value).isprintable(), change


DAMAGED = (
    ("records.jsonl", b"\xff\xfe\n", "line 1 of .* is not a record"),
    ("records.jsonl", b"[" * 200_000 + b"\n", "line 1 of .* is not a record"),
    ("config.yaml", b"method: [", "config.yaml"),
    ("config.yaml", b"method: 1\ndrafter: a\nrule: b", "config.yaml"),
    ("config.yaml", None, "config.yaml"),
)


def test_a_damaged_folder_is_named(folders: Folders) -> None:
    a, b = folders.make("a", MINE), folders.make("b", MINE)
    for file, content, sentence in DAMAGED:
        path = Path(b) / file
        whole = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UsageError, match=sentence):
            between(a, b)
        path.write_bytes(whole)


def test_a_run_that_is_still_at_work_can_be_compared(two: tuple[str, str]) -> None:
    path = Path(two[1]) / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:9], lines[9][:40]]))  # half a line, which is being written
    assert between(*two).pairs == 9
    assert path.read_bytes().endswith(lines[9][:40])  # and which is left alone


def test_words_that_name_no_run(
    two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two
    for words, sentence in (
        ([a], "compare takes A B"),
        ([a, b, a], "compare takes A B"),
        ([a, f"{b}/nope"], "there is no "),
        ([a, str(tmp_path)], f"contains 2 of them; name one, such as {a}"),
        ([a, "/"], "has no records of a run"),
        ([a, f"{b}/config.yaml"], "has no records of a run"),
        ([a, b, f"out={tmp_path}"], "it is a folder"),
        ([a, b, f"out={b}/config.yaml/x.csv"], "cannot write"),
    ):
        assert cli.main(["compare", *words]) == 2
        assert sentence in capsys.readouterr().err
    monkeypatch.chdir(b)
    assert cli.main(["compare", a, "."]) == 0
