"""Pairs of curves at an equal value: interpolated differences with the errors of paired prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from test_compare import Folders, image, score
from test_journal import record
from test_tables import FakeBench

from specbench import data, metrics
from specbench.compare import equal
from specbench.compare.paired import holm
from specbench.compare.passes import ScoredPass, read
from specbench.errors import UsageError
from specbench.harness.planned import PlannedRun
from specbench.metrics.outputs import image_key
from specbench.rows.csv_files import append_row
from specbench.rows.indices import STRIDE
from specbench.tables import collect, matched, measure
from specbench.tables.catalog import TABLES
from specbench.tables.definitions import TableFigure

N = 24
_CONTEXT = metrics.ScoringContext(metrics.ASSETS, Path())


def run(name: str, steps: float, divergence: float, noise: int, only: Sequence[int] = range(N)) -> ScoredPass:
    """A run whose images have about so many steps and so much emitted KL; `noise` is of it alone, the prompts' own is
    in all."""
    own, shared = np.random.default_rng(noise), np.random.default_rng(0).normal(size=N)
    many = np.round(steps * (1 + 0.1 * shared) + own.normal(size=N))
    much = divergence * (1 + 0.2 * shared) + 0.002 * own.normal(size=N)
    images = {
        i: replace(record(i), tokens=256, steps=int(many[i]), accepted_length=256 / many[i], emitted_kl=float(much[i]))
        for i in only
    }
    return ScoredPass(name, Path(name), False, {"method": name}, name, {}, images)


def curves(only: Sequence[int] = range(N)) -> dict[str, list[ScoredPass]]:
    weak, strong = ((130, 0.01), (118, 0.03)), ((128, 0.02), (119, 0.05))
    return {
        label: [run(f"{label}{i}", *one, seed + i, only) for i, one in enumerate(points)]
        for label, points, seed in (("band", weak, 1), ("cool", strong, 5))
    }


@pytest.mark.parametrize("x", ["step_compression", "accepted_length_mean"])
def test_the_error_of_a_difference_is_that_of_the_jackknife(x: str) -> None:
    """Each prompt left out in turn, the whole computation again: to first order the same. The influences are relative
    to means over 24, so the two errors differ by about 1 in 24."""
    (found,) = equal.rows(curves(), x, 2.1, "emitted_kl")
    left = []
    for out in range(N):
        only = [i for i in range(N) if i != out]
        (row,) = equal.rows(curves(only), x, 2.1, "emitted_kl")
        left.append(row["difference"])
    error = np.sqrt((N - 1) / N * np.square(left - np.mean(left)).sum())
    assert (found["a"], found["b"], found["prompts"]) == ("band", "cool", N)
    assert found["difference"] == pytest.approx(found["y_b"] - found["y_a"])
    assert found["z"] == pytest.approx(found["difference"] / error, rel=0.1)
    assert found["low"] < found["difference"] < found["high"]


def test_a_value_lies_on_the_line_between_two_runs() -> None:
    zero = np.zeros(3)
    points = [equal.CurvePoint(x, y, zero, zero) for x, y in ((3.0, 9.0), (1.0, 1.0), (2.0, 4.0))]
    assert [equal.interpolated(points, x)[0] for x in (1.0, 1.5, 2.5, 3.0)] == [1.0, 2.5, 6.5, 9.0]  # type: ignore[index]
    assert equal.interpolated(points, 0.9) is equal.interpolated(points, 3.1) is None
    assert equal.interpolated(points[:1], 3.0) is None


def test_several_images_of_a_prompt_count_once() -> None:
    """Doubling the images of all prompts changes no error."""

    def twice(one: ScoredPass) -> ScoredPass:
        again = {i + STRIDE: replace(r, index=i + STRIDE) for i, r in one.records.items()}
        return replace(one, records={**one.records, **again})

    (once,) = equal.rows(curves(), "step_compression", 2.1, "emitted_kl")
    (double,) = equal.rows({k: list(map(twice, v)) for k, v in curves().items()}, "step_compression", 2.1, "emitted_kl")
    assert double == pytest.approx(once)


def test_what_cannot_be_compared_is_refused() -> None:
    some = curves()
    with pytest.raises(UsageError, match="fid"):
        list(equal.rows(some, "step_compression", 2.1, "fid"))
    with pytest.raises(UsageError, match="latency"):
        list(equal.rows(some, "latency", 2.1, "emitted_kl"))
    with pytest.raises(UsageError, match="different prompts"):
        list(equal.rows({**some, "other": curves(range(3, N))["band"]}, "step_compression", 2.1, "emitted_kl"))
    assert list(equal.rows(some, "step_compression", 9.0, "emitted_kl")) == []


@pytest.fixture
def rewarded(tmp_path: Path) -> dict[str, list[str]]:
    """Two curves of two runs each, whose images are scored by one reader."""
    rng, found = np.random.default_rng(3), dict[str, list[str]]()
    for label, reward in (("band", 0.9), ("cool", 0.7)):
        for many in (130, 118):
            mine = [image(i, many + i % 3, sha256=f"{label}{many}{i}") for i in range(N)]
            folder = Folders(tmp_path).make(f"{label}{many}", mine)
            outputs = reward + many / 1000 + 0.1 * rng.normal(size=(N, 14))
            score(folder, "scenes_reward", "reader@1", outputs.astype(np.float32))
            found.setdefault(label, []).append(folder)
    return found


def passes(some: Mapping[str, Sequence[str]]) -> dict[str, list[ScoredPass]]:
    return {label: [read(folder) for folder in of] for label, of in some.items()}


def test_a_metric_is_compared_by_its_column(rewarded: dict[str, list[str]]) -> None:
    (found,) = equal.rows(passes(rewarded), "step_compression", 2.1, "image_reward")
    assert (found["a"], found["b"], found["prompts"]) == ("band", "cool", N)
    # 256 / 2.1 = 121.9 steps, a third of the way from 119 to 131, where the reward is higher by 0.012
    assert found["y_a"] == pytest.approx(0.9 + 0.122, abs=4 * 0.1 / N**0.5)
    assert found["difference"] == pytest.approx(-0.2, abs=4 * 0.1 * (2 / N) ** 0.5)
    assert found["z"] < -4  # type: ignore[operator]


def test_a_metric_is_compared_as_a_statistic_of_the_same_values_is(tmp_path: Path) -> None:
    """Prompts of several images, too, and in any order of the records. Scores are float32."""
    some, both = {}, curves()
    for label, runs in both.items():
        for number, one in enumerate(runs):
            again = {i + STRIDE: replace(r, index=i + STRIDE) for i, r in one.records.items()}
            mine = {
                i: replace(r, id=str(i % STRIDE), sha256=f"{label}{number}{i}")
                for i, r in {**again, **one.records}.items()
            }
            folder = Folders(tmp_path).make(f"{label}{number}", list(mine.values()))
            keys = [image_key(r.sha256, r.prompt) for r in mine.values()]
            cached = metrics.Outputs(Path(folder))
            cached.cache("reader@1").add(keys, np.array([[r.emitted_kl, 7] for r in mine.values()], np.float32))
            cached.name("scenes_reward", "reader@1")
            some.setdefault(label, []).append(folder)
    read_again = passes(some)
    (metric,) = equal.rows(read_again, "step_compression", 2.1, "image_reward")
    (statistic,) = equal.rows(read_again, "step_compression", 2.1, "emitted_kl")
    assert metric.pop("y") != statistic.pop("y")
    numbers = {name for name, value in statistic.items() if isinstance(value, float)}
    assert {"difference", "low", "z", "p"} <= numbers
    assert {name: metric[name] for name in numbers} == pytest.approx(
        {name: statistic[name] for name in numbers}, rel=1e-4
    )
    assert {k: v for k, v in metric.items() if k not in numbers} == {
        k: v for k, v in statistic.items() if k not in numbers
    }


@pytest.mark.parametrize(
    ("metric", "scorer", "why"),
    [
        ("scenes_fid", "scenes-classifier@42961392", "its prompts are not those"),
        ("scenes_fid", "of other weights", "whose weights are not here"),
        ("fid", "inception@1", "fetch"),
    ],
)
def test_why_a_metric_has_no_value_is_told_with_its_run(tmp_path: Path, metric: str, scorer: str, why: str) -> None:
    folder = Folders(tmp_path).make(
        "a", [image(i, 120, sha256=f"a{i}") for i in range(N)], "method=eagle_chain", "metrics_dir=none"
    )
    score(folder, metric, scorer, np.ones((N, 64), np.float32), prompts=False)
    with pytest.raises(UsageError, match=rf"/a: {metric}: .*{why}"):
        equal.point(read(folder), "step_compression", "fid")


def test_a_metric_that_some_runs_lack_or_score_otherwise_is_refused(rewarded: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError, match=r"did not measure geneval"):
        list(equal.rows(passes(rewarded), "step_compression", 2.1, "geneval"))
    other = rewarded["cool"][0]
    score(other, "scenes_reward", "reader@2", np.zeros((N, 14), np.float32))
    with pytest.raises(UsageError, match=r"reader@1 and by reader@2"):
        list(equal.rows(passes(rewarded), "step_compression", 2.1, "image_reward"))
    score(other, "scenes_reward", "reader@3", np.zeros((N - 1, 14), np.float32))
    with pytest.raises(UsageError, match=r"not every image .* reader@3"):
        list(equal.rows(passes(rewarded), "step_compression", 2.1, "image_reward"))


def test_a_metric_of_all_images_together_has_the_error_of_its_row(tmp_path: Path) -> None:
    """GenEval is a mean of means over tasks."""
    items, one = data.load({"data": "scenes_geneval", "n": N}), metrics.metric("scenes_geneval", _CONTEXT)
    labels = np.array([item.labels for item in items], np.float32)
    labels[::3] = (labels[::3] + 1) % 2  # a third of the images shows something else
    mine = [image(i, 120, prompt=item.prompt, sha256=f"a{i}") for i, item in enumerate(items)]
    folder = Folders(tmp_path).make("a", mine, "method=eagle_chain", "data=scenes_geneval")
    score(folder, "scenes_geneval", one.cache_key, labels, prompts=one.reads_prompt)
    row, found = one.score(labels, items)[0], equal.point(read(folder), "step_compression", "geneval")
    assert row.value is not None
    assert 0 < row.value < 1
    assert found.y == pytest.approx(row.value)
    assert np.sqrt(np.square(found.dy).sum()) / N == pytest.approx(row.stderr, rel=0.05)


class CurveBench(FakeBench):
    """Rows of a step compression; a pair of curves differs by 0.01, with p = 1e-6 for the first pair and 0.5 else."""

    def row(self, run: PlannedRun) -> Mapping[str, Any]:
        run.folder.mkdir(parents=True)
        row = {**super().row(run), "step_compression": 2 + len(self.ran) / 100, "emitted_kl": 0.01}
        append_row(run.folder / "row.csv", row)
        return row

    def equal(self, curves: Mapping[str, Sequence[Path]], x: str, value: float, y: str) -> Sequence[Mapping[str, Any]]:
        assert all((path / "row.csv").exists() for paths in curves.values() for path in paths)
        labels, shown = list(curves), {"x": x, "value": value, "y": y, "prompts": 9}
        held = {"y_a": 0.02, "y_b": 0.01, "difference": -0.01, "low": -0.012, "high": -0.008, "z": -5}
        pairs = [(a, b) for i, a in enumerate(labels) for b in labels[i + 1 :]]
        return [shown | held | {"a": a, "b": b, "p": 0.5 if i else 1e-6} for i, (a, b) in enumerate(pairs)]


def planned(results: Path) -> measure.TablePlan:
    return measure.plan(TESTED, TESTED.model, None, results, results / "runs")


def collected(results: Path, bench: CurveBench, say: Callable[[str], None] = lambda text: None) -> measure.TablePlan:
    return collect.collect(planned(results), results, bench, say)


TESTED = TABLES["relaxed_equal"]
assert TESTED.matched is not None
assert isinstance(TESTED.figure, TableFigure)
PANELS = [panel for panel in TESTED.figure.panels if panel.label in TESTED.matched.at]
PAIRS = [comb(len(panel.curves), 2) for panel in PANELS]


def test_a_table_tests_every_pair_of_its_curves_once(tmp_path: Path) -> None:
    bench = CurveBench()
    assert not planned(tmp_path).unequalled  # without runs there is nothing to test
    done = collected(tmp_path, bench)
    assert not done.unequalled
    assert not planned(tmp_path).unequalled
    tests = len(done.pairs)
    assert tests == sum(PAIRS)
    assert PAIRS[:2] == [36, 15]
    assert len(collected(tmp_path, bench).pairs) == tests
    adjusted = holm([float(row["p"]) for row in done.pairs])
    assert sorted(adjusted)[: len(PANELS) + 1] == pytest.approx([tests * 1e-6] * len(PANELS) + [1.0])
    remarks = " ".join(matched.build(done, "specbench tables relaxed_equal").remarks)
    # A standard error of 0.002 of 0.015.
    least = (norm.ppf(1 - 0.05 / (2 * tests)) + norm.ppf(0.95)) * 0.002 / 0.015
    assert remarks.count(f"over 9 prompts, which find {least:.0%} with a probability of 95%: ") == len(PANELS)
    firsts = [[curve.label for curve in panel.curves[:2]] for panel in PANELS]
    cool = firsts.count(["UniformRSD", "Cool-SD, exponential"])
    assert cool >= 4
    assert remarks.count(": Cool-SD, exponential below UniformRSD by 0.0100 (0.0080 to") == cool
    assert f"all {tests} tests" in remarks


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
    assert ran > 46  # the lines of nine curves, and some of the second panel
    bench = CurveBench()
    assert len(collected(tmp_path, bench).pairs) == sum(PAIRS)
    assert len(bench.ran) == len(TESTED.lines) - ran


def test_a_curve_that_did_not_measure_the_column_is_left_out(tmp_path: Path) -> None:
    """What typical acceptance emits on a tree has no known distribution."""

    class Partly(CurveBench):
        def row(self, run: PlannedRun) -> Mapping[str, Any]:
            row = super().row(run)
            unknown = {"method=eagle1", "rule=typical"} <= set(run.overrides)
            return {**row, "emitted_kl": None, "note": "emitted_kl: not computed"} if unknown else row

    said: list[str] = []
    done = collected(tmp_path, Partly(), said.append)
    assert len(done.pairs) == sum(PAIRS) - 5  # those of one curve of six
    assert any("typical did not measure emitted_kl" in text for text in said)


def test_runs_of_other_rows_are_compared_anew(tmp_path: Path) -> None:
    done = collected(tmp_path, CurveBench())
    first = next(run for run in done.runs if run.key in PANELS[0].keys)
    changed = done.with_rows({first.folder: {**(first.row or {}), "run_id": "another"}})
    assert [panel.label for panel in changed.unequalled.values()] == ["EAGLE-1, chain of 5"]
