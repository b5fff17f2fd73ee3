"""TIIF-Bench testmini (Wei et al. 2025, arXiv 2506.02161): cases in 39 dimensions, with a short and a long wording.

The repository states no licence, so the package neither includes nor downloads the prompts. They are read from the
folder data/testmini_prompts of github.com/A113N-W3I/TIIF-Bench, which has one JSONL file per dimension with the fields
type, short_description and long_description. According to public projects that use it, the commit below has 277 cases.
An id is the dimension, the wording and the number of the case in its dimension, counted from 0: "color+2d-short-3". The
score of TIIF-Bench, by GPT-4o, is not computed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specbench.data import base
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.reading import parse_json, read_text

COMMIT = "cca586f40f057c1590d819ae3807ea4e27620e84"
FOLDERS = ("data/testmini_prompts", "testmini_prompts", ".")
WORDINGS = ("short", "long")


def items(cfg: Mapping[str, Any]) -> list[Item]:
    """`n` prompts, chosen by `seed`. category: the dimension."""
    wordings = WORDINGS if cfg["wording"] == "both" else (cfg["wording"],)
    folder = home.expanded(cfg["data_dir"]) if cfg["data_dir"] else home.data_folder("tiif")
    for name in FOLDERS:
        if paths := sorted((folder / name).glob("*.jsonl")):
            return base.subset(base.check_ids(list(read(paths, wordings)), folder / name), cfg)
    raise UsageError(
        f"data=tiif needs the *.jsonl of {FOLDERS[0]}, looked for in {folder}: clone github.com/A113N-W3I/TIIF-Bench at"
        f" {COMMIT} (it states no licence, so it is not fetched for you) and name its folder with data_dir=DIR"
    )


def read(paths: list[Path], wordings: tuple[str, ...]) -> Iterator[Item]:
    """The cases of the files, in these wordings. Raises UsageError for a file with other fields."""
    numbers: Counter[str] = Counter()
    for path in paths:
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            case = parse_json(line, where)
            if not isinstance(case, dict):
                raise UsageError(f"{where}: a case must be an object with type and descriptions; get the file again")
            dimension = base.clean(case.get("type"), where, "type")
            for wording in wordings:
                prompt = base.clean(case.get(f"{wording}_description"), where, f"{wording}_description")
                name = f"{dimension}-{wording}-{numbers[dimension]}"
                yield Item(number, prompt, None, name, category=dimension)
            numbers[dimension] += 1
