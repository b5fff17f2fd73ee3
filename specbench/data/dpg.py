"""DPG-Bench (Hu et al. 2024): 1,065 long prompts. The package carries them, without the benchmark's questions.

A prompt's id is the name of its file in the authors' repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.data import base, prompts
from specbench.data.base import Item
from specbench.data.geneval import FILES


def items(cfg: Mapping[str, Any]) -> list[Item]:
    """`n` prompts, chosen by `seed`."""
    return base.subset(prompts.read(FILES / "dpg.tsv"), cfg)
