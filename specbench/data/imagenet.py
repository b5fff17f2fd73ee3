"""ImageNet's 1,000 classes, for class-conditional models: the prompt is the class number, as text.

Images are spread evenly: every thousand in a row has each class once, so that n = 50,000 is 50 of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.data import base
from specbench.data.base import Item

CLASSES = 1000


def items(cfg: Mapping[str, Any]) -> list[Item]:
    """`n` class numbers, in an order keyed by `seed`; the id "207-3" is the fourth image of class 207."""
    order = sorted(range(CLASSES), key=lambda label: base.key("class", cfg["seed"], label))
    drawn = [(i, order[i % CLASSES], i // CLASSES) for i in range(cfg["n"])]
    return [Item(i, str(label), (label,), f"{label}-{turn}") for i, label, turn in drawn]
