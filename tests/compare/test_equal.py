"""Pairs of curves at equal x: differences over the common range, with the errors of paired prompts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, t
from test_compare import Folders, image, score
from test_journal import record
from test_tables import FakeBench

from specbench import data, metrics
from specbench.compare import equal
from specbench.compare.passes import ScoredPass, read
from specbench.config.indices import STRIDE
from specbench.config.run_config import PromptSelection
from specbench.errors import UsageError
from specbench.harness.planned import PlannedRun
from specbench.metrics.outputs import image_key
from specbench.rows.csv_files import append_row
from specbench.rows.remark import as_json, remark
from specbench.tables import collect, matched, table_runs
from specbench.tables.catalog import TABLES
from specbench.tables.definitions import Table, TableFigure

N = 24
_CONTEXT = metrics.ScoringContext(metrics.ASSETS, Path())


def run(name: str, steps: float, divergence: float, noise: int, only: Sequence[int] = range(N)) -> ScoredPass:
    """A run whose images have about this many steps and this emitted KL. `noise` is the run's own; the noise of the
    prompts is the same in all runs."""
    noise_rng, shared = np.random.default_rng(noise), np.random.default_rng(0).normal(size=N)
    many = np.round(steps * (1 + 0.1 * shared) + noise_rng.normal(size=N))
    much = divergence * (1 + 0.2 * shared) + 0.002 * noise_rng.normal(size=N)
    images = {
        i: replace(record(i), tokens=256, steps=int(many[i]), accepted_length=256 / many[i], emitted_kl=float(much[i]))
        for i in only
    }
    return ScoredPass(name, Path(name), False, {"method": name}, name, {}, images)


def curves(only: Sequence[int] = range(N)) -> dict[str, list[ScoredPass]]:
    weak, strong = ((130, 0.01), (118, 0.03)), ((128, 0.02), (119, 0.05))
    return {
        label: [run(f"{label}{i}", *settings, seed + i, only) for i, settings in enumerate(points)]
        for label, points, seed in (("band", weak, 1), ("cool", strong, 5))
    }


@pytest.mark.parametrize("x", ["step_compression", "accepted_length_mean"])
def test_the_error_of_a_difference_equals_the_jackknife(x: str) -> None:
    """The whole computation is repeated without each prompt in turn. The two errors of 24 prompts differ by about 1 in
    24, and 9,999 samples find their quantile within 2 %."""
    (row,) = equal.rows(curves(), x, "emitted_kl")
    ends: list[float] = [row["from_x"], row["to_x"]]  # type: ignore[list-item]

    def difference(only: Sequence[int]) -> float:
        """Over the range of all prompts, with numpy's own interpolation."""
        at, means = np.linspace(*ends, 101), []
        for runs in curves(only).values():
            points = [equal.point(folder, x, "emitted_kl") for folder in runs]
            y = np.interp(at, [p.x for p in points], [p.y for p in points])
            means.append(np.trapezoid(y, at) / (ends[1] - ends[0]))
        return float(means[1] - means[0])

    left = [difference([i for i in range(N) if i != out]) for out in range(N)]
    error = np.sqrt((N - 1) / N * np.square(np.array(left) - np.mean(left)).sum())
    assert (row["a"], row["b"], row["prompts"]) == ("band", "cool", N)
    assert row["difference"] == pytest.approx(difference(range(N)), rel=0.01)
    assert row["difference"] == pytest.approx(row["y_b"] - row["y_a"])  # type: ignore[operator]
    half = (row["high"] - row["low"]) / 2  # type: ignore[operator]
    assert half == pytest.approx(t.ppf(0.975, N - 1) * error, rel=0.15)
    assert row["low"] < row["difference"] < row["high"]  # type: ignore[operator]
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]  # type: ignore[operator]


