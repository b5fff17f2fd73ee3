"""The second embedded world: reproducible, split for good, captioned truthfully, with the spectrum of photographs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from commands import usage_error

from specbench.config import configuration, missing_weights
from specbench.config.run_config import PromptSelection
from specbench.data import scenes, textures, worlds
from specbench.data.textures import WORLD


@cache
def rendered(count: int = 120) -> tuple[np.ndarray, list[str], np.ndarray]:
    return WORLD.render("train", range(count))


def test_a_sample_is_a_function_of_its_arguments() -> None:
    images, captions, labels = WORLD.render("validation", [3, 11])
    again, captions_again, labels_again = WORLD.render("validation", [11, 3])
    assert np.array_equal(images, again[::-1])
    assert captions == captions_again[::-1]
    assert np.array_equal(labels, labels_again[::-1])
    assert (images.shape, images.dtype) == ((2, 64, 64, 3), np.uint8)
    assert not np.array_equal(WORLD.render("validation", [3], seed=1)[0][0], images[0])


def test_the_splits_share_no_description_and_the_worlds_no_generator() -> None:
    train = {WORLD.sample("train", i).scene for i in range(2000)}
    validation = {WORLD.sample("validation", i).scene for i in range(400)}
    assert not train & validation
    first, other = WORLD.sample("train", 0).rng, scenes.WORLD.sample("train", 0).rng
    assert first.bit_generator.state["state"]["key"].tolist() != other.bit_generator.state["state"]["key"].tolist()


def test_a_caption_names_every_attribute_and_no_other() -> None:
    names = {value: {value, *textures._WORDS.get(value, ())} for value in (*textures.MATERIALS, *textures.COLOURS)}
    for i in range(400):
        sample = WORLD.sample("train", i)
        words = worlds.words(sample.caption)
        for attribute in ("material", "colour"):
            for value in textures.REGION_ATTRIBUTES[attribute]:
                stated = sum(word in names[value] for word in words)
                assert stated == sum(getattr(region, attribute) == value for region in sample.scene.regions)
        assert ("left" in words) == (sample.scene.light == "left" or "on the left" in sample.caption)
        assert ("faint" in words or "low" in words) == (sample.scene.contrast == "faint")
        assert sum(word in ("fine", "coarse", "rough") for word in words) == len(sample.scene.regions)


def test_labels_follow_the_description() -> None:
    assert len(WORLD.attributes) == 15
    for i in range(50):
        sample = WORLD.sample("train", i)
        labels = dict(zip(WORLD.attributes, sample.scene.labels(), strict=True))
        assert textures.LAYOUTS[labels["layout"]] == sample.scene.layout
        for slot in range(textures.MAX_REGIONS):
            if slot < len(sample.scene.regions):
                assert textures.MATERIALS[labels[f"material{slot}"]] == sample.scene.regions[slot].material
            else:
                assert labels[f"material{slot}"] == worlds.ABSENT
        outlines = [labels[f"outline{slot}"] != worlds.ABSENT for slot in range(textures.MAX_REGIONS)]
        assert sum(outlines) == {"patch": 1, "pair": 2}.get(sample.scene.layout, 0)


def test_labels_by_position_say_where_a_region_is() -> None:
    _, _, labels = rendered()
    by_position = WORLD.by_position(labels)
    names = list(WORLD.position_attributes)
    pairs = labels[:, 0] == textures.LAYOUTS.index("pair")
    left, second = names.index("material left"), list(WORLD.attributes).index("material1")
    assert pairs.sum() > 10
    assert np.array_equal(by_position[pairs, left], labels[pairs, second])
    assert (by_position[~pairs, left] == worlds.ABSENT).all()


def test_amplitudes_fall_with_frequency_as_in_photographs() -> None:
    """Photographs: about frequency to the power -1, between -0.8 and -1.5 (Tolhurst et al. 1992). White noise: 0."""
    grey = rendered()[0].astype(float).mean(-1) / 255
    window = np.hanning(64)[:, None] * np.hanning(64)
    spectrum = np.abs(np.fft.fft2((grey - grey.mean((1, 2), keepdims=True)) * window)).mean(0)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(64, 1 / 64), np.fft.fftfreq(64, 1 / 64)))
    rings = [spectrum[(frequency >= f) & (frequency < f + 1)].mean() for f in range(2, 25)]
    slope = np.polyfit(np.log(np.arange(2, 25) + 0.5), np.log(rings), 1)[0]
    assert -1.6 < slope < -0.7


def test_a_material_can_be_seen() -> None:
    """Fine and coarse, faint and strong differ in the picture as in the caption."""

    def picture(seed: int, **attributes: str) -> np.ndarray:
        region = textures.Region(**{"material": "leaves", "colour": "blue", "grain": "fine"} | attributes)
        contrast = "faint" if seed % 2 else "strong"
        description = textures.Picture("sheet", "even", contrast, (region,))
        return textures.draw(worlds.Sample(0, description, "", np.random.default_rng(seed))).astype(float)

    def roughness(image: np.ndarray) -> float:
        return float(np.abs(np.diff(image.mean(-1), axis=1)).mean() / image.mean(-1).std())

    for material in ("leaves", "blocks", "waves", "cells", "granite"):
        fine, coarse = (
            np.mean([roughness(picture(i, material=material, grain=grain)) for i in range(6)])
            for grain in textures.GRAINS
        )
        assert fine > 1.15 * coarse, material
    faint, strong = (np.mean([picture(i).mean(-1).std() for i in range(start, 12, 2)]) for start in (1, 0))
    assert strong > 1.5 * faint
    blue, red = picture(0).mean((0, 1)), picture(0, colour="red").mean((0, 1))
    assert blue.argmax() == 2
    assert red.argmax() == 0


def test_light_comes_from_its_side() -> None:
    region = textures.Region("clouds", "grey", "coarse")
    for light, axis, sign in (("left", 1, 1), ("right", 1, -1), ("above", 0, 1)):
        description = textures.Picture("sheet", light, "faint", (region,))
        images = [textures.draw(worlds.Sample(0, description, "", np.random.default_rng(i))).mean(-1) for i in range(8)]
        halves = np.split(np.mean(images, axis=0), 2, axis=axis)
        assert sign * (halves[0].mean() - halves[1].mean()) > 10


def test_items_have_the_captions_of_the_split() -> None:
    items = textures.items(PromptSelection("textures", 3, 5, {"split": "validation"}))
    assert [item.prompt for item in items] == WORLD.render("validation", range(3))[1]
    assert all(WORLD.describes(item.labels) and not scenes.WORLD.describes(item.labels) for item in items)


@pytest.mark.parametrize("name", ["scenes", "textures"])
def test_a_vocabulary_has_the_words_of_unseen_captions(name: str) -> None:
    world = worlds.world(name)
    vocabulary = set(world.vocabulary)
    captions = [world.sample("validation", i).caption for i in range(300)]
    assert {word for caption in captions for word in worlds.words(caption)} <= vocabulary


def test_a_drafter_that_was_not_trained_for_this_world_is_reported() -> None:
    missing_weights.check(configuration.compose(["model=llamagen_textures", "method=eagle1"]))
    message = usage_error(missing_weights.check, configuration.compose(["model=llamagen_textures", "method=medusa"]))
    assert "draft_model, eagle, eagle3" in message
    assert "specbench train drafter=medusa model=llamagen_textures" in message
