"""The embedded evaluators: building blocks, training, files, and the statistics of the committed ones."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.config.registry import ASSETS
from specbench.data import scenes
from specbench.errors import UsageError
from specbench.metrics.scenes_reference import FILE, ScenesReference
from specbench.models import evaluators as ev
from specbench.training import evaluators as te
from specbench.training.trainer import Recipe
from specbench.training.world import World

WIDTHS = (8, 8, 8)


def small(kind: str) -> ev.Classifier | ev.AttributeReader | ev.TwoTower:
    torch.manual_seed(0)
    if kind == "classifier":
        return ev.Classifier(ev.ClassifierConfig(WIDTHS, dim=16, part=4))
    if kind == "reader":
        return ev.AttributeReader(ev.ReaderConfig(WIDTHS, dim=16))
    words = tuple(scenes.words("a small red striped circle on plain background"))
    return ev.TwoTower(ev.TwoTowerConfig(WIDTHS, dim=16, vocabulary=words, text_dim=16, text_layers=1))


def outputs(module: torch.nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, ev.TwoTower):
        return torch.cat(
            [module.embed_images(x), module.embed_captions(["A small red circle.", "a"] * (len(x) // 2))], 1
        )
    return torch.cat(module(x), 1)


@pytest.fixture(scope="module")
def decoded_images() -> Tensor:
    return scenes.to_float(scenes.render("train", range(8))[0])


# --- networks and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classifier", "reader"])
def test_every_attribute_gets_its_logits(kind: str, decoded_images: Tensor) -> None:
    logits = small(kind).eval()(decoded_images)
    assert [tuple(one.shape) for one in logits] == [(8, len(choices)) for choices in scenes.ATTRIBUTES.values()]


def test_features_have_the_size_that_the_metric_is_reported(decoded_images: Tensor) -> None:
    default = ev.Classifier(ev.ClassifierConfig()).eval()
    assert default.features(decoded_images).shape == (8, default.num_features) == (8, 64)


def test_embeddings_are_unit_vectors(decoded_images: Tensor) -> None:
    towers = small("two_tower").eval()
    assert isinstance(towers, ev.TwoTower)
    for vectors in (towers.embed_images(decoded_images), towers.embed_captions(["a red circle", "nonsense"])):
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))


@pytest.mark.parametrize("kind", ["classifier", "reader", "two_tower"])
def test_a_stored_evaluator_answers_as_before(kind: str, decoded_images: Tensor, tmp_path: Path) -> None:
    module = small(kind).eval()
    path = tmp_path / f"scenes_{kind}.safetensors"
    ev.save(module, path)
    again = ev.load(path, type(module))
    assert again.cfg == module.cfg
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    # float16 keeps 11 bits of a weight: about 5e-4 of its size, and a handful of layers adds little to that
    torch.testing.assert_close(outputs(again, decoded_images), outputs(module, decoded_images), atol=5e-3, rtol=5e-3)


def test_a_backend_is_named_after_its_weights(tmp_path: Path) -> None:
    path = tmp_path / ev.READER
    module = small("reader")
    ev.save(module, path)
    before = ev.backend(path)
    assert before.startswith("scenes-reader@")
    assert len(before) == len("scenes-reader@") + 8
    with torch.no_grad():
        module.of_slot.bias += 1
    ev.save(module, path)
    assert ev.backend(path) != before


def test_a_wrong_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "scenes_reader.safetensors"
    with pytest.raises(UsageError, match=r"scenes_reader\.safetensors"):
        ev.load(path, ev.AttributeReader)
    ev.save(small("classifier"), path)
    with pytest.raises(UsageError, match="scenes-classifier"):
        ev.load(path, ev.AttributeReader)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match="readable"):
        ev.load(path, ev.AttributeReader)


def test_what_is_read_and_how_surely() -> None:
    """Two pictures, the second without any object: its slots count neither as right nor as wrong."""
    labels = torch.tensor([scenes.sample("train", 0).scene.labels(), [0, 1] + [scenes.ABSENT] * 12])
    logits = [torch.zeros(2, len(choices)) for choices in scenes.ATTRIBUTES.values()]
    logits[0][0, (labels[0, 0] + 1) % 6] = 5.0  # layout of picture 0: sure of something else
    logits[1][1, 1] = math.log(3.0)  # background of picture 1: 3 of 6 parts
    p, right = ev.captioned_probabilities(logits, labels), ev.read_right(logits, labels)
    assert p[0, 0] == pytest.approx(1 / (5 + math.exp(5)))
    assert p[1, 1] == pytest.approx(0.5)
    assert right[0, 0] == 0
    assert right[1, 1] == 1
    for table in (p, right):
        assert torch.equal(table.isnan(), labels == scenes.ABSENT)


# --- training ---------------------------------------------------------------------------------------------------------


def test_attribute_loss_averages_over_present_attributes() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([scenes.sample("train", i).scene.labels() for i in range(5)])
    logits = [torch.randn(5, len(c), generator=generator) for c in scenes.ATTRIBUTES.values()]
    each = [
        float(F.cross_entropy(logits[a][i : i + 1], labels[i, a : a + 1]))
        for i in range(5)
        for a in range(labels.shape[1])
        if labels[i, a] != scenes.ABSENT
    ]
    assert float(te.attribute_loss(logits, labels)) == pytest.approx(np.mean(each), rel=1e-5)


def test_degrade_spares_half_the_batch_and_says_what_it_did(decoded_images: Tensor) -> None:
    x = decoded_images.clone()
    worse, strength = te.degrade(x, np.random.default_rng(3))
    assert torch.equal(x, decoded_images)
    assert torch.equal(worse[4:], x[4:])
    assert (strength[4:] == 0).all()
    assert ((worse[:4] - x[:4]).abs().mean((1, 2, 3)) > 0.005).all()
    assert ((strength[:4] > 0) & (strength[:4] <= 1)).all()
    assert worse.abs().max() <= 1
    again, _ = te.degrade(x, np.random.default_rng(3))
    assert torch.equal(worse, again)


def test_degrade_blurs_as_strongly_as_it_says() -> None:
    """A bright column becomes a band whose second moment is sigma squared."""
    x = torch.zeros(64, 3, 64, 64)
    x[..., 32] = 1.0
    worse, strength = te.degrade(x, np.random.default_rng(0))
    sigma = 1.2 * strength[:32, 0]
    quiet = int((strength[:32, 1] + (sigma < 0.6)).argmin())  # little noise, much blur
    band = worse[quiet].mean((0, 1))
    band = (band - band[:16].mean())[26:39]  # without the colour shift
    assert band.sum() == pytest.approx(1.0, abs=0.05)
    variance = float((band * (torch.arange(13) - 6.0) ** 2).sum())
    # 192 rows average the noise away; what is left is its share in the far tails
    assert variance == pytest.approx(float(sigma[quiet]) ** 2, rel=0.1)


class TestWordEdits:
    words = scenes.vocabulary()
    ids = {word: i + 2 for i, word in enumerate(words)}  # noqa: RUF012 (read only)

    def edit(self, captions: list[str], seed: int = 0) -> list[list[str]]:
        rows = np.zeros((len(captions), 40), dtype=np.int64)
        for row, caption in zip(rows, captions):
            known = [self.ids.get(word, 1) for word in scenes.words(caption)]
            row[: len(known)] = known
        before = rows.copy()
        after = te.WordEdits(self.ids)(rows, np.random.default_rng(seed))
        assert np.array_equal(rows, before)
        name = {i: word for word, i in self.ids.items()}
        return [[name.get(int(i), "?") for i in row if i] for row in after]

    def test_one_detail_changes_and_stays_in_its_kind(self) -> None:
        kinds = [*map(set, scenes.OBJECT_ATTRIBUTES.values()), set(scenes.BACKGROUNDS)]
        captions = [scenes.sample("train", i).caption for i in range(200)]
        exchanged = replaced = 0
        for caption, after in zip(captions, self.edit(captions)):
            before = scenes.words(caption)
            assert len(before) == len(after)
            changes = [(a, b) for a, b in zip(before, after) if a != b]
            assert len(changes) <= 2
            for a, b in changes:
                assert any({a, b} <= kind for kind in kinds)
            if len(changes) == 2:
                assert changes[0] == changes[1][::-1]
            exchanged += len(changes) == 2
            replaced += len(changes) == 1
        assert exchanged > 20
        assert replaced > 100

    def test_a_caption_without_such_words_stays(self) -> None:
        caption = "A tiny violet rhombus on a flat backdrop."
        assert self.edit([caption]) == [scenes.words(caption)]


class TestContrastiveLoss:
    scale = torch.tensor(5.0)

    @pytest.fixture
    def vectors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [F.normalize(torch.randn(4, 6, generator=generator), dim=1) for _ in range(3)]

    def test_is_the_mean_of_both_directions(self, vectors: list[Tensor]) -> None:
        images, captions, edited = vectors
        wrong, same = torch.tensor([True, True, False, True]), torch.eye(4, dtype=torch.bool)
        expected = 0.0
        for i in range(4):
            to_caption = [math.exp(5 * float(images[i] @ captions[j])) for j in range(4)]
            extra = math.exp(5 * float(images[i] @ edited[i])) if wrong[i] else 0.0
            to_image = [math.exp(5 * float(images[j] @ captions[i])) for j in range(4)]
            expected -= math.log(to_caption[i] / (sum(to_caption) + extra)) + math.log(to_image[i] / sum(to_image))
        value = te.contrastive_loss(images, captions, edited, wrong, same, self.scale)
        assert float(value) == pytest.approx(expected / 8, rel=1e-5)

    def test_the_same_scene_is_no_negative(self, vectors: list[Tensor]) -> None:
        """Rows 0 and 1 show one scene: how near their captions are to each other's picture must not matter."""
        images, captions, edited = vectors
        none = torch.zeros(4, dtype=torch.bool)
        same = torch.eye(4, dtype=torch.bool)
        same[0, 1] = same[1, 0] = True
        value = te.contrastive_loss(images, captions, edited, none, same, self.scale)
        apart = te.contrastive_loss(images, captions, edited, none, torch.eye(4, dtype=torch.bool), self.scale)
        assert torch.isfinite(value)
        assert value < apart


