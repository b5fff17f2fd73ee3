"""The numbers of a run's images: image j of prompt i is i + j * `STRIDE`.

The first image of each prompt therefore has the number of the prompt. The number of an image does not depend on the
number of prompts, on the number of images per prompt, or on the process that decodes it. With the seed, it is the key
of the image's random stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

STRIDE = 2**20  # above the number of prompts of any run


def prompt_of(index: int) -> int:
    """The index of an image's prompt among the chosen prompts."""
    return index % STRIDE


def repeat_of(index: int) -> int:
    """The number of an image among the images of its prompt, from 0 on."""
    return index // STRIDE


class ImagesOfRun(Protocol):
    """The parameters that determine the images of a run."""

    @property
    def n(self) -> int: ...
    @property
    def shard(self) -> str | None: ...
    @property
    def images_per_prompt(self) -> int: ...


def of_run(config: ImagesOfRun) -> list[int]:
    """The numbers of the images of a run, prompt by prompt."""
    return of(config.n, config.shard, config.images_per_prompt)


def of(n: int, shard: str | None = None, images_per_prompt: int = 1) -> list[int]:
    """The numbers of the images of the first `n` prompts or, with `shard="2/8"`, of every eighth of these prompts,
    starting with the second; prompt by prompt."""
    part, parts = map(int, (shard or "1/1").split("/"))
    return [i + j * STRIDE for i in range(part - 1, n, parts) for j in range(images_per_prompt)]


def of_row(row: Mapping[str, Any]) -> list[int]:
    """The numbers of the images of a row. Its `n` counts only the prompts of its shard."""
    parts = int((row["shard"] or "1/1").partition("/")[2])
    return of(row["n"] * parts, row["shard"], row["images_per_prompt"])


def label(index: int, digits: int = 0) -> str:
    """ "12", and "12-3" for the fourth image of that prompt."""
    repeat = repeat_of(index)
    return f"{prompt_of(index):0{digits}d}" + (f"-{repeat}" if repeat else "")


def file_name(index: int) -> str:
    """ "00012.png", and "00012-3.png" for the fourth image of that prompt."""
    return f"{label(index, 5)}.png"
