"""GenEval 2 (Kamath et al. 2025, arXiv 2512.16853): 800 prompts. Their licence is CC BY-NC 4.0, so the package neither
carries nor fetches them: the user puts the file there.

A prompt's id is its line in the file, from 1 on. The file's questions, by which its authors score, are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.data import base, prompts
from specbench.data.base import Item

FILE = "geneval2_data.jsonl"
_HOW = (
    f"get {FILE} from github.com/facebookresearch/GenEval2 (CC BY-NC 4.0: not for commercial use, so it is not fetched"
    " for you) and put it there"
)


def items(cfg: Mapping[str, Any]) -> list[Item]:
    """`n` prompts, chosen by `seed`."""
    return base.subset(prompts.read(base.find(cfg, FILE, how=_HOW)), cfg)
