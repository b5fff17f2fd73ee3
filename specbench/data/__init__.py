"""The prompts that a run decodes. Importing this package imports no data set.

A data set is one file conf/data/NAME.yaml, with the parameters that it has, and the function `items` of
specbench/data/NAME.py, which takes the flat parameters of a run and gives its prompts in order, or that
function in a plug-in.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from specbench.config import parameters
from specbench.config.table import TABLE
from specbench.data.base import Item
from specbench.errors import UsageError, unknown
from specbench.rows import indices
from specbench.storage.files import sha256

__all__ = ["DRAWN", "Item", "counted", "images_of", "load", "prompts_hash"]

#: Data sets that the code makes; the prompts of the others come from files, which may change.
DRAWN = ("scenes", "scenes_classes", "scenes_geneval", "imagenet")

_MODULES = {"coco2014": "coco", "coco2017": "coco"}  # for data sets whose module has another name


class Named(Protocol):
    """An image's prompt: an `Item`, or a record."""

    @property
    def index(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def prompt(self) -> str: ...


def load(cfg: Mapping[str, Any]) -> list[Item]:
    """The prompts of a run with these flat parameters, in order: `data`, `n`, `seed` and what the data set declares.
    n = None: all prompts of the data set's file.

    The same parameters and files give the same prompts, and a larger n extends a smaller one. Raises
    UsageError for an unknown data set or split, absent or bad files, and where there are fewer than n.
    """
    name, n = cfg["data"], cfg["n"]
    if name not in parameters.choices("data"):
        raise unknown("data", name, parameters.choices("data"))
    if n is not None and n < 1:
        raise UsageError(f"n must be an integer of at least 1 (got {n})")
    if name == "scenes":
        return _scenes(cfg["split"], n)
    if plugin := parameters.provided("data", name):
        return list(plugin.load("items")(cfg))
    module = importlib.import_module(f"specbench.data.{_MODULES.get(name, name)}")
    items: list[Item] = module.items(cfg)
    return items


def counted(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The flat parameters of a run with n=all as the number of prompts that the data set has.

    Raises UsageError for absent or bad files, and for an endless data set.
    """
    if cfg["n"] != "all":
        return dict(cfg)
    if cfg["data"] in DRAWN:
        raise UsageError(f"data={cfg['data']} has no last prompt, so n=all is not possible: give n=NUMBER")
    return {**cfg, "n": len(load({**cfg, "n": None}))}


def _scenes(split: str, n: int) -> list[Item]:
    """The first `n` of a split, whatever the seed: a split is an endless random sequence already, and each of its
    captions belongs to an image of the same index."""
    if split not in (splits := TABLE["split"].choices):
        raise unknown("split of scenes", split, splits)
    from specbench.data import scenes  # draws with torch, which listing the choices must not import

    samples = (scenes.sample(split, index) for index in range(n))
    return [Item(s.index, s.caption, tuple(s.scene.labels()), str(s.index), category=s.scene.layout) for s in samples]


def images_of(cfg: Mapping[str, Any]) -> list[Item]:
    """The prompts of a run, one item for each of its images: of `images_per_prompt` images of a prompt, all but the
    first have another index (see `rows.indices`)."""
    repeats = range(indices.images_per_prompt(cfg))
    return [replace(item, index=item.index + j * indices.STRIDE) for item in load(cfg) for j in repeats]


def prompts_hash(items: Sequence[Named]) -> str:
    """Twelve hexadecimal digits of a SHA-256 over the prompts and their ids, in order; a prompt with several images
    counts once."""
    pairs = [[item.id, item.prompt] for item in items if not indices.repeat_of(item.index)]
    return sha256(json.dumps(pairs), 12)
