"""The embedded world: reproducible, with fixed splits, correct captions, and ambiguous captions."""

from __future__ import annotations

import numpy as np
import pytest

from specbench.data import scenes, worlds
from specbench.models.pixels import to_float, to_uint8


def test_a_sample_is_a_function_of_its_arguments():
    first, captions, labels = scenes.WORLD.render("validation", [3, 11])
    again, captions_again, labels_again = scenes.WORLD.render("validation", [11, 3])
    assert np.array_equal(first, again[::-1])
    assert captions == captions_again[::-1]
    assert np.array_equal(labels, labels_again[::-1])
    other = scenes.WORLD.render("validation", [3], seed=1)
    assert not np.array_equal(other[0][0], first[0])
    assert first.dtype == np.uint8
    assert first.shape == (2, 64, 64, 3)


def test_the_splits_share_no_scene():
    train = {scenes.sample("train", i).scene for i in range(3000)}
    validation = {scenes.sample("validation", i).scene for i in range(600)}
    assert not train & validation
    with pytest.raises(ValueError, match="'test'"):
        scenes.sample("test", 0)


def test_a_caption_names_every_attribute_and_no_other():
    shapes = {"circle": {"circle", "disc"}, "square": {"square", "box"}, "triangle": {"triangle"}}
    shapes |= {"diamond": {"diamond", "rhombus"}, "cross": {"cross", "plus"}}
    colours = {c: {c} for c in scenes.COLOURS} | {"purple": {"purple", "violet"}, "cyan": {"cyan", "turquoise"}}
    for i in range(400):
        s = scenes.sample("train", i)
        words = worlds.words(s.caption)
        for kind, meant in (("shape", shapes), ("colour", colours)):
            for value, names in meant.items():
                shown = sum(getattr(o, kind) == value for o in s.scene.objects)
                assert sum(w in names for w in words) == shown, s.caption
        assert words.count("dotted") == sum(o.fill == "dotted" for o in s.scene.objects)


def test_objects_are_in_canonical_order():
    """A reader can only know which object is the first if the order is visible."""
    white = {}
    for i in range(300):
        s = scenes.sample("train", i)
        if s.scene.layout not in ("beside", "above"):
            continue
        for slot, o in enumerate(s.scene.objects):
            if o.colour == "white" and o.fill == "solid" and sum(x.colour == "white" for x in s.scene.objects) == 1:
                picture = scenes.draw(s)
                ys, xs = np.nonzero(picture.min(-1) > 215)
                white.setdefault(s.scene.layout, []).append((slot, xs.mean(), ys.mean()))
    assert min(len(v) for v in white.values()) > 3
    assert all((x < 32) == (slot == 0) for slot, x, _ in white["beside"])
    assert all((y < 32) == (slot == 0) for slot, _, y in white["above"])


def test_labels_follow_the_scene():
    s = scenes.sample("train", 5)
    labels = dict(zip(scenes.ATTRIBUTES, s.scene.labels(), strict=True))
    assert scenes.LAYOUTS[labels["layout"]] == s.scene.layout
    for slot in range(scenes.MAX_OBJECTS):
        if slot < len(s.scene.objects):
            assert scenes.SHAPES[labels[f"shape{slot}"]] == s.scene.objects[slot].shape
            assert scenes.FILLS[labels[f"fill{slot}"]] == s.scene.objects[slot].fill
        else:
            assert labels[f"colour{slot}"] == worlds.ABSENT


def test_the_same_scene_has_many_images():
    """Properties that the caption does not name vary, so a model must spread its mass over them."""
    s = scenes.sample("train", 7)
    pictures = [scenes.draw(scenes.Sample(i, s.scene, s.caption, np.random.default_rng(i))) for i in range(8)]
    spread = np.stack(pictures).astype(float).std(0)
    assert spread.mean() > 10  # grey levels: hue, place and phase differ, not only the grain (which is about 6)


def test_every_caption_is_in_the_vocabulary():
    vocabulary = set(scenes.WORLD.vocabulary)
    assert all(set(worlds.words(scenes.sample("validation", i).caption)) <= vocabulary for i in range(500))


def test_conversion_to_float_and_back():
    picture = scenes.WORLD.render("train", [0])[0]
    x = to_float(picture)
    assert x.shape == (1, 3, 64, 64)
    assert -1 <= float(x.min()) < float(x.max()) <= 1
    assert np.array_equal(to_uint8(x), picture)