def test_a_value_is_on_the_line_between_two_runs() -> None:
    """To the left of the first run a curve has the y of that run, in every sample."""
    ones = np.ones(3)
    points = [equal.CurvePoint(x * ones, ones, y, 0 * ones) for x, y in ((3.0, 9.0), (1.0, 1.0), (2.0, 4.0))]
    curve = equal.curve(points, np.array([[1, 1, 1], [3, 0, 0]]))
    assert curve.at(np.array([0.5, 1.0, 1.5, 2.5, 3.0])).tolist() == [[1.0, 1.0, 2.5, 6.5, 9.0]] * 2
    # a sample may exchange neighbours (the second prompt alone has x = 3 at the weaker strength, 2 at the other): x is
    # sorted, y is not, as both grow with the strength
    over = np.array([[1.0, 3.0], [2.2, 2.0]])
    points = [equal.CurvePoint(row, np.ones(2), y, np.zeros(2)) for row, y in zip(over, (0.1, 0.2), strict=True)]
    curve = equal.curve(points, np.array([[1, 1], [0, 2]]))
    assert curve.x.tolist() == [[2.0, 2.1], [2.0, 3.0]]
    assert curve.y.tolist() == [[0.1, 0.2]] * 2


def test_a_band_is_as_wide_as_the_largest_of_many_differences_asks_for() -> None:
    """21 independent differences of 10,000 prompts: the largest of 21 normal deviations is below 3.03 in 95 % of
    samples, a single one below 1.96. With 20,000 samples a quantile of either has a standard error of about 1 %."""
    x, rng = np.tile(np.linspace(2.0, 3.0, 21), (20_001, 1)), np.random.default_rng(5)
    sampled = np.concatenate([np.full((1, 21), 0.5), 0.5 + rng.normal(size=(20_000, 21))])
    difference = equal.difference(equal.SampledCurve(x, 0 * x), equal.SampledCurve(x, sampled), 10_000)
    assert difference is not None
    assert difference.at == pytest.approx(x[0])
    assert difference.margins == pytest.approx([norm.ppf((1 + 0.95 ** (1 / 21)) / 2)] * 21, rel=0.05)
    # The mean of 21 by the trapezoidal rule, whose ends count half.
    error = np.sqrt(19 + 2 / 4) / 20
    assert np.diff(difference.interval)[0] / 2 == pytest.approx(1.96 * error, rel=0.05)
    assert difference.p == pytest.approx(2 * norm.sf(0.5 / error), rel=0.15)
    assert difference.ratio_interval is None  # the other mean is 0


def test_an_interval_of_few_prompts_is_as_wide_as_students() -> None:
    """Of the mean of n normal values, on average over 40 draws. The spread of samples is too small by a factor of
    sqrt((n - 1) / n). Intervals used to be too narrow by it: with the lighter tails of few prompts, 15, 7 and 4 % for
    4, 8 and 16 prompts. The tails alone take 2 % at most. A quantile of 2,000 samples varies by about 2 % in each draw,
    and by 0.3 % in the mean."""
    for n in (4, 8, 16):
        rng, widths = np.random.default_rng(0), []
        for _ in range(40):
            values, counts = rng.normal(size=n), rng.multinomial(n, np.full(n, 1 / n), 2000)
            sampled = np.concatenate([[values.mean()], counts @ values / n])[:, None]
            half = equal._margins(sampled, n, 0.0)[0][0]
            widths.append(half / (t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)))
        assert np.mean(widths) == pytest.approx(1, abs=0.03), n


TRUE_X = np.array([1.84, 1.90, 1.94, 2.07, 2.24, 2.38])
TRUE_Y = np.array([0.0, 0.001, 0.008, 0.03, 0.077, 0.137])


