"""Images as arrays (H, W, 3) uint8, from untrusted files. Imports neither torch nor a network."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, PngImagePlugin, UnidentifiedImageError

from specbench.errors import UsageError, plain

LARGEST = 2**26  # maximum pixels of an image; a small file can decompress to any number
NARROWEST = 1000  # maximum ratio of the longer side to the shorter one, which scorers enlarge to hundreds of pixels
#: The supported formats and their file name extensions. (Some formats of Pillow start other programs.)
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
_TEXT = "specbench"  # keyword of the text in a PNG that a run writes


def read(path: Path) -> np.ndarray:
    """The image in a file, (H, W, 3) uint8. Of several images in one file, the first.

    It is prepared as in clean-fid, pytorch-fid and torch-fidelity, by Pillow's `convert("RGB")`: an alpha channel is
    ignored, an EXIF rotation is not applied (except in a TIFF, where Pillow applies it itself), and CMYK is converted
    without a colour profile. Grey of 16 bits differs: its upper 8 are kept, while the tools make all above 255 white.
    `counted` counts such images.

    UsageError, which names the file, if it is empty, cut off, damaged, larger than `LARGEST`, or not an image in one of
    `FORMATS`.
    """
    try:
        if not path.is_file():
            raise UsageError(f"{path} is not a file; name an existing file or folder of images")
        if not path.stat().st_size:
            raise UsageError(f"{path} is empty; make that image again, or remove the file")
        with Image.open(path, formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > LARGEST:
                raise UsageError(f"{path} has {width}x{height} pixels, more than {LARGEST:,}; use a smaller image")
            if max(width, height) > NARROWEST * min(width, height):
                raise UsageError(f"{path} has {width}x{height} pixels, which is too narrow to score; use another image")
            if opened.format == "PNG":
                opened.verify()  # checks the checksums of its chunks, which reading does not; the file must be reopened
        with Image.open(path, formats=FORMATS) as opened:
            return np.array(_rgb(opened))
    except UsageError:
        raise
    except UnidentifiedImageError:
        raise UsageError(f"{path} is not an image in a supported format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UsageError(f"{path} has more than {LARGEST:,} pixels; use a smaller image") from None
    except Exception as e:  # each of Pillow's readers has its own errors for a damaged file
        text = " ".join(str(e).split())[:200]
        raise UsageError(f"cannot read the image {path} ({text}); it is cut off or damaged: make it again") from None


def _rgb(image: Image.Image) -> Image.Image:
    """An image of any of Pillow's modes as 8-bit RGB."""
    if _is_wide(image):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its values have more than 16 bits")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its values are not integers")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, without a warning of Pillow
    return image.convert("RGB")


def _is_wide(image: Image.Image) -> bool:
    """Whether an image is grey with more than 8 bits."""
    return image.mode == "I" or image.mode.startswith("I;16")


#: What an image file can have that its pixels do not show.
TRAITS = ("alpha", "rotation", "16 bits")


def traits(path: Path) -> tuple[str, ...]:
    """The `TRAITS` that hold for an image file; none for a file that cannot be read. Does not decode it."""
    with suppress(Exception):  # a damaged image is reported when it is read
        if path.is_file():
            with Image.open(path, formats=FORMATS) as opened:
                rotation = Image.Image.getexif(opened).get(ExifTags.Base.Orientation, 1)  # a PNG's own would decode it
                known = {
                    "alpha": opened.has_transparency_data,
                    "rotation": opened.format != "TIFF" and rotation in range(2, 9),
                    "16 bits": _is_wide(opened),
                }
                return tuple(name for name, holds in known.items() if holds)
    return ()


def counted(images: Sequence[Collection[str]]) -> list[dict[str, str | int]]:
    """How many images have each trait, from their traits: the values of a remark with the code "files"."""
    counts = {name: sum(name in traits for traits in images) for name in TRAITS}
    return [{"trait": name, "count": count, "images": len(images)} for name, count in counts.items() if count]


@dataclass(frozen=True)
class Made:
    """What a run states in each PNG that it writes: the id and the text of its prompt, and the number of the image
    among the images of that prompt, from 0 on. So an image keeps its prompt when it is copied or renamed."""

    id: str
    prompt: str
    number: int


def png(image: np.ndarray, made: Made) -> bytes:
    """An image (H, W, 3) uint8 as the bytes of a PNG file."""
    encoded, info = io.BytesIO(), PngImagePlugin.PngInfo()
    info.add_itxt(_TEXT, json.dumps(asdict(made), ensure_ascii=False))
    Image.fromarray(image).save(encoded, "PNG", pnginfo=info)
    return encoded.getvalue()


def made(path: Path) -> Made | None:
    """What the run that wrote an image states in it; None for any other file. Does not decode the image."""
    with suppress(Exception):  # a damaged image is reported when it is read
        if path.suffix.lower() == ".png" and path.is_file():
            with Image.open(path, formats=("PNG",)) as opened:
                match json.loads(opened.info[_TEXT]):
                    case {"id": str(name), "prompt": str(prompt), "number": int(number)} if number >= 0:
                        return Made(name, prompt, number)
    return None


def find(folder: Path) -> list[Path]:
    """The images in a folder and its subfolders, by file name extension, sorted. Skips hidden ones. UsageError for a
    name that is not UTF-8, which no table can contain."""
    paths: list[Path] = []
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(where, name) for name in files if not name.startswith(".") and name.lower().endswith(ENDINGS)]
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise UsageError(f"the name of the image {plain(path)} is not UTF-8; rename it") from None
    return sorted(paths)


def check(image: np.ndarray) -> None:
    """ValueError unless it is an image (H, W, 3) uint8."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3 or not image.size:
        raise ValueError(f"an image must be uint8 (H, W, 3), not {image.dtype} {image.shape}")


def center_crop(image: np.ndarray, side: int) -> np.ndarray:
    """The center square of an image (H, W, 3) uint8, resized to `side` with Lanczos."""
    height, width = image.shape[:2]
    if height == width == side:
        return image
    short = min(height, width)
    # An odd margin is halved as in torchvision's center_crop, so that the square equals LANTERN's to the pixel.
    top, left = round((height - short) / 2), round((width - short) / 2)
    square = Image.fromarray(np.ascontiguousarray(image[top : top + short, left : left + short]))
    return np.asarray(square.resize((side, side), Image.Resampling.LANCZOS))


def digest(image: np.ndarray) -> str:
    """The SHA-256 of an image's size and pixels, in hexadecimal digits."""
    hasher = hashlib.sha256(f"{image.shape} ".encode())
    hasher.update(np.ascontiguousarray(image).data)
    return hasher.hexdigest()


def contrast(image: np.ndarray) -> int:
    """The maximum difference of two pixels of an image (H, W, 3) uint8 in a channel: 0 for a single colour, at most
    255."""
    return max(int(np.ptp(image[..., channel])) for channel in range(3))


class ImageArray:
    """Images in memory: (N, H, W, 3) uint8."""

    def __init__(self, images: np.ndarray) -> None:
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise ValueError(f"images must be uint8 (N, H, W, 3), not {images.dtype} {images.shape}")
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._images[index]


class ImageFiles:
    """Images in files, each read on demand."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> np.ndarray:
        return read(self.paths[index])
