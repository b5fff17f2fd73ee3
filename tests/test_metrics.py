"""The metrics: agreement with independent formulas, pairing, independence of batches and order, honest refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch

from specbench import metrics
from specbench.data import Item, scenes
from specbench.errors import UsageError
from specbench.metrics import fid, image_reward
from specbench.models import evaluators as ev
from specbench.registry import ASSETS

NAMES = ["fid", "clip_score", "image_reward"]
N = 48  # more than the 16 features of the small classifier


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small evaluators with random weights, and a reference of 40 training pictures."""
    folder = tmp_path_factory.mktemp("assets")
    torch.manual_seed(0)
    widths = (8, 8, 8)
    for name, module in (
        (ev.CLASSIFIER, ev.Classifier(ev.ClassifierConfig(widths, dim=16, part=4))),
        (ev.READER, ev.AttributeReader(ev.ReaderConfig(widths, dim=16))),
        (
            ev.TWO_TOWER,
            ev.TwoTower(
                ev.TwoTowerConfig(widths, 16, vocabulary=tuple(scenes.vocabulary()), text_dim=16, text_layers=1)
            ),
        ),
    ):
        with torch.no_grad():
            for parameter in module.parameters():  # louder than at the start of a training, so that pictures differ
                parameter.mul_(2.0)
        ev.save(module, folder / name)
    classifier = ev.load(folder / ev.CLASSIFIER, ev.Classifier)
    images, _, _ = scenes.render("train", range(40))
    fid.Reference.of(classifier, images, ev.backend(folder / ev.CLASSIFIER)).save(folder / fid.REFERENCE)
    return folder


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return scenes.render("validation", range(N))[0]


@pytest.fixture(scope="module")
def items() -> list[Item]:
    samples = [scenes.sample("validation", i) for i in range(N)]
    return [Item(s.index, s.caption, tuple(s.scene.labels())) for s in samples]


def value_of(score: metrics.Score) -> float:
    assert score.value is not None, score.note
    return score.value


def features_of(assets: Path, images: np.ndarray) -> np.ndarray:
    classifier = ev.load(assets / ev.CLASSIFIER, ev.Classifier)
    return classifier.features(scenes.to_float(images)).double().numpy()


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """The textbook formula, with scipy's matrix square root."""
    s, t = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(s @ t)
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(s + t - 2 * np.real(root)))


# --- Fréchet distance -------------------------------------------------------------------------------------------------


def test_fid_agrees_with_the_textbook(assets: Path, images: np.ndarray, items: list[Item]) -> None:
    expected = frechet(features_of(assets, images), features_of(assets, scenes.render("train", range(40))[0]))
    score = metrics.score(["fid"], images, items, assets=assets)["fid"]
    assert expected > 0.01  # so that a relative tolerance means something
    # same formula, other square root: both work in float64 on float32 features
    assert value_of(score) == pytest.approx(expected, rel=1e-4)
    assert score.backend == ev.backend(assets / ev.CLASSIFIER)
    assert "40 real" in score.note


def test_reference_statistics_survive_their_file(assets: Path, images: np.ndarray, tmp_path: Path) -> None:
    classifier = ev.load(assets / ev.CLASSIFIER, ev.Classifier)
    fid.Reference.of(classifier, images, "any@1", batch=7).save(tmp_path / "r.safetensors")
    again = fid.Reference.load(tmp_path / "r.safetensors")
    features = features_of(assets, images)
    assert (again.count, again.backend) == (N, "any@1")
    np.testing.assert_allclose(again.mean, features.mean(0), atol=1e-5)
    np.testing.assert_allclose(again.covariance, np.cov(features, rowvar=False), atol=1e-4)


def test_fid_of_the_reference_itself_is_zero(assets: Path, items: list[Item]) -> None:
    again = metrics.score(["fid"], scenes.render("train", range(40))[0], items[:40], assets=assets)["fid"]
    assert value_of(again) == pytest.approx(0, abs=1e-5)


