"""Prompts of models with one vocabulary, as token ids: Lumina-mGPT and its second version, Anole, Emu3, Janus-Pro
and SimpleAR.

Sources of the facts: the reference README and README_3, by their numbers, and prompt_formats.json and
prompt_formats_3.json. Fixed wordings (an instruction, a quality suffix, a negative prompt) are settings: they come in
as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.errors import UsageError

#: Text -> token ids, without any special token.
Encode = Callable[[str], list[int]]


class Prompt(NamedTuple):
    """Token ids up to the last one before the first image token, with the prompt and without it (for guidance)."""

    conditional: list[int]
    unconditional: list[int]


def left_pad_ids(rows: Sequence[Sequence[int]], length: int, pad: int) -> tuple[Tensor, Tensor]:
    """N rows of token ids -> ids (N, length) int64 padded on the left with `pad`, and valid (N, length) bool.

    Raises UsageError for a row that is longer.
    """
    ids = torch.full((len(rows), length), pad, dtype=torch.int64)
    valid = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        if len(row) > length:
            raise UsageError(
                f"prompt {i} has {len(row)} tokens and prompt_length={length} allows {length}: "
                f"give prompt_length={len(row)} or more"
            )
        if row:
            ids[i, -len(row) :], valid[i, -len(row) :] = torch.tensor(row), True
    return ids, valid


@dataclass(frozen=True)
class ChameleonIds:
    """Special ids of Chameleon's vocabulary (reference README (21)). A side of p pixels is the id size + p / 32."""

    bos: int = 0
    pad: int = 1
    eos: int = 2
    image_end: int = 8196
    image_start: int = 8197
    end_of_turn: int = 8710
    new_line: int = 8803
    size: int = 8804


@dataclass(frozen=True)
class Emu3Ids:
    """Special ids of Emu3's vocabulary that a prompt is made of (manifest Emu3-Gen)."""

    pad: int = 151643
    bos: int = 151849
    img: int = 151851
    boi: int = 151852


@dataclass(frozen=True)
class JanusIds:
    """Special ids of Janus-Pro's vocabulary that a prompt is made of (manifest Janus-Pro-1B)."""

    bos: int = 100000
    pad: int = 100015
    begin_of_image: int = 100016


@dataclass(frozen=True)
class SimpleARIds:
    """Special ids of SimpleAR's vocabulary that a prompt is made of (manifest SimpleAR-0.5B)."""

    text_to_image: int = 151665
    image_start: int = 151667


def simplear_prompt(encode: Encode, prompt: str, instruction: str, negative: str, ids: SimpleARIds) -> Prompt:
    """SimpleAR: [text to image] instruction [image start]; `negative` in the same frame instead of an unconditional
    prompt (reference README_3 (61)). `instruction` holds {prompt}."""
    if "{prompt}" not in instruction:
        raise UsageError(f"the instruction {instruction!r} has no field for the prompt: write {{prompt}} into it")

    def framed(text: str) -> list[int]:
        return [ids.text_to_image, *encode(text), ids.image_start]

    return Prompt(framed(instruction.replace("{prompt}", prompt)), framed(negative))


def janus_prompt(text: Sequence[int], ids: JanusIds | None = None) -> Prompt:
    """Janus-Pro: [bos] text [begin of image]; the unconditional prompt is as long, with padding instead of the text,
    which is attended to (reference README_3 (39))."""
    ids = ids or JanusIds()
    first, last = [ids.bos], [ids.begin_of_image]
    return Prompt(first + list(text) + last, first + [ids.pad] * len(text) + last)


def lumina_prompt(
    encode: Encode,
    prompt: str,
    width: int,
    height: int,
    instruction: str,
    ids: ChameleonIds | None = None,
    unconditional: str = "header",
) -> Prompt:
    """Lumina-mGPT: [bos] instruction [end_of_turn] [image start, height, width]; without a prompt only the last three
    (reference README (21), (24)), or with unconditional="prompt_end" the last four, as in SJD's released code.

    `instruction` holds {width}, {height} and {prompt}; width and height are pixels, multiples of 32.
    """
    ids = ids or ChameleonIds()
    if "{prompt}" not in instruction:
        raise UsageError(f"the instruction {instruction!r} has no field for the prompt: write {{prompt}} into it")
    for name, side in (("width", width), ("height", height)):
        if side < 32 or side % 32:
            raise UsageError(f"Lumina-mGPT draws sides of 32, 64, 96, ... pixels: {name} cannot be {side}")
    text = instruction.replace("{width}", str(width)).replace("{height}", str(height)).replace("{prompt}", prompt)
    start = [ids.image_start, ids.size + height // 32, ids.size + width // 32]
    without = [ids.end_of_turn, *start] if unconditional == "prompt_end" else start
    return Prompt([ids.bos, *encode(text), ids.end_of_turn, *start], without)


def anole_prompt(encode: Encode, prompt: str, ids: ChameleonIds | None = None) -> Prompt:
    """Anole: [bos] prompt [end_of_turn, image start]; without a prompt [bos, image start] (reference README (24))."""
    ids = ids or ChameleonIds()
    return Prompt([ids.bos, *encode(prompt), ids.end_of_turn, ids.image_start], [ids.bos, ids.image_start])


def emu3_prompt(
    encode: Encode, prompt: str, rows: int, columns: int, suffix: str, negative: str, ids: Emu3Ids | None = None
) -> Prompt:
    """Emu3: [bos] prompt + suffix [boi] "rows*columns" as text [img]; `negative` has the same format, without the
    suffix, instead of an unconditional prompt (manifest Emu3-Gen, reference README (28), (29)).

    rows and columns count codes: 90 and 90 for 720x720.
    """
    ids = ids or Emu3Ids()
    frame = [ids.boi, *encode(f"{rows}*{columns}"), ids.img]
    return Prompt([ids.bos, *encode(prompt + suffix), *frame], [ids.bos, *encode(negative), *frame])
