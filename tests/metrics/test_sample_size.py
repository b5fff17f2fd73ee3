"""How many images a statistic needs. A Fréchet distance of fewer than 16 for each feature is marked, wherever a value
is computed, printed or drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import said
from scipy import stats

from specbench import metrics
from specbench.config import parameters
from specbench.config.registry import ASSETS
from specbench.data import Item, scenes, worlds
from specbench.errors import UsageError
from specbench.metrics import features, inception
from specbench.metrics.scenes import ScenesFID
from specbench.models import evaluators as ev
from specbench.rows import shown
from specbench.rows.differences import Difference, differences, several
from specbench.rows.paired import by_influence, paired, pairs_for, pairs_needed, reach
from specbench.rows.remark import as_json, remark
from specbench.rows.shown import bias
from specbench.tables import figures, layout
from specbench.tables.catalog import TABLES

BACKEND = "scenes-classifier@1a2b3c4d"
FEW = "n < 16 x 64 features: biased upwards at this n, compare only with the same n"


@pytest.mark.parametrize("n", [2, 16, 1023, 1024])
def test_a_distance_of_few_images_is_marked(n: int) -> None:
    """The features are noise, since no picture is needed. Two images have a distance, but no jackknife."""
    metric = ScenesFID(metrics.ScoringContext(ASSETS, ASSETS), {})
    features = np.random.default_rng(0).normal(size=(n, 64)).astype(np.float32)
    label = (0,) * len(scenes.ATTRIBUTES)
    items = [Item(i, "", label) for i in range(n)]
    [score] = metric.score(features, items)
    assert score.value is not None
    assert score.value > 0
    assert ((score.stderr is None), FEW in said(score)) == (n == 2, n < 1024)
    [single] = metric.score(features[:1], items[:1])
    assert single.value is None


def test_metrics_declare_the_features_of_their_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and the warning before a run read the declared number; a metric reads the width of its network's
    output."""
    declared = {name: d for name in parameters.single_metrics() if (d := shown.features(name))}
    inceptions = ("fid", "fid_clean", "fid_clean_256", "fid_pytorch")
    classifier = ev.load(ASSETS / "scenes_classifier.safetensors", ev.Classifier)
    assert declared == {
        **{name: {"inception-v3": inception.FEATURES} for name in inceptions},
        **{f"{world}_fid": {f"{world}-classifier": classifier.num_features} for world in worlds.NAMES},
        "fd_dinov2": {"dinov2-vit-l-14": features.DINO_FEATURES},
    }
    context = metrics.ScoringContext(ASSETS, ASSETS)
    assert metrics.metric("scenes_fid", context).cache_key.startswith("scenes-classifier@")  # as in the rows' backends
    for wrong in (64, {"scenes-classifier": "many"}, {"scenes-classifier": 0}):
        monkeypatch.setattr(parameters, "default", lambda *_, wrong=wrong: {"columns": ["fid"], "features": wrong})
        with pytest.raises(UsageError, match="conf/metrics/any.yaml"):
            shown.features("any")


def test_which_values_are_biased() -> None:
    assert shown.is_biased({"n": "1023", "fid": "9", "fid_backend": BACKEND}, "fid")
    assert shown.is_biased({"n": 5000, "fid_backend": "inception-v3@67, tf resize"}, "fid")
    assert not shown.is_biased({"n": 1024, "fid": 9.0, "fid_backend": BACKEND}, "fid")
    assert not shown.is_biased({"n": 2, "kid": 9.0, "kid_backend": "inception-v3@67, tf resize"}, "kid")
    assert not shown.is_biased({"n": 2, "clip_score": 0.9, "clip_score_backend": BACKEND}, "clip_score")


def _rows(n: int) -> dict[str, dict[str, str]]:
    """A row of n images for each line of a figure, as text."""
    lines = TABLES["coolsd_fig4"].lines
    remarks = [remark("against_validation", "fid", count=2000), *(r.about("fid") for r in bias(n, 64))]
    values = {"n": str(n), "fid_backend": BACKEND, "remarks": json.dumps(as_json(remarks))}
    return {
        line.key: {"accepted_length_mean": f"{1 + i / 10}", "fid": f"{9 + i}", "clip_score": "0.9", **values}
        for i, line in enumerate(lines)
    }


