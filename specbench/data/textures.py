"""*textures*: the second embedded world. Captioned 64x64 images of materials: clouds, granite, leaves, waves, ...

An image has one to three regions of a material, lit from one direction: a whole sheet, a horizon, or a ground with one
or two patches on it that cast a shadow. Every material is a random field with the statistics of natural images: noise
whose amplitude falls with the frequency, dead leaves (shapes of many sizes that occlude each other), cells, or gratings
that noise bends. The caption states a dozen attributes. Everything else is drawn from the generator of the index, so
hardly any token of an image is certain. In *scenes*, surfaces are flat.

Regions have a canonical order: upper before lower, the ground before its patches, the left patch before the right.
Train and validation share no symbolic description: a hash of it decides the split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from specbench.data.worlds import DrawnWorld, Sample, Wording, rgb

SIZE = 64  # pixels per side
MAX_REGIONS = 3

LAYOUTS = ("sheet", "horizon", "patch", "pair")
LAYOUT_COUNT = {"sheet": 1, "horizon": 2, "patch": 2, "pair": 3}
LAYOUT_SHARE = (0.3, 0.25, 0.25, 0.2)
LIGHTS = ("left", "right", "above", "even")
CONTRASTS = ("faint", "strong")
MATERIALS = ("clouds", "granite", "leaves", "blocks", "waves", "wood", "cells", "marble")
COLOURS = ("grey", "red", "orange", "yellow", "green", "blue", "purple", "brown")
GRAINS = ("fine", "coarse")
OUTLINES = ("round", "square", "torn")

#: Only patches have an outline.
REGION_ATTRIBUTES = {"material": MATERIALS, "colour": COLOURS, "grain": GRAINS, "outline": OUTLINES}
#: Layout -> the positions of its regions.
POSITIONS = {
    "sheet": ("ground",),
    "horizon": ("upper", "lower"),
    "patch": ("ground", "centre"),
    "pair": ("ground", "left", "right"),
}

_WORDS = {  # the synonyms in captions; the first is the plain one
    "clouds": ("clouds", "fog"),
    "granite": ("granite", "stone"),
    "leaves": ("leaves", "pebbles"),
    "blocks": ("blocks", "shards"),
    "waves": ("waves", "ripples"),
    "wood": ("wood", "timber"),
    "cells": ("cells", "scales"),
    "marble": ("marble",),
    "grey": ("grey", "silver"),
    "purple": ("purple", "violet"),
    "fine": ("fine", "fine-grained"),
    "coarse": ("coarse", "rough"),
    "round": ("round", "circular"),
    "torn": ("torn", "ragged"),
}
_LIGHT_PHRASES = {
    "left": ("lit from the left", "with light from the left"),
    "right": ("lit from the right", "with light from the right"),
    "above": ("lit from above", "with light from above"),
    "even": ("in even light", "evenly lit"),
}
_CONTRAST_PHRASES = {
    "faint": ("of faint contrast", "low in contrast"),
    "strong": ("of strong contrast", "high in contrast"),
}


@dataclass(frozen=True)
class Region:
    material: str
    colour: str
    grain: str
    outline: str = ""  # of a patch


@dataclass(frozen=True)
class Picture:
    """What a caption can state about an image."""

    layout: str
    light: str
    contrast: str
    regions: tuple[Region, ...]

    def labels(self) -> list[int]:
        return WORLD.labels(self, self.regions)


def describe(rng: np.random.Generator) -> Picture:
    """A random description, of either split. Neighbouring regions differ in material or colour."""
    layout = LAYOUTS[rng.choice(len(LAYOUTS), p=LAYOUT_SHARE)]
    regions: list[Region] = []
    while len(regions) < LAYOUT_COUNT[layout]:
        material, colour = MATERIALS[rng.integers(len(MATERIALS))], COLOURS[rng.integers(len(COLOURS))]
        grain, outline = GRAINS[rng.integers(len(GRAINS))], OUTLINES[rng.integers(len(OUTLINES))]
        is_patch = layout in ("patch", "pair") and bool(regions)
        if regions and colour == regions[0].colour:
            continue
        regions.append(Region(material, colour, grain, outline if is_patch else ""))
    light, contrast = LIGHTS[rng.integers(len(LIGHTS))], CONTRASTS[rng.integers(len(CONTRASTS))]
    return Picture(layout, light, contrast, tuple(regions))


def write_caption(description: Picture, rng: np.random.Generator) -> str:
    """A sentence that states all attributes, in one of several wordings."""
    wording = Wording(rng, _WORDS)
    one_of, word = wording.one_of, wording.word

    def phrase(region: Region) -> str:
        grain, colour, material = word(region.grain), word(region.colour), word(region.material)
        text = f"{grain} {colour} {material}"
        return f"a {word(region.outline)} patch of {text}" if region.outline else text

    a, b, c = [phrase(region) for region in description.regions] + [""] * (3 - len(description.regions))
    body = one_of(
        {
            "sheet": (f"{a}", f"a sheet of {a}", f"nothing but {a}"),
            "horizon": (f"{a} above {b}", f"{a} over a floor of {b}", f"a horizon between {a} and, below, {b}"),
            "patch": (f"{b} on {a}", f"{a}, and on it {b}", f"{b} in front of {a}"),
            "pair": (
                f"{b} on the left and {c} on the right, on {a}",
                f"{a} behind {b} and, to its right, {c}",
                f"on {a}, {b} beside {c}",
            ),
        }[description.layout]
    )
    light, contrast = one_of(_LIGHT_PHRASES[description.light]), one_of(_CONTRAST_PHRASES[description.contrast])
    text = one_of((f"{body}, {light}, {contrast}", f"{light}, {contrast}: {body}", f"{body}, {contrast}, {light}"))
    return text[0].upper() + text[1:] + "."


# --- fields: float (64, 64), about 0 to 1 -----------------------------------------------------------------------------

_Y, _X = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32) + 0.5
_EDGE = 2 * SIZE  # noise is drawn on a larger square, because it is periodic
Field = np.ndarray


@cache
def _spectrum(slope: float, stretch: float) -> np.ndarray:
    """Amplitudes of a random field: the frequency to the power -slope. stretch: the ratio of a structure's length along
    x to its height."""
    fy, fx = np.meshgrid(np.fft.fftfreq(_EDGE), np.fft.rfftfreq(_EDGE), indexing="ij")
    radius = np.hypot(fy, fx * stretch)
    radius[0, 0] = np.inf
    return np.maximum(radius, 1 / _EDGE) ** -slope * np.isfinite(radius)


def _noise(rng: np.random.Generator, slope: float, stretch: float = 1.0) -> Field:
    """Unit-variance noise whose amplitude falls with frequency to the power -slope."""
    white = np.fft.rfft2(rng.standard_normal((_EDGE, _EDGE)))
    field = np.fft.irfft2(white * _spectrum(slope, stretch), s=(_EDGE, _EDGE))[:SIZE, :SIZE]
    deviation = field.std()
    return (field - field.mean()) / (deviation + 1e-9)


def _unit(field: Field) -> Field:
    """Maps a field of about unit variance to values between 0 and 1."""
    return 0.5 + 0.5 * np.tanh(field / 1.4)


def _clouds(rng: np.random.Generator, scale: float) -> Field:
    return _unit(_noise(rng, 1.4 + 0.5 * scale))


def _granite(rng: np.random.Generator, scale: float) -> Field:
    speckle = _noise(rng, 1.0 + 0.4 * scale)
    return _unit(0.7 * speckle + 0.4 * _noise(rng, 2.0) + 0.7 * np.clip(4 * (speckle - 1.2), 0, 1))


def _natural_sizes(rng: np.random.Generator, count: int, low: float, high: float) -> np.ndarray:
    """Sizes with density proportional to size^-3, as objects of natural images have."""
    u = rng.uniform(size=count)
    return (low**-2 - u * (low**-2 - high**-2)) ** -0.5


def _dead_leaves(rng: np.random.Generator, count: int, low: float, high: float, square: bool) -> Field:
    """Slightly shaded shapes of random lightness that occlude each other."""
    radii = _natural_sizes(rng, count, low, high)
    centres, shades = rng.uniform(-6, SIZE + 6, (count, 2)), rng.uniform(0, 1, count)
    angles, tilts = rng.uniform(0, np.pi, count), rng.uniform(-0.25, 0.25, (count, 2))
    field = np.full((SIZE, SIZE), 0.5)
    for radius, (cx, cy), shade, angle, tilt in zip(radii, centres, shades, angles, tilts, strict=True):
        reach = int(np.ceil(1.5 * radius)) + 1
        y0, x0 = max(0, int(cy) - reach), max(0, int(cx) - reach)
        y1, x1 = min(SIZE, int(cy) + reach + 1), min(SIZE, int(cx) + reach + 1)
        if y0 >= y1 or x0 >= x1:
            continue
        dx, dy = _X[y0:y1, x0:x1] - cx, _Y[y0:y1, x0:x1] - cy
        if square:
            along, across = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
            distance = np.maximum(np.abs(along) - radius, np.abs(across) - 0.6 * radius)
        else:
            distance = np.hypot(dx, dy) - radius
        cover = np.clip(0.5 - distance, 0, 1)
        lightness = np.clip(shade + (tilt[0] * dx + tilt[1] * dy) / radius, 0, 1)
        rim = 0.75 + 0.25 * np.clip(-distance / 1.5, 0, 1)
        view = field[y0:y1, x0:x1]
        view += cover * (lightness * rim - view)
    return field


def _leaves(rng: np.random.Generator, scale: float) -> Field:
    return _dead_leaves(rng, int(160 / scale**2), 4 * scale, 14 * scale, False)


def _blocks(rng: np.random.Generator, scale: float) -> Field:
    return _dead_leaves(rng, int(160 / scale**2), 4 * scale, 14 * scale, True)


def _waves(rng: np.random.Generator, scale: float) -> Field:
    angle = rng.uniform(0, np.pi)
    period = rng.uniform(7, 9) * scale
    along = _X * np.cos(angle) + _Y * np.sin(angle) + 0.35 * period * _noise(rng, 2.4)
    crest = np.sin(2 * np.pi * along / period + rng.uniform(0, 2 * np.pi))
    return np.clip(0.5 + 0.42 * crest + 0.06 * _noise(rng, 1.8), 0, 1)


def _wood(rng: np.random.Generator, scale: float) -> Field:
    grain = _noise(rng, 1.8, 0.12)
    rings = np.sin(11 / scale * 2 * np.pi * (_Y / SIZE / 2 + 0.03 * _noise(rng, 2.4, 0.25)))
    field = _unit(0.55 * grain + 0.85 * rings)
    return field.T.copy() if rng.uniform() < 0.5 else field


def _nearest_two(rng: np.random.Generator, count: int) -> tuple[Field, Field, np.ndarray]:
    """Distances to the nearest and to the second nearest of random points, and the index of the nearest point."""
    points = rng.uniform(-8, SIZE + 8, (count, 2)).astype(np.float32)
    distances = np.hypot(_X[..., None] - points[:, 0], _Y[..., None] - points[:, 1])
    indices = np.argpartition(distances, 1, axis=-1)[..., :2]
    nearest = np.take_along_axis(distances, indices, -1)
    order = nearest.argsort(-1)
    nearest, indices = np.take_along_axis(nearest, order, -1), np.take_along_axis(indices, order, -1)
    return nearest[..., 0], nearest[..., 1], indices[..., 0]


def _cells(rng: np.random.Generator, scale: float) -> Field:
    count = int(70 / scale**2)
    first, second, number = _nearest_two(rng, count)
    shades = rng.uniform(0.3, 1, count)[number]
    wall = np.clip((second - first) / (1.2 + scale), 0, 1)
    return np.clip(shades * wall - 0.012 * first + 0.03 * _noise(rng, 1.8), 0, 1)


def _marble(rng: np.random.Generator, scale: float) -> Field:
    angle, warp = rng.uniform(0, np.pi), _noise(rng, 2.2)
    period = rng.uniform(15, 20) * scale
    along = (_X * np.cos(angle) + _Y * np.sin(angle)) / period + 0.55 * warp
    vein = np.abs(np.sin(np.pi * along)) ** 0.6
    return np.clip(0.15 + 0.8 * vein + 0.04 * _noise(rng, 1.8), 0, 1)


#: Sizes of a material's structures by grain. On a patch they are smaller by a factor, so that it shows several.
_SCALE, _OF_PATCHES = {"fine": 1.0, "coarse": 1.7}, 0.65
_FIELDS: dict[str, Callable[[np.random.Generator, float], Field]] = {
    "clouds": _clouds,
    "granite": _granite,
    "leaves": _leaves,
    "blocks": _blocks,
    "waves": _waves,
    "wood": _wood,
    "cells": _cells,
    "marble": _marble,
}

#: Hue and saturation of a colour; the hues of a material's parts are drawn near it.
_TONES = {
    "grey": (0.6, 0.06),
    "red": (0.99, 0.72),
    "orange": (0.07, 0.85),
    "yellow": (0.145, 0.8),
    "green": (0.34, 0.6),
    "blue": (0.6, 0.7),
    "purple": (0.78, 0.55),
    "brown": (0.065, 0.5),
}


def _paint(region: Region, strong: bool, rng: np.random.Generator) -> np.ndarray:
    """The surface of a material, (64, 64, 3) in 0 to 1."""
    scale = _SCALE[region.grain] * (_OF_PATCHES if region.outline else 1)
    field = _FIELDS[region.material](rng, scale)
    hue, saturation = _TONES[region.colour]
    dark, light = (0.12, 0.95) if strong else (0.36, 0.72)
    if region.colour == "brown":
        dark, light = dark * 0.8, light * 0.62
    value = dark + (light - dark) * field + rng.uniform(-0.05, 0.05)
    shift = rng.uniform(-0.035, 0.035) + 0.03 * rng.standard_normal() * (field - 0.5) + 0.012 * _noise(rng, 2.4)
    depth = np.clip(saturation * (rng.uniform(0.85, 1.1) + 0.12 * _noise(rng, 2.4)) * (1.1 - 0.35 * field), 0, 1)
    return rgb(hue + shift, depth, np.clip(value, 0, 1))


def _patch(outline: str, centre: tuple[float, float], radius: float, rng: np.random.Generator) -> Field:
    """Signed distance of a patch in pixels, negative inside."""
    dx, dy = _X - centre[0], _Y - centre[1]
    if outline == "square":
        angle = rng.uniform(-0.3, 0.3)
        along, across = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
        return np.maximum(np.abs(along), np.abs(across)) - 0.88 * radius
    distance = np.hypot(dx, dy) - radius
    return distance + 3.2 * _noise(rng, 1.5) if outline == "torn" else distance


_LIGHT_FROM = {"left": (-1.0, -0.25), "right": (1.0, -0.25), "above": (0.0, -1.0), "even": (0.0, 0.0)}


def draw(s: Sample) -> np.ndarray:
    """The image of a sample: (64, 64, 3) uint8. It consumes the sample's generator, so draw a sample only once."""
    rng, description = s.rng, s.scene
    strong, source = description.contrast == "strong", np.array(_LIGHT_FROM[description.light])
    surfaces = [_paint(region, strong, rng) for region in description.regions]
    image = surfaces[0]
    if description.layout == "horizon":
        line = SIZE * rng.uniform(0.4, 0.6) + rng.uniform(-4, 4) * (_X / SIZE - 0.5) + 1.6 * _noise(rng, 2.0)
        below = np.clip(_Y - line + 0.5, 0, 1)[..., None]
        image = image * (1 - below) + surfaces[1] * below
    else:
        centres = {"sheet": (), "patch": ((32.0, 32.0),), "pair": ((18.5, 32.0), (45.5, 32.0))}[description.layout]
        jitter, radius = (9.0, 15.0) if description.layout == "patch" else (2.5, 10.5)
        for (x, y), region, surface in zip(centres, description.regions[1:], surfaces[1:], strict=True):
            centre = (x + rng.uniform(-1, 1) * jitter, y + rng.uniform(-1, 1) * (jitter if jitter > 3 else 8.0))
            distance = _patch(region.outline, centre, radius * rng.uniform(0.88, 1.12), rng)
            shift = -2.5 * source
            shadow = np.clip(0.5 - _moved(distance, shift) / 2.5, 0, 1)[..., None]
            image = image * (1 - 0.5 * shadow)
            cover = np.clip(0.5 - distance, 0, 1)[..., None]
            image = image * (1 - cover) + surface * cover
    toward = ((_X - SIZE / 2) * source[0] + (_Y - SIZE / 2) * source[1]) / SIZE
    image = image * (1 + 0.75 * toward)[..., None] * rng.uniform(0.92, 1.05)
    image = image + 0.006 * rng.standard_normal(image.shape)
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


def _moved(field: Field, by: np.ndarray) -> Field:
    """A field moved by whole pixels (x, y); its edges are repeated."""
    x, y = (round(float(v)) for v in by)
    rows = np.clip(np.arange(SIZE) - y, 0, SIZE - 1)
    columns = np.clip(np.arange(SIZE) - x, 0, SIZE - 1)
    return field[rows][:, columns]


WORLD = DrawnWorld(
    name="textures",
    size=SIZE,
    shared={"layout": LAYOUTS, "light": LIGHTS, "contrast": CONTRASTS},
    slot=REGION_ATTRIBUTES,
    slots=MAX_REGIONS,
    positions=POSITIONS,
    describe=describe,
    caption=write_caption,
    draw=draw,
    key=2**62,
)
items = WORLD.items
