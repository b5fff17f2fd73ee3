"""Degenerate images: of one colour, repeated, of few codes, or the same as another prompt's.

Engines really return such images: a decoder whose half-precision values overflow or a safety filter returns
black images, a cache that ignores the prompt returns one image for every request, a lost grid or greedy decoding
returns a loop of codes. Scores do not show it. The checks use statistics of each image (`statistics`, in its record),
its digest and its prompt. docs/metrics.md says how far real images are from each bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from specbench.rows.columns import Row
from specbench.rows.journal import Record
from specbench.rows.remark import Remark, remark
from specbench.storage import image_files

#: A flat image: in no channel do two pixels differ by more levels of 255. A generated image of fog or of the night
#: differs by tens; a lossy file format changes a single colour by at most one level.
FLAT = 2
#: The minimum side in pixels: one token of the image tokenizers with the usual factor of 16.
LEAST_SIDE = 16
#: A repeated image: the agreement of its codes, or of its pixels, with themselves at a shift (see `repetition`). It is
#: 1 if a row, a column or a tile is repeated. Greedy decoding comes near to it in few images. Pixels agree in more
#: images, such as a sky above a sea, so that their bound is stricter.
REPEATED_CODES, REPEATED_PIXELS = 0.75, 0.99
#: Few codes: the share of an image's codes that differ from each other. A single row of a square image of 1024 codes
#: has 32.
FEW = 1 / 32
#: Minimum number of codes in an image whose repetition and number of different codes are checked. In smaller images
#: they depend on chance.
LEAST_CODES = 64
#: The maximum share of degenerate images in a run that ends with exit code 0. Vanilla AR of the embedded model had no
#: degenerate image; an engine with such a fault fails for most requests.
MOST = 0.1
_CELLS = 64  # pixels are averaged over squares: at most this many on each side


def statistics(pixels: np.ndarray, codes: np.ndarray | None) -> dict[str, Any]:
    """The fields of `Record` that show whether an image is degenerate. pixels: (H, W, 3) uint8; codes: (rows, columns),
    or None if unknown."""
    fields: dict[str, Any] = {"contrast": image_files.contrast(pixels)}
    if codes is not None and codes.size >= LEAST_CODES:
        fields["distinct"] = round(len(np.unique(codes)) / codes.size, 4)
        fields["repetition"] = round(repetition(codes), 4)
    elif codes is None and min(pixels.shape[:2]) >= LEAST_SIDE:
        fields["repetition"] = round(pixel_repetition(pixels), 4)
    return fields


def repetition(codes: np.ndarray) -> float:
    """How much codes (rows, columns) repeat, from 0 to 1: the share of positions with the same code at a shift,
    corrected for chance. The maximum over shifts by a quarter to a half of the rows or of the columns.

    With p_k the share of code k, two independent positions agree with probability c = sum_k p_k^2. A share s of
    agreeing positions gives (s - c) / (1 - c) (Cohen's kappa). A single repeated row, column or tile gives 1, since
    some multiple of its period is among these shifts. Similar neighbours do not count. An image of a single code gives
    1.
    """
    chance = float(np.square(np.unique(codes, return_counts=True)[1] / codes.size).sum())
    if chance == 1:
        return 1.0
    shares = [float((a == b).mean()) for a, b in _shifted(codes)]
    return max(0.0, *((share - chance) / (1 - chance) for share in shares))


def pixel_repetition(pixels: np.ndarray) -> float:
    """`repetition` of pixels (H, W, 3) uint8, averaged over squares: 1 - |a - b|^2 / (|a|^2 + |b|^2), where a and b are
    the two shifted parts minus the image's mean colour. A period that is not a multiple of a square's side is detected
    if one of its multiples is."""
    side = -(-max(pixels.shape[:2]) // _CELLS)
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    squares = pixels[: rows * side, : columns * side].reshape(rows, side, columns, side, 3)
    cells = squares.mean((1, 3), dtype=np.float64)
    cells -= cells.mean((0, 1))
    agree = 0.0
    for a, b in _shifted(cells):
        power = float(np.square(a).sum() + np.square(b).sum())
        agree = max(agree, 1 - float(np.square(a - b).sum()) / power if power else 0.0)
    return agree


def _shifted(grid: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A grid (rows, columns, ...) without its first rows, and without its last rows; then the same for columns."""
    for lines in (grid, grid.swapaxes(0, 1)):
        for shift in range(max(1, -(-len(lines) // 4)), len(lines) // 2 + 1):
            yield lines[shift:], lines[:-shift]


@dataclass(frozen=True)
class ImageFacts:
    """The known properties of an image. prompt: "" if unknown; digest: of its pixels; contrast: the maximum difference
    of two pixels in a channel; size: (width, height) in pixels; the others: see `Record`."""

    prompt: str
    digest: str | None
    contrast: int | None = None
    size: tuple[int, int] | None = None
    distinct: float | None = None
    repetition: float | None = None

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """The properties of an image that a run decoded."""
        return cls(
            record.prompt,
            record.sha256,
            record.contrast,
            distinct=record.distinct,
            repetition=record.repetition,
        )

    @property
    def is_flat(self) -> bool:
        return self.contrast is not None and self.contrast <= FLAT

    @property
    def is_repeated(self) -> bool:
        bound = REPEATED_PIXELS if self.distinct is None else REPEATED_CODES
        return self.repetition is not None and self.repetition >= bound

    @property
    def has_few_codes(self) -> bool:
        return self.distinct is not None and self.distinct <= FEW


@dataclass(frozen=True)
class Finding:
    """A problem of some images. remark: says what it is; images: their positions among the checked images; degenerate:
    whether they count as degenerate. (A small image does not.)"""

    remark: Remark
    images: frozenset[int]
    degenerate: bool = True


def findings(images: Sequence[ImageFacts]) -> list[Finding]:
    """The problems of the images of a run. An image counts in the first problem that it has.

    Two images of different prompts with equal pixels are a problem, even if they are the only ones: the tokens of an
    image have hundreds of bits, so that no two samples coincide, and a model that decodes greedily still depends on its
    prompt. Equal images of one prompt are only a remark: greedy decoding gives them, and so does an engine or a method
    that ignores the seed. Prompts that differ only in case and white space count as one, because text encoders read
    them as one. Without any prompt, only a set of equal images is a problem, since a folder may contain copies.
    """
    n, result = len(images), []
    rest = list(range(n))
    for name, code in (("is_flat", "flat"), ("has_few_codes", "few_codes"), ("is_repeated", "repeated")):
        if matches := frozenset(i for i in rest if getattr(images[i], name)):
            bound = {"share": FEW} if code == "few_codes" else {}
            result.append(Finding(Remark(code, {"images": len(matches), "of": n, **bound}), matches))
        rest = [i for i in rest if i not in matches]
    if small := _small(images):
        result.append(small)
    if any(image.prompt for image in images):
        equal = _equal(images, rest)
        if copies := frozenset(i for group in equal if len(set(group.values())) > 1 for i in group):
            result.append(Finding(remark("equal_prompts", images=len(copies), of=n), copies))
        if copies := frozenset(i for group in equal if len(set(group.values())) == 1 for i in group):
            result.append(Finding(remark("equal_repeats", images=len(copies), of=n), copies, degenerate=False))
    elif n > 1 and len(rest) == n and len({image.digest for image in images} - {None}) == 1:
        result.append(Finding(remark("all_equal", of=n), frozenset(rest)))
    return result


def _small(images: Sequence[ImageFacts]) -> Finding | None:
    """The images with a very small side."""
    small = {i: image.size for i, image in enumerate(images) if image.size and min(image.size) < LEAST_SIDE}
    if not small:
        return None
    width, height = min(small.values(), key=lambda s: s[0] * s[1])
    values = {"images": len(small), "of": len(images), "side": LEAST_SIDE, "width": width, "height": height}
    return Finding(Remark("small", values), frozenset(small), degenerate=False)


def _equal(images: Sequence[ImageFacts], among: Sequence[int]) -> list[dict[int, str]]:
    """The sets of images that are equal to the pixel, each image with its prompt."""
    by_digest: dict[str, dict[int, str]] = defaultdict(dict)
    for i in among:
        if digest := images[i].digest:
            by_digest[digest][i] = " ".join(images[i].prompt.casefold().split())
    return [group for group in by_digest.values() if len(group) > 1]


def of_records(records: Sequence[Record]) -> list[Finding]:
    """The `findings` on the images of a run."""
    return findings([ImageFacts.from_record(record) for record in records])


def count(wrong: Sequence[Finding]) -> int:
    """The number of degenerate images."""
    return len(frozenset[int]().union(*(finding.images for finding in wrong if finding.degenerate)))


def why_failed(row: Row) -> str:
    """Why a run with this row fails because of degenerate images; "" if it does not fail."""
    degenerate, images = (int(row.get(name) or 0) for name in ("degenerate_images", "images"))  # cells may be text
    if degenerate <= MOST * images:
        return ""
    return (
        f"{degenerate} of {images} images are degenerate, more than {MOST:.0%} (the remarks say how): look at them"
        " before you use this row"
    )
