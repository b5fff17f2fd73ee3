"""Inception-V3 as a feature extractor, and the four statistics over its outputs."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import random_inception
import torch
from commands import said
from PIL import Image
from scipy import linalg
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric
from torchvision.transforms import functional as tv

from specbench import metrics
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.metrics import compared, frechet, inception
from specbench.metrics import reference as references
from specbench.metrics.base import Metric, ScoringContext, Unavailable
from specbench.metrics.inception import InceptionScorer
from specbench.metrics.outputs import image_key
from specbench.metrics.reference import ReferenceStatistics
from specbench.storage import image_files
from specbench.storage.files import cached_sha256

PUBLISHED = inception.SHA256
WIDTH = 24  # the number of features in the tests of the statistics, which are the same at any width


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return random_inception.network()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of evaluator weights that count as the published ones."""
    folder = tmp_path_factory.mktemp("weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "SHA256", random_inception.write(folder))
        patch.setenv("SPECBENCH_HOME", str(tmp_path_factory.mktemp("home")))
        yield folder


def an_image(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth colours with some noise, (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize((width, height), Image.BICUBIC)
    return np.clip(np.asarray(coarse) + rng.normal(0, 8, (height, width, 3)), 0, 255).astype(np.uint8)


def some_items(n: int) -> list[Item]:
    return [Item(i, f"prompt {i}", None, f"id{i}") for i in range(n)]


def test_the_outputs_equal_torch_fidelity(published: Path) -> None:
    fid = metrics.metric("fid", ScoringContext(Path(), published))
    scorer = fid.scorer()
    shown = [an_image(64, 64, 1), an_image(300, 200, 2)]
    rows = scorer(shown, some_items(2))
    assert rows.shape == (2, 2048 + 1008)
    assert rows.dtype == np.float32
    for p, row in zip(shown, rows, strict=True):
        with torch.inference_mode():
            expected = torch.cat(scorer.network(torch.from_numpy(p).permute(2, 0, 1)[None]), 1)[0].numpy()
        np.testing.assert_array_equal(row, expected)
    # on a CPU the batch changes no bit
    np.testing.assert_array_equal(rows[1], scorer(shown[1:], some_items(1))[0])
    # the outputs depend on the image
    assert np.abs(rows[0] - rows[1]).max() > 0.1 * np.abs(rows).max()
    assert fid.cache_key == f"inception-v3@{inception.SHA256[:8]}, tf resize"


def test_resizes(network: torch.nn.Module) -> None:
    def prepared(resize: str, shown: np.ndarray) -> torch.Tensor:
        return InceptionScorer(network, resize)._prepared(shown)[0]

    whole = an_image(299, 299)
    scaled = (torch.from_numpy(whole).permute(2, 0, 1).float() - 128) / 128
    assert torch.equal(prepared("tf", whole), scaled)  # nothing to resize
    torch.testing.assert_close(prepared("clean", whole), scaled)
    torch.testing.assert_close(prepared("pytorch", whole), torch.from_numpy(whole).permute(2, 0, 1) / 127.5 - 1)
    # Black and white columns, two per target pixel: TensorFlow's resize takes one of them, clean-fid's the mean of
    # many.
    columns = np.zeros((598, 598, 3), np.uint8)
    columns[:, 1::2] = 255
    assert prepared("tf", columns).max() == -1
    np.testing.assert_allclose(prepared("clean", columns)[:, :, 5:-5], (127.5 - 128) / 128, atol=0.01)
    edges = np.kron(np.random.default_rng(0).choice([0, 255], (40, 40, 3)), np.ones((4, 4, 1))).astype(np.uint8)
    assert (prepared("clean", edges).min(), prepared("clean", edges).max()) == (-1, 127 / 128)  # no overshoot
    odd = an_image(150, 211)
    expected = tv.resize(torch.from_numpy(odd).permute(2, 0, 1).float(), [299, 299], antialias=False) / 127.5 - 1
    torch.testing.assert_close(prepared("pytorch", odd), expected, atol=1e-5, rtol=0)
    assert (prepared("pytorch", odd) - prepared("tf", odd)).abs().max() > 0.02


def test_the_crop_is_lanterns() -> None:
    for size in [(40, 61), (63, 40), (41, 40), (40, 43), (12, 9)]:
        shown = an_image(*size)
        square = tv.center_crop(Image.fromarray(shown), min(size)).resize((32, 32), Image.LANCZOS)
        np.testing.assert_array_equal(image_files.center_crop(shown, 32), np.asarray(square))


def test_a_crop_leaves_a_square_of_its_side_alone(network: torch.nn.Module) -> None:
    shown = an_image(64, 64)
    assert image_files.center_crop(shown, 64) is shown
    cropped = InceptionScorer(network, crop=64)
    assert torch.equal(cropped._prepared(shown), InceptionScorer(network)._prepared(shown))
    wide = np.concatenate([np.zeros((64, 10, 3), np.uint8), shown, np.zeros((64, 10, 3), np.uint8)], 1)
    assert torch.equal(cropped._prepared(wide), InceptionScorer(network)._prepared(shown))


@dataclasses.dataclass
class _Command:
    path: Path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def save(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_only_the_published_weights_are_loaded(
    tmp_path: Path, network: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(inception, "SHA256", PUBLISHED)
    path = tmp_path / "weights.pth"
    path.write_bytes(save({}))
    with pytest.raises(UsageError, match="6726825d"):
        inception.load(path)
    small = {name: tensor for name, tensor in network.state_dict().items() if tensor.numel() < 100}
    kernel, whole = "Conv2d_1a_3x3.conv.weight", network.state_dict()
    for content, message in [
        (b"no weights", "cannot be read as weights"),
        (save(small)[:-200], "cannot be read as weights"),
        (save({"a": _Command(tmp_path / "executed")}), "cannot be read as weights"),
        (save([1, 2]), "does not contain a network's tensors"),
        (save({"a": 1}), "does not contain a network's tensors"),
        (save(small), f"tensor '{kernel}' .*is missing"),
        (save(whole | {kernel: torch.zeros(32, 3, 5, 5)}), rf"'{kernel}' has shape \[32, 3, 5, 5\], expected"),
        (save(whole | {kernel: torch.full((32, 3, 3, 3), torch.nan)}), f"'{kernel}' holds NaN"),
    ]:
        path.write_bytes(content)
        monkeypatch.setattr(inception, "SHA256", cached_sha256(path))
        with pytest.raises(UsageError, match=message) as caught:
            inception.load(path)
        assert "weights.pth" in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_absent_weights_leave_the_columns_empty(tmp_path: Path) -> None:
    context = ScoringContext(Path(), tmp_path)
    shown = image_files.ImageArray(np.zeros((2, 8, 8, 3), np.uint8))
    scores = metrics.score(["fid", "kid", "inception_score", "precision_recall"], shown, some_items(2), context)
    assert list(scores) == ["fid", "kid", "inception_score", "precision", "recall"]
    for score in scores.values():
        assert score.value is None
        assert "specbench fetch metrics=fid" in said(score)
        assert str(tmp_path / "inception") in said(score)
    with pytest.raises(Unavailable, match=inception.FILES[0]):
        metrics.metric("fid", context).scorer()


def test_options_are_checked() -> None:
    for options, message in [
        ({"resise": "tf"}, "unknown option of KID 'resise' .*crop, resize, subset_size, subsets"),
        ({"resize": "bicubic"}, "unknown resize of Inception 'bicubic' .*clean, pytorch, tf"),
        *(({"crop": wrong}, "crop must be .*at least 1") for wrong in (0, True)),
        *(({"subsets": wrong}, "subsets must be .*at least 1") for wrong in (None, 2.0)),
    ]:
        with pytest.raises(UsageError, match=message):
            inception.KID(ScoringContext(Path(), Path()), options)


@pytest.fixture
def narrow(published: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of weights; the statistics use `WIDTH` features."""
    monkeypatch.setattr(inception, "FEATURES", WIDTH)
    return published


def features(n: int, seed: int, shift: float = 0.0, spread: float = 1.0) -> np.ndarray:
    """Features (N, WIDTH) float32, non-negative and unequal, like the features after the last pooling."""
    rng = np.random.default_rng(seed)
    scale = np.arange(1, WIDTH + 1) ** -0.5
    return (np.abs(rng.standard_normal((n, WIDTH)) * spread + shift) * scale).astype(np.float32)


def outputs(pooled: np.ndarray, seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 3, (len(pooled), 1008)).astype(np.float32)
    return np.concatenate([pooled, logits], 1)


def metric_against(measure: type[Metric], real: np.ndarray, weights: Path, **options: object) -> Metric:
    """A metric whose reference has these features."""
    metric = measure(ScoringContext(Path(), weights), options)
    metric.__dict__["reference"] = statistics(real, metric.cache_key)
    return metric


def statistics(real: np.ndarray, cache_key: str) -> ReferenceStatistics:
    moments, provenance = frechet.Moments.of(torch.from_numpy(real)), {"data": "any", "cache_key": cache_key}
    return ReferenceStatistics(moments.mean.numpy(), moments.covariance.numpy(), "any", real, len(real), provenance)


def by_singular_values(fake: np.ndarray, real: np.ndarray) -> float:
    """The Fréchet distance without a matrix root: with S = A A^T and S_r = B B^T, the trace of (S S_r)^{1/2} is the sum
    of the singular values of A^T B."""
    means = [f.mean(0, dtype=np.float64) for f in (fake, real)]
    a, b = ((f - mean) / np.sqrt(len(f) - 1) for f, mean in zip((fake, real), means))
    gap = means[0] - means[1]
    return float(gap @ gap + (a**2).sum() + (b**2).sum() - 2 * linalg.svdvals(a @ b.T).sum())


@pytest.mark.parametrize("n", [5, 20, 200])
def test_fid_agrees_with_torch_fidelity(narrow: Path, n: int) -> None:
    real, fake = features(300, 1), features(n, 2, 0.2)
    (score,) = metric_against(inception.FID, real, narrow).score(outputs(fake), some_items(n))
    both_statistics = [fid_features_to_statistics(torch.from_numpy(f).double()) for f in (fake, real)]
    expected = fid_statistics_to_metric(*both_statistics, verbose=False)["frechet_inception_distance"]
    assert score.value == pytest.approx(expected, rel=1e-6)  # the requirement is 1e-3
    assert score.value == pytest.approx(by_singular_values(fake, real), rel=1e-4)
    assert score.backend.startswith(f"inception-v3@{inception.SHA256[:8]}, tf resize, reference any@")
    assert "300 real" in said(score)
    assert " any" in said(score)
    assert score.stderr is not None


def test_fid_standard_error_is_the_spread_over_fresh_draws(narrow: Path) -> None:
    fid = metric_against(inception.FID, features(4000, 1), narrow)
    n = 10 * WIDTH
    scores = [fid.score(outputs(features(n, seed, 0.3)), some_items(n))[0] for seed in range(100, 140)]
    spread = np.std([score.value for score in scores], ddof=1)
    # 40 draws give their spread to 1 / sqrt(2 * 39) = 11 %, one sigma; the first order is up to a tenth too large
    assert np.mean([score.stderr for score in scores]) == pytest.approx(spread, rel=0.4)


@pytest.mark.parametrize("n", [40, 130])
def test_kid_agrees_with_torch_fidelity(narrow: Path, n: int) -> None:
    real, fake, names = features(90, 1), features(n, 2, 0.2), some_items(n)
    kid = metric_against(inception.KID, real, narrow, subsets=7, subset_size=50)
    (score,) = kid.score(outputs(fake), names)
    permuted = torch.from_numpy(fake[compared.order(outputs(fake), names)])
    size = min(n, 50)
    reference = kid_features_to_metric(
        permuted, torch.from_numpy(real), kid_subsets=7, kid_subset_size=size, rng_seed=2020, verbose=False
    )
    assert score.value == reference["kernel_inception_distance_mean"]
    assert "90 real" in said(score)
    assert f" any; 7 subsets of {size}" in said(score)


def test_kid_is_the_unbiased_discrepancy_and_estimates_its_spread(narrow: Path) -> None:
    n = 60
    real = features(n, 1)
    kid = metric_against(inception.KID, real, narrow, subsets=1)
    scores, exact = [], []
    for seed in range(100, 160):
        x = features(n, seed, 0.3).astype(np.float64)
        inner, cross, outer = ((a @ b.T / WIDTH + 1) ** 3 for a, b in ((x, x), (x, real), (real, real)))
        pairs = n * (n - 1)
        exact.append((inner.sum() - inner.trace()) / pairs + (outer.sum() - outer.trace()) / pairs - 2 * cross.mean())
        scores.append(kid.score(outputs(x.astype(np.float32)), some_items(n))[0])
    values = [score.value for score in scores]
    np.testing.assert_allclose(values, exact, atol=1e-5)
    # 60 draws give their spread to 9 %, one sigma
    assert np.mean([score.stderr for score in scores]) == pytest.approx(np.std(values, ddof=1), rel=0.3)


def test_inception_score_agrees_with_torch_fidelity(narrow: Path) -> None:
    n = 45
    context, rows, names = ScoringContext(Path(), narrow), outputs(features(n, 1)), some_items(n)
    (score,) = inception.InceptionScore(context, {}).score(rows, names)
    logits = torch.from_numpy(rows[compared.order(rows, names)][:, WIDTH:])
    reference = isc_features_to_metric(logits, 10, shuffle=False)
    assert score.value == reference["inception_score_mean"]
    splits = [isc_features_to_metric(part, 1)["inception_score_mean"] for part in torch.tensor_split(logits, 10)]
    # torch-fidelity and tensor_split give the extra image to different splits
    assert score.stderr == pytest.approx(np.std(splits, ddof=1) / np.sqrt(10), rel=0.5)
    assert "n = 45 in 10 splits for 1008 classes" in said(score)
    assert score.backend.endswith("tf resize, 10 splits")
    for few in (9, 10, 15, 19, 20):  # an image alone in its split would score 1
        (score,) = inception.InceptionScore(context, {}).score(rows[:few], names[:few])
        assert (score.value is None) == (few < 20), few
    assert (score.value or 0) > 1
    (one,) = inception.InceptionScore(context, {"splits": 1}).score(rows[:1], names[:1])
    assert one.value is None


def test_inception_score_of_unambiguous_images_is_the_number_of_classes(narrow: Path) -> None:
    rows = outputs(features(60, 1))
    rows[:, WIDTH:] = 100 * np.eye(1008)[np.arange(60) % 12]
    metric = inception.InceptionScore(ScoringContext(Path(), narrow), {"splits": 1})
    (score,) = metric.score(rows, some_items(60))
    assert score.value == pytest.approx(12)
    assert score.stderr is None


def test_precision_and_recall_agree_with_torch_fidelity(narrow: Path) -> None:
    real, fake = features(80, 1), features(50, 2, 0.4, 0.6)
    metric = metric_against(inception.PrecisionRecall, real, narrow)
    precision, recall = metric.score(outputs(fake), some_items(50))
    reference = prc_features_to_metric(torch.from_numpy(fake), torch.from_numpy(real), verbose=False)
    assert (precision.value, recall.value) == (reference["precision"], reference["recall"])

    def covered(points: np.ndarray, centres: np.ndarray) -> float:
        radii = np.sort(np.linalg.norm(centres[:, None] - centres, axis=2), 1)[:, 3]  # the first is the point itself
        return float((np.linalg.norm(points[:, None] - centres, axis=2) <= radii).any(1).mean())

    assert precision.value == pytest.approx(covered(fake, real))
    assert recall.value == pytest.approx(covered(real, fake))
    assert 0 < recall.value < precision.value < 1
    assert precision.stderr == pytest.approx(np.sqrt(precision.value * (1 - precision.value) / 50))
    assert recall.stderr is None
    assert "50 images to 80" in said(recall)
    too_few = metric.score(outputs(fake)[:3], some_items(3))
    assert [score.value for score in too_few] == [None, None]


METRICS = [inception.FID, inception.KID, inception.InceptionScore, inception.PrecisionRecall]


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("named", [True, False])
def test_the_order_of_the_images_changes_nothing(narrow: Path, measure: type[Metric], named: bool) -> None:
    n = 60
    rows, names = outputs(features(n, 2)), [Item(i, "the same", None) for i in range(n)]
    if named:
        names = some_items(n)
    rows[7] = rows[3]  # an image that occurs twice
    metric = metric_against(
        measure, features(50, 1), narrow, **({"subset_size": 20} if measure is inception.KID else {})
    )
    shuffled = np.random.default_rng(0).permutation(n)
    assert metric.score(rows, names) == metric.score(rows[shuffled], [names[i] for i in shuffled])


def test_splits_hold_the_same_prompts_in_every_run(published: Path) -> None:
    n = 20
    first, second = (compared.order(outputs(features(n, seed)), some_items(n)) for seed in (1, 2))
    assert first.tolist() == second.tolist() != list(range(n))


def test_scores_do_not_depend_on_the_batch(narrow: Path, tmp_path: Path) -> None:
    context = ScoringContext(Path(), narrow, tmp_path / "real.npz", batch=3)
    cache_key, reals = metrics.metric("fid", context).cache_key, features(5, 1)
    references.write(tmp_path / "real.npz", statistics(reals, cache_key))
    names, cached = ["fid", "kid", "precision_recall", "inception_score"], metrics.Outputs(None)
    shown = [an_image(32 + 8 * i, 64, i) for i in range(4)]
    scores = metrics.score(names, shown, some_items(4), context, cached)
    assert scores == metrics.score(names, shown, some_items(4), dataclasses.replace(context, batch=4))
    rows = cached.of(cache_key, [image_key(image_files.digest(x)) for x in shown])
    assert rows.shape == (4, 2048 + 1008)
    assert scores["fid"].value == pytest.approx(by_singular_values(rows[:, :WIDTH], reals), rel=1e-4)
    assert all(scores[column].value is not None for column in ("kid", "precision", "recall"))
    assert scores["inception_score"].value is None  # fewer than two images per split