def simulated(rng: np.random.Generator, steeper: float) -> dict[str, list[equal.CurvePoint]]:
    """Two curves from one exact run: the true y of the second is `steeper` times the y of the first. The 24 prompts
    vary by 13 % in steps and 12 % in divergence, equally in all runs, and each run adds its own noise to both."""
    shared, curves_by_label = rng.normal(size=(2, N)), {}
    exact = None
    for label, factor in (("a", 1.0), ("b", steeper)):
        points = []
        for x, y in zip(TRUE_X, factor * TRUE_Y, strict=True):
            steps = 256 / x * (1 + 0.13 * shared[0] + 0.1 * rng.normal(size=N))
            much = y * np.exp(0.12 * shared[1] + 0.2 * rng.normal(size=N) - (0.12**2 + 0.2**2) / 2)
            points.append(equal.CurvePoint(np.full(N, 256.0), steps, float(much.mean()), much - much.mean()))
        exact = exact or points[0]
        curves_by_label[label] = [exact, *points[1:]]
    return curves_by_label


def test_intervals_cover_the_truth_and_the_test_keeps_its_level() -> None:
    """200 simulations of 24 prompts. At a coverage of 95 % the truth is outside in 10 of them, with a standard
    deviation of 3.1: more than 10 + 4 * 3.1 = 22 are not chance. The same holds for rejections of a true null
    hypothesis."""
    for steeper in (1.0, 2.0):
        rng, outside, rejected, missed = np.random.default_rng(2), 0, 0, 0
        for _ in range(200):
            [(_, _, interval)] = equal.pairs(simulated(rng, steeper), samples=200)
            truth = (steeper - 1) * np.interp(interval.at, TRUE_X, TRUE_Y)
            mean = np.trapezoid(truth, interval.at) / (interval.at[-1] - interval.at[0])
            outside += bool((np.abs(interval.differences - truth) > interval.margins).any())
            missed += not interval.interval[0] <= mean <= interval.interval[1]
            assert interval.p is not None
            rejected += interval.p < 0.05
        assert outside <= 22
        assert missed <= 22
        assert rejected <= 22 if steeper == 1 else rejected >= 40


def test_several_images_of_a_prompt_count_once() -> None:
    """Doubling the images of all prompts changes no error."""

    def twice(scored: ScoredPass) -> ScoredPass:
        again = {i + STRIDE: replace(r, index=i + STRIDE) for i, r in scored.records.items()}
        return replace(scored, records={**scored.records, **again})

    (once,) = equal.rows(curves(), "step_compression", "emitted_kl")
    (double,) = equal.rows({k: list(map(twice, v)) for k, v in curves().items()}, "step_compression", "emitted_kl")
    same(once, double)


def same(first: Mapping[str, Any], second: Mapping[str, Any], rel: float = 1e-6) -> None:
    """Asserts that two rows have the same numbers and texts, except for y; lists have six digits."""
    assert first.keys() == second.keys()
    for name in first.keys() - {"y"}:
        if name in ("at", "values", "differences", "margins"):
            assert matched.numbers(first, name) == pytest.approx(
                matched.numbers(second, name), rel=max(rel, 1e-4), abs=1e-7
            )
        elif isinstance(first[name], float):
            assert first[name] == pytest.approx(second[name], rel=rel)
        else:
            assert first[name] == second[name]


def test_curves_of_the_same_runs_have_no_test() -> None:
    runs = curves()["band"]
    (compared,) = equal.rows({"a": runs, "b": runs}, "step_compression", "emitted_kl")
    assert (compared["difference"], compared["p"], compared["ratio"]) == (0, None, 1)
    assert matched.stretches(compared) == []  # type: ignore[arg-type]
    # two exact methods: their emitted divergences are the rounding of float32, and differ for every prompt
    rounding = np.random.default_rng(3).normal(size=(4, N)) * 1e-9
    exact = {
        label: [
            replace(path, records={i: replace(r, emitted_kl=1e-8 + rounding[row, i]) for i, r in path.records.items()})
            for row, path in zip(rows, paths, strict=True)
        ]
        for rows, (label, paths) in zip(((0, 1), (2, 3)), curves().items(), strict=True)
    }
    (compared,) = equal.rows(exact, "step_compression", "emitted_kl")
    assert compared["difference"] != 0
    assert compared["p"] is None


