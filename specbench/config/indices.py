"""The numbers of a run's images: image j of prompt i is i + j * `STRIDE`.

So the first image of each prompt has the number of the prompt, and the number of an image does not depend on how many
images a prompt has, on the number of prompts, or on who decodes it. With the seed it is the key of the image's random
stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STRIDE = 2**20  # more than any run has prompts


def prompt_of(index: int) -> int:
    """The index of an image's prompt among the chosen ones."""
    return index % STRIDE


def repeat_of(index: int) -> int:
    """The number of an image among those of its prompt, from 0 on."""
    return index // STRIDE


def of_run(cfg: Mapping[str, Any]) -> list[int]:
    """The numbers of the images of a run, prompt by prompt: of its first `n` prompts or, with `shard="2/8"`, of the
    second, tenth, ... of them."""
    part, parts = map(int, (cfg.get("shard") or "1/1").split("/"))
    repeats = range(cfg.get("images_per_prompt") or 1)  # older ones lack it
    return [i + j * STRIDE for i in range(part - 1, cfg["n"], parts) for j in repeats]


def of_row(row: Mapping[str, Any]) -> list[int]:
    """The numbers of the images of a row, whose `n` counts the prompts of its shard alone."""
    parts = int((row.get("shard") or "1/1").partition("/")[2])
    return of_run({**row, "n": row["n"] * parts})


def label(index: int, digits: int = 0) -> str:
    """ "12", and "12-3" for the fourth image of that prompt."""
    repeat = repeat_of(index)
    return f"{prompt_of(index):0{digits}d}" + (f"-{repeat}" if repeat else "")


def file_name(index: int) -> str:
    """ "00012.png", and "00012-3.png" for the fourth image of that prompt."""
    return f"{label(index, 5)}.png"
