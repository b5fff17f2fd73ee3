"""GenEval (Ghosh et al. 2023): 553 prompts in six tasks, each with what must be seen. The package carries them.

A prompt's id is the number of its line in GenEval's file, from 0 on, as its authors' code names the folders of images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from specbench.data import base
from specbench.data.base import Item
from specbench.data.prompts import CARRIED

#: The tags of GenEval's prompts, in the order of its file.
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def items(cfg: Mapping[str, Any]) -> list[Item]:
    """`n` prompts, chosen by `seed`. metadata: GenEval's own (tag, include, exclude)."""
    return base.subset(entries(), cfg)


@cache
def entries() -> tuple[Item, ...]:
    """Every prompt, in the order of the file."""
    lines = (CARRIED / "geneval.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return tuple(Item(i, one["prompt"], None, str(i), metadata=one) for i, one in enumerate(found))


@cache
def classes() -> tuple[str, ...]:
    """GenEval's names of COCO's 80 classes, in the order of a detector's labels."""
    return tuple((CARRIED / "geneval_objects.txt").read_text(encoding="utf-8").splitlines())
