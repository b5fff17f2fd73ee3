"""PartiPrompts (Yu et al. 2022): 1,632 prompts, most of them hard. They come without real images.

A prompt's id is its row below the header, from 1 on. The column Category is its category; Challenge and Note are not
used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.data import base, prompts
from specbench.data.base import Item

FILE = "PartiPrompts.tsv"


def items(cfg: Mapping[str, Any]) -> list[Item]:
    """`n` prompts, chosen by `seed`."""
    return base.subset(prompts.read(base.find(cfg, FILE)), cfg)
