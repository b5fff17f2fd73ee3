"""ImageNet's 1,000 classes, for class-conditional models: the prompt is the class number, as text.

Images are spread evenly: 1,000 consecutive images have each class once, so n = 50,000 is 50 images per class.
"""

from __future__ import annotations

from specbench.config.run_config import PromptSelection
from specbench.data import base
from specbench.data.base import Item

CLASSES = 1000


def items(wanted: PromptSelection) -> list[Item]:
    """`n` class numbers; see `base.spread`."""
    return [Item(i, str(label), (label,), name) for i, label, name in base.spread(CLASSES, wanted)]
