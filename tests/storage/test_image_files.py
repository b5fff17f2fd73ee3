"""Image files: every supported form is read as it looks, and an unsupported one is an error that names the file."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from specbench.errors import UsageError
from specbench.storage import image_files

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (6, 5, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (6, 5), dtype=np.uint8)


def save_and_read(path: Path, image: Image.Image, **options: Any) -> np.ndarray:
    image.save(path, **options)
    pixels = image_files.read(path)
    assert (pixels.dtype, pixels.ndim, pixels.shape[-1]) == (np.uint8, 3, 3)
    assert pixels.flags.writeable  # torch.from_numpy complains about arrays that are not writeable
    return pixels


def channels(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, 2)


SMOOTH = np.linspace(0, 255, 64, dtype=np.uint8)[None, :, None].repeat(64, 0).repeat(3, 2)
FORMS = [
    *[(ending, COLOUR, COLOUR, 0) for ending in ("png", "bmp", "tif", "ppm", "webp")],
    ("jpg", SMOOTH, SMOOTH, 8),
    *[(ending, GREY, channels(GREY), 0) for ending in ("png", "tif", "pgm")],
    ("png", GREY > 127, channels(np.where(GREY > 127, 255, 0)), 0),
]


def test_a_picture_is_read_as_it_is_shown(tmp_path: Path) -> None:
    for ending, pixels, shown, off in FORMS:
        options = {"webp": {"lossless": True}, "jpg": {"quality": 95}}.get(ending, {})
        read = save_and_read(tmp_path / f"a.{ending}", Image.fromarray(pixels), **options)
        assert np.abs(read.astype(int) - shown).max() <= off, (ending, pixels.shape, pixels.dtype)


def test_a_palette_is_looked_up(tmp_path: Path) -> None:
    indexed = Image.fromarray(GREY % 4).convert("P")
    indexed.putpalette(COLOUR.reshape(-1, 3)[:4].tobytes() + bytes(3 * 252))
    opaque = COLOUR.reshape(-1, 3)[GREY % 4]
    for ending in ("png", "gif"):
        assert (save_and_read(tmp_path / f"a.{ending}", indexed) == opaque).all(), ending
        assert (save_and_read(tmp_path / f"b.{ending}", indexed, transparency=2) == opaque).all(), ending
        assert image_files.traits(tmp_path / f"b.{ending}") == ("alpha",)


@pytest.mark.filterwarnings("ignore:Palette images")  # of Pillow in torch-fidelity
def test_images_are_prepared_as_in_torch_fidelity(tmp_path: Path) -> None:
    """clean-fid and pytorch-fid prepare them in the same way. What a viewer would show otherwise is counted."""
    from torch_fidelity.datasets import ImagesPathDataset

    alpha = np.full((6, 5), 255, np.uint8)
    alpha[0], alpha[1] = 0, 128
    rgba, exif = Image.fromarray(np.dstack([COLOUR, alpha])), Image.Exif()
    exif[0x0112] = 6  # the top is on the right-hand side
    wide = Image.fromarray(RNG.integers(256, 2**16, (6, 5), dtype=np.uint16))
    indexed = Image.fromarray(GREY % 4).convert("P")
    indexed.putpalette(COLOUR.reshape(-1, 3)[:4].tobytes() + bytes(3 * 252))
    grey = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(alpha)])
    plain, key = Image.fromarray(COLOUR), tuple(COLOUR[3, 3].tolist())
    files: list[tuple[str, Image.Image, dict[str, Any], tuple[str, ...]]] = [
        ("rgba.png", rgba, {}, ("alpha",)),
        ("rgba.webp", rgba, {"lossless": True, "exact": True}, ("alpha",)),
        ("rgba.tif", rgba, {}, ("alpha",)),
        ("grey.png", grey, {}, ("alpha",)),
        ("keyed.png", plain, {"transparency": key}, ("alpha",)),
        ("palette.png", indexed, {"transparency": bytes([255, 0, 128, 255])}, ("alpha",)),
        ("palette.gif", indexed, {"transparency": 1}, ("alpha",)),
        ("rotated.png", plain, {"exif": exif}, ("rotation",)),
        ("rotated.jpg", plain, {"exif": exif}, ("rotation",)),
        ("rotated.webp", plain, {"exif": exif, "lossless": True}, ("rotation",)),
        ("rotated.tif", plain, {"exif": exif}, ()),  # Pillow rotates it in every tool
        ("both.png", rgba, {"exif": exif}, ("alpha", "rotation")),
        ("inks.tif", plain.convert("CMYK"), {}, ()),
        ("plain.png", plain, {}, ()),
        ("wide.png", wide, {}, ("16 bits",)),
        ("wide.tif", wide, {}, ("16 bits",)),
    ]
    for name, image, options, traits in files:
        read = save_and_read(tmp_path / name, image, **options)
        tool = ImagesPathDataset([tmp_path / name])[0].permute(1, 2, 0).numpy()
        if "16 bits" in traits:
            assert (tool == 255).all(), name  # the difference that the remark states
        else:
            np.testing.assert_array_equal(read, tool, err_msg=name)
        assert image_files.traits(tmp_path / name) == traits, name
    counts = {"alpha": 8, "rotation": 4, "16 bits": 2}
    expected = [{"trait": trait, "count": count, "images": 16} for trait, count in counts.items()]
    assert image_files.counted([traits for *_, traits in files]) == expected
    (tmp_path / "damaged.png").write_bytes((tmp_path / "rgba.png").read_bytes()[:20])
    assert image_files.traits(tmp_path / "damaged.png") == image_files.traits(tmp_path) == ()


def png(width: int, height: int, depth: int, kind: int, rows: bytes, *texts: bytes) -> bytes:
    """A PNG file (RFC 2083) with these scan lines, each preceded by its filter's number, and with these compressed
    texts."""

    def part(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = part(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    more = b"".join(part(b"zTXt", text) for text in texts)
    return b"\x89PNG\r\n\x1a\n" + head + more + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")


def test_sixteen_bits_lose_the_lower_eight(tmp_path: Path) -> None:
    wide = RNG.integers(0, 2**16, (6, 5), dtype=np.uint16)
    wide[0, 0], wide[0, 1] = 0xFFFF, 0x00FF
    for ending in ("png", "tif"):
        assert (save_and_read(tmp_path / f"a.{ending}", Image.fromarray(wide)) == channels(wide >> 8)).all()
    (tmp_path / "a.pgm").write_bytes(b"P5 5 6 65535\n" + wide.astype(">u2").tobytes())
    assert (image_files.read(tmp_path / "a.pgm") == channels(wide >> 8)).all()
    colour = RNG.integers(0, 2**16, (6, 5, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colour)
    (tmp_path / "b.png").write_bytes(png(5, 6, 16, 2, rows))
    assert (image_files.read(tmp_path / "b.png") == colour >> 8).all()


def test_cmyk_is_converted(tmp_path: Path) -> None:
    inks = np.zeros((8, 8, 4), np.uint8)
    inks[:4, :, 0] = 255  # cyan at the top, nothing at the bottom
    read = save_and_read(tmp_path / "a.tif", Image.fromarray(inks, "CMYK"))
    assert (read[0, 0] == (0, 255, 255)).all()
    assert (read[7, 7] == 255).all()
    jpeg = save_and_read(tmp_path / "a.jpg", Image.fromarray(inks, "CMYK"), quality=100, subsampling=0)
    assert np.abs(jpeg.astype(int) - read).max() <= 3


def test_the_first_image_of_an_animation_is_read(tmp_path: Path) -> None:
    frames = [Image.fromarray(np.full((4, 4, 3), v, np.uint8)) for v in (10, 200)]
    read = save_and_read(tmp_path / "a.webp", frames[0], save_all=True, append_images=frames[1:], lossless=True)
    assert (read == 10).all()


def encode(form: str) -> bytes:
    content = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(content, form)
    return content.getvalue()


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


#: Name, content, and the text of the error.
UNREADABLE = [
    ("a.png", b"", "is empty"),
    ("a.png", b"not an image at all", "is not an image in a supported format"),
    ("a.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image in a"),  # starts Ghostscript
    ("a.png", encode("PNG")[:-6000], "cannot read the image"),
    ("a.png", encode("PNG")[:60], "cannot read the image"),
    ("a.png", _flipped(encode("PNG")), "cannot read the image"),
    ("a.jpg", encode("JPEG")[:2000], "cannot read the image"),
    ("a.webp", encode("WEBP")[:2000], ""),
    ("a.bmp", encode("BMP")[:2000], "cannot read the image"),
    ("a.tif", encode("TIFF")[:2000], ""),
    ("a.png", png(2**31 - 1, 2**31 - 1, 8, 2, b""), ""),
    ("a.png", png(60_000, 1, 8, 2, bytes(1000)), ""),
    ("a.png", png(64, 64, 8, 2, bytes(1000), b"a\0\0" + zlib.compress(bytes(2**24))), ""),  # a text that grows
    ("a.png", png(50_000, 50_000, 8, 0, b""), "pixels"),
    ("a.png", png(9_000, 9_000, 8, 0, b""), "9000x9000"),
]


@pytest.mark.filterwarnings("error")  # a user may have turned warnings into errors
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name, content, sentence in UNREADABLE:
        path = tmp_path / name
        path.write_bytes(content)
        message = unreadable(path)
        assert (str(path) in message, sentence in message, "\n" in message) == (True, True, False), message
    for values in (np.full((4, 4), 0.5, np.float32), np.full((4, 4), 1 << 20, np.int32)):
        Image.fromarray(values).save(tmp_path / "a.tif")
        assert "a.tif (its values" in unreadable(tmp_path / "a.tif")
    for path in (tmp_path / "absent.png", tmp_path):
        assert str(path) in unreadable(path)


def unreadable(path: Path) -> str:
    """The error message of reading a file."""
    with pytest.raises(UsageError) as error:
        image_files.read(path)
    return str(error.value)


def test_a_folder_is_searched_recursively(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "deep/er/c.webp", "deep/note.txt", ".hidden/d.png", "._e.png", "deep/weights.npz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "round").symlink_to(tmp_path)
    assert [str(p.relative_to(tmp_path)) for p in image_files.find(tmp_path)] == ["a.JPG", "b.png", "deep/er/c.webp"]


def test_a_digest_covers_size_and_pixels() -> None:
    digests = {image_files.digest(a) for a in (COLOUR, COLOUR.reshape(5, 6, 3), COLOUR[::-1], COLOUR + 1)}
    assert len(digests) == 4
    assert image_files.digest(COLOUR[::-1]) == image_files.digest(COLOUR[::-1].copy())


def test_arrays_are_checked() -> None:
    shapes = (4, 4), (4, 4, 4), (0, 4, 3)
    for wrong in (*(np.zeros(shape, np.uint8) for shape in shapes), COLOUR / 255):
        for reader in (image_files.check, image_files.ImageArray):
            with pytest.raises(ValueError, match="uint8"):
                reader(wrong)