def test_fid_standard_error_agrees_with_a_bootstrap() -> None:
    rng = np.random.default_rng(0)
    d, n = 6, 400
    real = rng.standard_normal((5000, d))
    fake = rng.standard_normal((n, d)) @ rng.uniform(-0.7, 0.7, (d, d)) + 0.3
    f = torch.from_numpy(real)
    reference = fid.Reference(f.sum(0), f.T @ f, len(f), "any")
    error = fid.standard_error(torch.from_numpy(fake), reference)
    bootstrap = np.std([frechet(fake[rng.integers(0, n, n)], real) for _ in range(300)])
    # 300 resamples know their own spread to 4 %; the rest is the difference between first order and all orders
    assert error == pytest.approx(bootstrap, rel=0.2)
    assert fid.standard_error(torch.from_numpy(fake[: 4 * d - 1]), reference) is None


def test_fid_says_when_there_are_too_few_pictures(assets: Path, images: np.ndarray, items: list[Item]) -> None:
    few = metrics.score(["fid"], images[:10], items[:10], assets=assets)["fid"]
    assert "n = 10 for 16 features: biased far upwards" in few.note
    assert few.stderr is None
    more = metrics.score(["fid"], images, items, assets=assets)["fid"]
    assert f"n = {N} for 16 features: biased upwards" in more.note
    one = metrics.score(["fid"], images[:1], items[:1], assets=assets)["fid"]
    assert one.value is None
    assert "two pictures" in one.note


@pytest.mark.parametrize("stored", ["absent", "of other weights"])
def test_fid_renders_its_reference_where_none_is_stored(
    stored: str, assets: Path, images: np.ndarray, items: list[Item], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ev.CLASSIFIER).write_bytes((assets / ev.CLASSIFIER).read_bytes())
    if stored == "of other weights":
        fid.Reference(torch.ones(16).double(), torch.eye(16).double(), 3, "another@0").save(tmp_path / fid.REFERENCE)
    monkeypatch.setattr(fid, "REFERENCE_COUNT", 30)
    score = metrics.score(["fid"], images, items, assets=tmp_path)["fid"]
    expected = frechet(features_of(assets, images), features_of(assets, images[:30]))
    assert value_of(score) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert "30 real" in score.note


# --- CLIP score -------------------------------------------------------------------------------------------------------


def test_clip_score_is_the_mean_cosine(assets: Path, images: np.ndarray, items: list[Item]) -> None:
    towers = ev.load(assets / ev.TWO_TOWER, ev.TwoTower)
    cosines = (
        (towers.embed_images(scenes.to_float(images)) * towers.embed_captions([i.prompt for i in items])).sum(1).numpy()
    )
    keep = np.flatnonzero(cosines > np.median(cosines))  # a set whose mean is clearly positive
    if cosines[keep].mean() < 0.01:
        keep = np.argsort(cosines)[-5:]
    score = metrics.score(["clip_score"], images[keep], [items[i] for i in keep], assets=assets)["clip_score"]
    assert cosines[keep].mean() > 0
    assert value_of(score) == pytest.approx(cosines[keep].mean(), abs=1e-6)
    assert score.stderr == pytest.approx(cosines[keep].std(ddof=1) / np.sqrt(len(keep)), rel=1e-4)
    assert score.note == ""


def test_clip_score_counts_captions_it_cannot_read(assets: Path, images: np.ndarray) -> None:
    items = [Item(0, "a red circle", None), Item(1, "a zebra on a bicycle", None)]
    note = metrics.score(["clip_score"], images[:2], items, assets=assets)["clip_score"].note
    assert "1 of 2 captions" in note


# --- reward -----------------------------------------------------------------------------------------------------------


def logits_for(labels: torch.Tensor, strength: float, shift: int = 0) -> list[torch.Tensor]:
    out = []
    for i, choices in enumerate(scenes.ATTRIBUTES.values()):
        one = torch.zeros(len(labels), len(choices))
        one.scatter_(1, (labels[:, i : i + 1].clamp(min=0) + shift) % len(choices), strength)
        out.append(one)
    return out