def tiny_world(split: str, n: int) -> World:
    images, captions, labels = scenes.render(split, range(n))
    return World(images, captions, labels)


def test_train_all_trains_what_is_missing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of each: this is about files and statistics, not about learning."""
    for name in ("CLASSIFIER_RECIPE", "READER_RECIPE", "TWO_TOWER_RECIPE"):
        monkeypatch.setattr(te, name, Recipe(steps=2, batch=8, lr=1e-3, warmup=1))
    train, held = tiny_world("train", 24), tiny_world("validation", 20)
    assets = tmp_path / "assets"
    statistics = te.train_all(train, held, tmp_path / "work", assets)
    files = [ev.CLASSIFIER, ev.READER, ev.TWO_TOWER, FILE]
    assert sorted(p.name for p in assets.iterdir()) == sorted(files)
    wanted = {"classifier_accuracy", "fid_of_real", "reader_accuracy", "reader_accuracy_fill2", "two_tower_top1"}
    assert wanted | {"reader_seconds"} <= set(statistics)
    assert all(math.isfinite(value) for value in statistics.values())
    reference = ScenesReference.load(assets / FILE)
    assert (reference.backend, reference.count) == (ev.backend(assets / ev.CLASSIFIER), 20)

    before = {name: (assets / name).read_bytes() for name in files}
    (assets / ev.READER).unlink()
    again = te.train_all(train, held, tmp_path / "work", assets)
    assert {"classifier_seconds", "two_tower_seconds"}.isdisjoint(again)
    assert "reader_seconds" in again
    assert again["reader_accuracy"] == pytest.approx(statistics["reader_accuracy"], abs=1e-6)
    for name in files:
        if name != ev.READER:  # trained to the end before, so it is written again from its checkpoint
            assert (assets / name).read_bytes() == before[name]


def test_training_learns(tmp_path: Path) -> None:
    """Twenty steps on sixteen pictures: the loss of the same batch must fall well below that of a blind guess."""
    world = tiny_world("train", 16)
    recipe = Recipe(steps=20, batch=16, lr=2e-3, warmup=2)
    reader, statistics = te.train_attributes(ev.AttributeReader, world.images, world.labels, recipe, tmp_path)
    blind = np.mean(
        [
            math.log(len(scenes.ATTRIBUTES[a]))
            for row in world.labels
            for a in np.array(list(scenes.ATTRIBUTES))[row >= 0]
        ]
    )
    assert statistics["loss"] < 0.8 * blind
    assert not reader.training


def test_two_tower_statistics_count_what_they_say() -> None:
    """With embeddings planted by hand: picture i matches caption i, except that 0 and 1 are exchanged."""

    class Planted(ev.TwoTower):
        def __init__(self) -> None:
            super().__init__(
                dataclasses.replace(ev.TwoTowerConfig(WIDTHS, 16), vocabulary=tuple(scenes.vocabulary()), text_dim=16)
            )
            self.order = [1, 0, 2, 3]

        def embed_images(self, images: Tensor) -> Tensor:
            return torch.eye(4)[self.order]

        def embed_ids(self, ids: Tensor) -> Tensor:
            return torch.eye(4)

    images, captions, labels = scenes.render("validation", range(4))
    statistics = te.evaluate_two_tower(Planted(), images, captions, labels)
    assert statistics["top1"] == 0.5
    assert statistics["own_cosine"] == 0.5
    assert statistics["other_cosine"] == pytest.approx(2 / 12)
    labels[1] = labels[0]  # now both show one scene, and either caption is right
    assert te.evaluate_two_tower(Planted(), images, captions, labels)["top1"] == 1.0


# --- the committed evaluators -----------------------------------------------------------------------------------------

COMMITTED = [ASSETS / name for name in (ev.CLASSIFIER, ev.READER, ev.TWO_TOWER, FILE)]


def test_committed_evaluators_reach_their_statistics() -> None:
    """On 400 validation pictures; 0.97 is the project's target for the reader."""
    images, captions, labels = scenes.render("validation", range(400))
    reader = te.evaluate_attributes(ev.load(ASSETS / ev.READER, ev.AttributeReader), images, labels)
    assert reader["mean"] >= 0.97
    assert min(reader.values()) >= 0.90
    classifier = te.evaluate_attributes(ev.load(ASSETS / ev.CLASSIFIER, ev.Classifier), images, labels)
    assert classifier["mean"] >= 0.90
    towers = te.evaluate_two_tower(ev.load(ASSETS / ev.TWO_TOWER, ev.TwoTower), images, captions, labels)
    assert towers["top1"] >= 0.95
    assert towers["edits_told"] >= 0.80


def test_committed_evaluators_are_small_and_their_reference_is_theirs() -> None:
    assert sum(p.stat().st_size for p in COMMITTED) < 6e6
    reference = ScenesReference.load(ASSETS / FILE)
    assert reference.backend == ev.backend(ASSETS / ev.CLASSIFIER)
    assert reference.count >= 1000