def test_what_cannot_be_compared_is_refused() -> None:
    paths = curves()
    with pytest.raises(UsageError, match="fid"):
        list(equal.rows(paths, "step_compression", "fid"))
    with pytest.raises(UsageError, match="latency"):
        list(equal.rows(paths, "latency", "emitted_kl"))
    with pytest.raises(UsageError, match="prompts"):
        list(equal.rows({**paths, "other": curves(range(3, N))["band"]}, "step_compression", "emitted_kl"))
    far = [run(f"far{i}", steps, 0.1, 9 + i) for i, steps in enumerate((30, 25))]
    (apart,) = equal.rows({"band": paths["band"], "far": far}, "step_compression", "emitted_kl")
    assert apart.keys() == {"x", "y", "a", "b", "prompts"}  # no common range


@pytest.fixture
def rewarded(tmp_path: Path) -> dict[str, list[str]]:
    """Two curves of two runs each. One reader scores their images."""
    rng, folders_by_label = np.random.default_rng(3), dict[str, list[str]]()
    for label, reward in (("band", 0.9), ("cool", 0.7)):
        for many in (130, 118):
            records = [image(i, many + i % 3, sha256=f"{label}{many}{i}") for i in range(N)]
            folder = Folders(tmp_path).make(f"{label}{many}", records)
            outputs = reward + many / 1000 + 0.1 * rng.normal(size=(N, 14))
            score(folder, "scenes_reward", "reader@1", outputs.astype(np.float32))
            folders_by_label.setdefault(label, []).append(folder)
    return folders_by_label


def passes(folders_by_label: Mapping[str, Sequence[str]]) -> dict[str, list[ScoredPass]]:
    return {label: [read(folder) for folder in paths] for label, paths in folders_by_label.items()}


def test_a_metric_that_is_missing_or_scored_differently_in_some_runs_is_refused(rewarded: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError, match="geneval"):
        list(equal.rows(passes(rewarded), "step_compression", "geneval"))
    for scorer, n, why in (("reader@2", N, r"reader@1 and by reader@2"), ("reader@3", N - 1, r"not every image .*@3")):
        score(rewarded["cool"][0], "scenes_reward", scorer, np.zeros((n, 14), np.float32))
        with pytest.raises(UsageError, match=why):
            list(equal.rows(passes(rewarded), "step_compression", "image_reward"))


def test_a_metric_is_compared_as_a_statistic_of_the_same_values_is(tmp_path: Path) -> None:
    """Also with several images per prompt, and in any order of the records. Scores are float32."""
    rewards, statistics = {}, curves()
    for label, runs in statistics.items():
        for number, path in enumerate(runs):
            again = {i + STRIDE: replace(r, index=i + STRIDE) for i, r in path.records.items()}
            scores = {
                i: replace(r, id=str(i % STRIDE), sha256=f"{label}{number}{i}")
                for i, r in {**again, **path.records}.items()
            }
            folder = Folders(tmp_path).make(f"{label}{number}", list(scores.values()))
            keys = [image_key(r.sha256, r.prompt) for r in scores.values()]
            cached = metrics.Outputs(Path(folder))
            cached.cache("reader@1").add(keys, np.array([[r.emitted_kl, 7] for r in scores.values()], np.float32))
            cached.name("scenes_reward", "reader@1")
            rewards.setdefault(label, []).append(folder)
    read_again = passes(rewards)
    (metric,) = equal.rows(read_again, "step_compression", "image_reward")
    (statistic,) = equal.rows(read_again, "step_compression", "emitted_kl")
    same(metric, statistic, 1e-4)


