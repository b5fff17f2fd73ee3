"""The world of photographs: its files are read as they are, and only training needs them."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import photographs
import pytest
from commands import usage_error

from specbench.config import configuration
from specbench.config.run_config import PromptSelection
from specbench.data import fashion, worlds
from specbench.data.fashion import NAMES, WORLD
from specbench.errors import MissingFilesError
from specbench.training import example_prompts, recipes

COUNTS = {"train": 30, "validation": 20}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder where photographs are looked for. It does not exist yet, and shall have few of them."""
    monkeypatch.setattr(fashion, "FOLDER", tmp_path / "none")
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(fashion, "COUNTS", COUNTS)
    fashion.photographs.cache_clear()
    yield tmp_path / "data" / "fashion"
    fashion.photographs.cache_clear()


def write(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(0).integers(0, 256, (COUNTS[split], 28, 28), dtype=np.uint8)
    return images, photographs.write(folder, split, images)


def test_photographs_are_read_with_their_classes_and_padded(folder: Path) -> None:
    expected, numbers = write(folder, "train")
    images, captions, labels = WORLD.render("train", [4, 17])
    assert (images.shape, images.dtype) == ((2, 32, 32, 3), np.uint8)
    assert np.array_equal(images[:, 2:30, 2:30, 0], expected[[4, 17]])
    assert (images == images[..., :1]).all()
    assert images.sum() == 3 * expected[[4, 17]].sum(dtype=np.int64)  # the border is black
    assert labels.tolist() == [[4], [7]] == numbers[[4, 17], None].tolist()
    assert captions == ["coat", "sneaker"]
    write(folder, "validation")
    assert len(WORLD.render("validation", range(20))[0]) == 20
    assert "20 photographs" in usage_error(WORLD.sample, "validation", 20)


def test_missing_and_damaged_files_are_short_errors(folder: Path) -> None:
    with pytest.raises(MissingFilesError, match="apt-get install dataset-fashion-mnist"):
        WORLD.render("train", [0])
    write(folder, "train")
    path = folder / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for content in (whole[:-20], b"no gzip", gzip.compress(gzip.decompress(whole)[:-1]), gzip.compress(b"\0" * 100)):
        path.write_bytes(content)
        assert str(path) in usage_error(fashion.photographs, "train")


def test_prompts_are_class_names_and_need_no_files(folder: Path) -> None:
    cfg = configuration.compose(["model=llamagen_fashion", "n=25"])
    items = fashion.items(cfg.prompts)
    assert {item.prompt for item in items[:10]} == {item.prompt for item in items[10:20]} == set(NAMES)
    assert [item.prompt for item in items[:10]] == [item.prompt for item in items[10:20]]
    assert all((NAMES[item.labels[0]],) == (item.prompt,) and WORLD.describes(item.labels) for item in items)
    assert items == fashion.items(replace(cfg.prompts, n=30))[:25]
    assert items != fashion.items(PromptSelection("fashion", 25, seed=1))
    assert not worlds.world("scenes").describes(items[0].labels)


def test_a_class_is_named_by_words_or_number() -> None:
    assert fashion.numbers_in([*NAMES], "any") == list(range(10)) == fashion.numbers_in(map(str, range(10)), "any")
    assert fashion.numbers_in([" Ankle  BOOT\n", "009"], "any") == [9, 9]
    for wrong in ("boot", "10", "-1", "", "a coat", "²"):
        message = usage_error(fashion.numbers_in, ["coat", wrong], "llamagen_fashion")
        assert "llamagen_fashion" in message
        assert f"'{wrong}'" in message
        assert "ankle boot" in message


def test_drafters_learn_from_training_photographs(folder: Path) -> None:
    images, _ = write(folder, "train")
    plan = recipes.plan(["drafter=eagle", "model=llamagen_fashion", "n=30"])
    assert (plan["recipe"], plan.cfg.data) == ("fashion", "fashion")
    examples = example_prompts.pairs(plan, len(NAMES))
    assert [example.prompt for example in examples] == [NAMES[i % 10] for i in range(30)]
    assert examples[7].image is not None
    assert np.array_equal(examples[7].image()[2:30, 2:30, 1], images[7])
    assert "30 photographs" in usage_error(
        example_prompts.pairs, recipes.plan(["drafter=eagle", "model=llamagen_fashion", "n=31"]), len(NAMES)
    )


@pytest.mark.skipif(not os.path.isdir(fashion.FOLDER), reason=f"{fashion.PACKAGE} is not installed")
def test_the_package_has_the_published_counts() -> None:
    for split, count in (("train", 60_000), ("validation", 10_000)):
        images, labels = fashion.photographs(split)
        assert images.shape == (count, 28, 28)
        assert np.bincount(labels).tolist() == [count // 10] * 10
