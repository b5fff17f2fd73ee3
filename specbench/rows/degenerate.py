"""What is wrong with a set of images whatever they show: they are flat, too small, or the same for different prompts.

Serving engines really return such images: a decoder whose half-precision values overflow or a safety filter gives black
ones, a cache that ignores the prompt gives one image for every request. Scores do not show it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

#: A flat image: no channel has two pixels that differ by more levels of 255. A generated image, of fog or of the night,
#: differs by tens; a file format that loses something keeps a single colour to a level.
FLAT = 2
#: The least side in pixels where no size was requested: one token of the image tokenizers with the usual factor of 16.
LEAST_SIDE = 16


def remarks(
    prompts: Sequence[str],
    digests: Sequence[str | None],
    contrasts: Sequence[int | None],
    sizes: Sequence[tuple[int, int] | None],
    requested: str | None = None,
) -> list[str]:
    """Remarks on degenerate images; none where nothing is wrong.

    Two images of different prompts that are equal to the pixel are a finding, however few images there are: the tokens
    of an image have hundreds of bits, so that no two samples coincide, and a model that decodes greedily still depends
    on its prompt. Equal images of one prompt are not a finding, since a server may decode greedily and ignore the seed.
    Prompts that differ only in case and white space count as one, as text encoders read them.

    Args:
        prompts: of each image; all empty where unknown. Then only a set of equal images is a finding.
        digests: of the pixels; None: unknown.
        contrasts: the largest difference of two pixels in a channel; None: unknown.
        sizes: (width, height) in pixels; None: unknown.
        requested: "WIDTHxHEIGHT", the size that was asked for.
    """
    n, found = len(prompts), []
    flat = [contrast is not None and contrast <= FLAT for contrast in contrasts]
    if any(flat):
        found.append(f"{sum(flat)} of {n} images are of one flat colour")
    if wrong := [s for s in sizes if s and (f"{s[0]}x{s[1]}" != requested if requested else min(s) < LEAST_SIDE)]:
        what = f"are not {requested} as requested" if requested else f"have a side below {LEAST_SIDE} pixels"
        width, height = min(wrong, key=lambda s: s[0] * s[1])
        found.append(f"{len(wrong)} of {n} images {what} (the smallest is {width}x{height})")
    images = [(digest, i) for i, digest in enumerate(digests) if digest and not flat[i]]
    if any(prompts):
        by_digest: dict[str, list[str]] = defaultdict(list)
        for digest, i in images:
            by_digest[digest].append(" ".join(prompts[i].casefold().split()))
        if same := sum(len(sharing) for sharing in by_digest.values() if len(set(sharing)) > 1):
            found.append(f"{same} of {n} images equal the image of another prompt to the pixel")
    elif n > 1 and len(images) == n and len({digest for digest, _ in images}) == 1:
        found.append(f"all {n} images are equal to the pixel")
    return found