def test_the_reason_for_a_missing_metric_names_its_run(tmp_path: Path) -> None:
    images = [image(i, 120, sha256=f"a{i}") for i in range(N)]
    for metric, scorer, why in (
        ("scenes_fid", "scenes-classifier@42961392", "its prompts are not the present ones"),
        ("scenes_fid", "of other weights", "whose weights are not here"),
        ("fid", "inception@1", "fetch"),
    ):
        folder = Folders(tmp_path / why).make("a", images, "method=eagle_chain", "metrics_dir=none")
        score(folder, metric, scorer, np.ones((N, 64), np.float32), prompts=False)
        with pytest.raises(UsageError, match=rf"/a: {metric}: .*{why}"):
            equal.point(read(folder), "step_compression", "fid")


def test_a_metric_of_all_images_together_has_the_error_of_its_row(tmp_path: Path) -> None:
    """GenEval is a mean of means over tasks."""
    items, metric = data.load(PromptSelection("scenes_geneval", N)), metrics.metric("scenes_geneval", _CONTEXT)
    labels = np.array([item.labels for item in items], np.float32)
    labels[::3] = (labels[::3] + 1) % 2  # a third of the images shows something else
    records = [image(i, 120, prompt=item.prompt, sha256=f"a{i}") for i, item in enumerate(items)]
    folder = Folders(tmp_path).make("a", records, "method=eagle_chain", "data=scenes_geneval")
    score(folder, "scenes_geneval", metric.cache_key, labels, prompts=metric.reads_prompt)
    row, point = metric.score(labels, items)[0], equal.point(read(folder), "step_compression", "geneval")
    assert row.value is not None
    assert 0 < row.value < 1
    assert point.y == pytest.approx(row.value)
    assert np.sqrt(np.square(point.dy).sum()) / N == pytest.approx(row.stderr, rel=0.05)


#: The first pair's ratio with its interval, of 9 prompts: half of it, in logarithms, is 2.306 standard errors (t with 8
#: degrees of freedom). And the factor of an interval around 0.8 with p = 0.5, where t is 0.7064.
RATIO = (0.5, 0.4, 0.625)
P = 2 * t.sf(np.log(0.5) / (np.log(0.8) / 2.306004), 8)
WIDE = 0.8 ** (2.306004 / 0.706387)


class CurveBench(FakeBench):
    """Rows with a step compression; a pair of curves differs by 0.01. The first pair's ratio has p = P, the others'
    0.5."""

    def row(self, run: PlannedRun) -> Mapping[str, Any]:
        run.folder.mkdir(parents=True)
        row = {
            **super().row(run),
            "run_id": str(run.folder) + str(self.cells),
            "step_compression": 2 + len(self.ran) / 100,
            "emitted_kl": 0.01,
        }
        append_row(run.folder / "row.csv", row)
        return row

    def equal(self, curves: Mapping[str, Sequence[Path]], x: str, y: str) -> Sequence[Mapping[str, Any]]:
        assert all((path / "row.csv").exists() for paths in curves.values() for path in paths)
        shown: dict[str, Any] = {"x": x, "y": y, "prompts": 9, "from_x": 2.0, "to_x": 2.2, "y_a": 0.02, "y_b": 0.01}
        shown |= {"difference": -0.01, "low": -0.012, "high": -0.008, "p": 0.0001}
        shown |= {"at": "[2.0,2.1,2.2]", "values": "[0.01,0.02,0.03]", "differences": "[0.001,-0.01,-0.02]"}
        pairs = enumerate(combinations(curves, 2))
        ratios = dict(zip(("ratio", "ratio_low", "ratio_high"), RATIO, strict=True)), {
            "ratio": 0.8, "ratio_low": 0.8 * WIDE, "ratio_high": 0.8 / WIDE
        }  # fmt: skip
        return [{**shown, **ratios[min(i, 1)], "margins": "[0.002,0.002,0.003]", "a": a, "b": b} for i, (a, b) in pairs]


def planned(results: Path) -> table_runs.TablePlan:
    return table_runs.plan(TESTED, TESTED.model, None, results, results / "runs")