def test_reward_is_one_when_sure_and_zero_by_chance() -> None:
    labels = torch.tensor([scenes.sample("train", i).scene.labels() for i in range(20)])
    ones, zeros = torch.ones(20), torch.zeros(20)
    torch.testing.assert_close(image_reward.rewards(logits_for(labels, 60.0), labels), ones)
    torch.testing.assert_close(image_reward.rewards(logits_for(labels, 0.0), labels), zeros, atol=1e-6, rtol=0)
    sure_of_else = image_reward.rewards(logits_for(labels, 60.0, shift=1), labels)
    for row, value in zip(labels, sure_of_else):
        counts = [1 / (len(c) - 1) for c, y in zip(scenes.ATTRIBUTES.values(), row) if y != scenes.ABSENT]
        assert float(value) == pytest.approx(-np.mean(counts), rel=1e-5)


def test_reward_rises_smoothly_with_certainty() -> None:
    labels = torch.tensor([scenes.sample("train", 0).scene.labels()])
    ladder = [float(image_reward.rewards(logits_for(labels, s), labels)) for s in np.linspace(0, 6, 13)]
    assert (np.diff(ladder) > 0).all()
    assert np.diff(ladder).max() < 0.2


def test_reward_ignores_objects_that_are_not_there() -> None:
    """What the reader sees in an empty slot is no fault of the picture."""
    single = next(s for s in (scenes.sample("train", i).scene for i in range(50)) if s.layout == "single")
    labels = torch.tensor([single.labels()])
    logits = logits_for(labels, 60.0)
    for i in range(6, 14):
        logits[i] = torch.randn_like(logits[i]) * 10
    assert float(image_reward.rewards(logits, labels)) == pytest.approx(1.0)


def test_reward_names_the_attribute_accuracy(assets: Path, images: np.ndarray, items: list[Item]) -> None:
    score = metrics.score(["image_reward"], images, items, assets=assets)["image_reward"]
    found = re.fullmatch(r"attribute accuracy (\d\.\d{4})", score.note)
    reader = ev.load(assets / ev.READER, ev.AttributeReader)
    labels = torch.tensor([item.labels for item in items])
    logits = reader(scenes.to_float(images))
    right = [
        bool(logits[a][i].argmax() == labels[i, a])
        for i in range(N)
        for a in range(labels.shape[1])
        if labels[i, a] != scenes.ABSENT
    ]
    assert found is not None
    assert float(found[1]) == pytest.approx(np.mean(right), abs=6e-5)
    assert value_of(score) == pytest.approx(float(image_reward.rewards(logits, labels).mean()), abs=1e-5)


# --- what holds for all -----------------------------------------------------------------------------------------------


def scores(assets: Path, images: np.ndarray, items: Sequence[Item], batch: int = 128) -> dict[str, metrics.Score]:
    return metrics.score(NAMES, images, items, batch=batch, assets=assets)


def assert_same(one: dict[str, metrics.Score], two: dict[str, metrics.Score]) -> None:
    """Equal up to float32: a convolution picks its summation order by batch size, which moves a feature by about 1e-6
    of its size. Means keep that; the Fréchet distance subtracts traces a hundred times its size, hence 1e-4."""
    for name in NAMES:
        tolerance = {"rel": 1e-4, "abs": 1e-6} if name == "fid" else {"rel": 1e-5, "abs": 1e-6}
        assert value_of(one[name]) == pytest.approx(value_of(two[name]), **tolerance)
        if one[name].stderr is not None:
            assert one[name].stderr == pytest.approx(two[name].stderr, rel=1e-3)
        assert (one[name].backend, one[name].note) == (two[name].backend, two[name].note)


@pytest.mark.parametrize("batch", [1, 7, 48])
def test_batch_size_does_not_matter(batch: int, assets: Path, images: np.ndarray, items: list[Item]) -> None:
    assert_same(scores(assets, images, items, batch), scores(assets, images, items, 17))