@pytest.mark.usefixtures("drawn_once")
def test_tables_and_figures_have_it_with_one_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES["coolsd_fig4"]
    fid = [column.key for column in table.columns].index("fid")
    drawn: list[int] = []
    axes = figures.new_axes
    monkeypatch.setattr(
        figures, "new_axes", lambda down, across, **shared: (drawn.append(across), axes(down, across))[1]
    )
    for n in (500, 1024):
        sheet = layout.build(table, table.model, _rows(n), [], {}, "")
        assert all(entry.cells[fid].value for entry in sheet.entries)
        assert sum(FEW in note for _, note in sheet.notes) == (n < 1024)
        figures.draw(table, _rows(n), tmp_path, "any")
    assert drawn[0] == drawn[1]


def test_the_number_of_pairs_for_a_significant_difference() -> None:
    """The power of the paired t-test with this many pairs, from its non-central distribution."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, (2, 200))
    difference = paired(a, b + 0.2)
    assert difference.test is not None
    needed, least = pairs_needed(difference) or (0, 0)
    d_z = difference.difference / float((b - a).std(ddof=1))
    for n, effect in ((needed, d_z), (least, d_z * difference.test.high / difference.difference)):
        power = float(stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, effect * np.sqrt(n)))
        assert power == pytest.approx(0.95, abs=0.01)  # with this many pairs, the t-test is nearly normal
    assert least < needed
    with_influences = by_influence(1.0, 1.5, a - a.mean(), b - b.mean())  # the same with influences, whose mean is zero
    assert with_influences.test is not None
    assert pairs_needed(with_influences) == pairs_needed(paired(a - a.mean(), b - b.mean() + 0.5))
    assert pairs_needed(paired([1.0, 2.0], [1.5, 2.5])) is None


@pytest.mark.parametrize("effect", [0.3, 1.0, 2.7, 3.0, 4.4, 4.6, 50.0])
def test_few_pairs_need_students_t(effect: float) -> None:
    """The normal approximation said 1 or 2 pairs where the test needs 3 or 4. 100,000 simulated tests with that many
    pairs and with one less: the share of significant ones has a standard error of at most 0.0007 at 0.95, and 0.0035
    is five of them."""
    needed = pairs_for(effect, 4, 0.5)  # one pair deviates by 1
    rng = np.random.default_rng(0)

    def power(n: int) -> float:
        samples = rng.normal(effect, 1, (100_000, n))
        t = samples.mean(1) / samples.std(1, ddof=1) * np.sqrt(n)
        return float((t > stats.t.ppf(0.975, n - 1)).mean())

    assert power(needed) > 0.95 - 0.0035
    assert needed == 2 or power(needed - 1) < 0.95 + 0.0035
    assert (needed >= 3) == (effect < 17)  # two pairs detect 25 / 2 ** 0.5 deviations
    assert reach(needed, needed**-0.5) <= effect * (1 + 1e-9)


def _row_of(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """The columns of the CLIP score for a method's images (b) against vanilla's (a)."""
    d = b - a
    error = float(d.std(ddof=1) / np.sqrt(len(d)))
    difference = {"clip_score_difference": d.mean(), "clip_score_difference_stderr": error}
    return {"n": len(d), "clip_score": b.mean()} | difference


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.parametrize(("shift", "significant"), [(-0.05, True), (0.02, False), (0.05, True)])
def test_a_difference_from_vanilla_equals_the_paired_test(shift: float, significant: bool) -> None:
    """The errors are 0.01: a shift of 0.05 is five of them, and 0.02 (drawn: 0.0135 with p 0.2) is not detected."""
    rng = np.random.default_rng(0)
    a = rng.normal(0.9, 0.3, 100)
    b = a + rng.normal(shift, 0.1, 100)
    [difference] = differences(_row_of(a, b), ["clip_score", "fid"])
    expected = paired(a, b)
    assert expected.test is not None
    assert difference.interval == pytest.approx((expected.test.low, expected.test.high))
    assert (difference.p, difference.vanilla) == pytest.approx((expected.test.p, a.mean()))
    assert difference.is_significant == significant
    first, verdict, needed = difference.sentences()
    assert _numbers(first)[:2] == pytest.approx([a.mean(), expected.difference], abs=6e-5)
    low, high = difference.interval
    loss, gain = -low, high
    if significant:
        least, most = sorted((abs(low), abs(high)))
        assert (" loss " in verdict, " gain " in verdict) == (shift < 0, shift > 0)
        assert _numbers(verdict)[-4::2] == pytest.approx([least, most], abs=6e-5)
    else:  # the differences that are excluded
        assert _numbers(verdict)[-4::2] == pytest.approx([loss, gain], abs=6e-5)
        assert _numbers(verdict)[-3::2] == pytest.approx([100 * end / a.mean() for end in (loss, gain)], rel=0.05)
    # The power of the t-test with this many pairs, from its non-central distribution.
    n, size, _, share, _, more = _numbers(needed)
    assert (n, share) == (100, 1)
    std = float((b - a).std(ddof=1))
    for pairs, effect in ((n, size), (more, 0.01 * a.mean())):
        power = stats.nct.sf(stats.t.ppf(0.975, pairs - 1), pairs - 1, effect / std * np.sqrt(pairs))
        assert power == pytest.approx(0.95, abs=0.01)


def test_where_lower_is_better_a_rise_is_a_loss() -> None:
    row = {"n": 2000, "fid": 5.5, "fid_difference": 0.5, "fid_difference_stderr": 0.1}
    [worse] = differences(row, ["fid"])
    assert " loss " in worse.sentences()[1]
    [better] = differences(row | {"fid_difference": -0.5}, ["fid"])
    assert " gain " in better.sentences()[1]
    [either] = differences(row | {"fid_difference": 0.1, "fid_difference_stderr": 0.1}, ["fid"])
    text = either.sentences()[1]
    low, high = either.interval
    assert float(re.findall(r"loss above ([\d.]+)", text)[0]) == pytest.approx(high, abs=6e-5)
    assert float(re.findall(r"gain above ([\d.]+)", text)[0]) == pytest.approx(-low, abs=6e-5)


def test_a_biased_difference_has_no_verdict() -> None:
    """Of a Fréchet distance of 64 features: 2,000 images are enough, 1,000 are not."""
    row = {
        "fid": 5.5,
        "fid_difference": -0.5,
        "fid_difference_stderr": 0.25,
        "fid_backend": "scenes-classifier@1, world",
    }
    [sure] = differences(row | {"n": 2000, "images": 2000}, ["fid"])
    [biased] = differences(row | {"n": 1000, "images": 1000}, ["fid"])
    assert (sure.is_significant, biased.is_significant) == (True, False)
    first, verdict = biased.sentences()
    assert _numbers(first)[:2] == [6.0, -0.5]
    assert (biased.p < 0.05, _numbers(verdict)[0]) == (True, pytest.approx(biased.p, rel=0.05))
    assert "16 x 64 features" in verdict
    assert not re.search("significant|loss|gain", verdict)


def test_a_difference_without_an_error_or_without_noise_has_no_verdict() -> None:
    """A value of few images, which is not printed, has no difference either."""
    unknown, no_noise = Difference("clip_score", 0.5, 0.6, 1, None), Difference("clip_score", 0.6, 0.6, 8, 1e-17)
    for difference in (unknown, no_noise):
        assert (difference.is_tested, difference.is_significant, len(difference.sentences())) == (False, False, 1)
    assert differences({"n": 8, "fid": None, "fid_difference": 0.1, "fid_difference_stderr": None}, ["fid"]) == []
    tested = Difference("image_reward", 0.5, 0.0, 8, 0.1)  # no share of zero
    assert stats.nct.sf(stats.t.ppf(0.975, 7), 7, 4.231) == pytest.approx(0.95, abs=1e-4)  # errors of the mean
    assert _numbers(tested.sentences()[2]) == pytest.approx([8, 0.4231, 95])
    assert (several([tested, unknown]), several([tested, tested]) != "") == ("", True)
