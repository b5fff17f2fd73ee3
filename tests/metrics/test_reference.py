"""Statistics of real images: computing and reading them, and errors if they are wrong or missing."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_inception
from commands import said
from PIL import Image

from specbench import cli, metrics
from specbench.cli.images import reference as command
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.metrics import inception, real_images
from specbench.metrics import reference as references
from specbench.metrics.base import Scorer, ScoringContext, Unavailable
from specbench.metrics.inception import InceptionMetric
from specbench.rows import remark_text
from specbench.storage import image_files

D = 6  # width of the files that are only read


class Fake(Scorer):
    """A scorer whose features are random numbers seeded by the image; a real network needs a second per file."""

    stop_after = 10**9

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, shown: Any, items: Any) -> np.ndarray:
        if len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append(len(shown))
        rows = [np.random.default_rng(int(image.astype(np.int64).sum())).random(8 + 1008) for image in shown]
        return np.array(rows, np.float32)


@pytest.fixture
def scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A scorer with eight features per image, with weights that exist; the test has its own home folder."""
    fake = Fake()
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(inception, "FEATURES", 8)
    weights = tmp_path / "home" / "metrics" / "inception" / inception.FILES[1]
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    monkeypatch.setattr(InceptionMetric, "scorer", lambda self: fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven images of different sizes, two of them in a sub-folder, and other files."""
    folder = tmp_path / "real"
    (folder / "sub").mkdir(parents=True)
    for i in range(7):
        pixels = np.random.default_rng(i).integers(0, 256, (10 + i, 12, 3), np.uint8)
        Image.fromarray(pixels).save(folder / ("sub" if i > 4 else ".") / f"{i}.{'png' if i % 2 else 'JPG'}")
    (folder / "notes.txt").write_text("no image")
    (folder / "._0.jpg").write_bytes(b"what a Mac leaves")
    return folder


def context(tmp_path: Path, data: str = "coco2017", file: Path | None = None) -> ScoringContext:
    return ScoringContext(Path(), tmp_path / "home" / "metrics", file, data)


def test_statistics_equal_those_of_the_images(
    scorer: Fake, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "KEPT", 5)
    monkeypatch.setattr(real_images, "BLOCK", 3)
    words = ["reference", "data=coco2017", f"images={folder}", "batch=2", "device=cpu"]
    assert cli.main(words) == 0
    assert scorer.calls == [2, 1, 2, 1, 1]
    scorer.calls = []
    metric = metrics.metric("fid", context(tmp_path))
    reference = metric.reference
    paths = [*folder.glob("[0-9].*"), *folder.glob("sub/*")]
    features = scorer([image_files.read(path) for path in paths], [])[:, :8]
    np.testing.assert_allclose(reference.mean, features.mean(0), rtol=1e-6)
    np.testing.assert_allclose(reference.covariance, np.cov(features, rowvar=False), rtol=1e-5, atol=1e-7)
    assert reference.features.dtype == np.float32
    rows = {row.tobytes() for row in features}
    assert len(reference.features) == len({row.tobytes() for row in reference.features} & rows) == 5
    assert reference.count == len(paths) == 7
    expected = {"data": "coco2017", "folder": "real", "images": 7, "cache_key": metric.cache_key}
    assert expected.items() <= reference.provenance.items()
    assert metric.fingerprint().endswith(f"reference coco2017@{reference.label[-8:]}")
    # no other file is left, and the same command has nothing to do
    [stored] = (tmp_path / "home" / "references" / "coco2017").iterdir()
    assert stored.suffix == ".npz"
    capsys.readouterr()
    scorer.calls = []
    assert cli.main(words) == 0
    assert scorer.calls == []
    assert "from these 7" in capsys.readouterr().out
    (folder / "1.png").unlink()
    assert cli.main(words) == 0
    assert sum(scorer.calls) == 6


@pytest.mark.parametrize("ending", ["bmp", "ppm", "png"])
def test_replaced_images_have_new_statistics(scorer: Fake, tmp_path: Path, ending: str) -> None:
    """Also if names, sizes and times stay the same."""

    def image(level: int) -> bytes:
        pixels, file = np.full((8, 8, 3), level, np.uint8), io.BytesIO()
        Image.fromarray(pixels).save(file, {"ppm": "PPM"}.get(ending, ending))
        return file.getvalue()

    folder, mine = tmp_path / "real", tmp_path / "mine.npz"
    folder.mkdir()
    words = ["reference", f"images={folder}", f"out={mine}", "device=cpu"]
    means = []
    for levels in ((10, 20), (30, 41), (41, 30)):
        for i, level in enumerate(levels):
            (folder / f"{i}.{ending}").write_bytes(image(level))
            os.utime(folder / f"{i}.{ending}", (0, 0))
        assert len(image(levels[0])) == len(image(levels[1]))
        assert cli.main(words) == 0
        means.append(references.read(mine, 8).mean)
    np.testing.assert_allclose(means[1], scorer([np.full((8, 8, 3), x, np.uint8) for x in (30, 41)], [])[:, :8].mean(0))
    assert not np.allclose(means[0], means[1])
    np.testing.assert_allclose(means[1], means[2])
    assert scorer.calls[:3] == [2, 2, 2]  # the exchanged images, too: names choose the stored features


def test_images_that_the_tools_prepare_in_a_special_way_are_counted(
    scorer: Fake, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGBA", (8, 8), (1, 2, 3, 0)).save(folder / "clear.png")
    assert cli.main(["reference", "data=coco2017", f"images={folder}", "device=cpu"]) == 0
    assert "1 of 8 images have transparency" in capsys.readouterr().out
    files = [{"trait": "alpha", "count": 1, "images": 8}]
    assert metrics.metric("fid", context(tmp_path)).against().values["files_with"] == files
    expected = np.random.default_rng((1 + 2 + 3) * 64).random(8)  # the colours below the transparency
    assert np.abs(metrics.metric("fid", context(tmp_path)).reference.features - expected).max(1).min() < 1e-6


def test_an_archive_of_the_same_size_has_new_statistics(scorer: Fake, tmp_path: Path) -> None:
    words = ["reference", f"images={tmp_path / 'real.npz'}", f"out={tmp_path / 'mine.npz'}", "device=cpu"]
    means = []
    for seed in (0, 1):
        images = np.random.default_rng(seed).integers(0, 256, (3, 8, 8, 3), np.uint8)
        np.savez(tmp_path / "real.npz", arr_0=images)
        os.utime(tmp_path / "real.npz", (0, 0))
        assert cli.main(words) == 0
        means.append(references.read(tmp_path / "mine.npz", 8).mean)
    assert not np.allclose(*means)


def test_it_resumes(scorer: Fake, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_images, "BLOCK", 3)
    words = ["reference", f"images={folder}", f"out={tmp_path / 'mine.npz'}", "batch=2", "device=cpu"]
    scorer.stop_after = 3
    assert cli.main(words) == cli.STOPPED
    assert not (tmp_path / "mine.npz").exists()
    scorer.stop_after, scorer.calls = 10**9, []
    assert cli.main(words) == 0
    assert sum(scorer.calls) == 7 - 5
    assert references.read(tmp_path / "mine.npz", 8).name == "mine"


def test_metrics_of_one_scorer_share_a_file_and_a_crop_has_its_own(scorer: Fake, folder: Path, tmp_path: Path) -> None:
    base = ["reference", "data=coco2017", f"images={folder}", "device=cpu"]
    assert cli.main([*base, "metrics=[fid,kid,fid_clean]"]) == 0
    assert cli.main([*base, "crop=16"]) == 0
    stored = sorted(path.stem for path in (tmp_path / "home" / "references" / "coco2017").iterdir())
    network = metrics.metric("fid", context(tmp_path)).cache_key.partition(",")[0]
    assert stored == [f"{network}-{resize}" for resize in ("clean-resize", "tf-resize", "tf-resize-crop-16")]


MISTAKES = [
    (["data=coco2017"], "images=DIR is required: folder"),
    (["images={folder}"], "data set .*data=NAME"),
    (["data=cocoa", "images={folder}"], "unknown data 'cocoa' .*coco2017"),
    (["data=coco2017", "folder={folder}"], "unknown .*'folder'"),
    (["data=coco2017", "images={folder}/none"], "there is no folder .*none"),
    (["data=coco2017", "images={folder}/empty"], "fewer than two .*empty"),
    (["data=coco2017", "images={folder}", "metrics=clip"], "unknown metric .*fid_clean"),
    (["data=coco2017", "images={folder}", "metrics=fid,fid_clean", "out=a.npz"], "out= is one file"),
    (["data=coco2017", "images={folder}", "crop=0"], "crop must be .* not 0"),
    (["data=coco2017", "images={folder}", "batch=0"], "batch must be .*got 0"),
    (["data=coco2017", "images={folder}", "device=gpu"], "device must be .*gpu"),
    (["images={folder}", "out=a.png"], "must end with .npz"),
    (["images={folder}", "out={folder}/mine.npz"], "is no .npz file"),
    (["data=coco2017", "images={folder}", "metrics_dir={folder}"], "specbench fetch metrics=fid"),
]


def test_mistakes_are_usage_errors(scorer: Fake, folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "mine.npz").write_text("my own")
    for words, message in MISTAKES:
        with pytest.raises(UsageError, match=message):
            command([word.format(folder=folder) for word in words])
    assert scorer.calls == []


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_images_come_from_adms_file_too(scorer: Fake, tmp_path: Path, monkeypatch: Any, save: Any) -> None:
    """Its mu and sigma are of more images than it contains, with TensorFlow's resize. For other resizes they are
    computed."""
    monkeypatch.setattr(real_images, "_BYTES", 3 * 4 * 5 * 3)
    shown = np.random.default_rng(0).integers(0, 256, (7, 4, 5, 3), np.uint8)
    save(tmp_path / "adm.npz", arr_0=shown, mu=np.full(8, 0.5), sigma=np.eye(8))
    base = ["reference", "data=imagenet", f"images={tmp_path / 'adm.npz'}", "device=cpu"]
    assert cli.main([*base, "metrics=fid,fid_clean"]) == 0
    assert scorer.calls == [3, 3, 1] * 2
    tf, clean = (metrics.metric(name, context(tmp_path, "imagenet")) for name in ("fid", "fid_clean"))
    np.testing.assert_array_equal(tf.reference.mean, np.full(8, 0.5))
    np.testing.assert_array_equal(tf.reference.covariance, np.eye(8))
    features = scorer(shown, [])[:, :8]
    np.testing.assert_array_equal(tf.reference.features, features)
    np.testing.assert_allclose(clean.reference.mean, features.mean(0), rtol=1e-6)
    assert all(text in remark_text.text(tf.against()) for text in ("adm.npz", "7 real", "imagenet"))
    scores = score(["fid", "kid", "precision_recall"], context(tmp_path, "imagenet"))
    assert all(value.value is not None for value in scores.values())


WITHOUT_IMAGES = [
    (None, "has no array 'arr_0'"),
    (np.zeros((3, 4, 4, 1), np.uint8), "'arr_0' is uint8 .* not images"),
    (np.zeros((3, 4, 4, 3)), "'arr_0' is float64 .* not images"),
    (np.zeros((1, 4, 4, 3), np.uint8), "not images"),
    (np.zeros((2, 1, 5000, 3), np.uint8), "not images"),
    (np.array([{}], object), "array of objects"),
    (np.asfortranarray(np.zeros((2, 4, 5, 3), np.uint8)), "Fortran"),
]  # fmt: skip


def test_a_file_without_images_is_named(scorer: Fake, tmp_path: Path) -> None:
    for array, message in WITHOUT_IMAGES:
        np.savez(tmp_path / "adm.npz", **({"mu": np.zeros(8)} if array is None else {"arr_0": array}))
        with pytest.raises(UsageError, match=message):
            command(["data=imagenet", f"images={tmp_path / 'adm.npz'}", "device=cpu"])
    assert scorer.calls == []


def test_an_image_that_cannot_be_read_is_named(scorer: Fake, folder: Path) -> None:
    (folder / "3.png").write_bytes(b"\x89PNG and no more")
    with pytest.raises(UsageError, match=r"3\.png"):
        command(["data=coco2017", f"images={folder}", "device=cpu"])


def good() -> dict[str, Any]:
    """The arrays of a file with `D` features, as `specbench reference` writes it."""
    features = np.random.default_rng(0).random((9, D)).astype(np.float32)
    return {
        "mu": features.mean(0, dtype=np.float64),
        "sigma": np.cov(features.astype(np.float64), rowvar=False),
        "count": np.int64(9),
        "features": features,
        "provenance": np.array(json.dumps({"data": "coco2017", "cache_key": "inception-v3@1, tf resize"})),
    }


def test_a_written_file_is_read(tmp_path: Path) -> None:
    mu, sigma, _, features, provenance = good().values()
    made = references.ReferenceStatistics(mu, sigma, "coco2017", features, 9, json.loads(str(provenance)))
    references.write(tmp_path / "deep" / "a.npz", made)
    loaded = references.read(tmp_path / "deep" / "a.npz", D)
    for name in ("mean", "covariance", "features"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(made, name))
    assert (loaded.count, loaded.name, loaded.label, loaded.provenance) == (9, "coco2017", made.label, made.provenance)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.npz"]


def test_only_the_moments_of_other_files_are_read(tmp_path: Path) -> None:
    """ADM's file also has images and a second pair of moments; MAR's has only the first pair."""
    moments = {name: good()[name] for name in ("mu", "sigma")}
    others = {"mu_s": np.zeros(3), "arr_0": np.zeros((4, 2, 2, 3), np.uint8), "features": np.array([{}], object)}
    np.savez(tmp_path / "VIRTUAL_imagenet256_labeled.npz", **moments, **others)
    np.savez_compressed(tmp_path / "adm_in256_stats.npz", **moments)
    adm = references.read(tmp_path / "VIRTUAL_imagenet256_labeled.npz", D)
    mar = references.read(tmp_path / "adm_in256_stats.npz", D)
    np.testing.assert_array_equal(adm.mean, moments["mu"])
    assert (adm.features, adm.count, adm.cache_key) == (None, None, "")
    assert adm.label.startswith("VIRTUAL_imagenet256_labeled@")
    assert adm.label[-8:] == mar.label[-8:]  # equal numbers


def change(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in (good() | arrays).items() if array is not None}


def broken(value: float) -> np.ndarray:
    return np.where(np.arange(D * D).reshape(D, D) == 2 * D + 3, value, good()["sigma"])


WRONG = [
    (change(mu=None), "has no array 'mu'"),
    (change(count=None), "has no array 'count'"),
    (change(mu=np.array([{}] * D, object)), "'mu' is an array of objects"),
    (change(provenance=np.array({}, object)), "'provenance' is an array of objects"),
    (change(mu=np.zeros(64)), rf"'mu' is float64 \[64\], not floating-point \[{D}\]"),
    (change(mu=np.zeros(D, np.int64)), "'mu' is int64"),
    (change(sigma=np.zeros((D, D + 1))), "'sigma' is float64"),
    (change(mu=np.full(D, np.nan)), "'mu' contains NaN or infinity"),
    (change(sigma=broken(np.inf)), "'sigma' contains NaN or infinity"),
    (change(sigma=broken(7.0)), "'sigma' is no covariance"),
    (change(features=np.zeros((9, D + 1), np.float32)), "'features' is float32"),
    (change(features=np.zeros((10_001, D), np.float16)), "not floating-point .up to 10000, 6"),
    (change(features=np.zeros((10, D), np.float32)), "9 .* cannot have these statistics"),
    (change(count=np.int64(1), features=None), "1 .* cannot have"),
    (change(count=np.float64(9)), "'count' is float64"),
    (change(provenance=np.array("{")), "'provenance' is not one of specbench's"),
    (change(provenance=np.array("[" * 10_000)), "'provenance' is not one of specbench's"),
    (change(provenance=np.array('{"data": "a\\nb", "cache_key": ""}')), "'provenance' is not one of specbench's"),
    (change(provenance=np.array("x" * 70_000)), "'provenance' is <U70000"),
]


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.npz"
    for arrays, message in WRONG:
        np.savez(path, **arrays)
        with pytest.raises(UsageError, match=message) as caught:
            references.read(path, D)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "damaged.npz"
    np.savez(path, **good())
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[400] ^= 255
    buffer = io.BytesIO()
    np.save(buffer, good()["mu"])
    for damaged in (b"", b"statistics", content[: len(content) // 2], bytes(flipped), buffer.getvalue()):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"damaged\.npz.*(again|check)"):
            references.read(path, D)
    for absent in (tmp_path / "none.npz", tmp_path):
        with pytest.raises(UsageError, match="file"):
            references.read(absent, D)


def score(names: list[str], where: ScoringContext) -> dict[str, metrics.Score]:
    shown = image_files.ImageArray(np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8))
    return metrics.score(names, shown, [Item(i, "", None, str(i)) for i in range(4)], where)


def test_an_absent_reference_leaves_the_columns_empty(scorer: Fake, tmp_path: Path) -> None:
    scores = score(["fid_clean_256", "kid", "precision_recall"], context(tmp_path))
    assert scorer.calls == []  # nothing is scored unnecessarily
    assert {column: value.value for column, value in scores.items()} == dict.fromkeys(
        ["fid", "kid", "precision", "recall"]
    )
    assert "`specbench reference data=coco2017 images=DIR metrics=fid_clean crop=256`" in said(scores["fid"])
    assert re.search("images=DIR metrics=fid`.* reference=NAME", said(scores["kid"]))
    adm = metrics.metric("fid", context(tmp_path, "imagenet"))
    with pytest.raises(Unavailable, match=r"VIRTUAL_imagenet256_labeled\.npz"):
        adm.fingerprint()
    with pytest.raises(Unavailable, match="data=imagenet"):
        adm.score(np.zeros((4, 8), np.float32), [Item(0, "", None)] * 4)


def test_a_reference_with_only_moments_serves_only_fid(scorer: Fake, tmp_path: Path) -> None:
    np.savez(tmp_path / "adm.npz", mu=np.zeros(8), sigma=np.eye(8))
    scores = score(["fid", "kid"], context(tmp_path, "imagenet", tmp_path / "adm.npz"))
    assert scores["fid"].value is not None
    assert " adm" in said(scores["fid"])
    assert ", reference adm@" in scores["fid"].backend
    assert scores["kid"].value is None
    assert re.search("mu .*sigma", said(scores["kid"]))


def test_a_reference_must_have_the_metric_s_scorer(scorer: Fake, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "clean.npz"
    assert cli.main(["reference", f"images={folder}", f"out={file}", "metrics=fid_clean", "device=cpu"]) == 0
    with pytest.raises(UsageError, match="clean.*tf"):
        score(["fid"], context(tmp_path, "", file))
    own = score(["fid_clean"], context(tmp_path, "", file))["fid"]
    assert re.search("7 real .*clean", said(own))
    other = score(["fid_clean_256"], context(tmp_path, "", file))["fid"]
    assert other.value is not None
    assert re.search("clean .*crop null.*crop 256", said(other))


def test_with_the_network_itself(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(inception, "SHA256", random_inception.write(tmp_path / "home" / "metrics"))
    for path in [*folder.glob("[0-3].*"), *folder.glob("sub/*")]:
        path.unlink()
    (folder / "5.png").write_bytes((folder / "4.JPG").read_bytes())
    assert cli.main(["reference", "data=coco2014", f"images={folder}", "crop=32", "device=cpu"]) == 0
    [file] = (tmp_path / "home" / "references" / "coco2014").iterdir()
    loaded = references.read(file, inception.FEATURES)
    assert loaded.features.shape == (2, 2048)
    np.testing.assert_array_equal(loaded.features[0], loaded.features[1])  # the same image under two names
    np.testing.assert_allclose(loaded.covariance, 0, atol=1e-9 * loaded.mean.max() ** 2)
    shown = image_files.center_crop(image_files.read(folder / "4.JPG"), 32)
    scored = metrics.metric("fid", context(tmp_path)).scorer()([shown], [])
    np.testing.assert_array_equal(scored[0, :2048], loaded.features[0])