def test_pictures_belong_to_the_item_at_their_place(assets: Path, images: np.ndarray, items: list[Item]) -> None:
    """Permuting both changes nothing; permuting the items alone changes what depends on captions, and nothing else."""
    order = np.random.default_rng(0).permutation(N)
    together = scores(assets, images, items)
    assert_same(scores(assets, images[order], [items[i] for i in order]), together)
    apart = scores(assets, images, [items[i] for i in order])
    assert value_of(apart["fid"]) == value_of(together["fid"])
    assert abs(value_of(apart["image_reward"]) - value_of(together["image_reward"])) > 1e-4
    # the clip score's mean may be floored at 0 for untrained weights; its spread is not
    assert abs((apart["clip_score"].stderr or 0) - (together["clip_score"].stderr or 0)) > 1e-5


def test_every_score_names_its_own_network(assets: Path, images: np.ndarray, items: list[Item]) -> None:
    backends = {name: score.backend.split("@")[0] for name, score in scores(assets, images, items).items()}
    assert backends == {"fid": "scenes-classifier", "clip_score": "scenes-two-tower", "image_reward": "scenes-reader"}


def test_absent_weights_are_a_note_not_a_crash(images: np.ndarray, items: list[Item], tmp_path: Path) -> None:
    for name, score in metrics.score(NAMES, images, items, assets=tmp_path).items():
        assert (score.value, score.stderr, score.backend) == (None, None, "")
        assert "make train-scenes" in score.note
        assert metrics.missing(name, tmp_path) == list(metrics.METRICS[name].needs)
        assert metrics.missing(name, tmp_path)[0] in score.note
        assert "\n" not in score.note


def test_what_cannot_be_judged_is_not_judged(assets: Path, images: np.ndarray, items: list[Item]) -> None:
    strangers = [Item(i.index, i.prompt, None) for i in items]
    unlabelled = scores(assets, images, strangers)
    assert unlabelled["image_reward"].value is None
    assert "labels" in unlabelled["image_reward"].note
    assert value_of(unlabelled["fid"]) > 0
    assert "not of scenes" in unlabelled["fid"].note
    large = scores(assets, np.zeros((2, 128, 96, 3), np.uint8), items[:2])
    assert all(score.value is None and "96x128" in score.note for score in large.values())
    empty = scores(assets, images[:0], [])
    assert all(score.value is None and score.note == "no pictures" for score in empty.values())


def test_misuse_is_named(assets: Path, images: np.ndarray, items: list[Item]) -> None:
    with pytest.raises(UsageError, match="unknown metric 'fdi'.*clip_score, fid, image_reward"):
        metrics.score(["fdi"], images, items, assets=assets)
    with pytest.raises(ValueError, match="48 images cannot be paired with 47 items"):
        metrics.score(["fid"], images, items[:-1], assets=assets)
    with pytest.raises(ValueError, match="uint8"):
        metrics.score(["fid"], images.astype(np.float32), items, assets=assets)


def test_the_list_needs_no_torch_and_names_real_files() -> None:
    assert list(metrics.available()) == NAMES
    assert {need for entry in metrics.METRICS.values() for need in entry.needs} == {
        ev.CLASSIFIER,
        ev.TWO_TOWER,
        ev.READER,
    }
    assert metrics.ASSETS == ASSETS
    code = "import sys, specbench.metrics as m; m.available(); m.missing('fid'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_committed_evaluators_tell_good_from_bad() -> None:
    """Real pictures under their own captions, under other captions, and at a quarter of the resolution."""
    n = 300
    pictures, captions, labels = scenes.render("validation", range(n))
    own = [Item(i, c, tuple(y)) for i, (c, y) in enumerate(zip(captions, labels.tolist()))]
    real = metrics.score(NAMES, pictures, own)
    other = metrics.score(NAMES, pictures, own[1:] + own[:1])
    coarse = metrics.score(NAMES, np.repeat(np.repeat(pictures[:, ::4, ::4], 4, 1), 4, 2), own)
    assert value_of(real["clip_score"]) > value_of(other["clip_score"]) + 0.5
    assert value_of(real["image_reward"]) > 0.9
    assert abs(value_of(other["image_reward"])) < 0.1
    assert value_of(other["fid"]) == pytest.approx(value_of(real["fid"]), rel=1e-6)
    assert value_of(coarse["fid"]) > 3 * value_of(real["fid"])
    assert value_of(coarse["image_reward"]) < value_of(real["image_reward"])
