"""The prompts that a run decodes. Importing this package imports no data set.

A data set is one file conf/data/NAME.yaml, which declares its parameters, and the function `items` of
specbench/data/NAME.py, or the function that the file names with `implementation`. The function takes a
`PromptSelection` and returns its prompts in order (see `config.registry`). `drawn: true` in the file says that the
code generates the prompts, so that any n is possible.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from specbench.config import indices, parameters, registry
from specbench.config.run_config import PromptSelection, RunConfig
from specbench.data.base import Item
from specbench.errors import UsageError, unknown
from specbench.storage.files import sha256

__all__ = ["Item", "images_of", "load", "prompts_hash"]


class Named(Protocol):
    """The prompt of an image: an `Item`, or a record."""

    @property
    def index(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def prompt(self) -> str: ...


def load(wanted: PromptSelection) -> list[Item]:
    """The prompts of a selection, in order.

    The same parameters and files give the same prompts, and a larger n extends a smaller one. Raises UsageError for an
    unknown data set or split, for missing or bad files, and if there are fewer than n prompts.
    """
    name, n = wanted.data, wanted.n
    if name not in parameters.choices("data"):
        raise unknown("data", name, parameters.choices("data"))
    if n is not None and n < 1:
        raise UsageError(f"n must be an integer of at least 1 (got {n})")
    return list(registry.find("data", name)(wanted))


def images_of(cfg: RunConfig) -> list[Item]:
    """The prompts of a run, one item per image, in the order of `config.indices.of_run`. Raises UsageError as `load`
    does, and if the run's shard has no prompt."""
    prompts = {item.index: item for item in load(cfg.prompts)}
    if not (image_indices := indices.of_run(cfg)):
        raise UsageError(f"shard={cfg.shard} of {cfg.n} prompts is empty: use at most {cfg.n} shards")
    return [replace(prompts[indices.prompt_of(index)], index=index) for index in image_indices]


def prompts_hash(items: Sequence[Named]) -> str:
    """The first 12 hexadecimal digits of a SHA-256 over the prompts and their ids, in order. A prompt with several
    images counts once."""
    pairs = [[item.id, item.prompt] for item in items if not indices.repeat_of(item.index)]
    return sha256(json.dumps(pairs), 12)
