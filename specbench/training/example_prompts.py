"""The prompts and images of training examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specbench import data
from specbench.config.run_config import RunConfig
from specbench.data import worlds
from specbench.data.base import key
from specbench.errors import UsageError
from specbench.storage import home, image_files
from specbench.storage.reading import read_text
from specbench.training.recipes import TrainingPlan


@dataclass(frozen=True)
class ExamplePrompt:
    """A prompt, its stable name, and the function that returns its image. None: the target draws the image."""

    name: str
    prompt: str
    image: Callable[[], np.ndarray] | None = None


def pairs(plan: TrainingPlan, classes: int) -> list[ExamplePrompt]:
    """The examples' prompts and images, in an order keyed by the seed. classes: the number of classes of a
    class-conditional model, else 0. Raises UsageError for missing images or captions, and for fewer than two
    examples."""
    examples = _examples(plan, classes)
    if len(examples) < 2:
        raise UsageError(f"a training needs at least two examples, not {len(examples)}")
    return examples


def _examples(plan: TrainingPlan, classes: int) -> list[ExamplePrompt]:
    cfg = plan.cfg
    if plan["source"] == "self":
        return [ExamplePrompt(item.id, item.prompt) for item in data.load(replace(cfg.prompts, n=plan["n"]))]
    if not plan["images"]:
        if cfg.data not in worlds.NAMES:
            raise UsageError(
                f"source=pairs needs images, but data={cfg.data} has no images: name their folder with"
                " images=DIR, or let the target draw them with source=self"
            )
        split = cfg.own.get("split", "train")  # a data set of classes has none
        drawn = (worlds.world(cfg.data).sample(split, i) for i in range(plan["n"]))
        return [ExamplePrompt(str(s.index), s.caption, _Drawn(cfg.data, split, s.index)) for s in drawn]
    folder = home.expanded(plan["images"])
    if not folder.is_dir():
        raise UsageError(f"images: the folder {folder} does not exist")
    captioned = _captioned(folder, classes, cfg)
    return sorted(captioned, key=lambda p: key("subset", cfg.seed, p.name))[: plan["n"]]


@dataclass(frozen=True)
class _Drawn:
    world: str
    split: str
    index: int

    def __call__(self) -> np.ndarray:
        world = worlds.world(self.world)
        return world.draw(world.sample(self.split, self.index))


def _captioned(folder: Path, classes: int, cfg: RunConfig) -> list[ExamplePrompt]:
    """The images of a folder with their captions: from .txt files next to them, from sub-folders (one per class, in
    order), or from the data set of the images."""
    files = image_files.find(folder)
    if not files:
        raise UsageError(f"images: {folder} contains no images")

    def reads(path: Path) -> Callable[[], np.ndarray]:
        return lambda: image_files.read(path)

    def name(path: Path) -> str:
        return str(path.relative_to(folder))

    if classes:
        groups = sorted({path.relative_to(folder).parts[0] for path in files if path.parent != folder})
        if not 0 < len(groups) <= classes or any(path.parent == folder for path in files):
            raise UsageError(
                f"images: {folder} must have one sub-folder per class, at most {classes}, and no images next to them"
                f" (it has {len(groups)})"
            )
        class_of = {group: str(i) for i, group in enumerate(groups)}
        return [ExamplePrompt(name(path), class_of[path.relative_to(folder).parts[0]], reads(path)) for path in files]
    if files[0].with_suffix(".txt").is_file():
        captioned = []
        for path in files:
            text = read_text(path.with_suffix(".txt")).strip()
            if not text:
                raise UsageError(f"{path.with_suffix('.txt')} is empty; write the image's caption there")
            captioned.append(ExamplePrompt(name(path), " ".join(text.split()), reads(path)))
        return captioned
    every = data.load(replace(cfg.prompts, n=None)) if cfg.data not in worlds.NAMES else []
    items = [item for item in every if item.reference]
    by_name = {path.name: path for path in files}
    captioned = [
        ExamplePrompt(item.id, item.prompt, reads(by_name[item.reference]))
        for item in items
        if item.reference in by_name
    ]
    if not captioned:
        raise UsageError(
            f"images: the images in {folder} have no captions: put NAME.txt next to NAME.jpg, or name their data set"
            " with data="
        )
    return captioned
