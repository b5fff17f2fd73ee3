"""GenEval (Ghosh et al. 2023): 553 prompts in six tasks, with the objects that each image must show. The package
includes them.

A prompt's id is the number of its line in GenEval's file, counted from 0, as the authors' code names image folders.
"""

from __future__ import annotations

import json
from functools import cache

from specbench.config.run_config import PromptSelection
from specbench.data import base
from specbench.data.base import Item
from specbench.data.prompts import CARRIED

#: The tags of GenEval's prompts, in the order of its file.
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def items(wanted: PromptSelection) -> list[Item]:
    """`n` prompts, chosen by `seed`. metadata: GenEval's (tag, include, exclude)."""
    return base.subset(entries(), wanted)


@cache
def entries() -> tuple[Item, ...]:
    """All prompts, in the order of the file."""
    lines = (CARRIED / "geneval.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    return tuple(Item(i, prompt["prompt"], None, str(i), metadata=prompt) for i, prompt in enumerate(prompts))


@cache
def classes() -> tuple[str, ...]:
    """GenEval's names of COCO's 80 classes, in the order of the detector's labels."""
    return tuple((CARRIED / "geneval_objects.txt").read_text(encoding="utf-8").splitlines())