def collected(results: Path, bench: CurveBench, say: Callable[[str], None] = lambda text: None) -> table_runs.TablePlan:
    return collect.collect(planned(results), bench, say)


def first_lines(table: Table, panels: Sequence[int]) -> Table:
    """A table with only these panels of its figure, and only the first two lines of their curves."""
    assert isinstance(table.figure, TableFigure)
    cut = [
        replace(panel, curves=tuple(replace(curve, lines=curve.lines[:2]) for curve in panel.curves))
        for panel in (table.figure.panels[i] for i in panels)
    ]
    keys = {key for panel in cut for key in panel.keys}
    lines = tuple(line for line in table.lines if line.key in keys)
    return replace(table, lines=lines, figure=replace(table.figure, panels=tuple(cut)))


TESTED = first_lines(TABLES["relaxed_equal"], (0, 1, -1))
PANELS = TESTED.compared_panels
PAIRS = [comb(len(panel.curves), 2) for panel in PANELS]


def test_a_table_tests_every_pair_of_its_curves_once(tmp_path: Path) -> None:
    bench = CurveBench()
    assert not planned(tmp_path).unequalled  # without runs there is nothing to test
    done = collected(tmp_path, bench)
    assert not done.unequalled
    assert not planned(tmp_path).unequalled
    tests = len(done.pairs)
    assert tests == sum(PAIRS)
    assert PAIRS == [36, 15, 6]
    assert len(collected(tmp_path, bench).pairs) == tests
    sheet = matched.build(done, "specbench tables relaxed_equal")
    first = sheet.entries[0]
    assert first.method == "EAGLE-1, chain of 5: Cool-SD, exponential against UniformRSD"
    assert [cell.value for cell in first.cells] == [
        *("2.00 to 2.20", "0.50 (0.40 to 0.62)", "-0.0100 (-0.0120 to -0.0080)", f"{tests * P:.2g}"),
        "2.10 to 2.20 (below)",
    ]
    assert len(sheet.entries) == tests
    remarks = " ".join(sheet.remarks)
    assert remarks.count("on 9 prompts") == len(PANELS)
    assert f"all {tests} pairs" in remarks


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> table_runs.TablePlan:
    return collected(tmp_path_factory.mktemp("curves"), CurveBench())


def test_the_tests_of_a_panel_are_adjusted_for_later_panels(done: table_runs.TablePlan) -> None:
    """Otherwise the p of a panel would grow with every other panel that is compared."""
    chain = tuple(row for row in done.pairs if row["panel"] == "EAGLE-1, chain of 5")
    for measured in (done.pairs, chain):
        [(_, p), *others] = matched.adjusted_pairs(replace(done, pairs=measured))[
            "EAGLE-1, chain of 5", "step_compression", "emitted_kl"
        ]
        assert p == pytest.approx(sum(PAIRS) * P)
        assert {q for _, q in others} == {1.0}
    sheet = matched.build(replace(done, pairs=chain), "")
    assert f"{sum(PAIRS) - 36} of them" in sheet.remarks[-1]
    assert {cell.value for entry in sheet.entries[36:] for cell in entry.cells} == {""}
    # runs of other rows are compared again
    first = next(run for run in done.runs if run.key in PANELS[0].keys)
    changed = done.with_rows({first.folder: {**(first.row or {}), "run_id": "another"}})
    assert [panel.label for panel in changed.unequalled.values()] == ["EAGLE-1, chain of 5"]


@pytest.mark.usefixtures("drawn_once")
def test_the_figure_has_the_curves_and_every_difference_with_its_band(
    done: table_runs.TablePlan, tmp_path: Path
) -> None:
    reduced = replace(
        done, pairs=tuple(row for row in done.pairs if row["panel"] in (PANELS[0].label, PANELS[-1].label))
    )
    files = matched.draw(reduced, tmp_path, "relaxed_equal")
    assert [path.name for path in files] == ["relaxed_equal.svg", "relaxed_equal.png"]
    text = files[0].read_text(encoding="utf-8")
    assert text.count("simultaneous") == sum(len(panel.curves) - 1 for panel in (PANELS[0], PANELS[-1]))
    assert matched.draw(replace(done, pairs=()), tmp_path, "none") == []


