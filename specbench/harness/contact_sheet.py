"""The contact sheet: a run's images, enlarged, with their prompts below them, in one PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from specbench.config import indices
from specbench.harness.folder import RunRecords
from specbench.storage.files import write_atomically

SIDE = 192  # pixels; an image is enlarged by an integer factor up to this side, so that no pixel is blurred
WIDTH = 1640  # pixels; maximum width of a page, unless a single prompt is wider
LIMIT = 32  # maximum number of prompts on the sheet of a run
LONGEST = 500  # maximum number of characters in a caption; a longer one is cut
_PAD, _GAP, _TEXT, _TITLE = 14, 4, 14, 20
_INK, _FAINT, _PAPER = (20, 20, 20), (110, 110, 110), (255, 255, 255)


@dataclass(frozen=True)
class SheetCell:
    """One prompt: its caption and its images, (H, W, 3) uint8, each with a label to print above it."""

    caption: str
    images: Sequence[tuple[str, np.ndarray]]


def draw(title: str, cells: Sequence[SheetCell], remarks: Sequence[str] = ()) -> Image.Image:
    """The sheet of some prompts, each with the same number of images of the same size. remarks: below the title."""
    height, width = cells[0].images[0][1].shape[:2]
    factor = max(1, SIDE // max(height, width))
    height, width = height * factor, width * factor
    each = len(cells[0].images)
    cell_width = each * width + (each - 1) * _GAP
    columns = min(len(cells), max(1, WIDTH // (cell_width + _PAD)))
    small, large = ImageFont.load_default(_TEXT), ImageFont.load_default(_TITLE)
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    captions = [[_wrap(_cut(cell.caption), small, cell_width) for cell in row] for row in rows]
    label, line = _TEXT + 6, _TEXT + 4
    row_heights = [label + height + _GAP + line * max(map(len, row)) + _PAD for row in captions]
    page_width = columns * (cell_width + _PAD) + _PAD
    heading = _wrap(title, large, page_width - 2 * _PAD)
    below = [part for remark in remarks for part in _wrap(remark, small, page_width - 2 * _PAD)]
    y = _PAD + len(heading) * (_TITLE + 6)
    top = y + len(below) * line + _PAD

    page = Image.new("RGB", (page_width, top + sum(row_heights)), _PAPER)
    pen = ImageDraw.Draw(page)
    for i, text in enumerate(heading):
        pen.text((_PAD, _PAD + i * (_TITLE + 6)), text, fill=_INK, font=large)
    for i, text in enumerate(below):
        pen.text((_PAD, y + i * line), text, fill=_INK, font=small)
    y = top
    for row, texts, row_height in zip(rows, captions, row_heights):
        for c, (cell, lines) in enumerate(zip(row, texts)):
            x = _PAD + c * (cell_width + _PAD)
            for p, (name, image) in enumerate(cell.images):
                left = x + p * (width + _GAP)
                pen.text((left, y), name, fill=_FAINT, font=small)
                enlarged = Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST)
                page.paste(enlarged, (left, y + label))
            for i, text in enumerate(lines):
                pen.text((x, y + label + height + _GAP + i * line), text, fill=_INK, font=small)
        y += row_height
    return page


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Lines of unbroken words that fit into `width` pixels; a wider word has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines or [""]


def cells(method: str, records: RunRecords) -> list[SheetCell]:
    """The cells of a run's first prompts. If the run has a baseline, vanilla AR's image is before the method's."""
    result = []
    numbers = [list(of_prompt) for _, of_prompt in groupby(records.wanted, indices.prompt_of)]
    for of_prompt in numbers[: max(LIMIT // len(numbers[0]), 1)]:
        images = []
        for number in of_prompt:
            if records.vanilla is not None:
                images.append(("vanilla", records.vanilla.image(number)))
            images.append((method, records.method.image(number)))
        result.append(SheetCell(records.method.records[of_prompt[0]].prompt, images))
    return result


def save(path: Path, title: str, cells: Sequence[SheetCell], remarks: Sequence[str] = ()) -> None:
    """Draws a sheet into a PNG file."""
    encoded = io.BytesIO()
    draw(title, cells, remarks).save(encoded, "PNG")
    write_atomically(path, encoded.getvalue())