def test_the_tests_of_a_panel_survive_a_stop(tmp_path: Path) -> None:
    class Stopped(CurveBench):
        def row(self, run: PlannedRun) -> Mapping[str, Any]:
            if {"method=eagle1", "rule=cool"} <= set(run.overrides):  # after lines of the second panel
                raise KeyboardInterrupt
            return super().row(run)

    bench: CurveBench = Stopped()
    with pytest.raises(KeyboardInterrupt):
        collected(tmp_path, bench)
    assert len(planned(tmp_path).pairs) == 36
    assert [panel.label for panel in planned(tmp_path).equal.values()] == ["EAGLE-1, chain of 5"]
    ran = len(bench.ran)
    assert ran > len({*PANELS[0].keys})  # the lines of nine curves, and some of the second panel
    bench = CurveBench()
    assert len(collected(tmp_path, bench).pairs) == sum(PAIRS)
    assert len(bench.ran) == len(TESTED.lines) - ran


def test_a_panel_is_complete_only_with_every_pair(tmp_path: Path) -> None:
    """After a stop between two pairs, the others are added. A pair without a common range is not tried again."""

    class Apart(CurveBench):
        def equal(self, curves: Mapping[str, Sequence[Path]], x: str, y: str) -> Sequence[Mapping[str, Any]]:
            *others, last = super().equal(curves, x, y)
            return [*others, {name: last[name] for name in ("x", "y", "a", "b", "prompts")}]

    bench, file = Apart(), tmp_path / "relaxed_equal_pairs.csv"
    done = collected(tmp_path, bench)
    assert not done.unequalled
    assert sum(len(group) for group in matched.adjusted_pairs(done).values()) == sum(PAIRS) - len(PANELS)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-3]))
    assert [panel.label for panel in planned(tmp_path).unequalled.values()] == [PANELS[-1].label]
    assert collected(tmp_path, bench).pairs == done.pairs
    assert file.read_text().splitlines(keepends=True) == lines


def test_a_curve_that_did_not_measure_the_column_is_left_out(tmp_path: Path) -> None:
    """The emitted distribution of typical acceptance on a tree is not known."""

    class Partly(CurveBench):
        def row(self, run: PlannedRun) -> Mapping[str, Any]:
            row = super().row(run)
            unknown = {"method=eagle1", "rule=typical"} <= set(run.overrides)
            about = as_json([remark("emitted_tree", "emitted_kl", rule="typical")])
            return {**row, "emitted_kl": None, "remarks": about} if unknown else row

    said: list[str] = []
    done = collected(tmp_path, Partly(), said.append)
    assert len(done.pairs) == sum(PAIRS) - 5  # without the pairs of one of six curves
    assert any(re.search("typical .*emitted_kl", text) for text in said)


def test_curves_whose_images_are_gone_are_decoded_and_tested_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests are of the new runs."""
    panel = replace(PANELS[0], curves=PANELS[0].curves[:2])
    lines = tuple(line for line in TESTED.lines if line.key in panel.keys)
    figure = replace(TESTED.figure, panels=(panel,))  # type: ignore[type-var]
    monkeypatch.setitem(globals(), "TESTED", replace(TESTED, lines=lines, figure=figure))
    collected(tmp_path, CurveBench())
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "relaxed_equal_pairs.csv").unlink()
    bench = CurveBench(commit="another")
    done = collected(tmp_path, bench)
    assert len(bench.ran) == len(lines)
    assert len(done.pairs) == 1
    assert not done.unequalled
    assert not planned(tmp_path).unequalled
