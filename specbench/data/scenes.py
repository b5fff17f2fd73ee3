"""*scenes*: the embedded world. Captioned 64x64 images of one to three objects, drawn from a seed.

A scene is a symbolic description (layout, objects, background). Everything else about its image (exact positions,
hues, stripe phases, clouds, grain) is drawn from the generator of its index and is *not* in the caption. A model can
only spread its probability over it, as with real photographs.

Objects have a canonical order, so that "the first object" is unambiguous: left to right in a row, top to bottom in a
column, the top object first in a pyramid. Train and validation share no scene: a hash of the symbolic description
decides the split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbench.data.worlds import DrawnWorld, Sample, Wording, rgb

SIZE = 64  # pixels per side
MAX_OBJECTS = 3

SHAPES = ("circle", "square", "triangle", "diamond", "cross")
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "white")
SIZES = ("small", "large")
FILLS = ("solid", "striped", "dotted")
BACKGROUNDS = ("plain", "gradient", "striped", "cloudy")
LAYOUTS = ("single", "beside", "above", "row", "column", "pyramid")
LAYOUT_COUNT = {"single": 1, "beside": 2, "above": 2, "row": 3, "column": 3, "pyramid": 3}
LAYOUT_SHARE = (0.34, 0.21, 0.21, 0.08, 0.08, 0.08)

OBJECT_ATTRIBUTES = {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "fill": FILLS}
#: Layout -> the positions of its objects, by slot.
POSITIONS = {
    "single": ("centre",),
    "beside": ("left", "right"),
    "above": ("top", "bottom"),
    "row": ("left", "centre", "right"),
    "column": ("top", "centre", "bottom"),
    "pyramid": ("top", "bottom left", "bottom right"),
}

_HUES = {"red": 0.0, "orange": 0.08, "yellow": 0.155, "green": 0.34, "cyan": 0.5, "blue": 0.62, "purple": 0.79}
# Centre (x, y) and jitter (x, y) of each slot, in pixels.
_CENTRES: dict[str, list[tuple[tuple[float, float], tuple[float, float]]]] = {
    "single": [((32, 32), (11, 11))],
    "beside": [((18, 32), (4, 8)), ((46, 32), (4, 8))],
    "above": [((32, 18), (8, 4)), ((32, 46), (8, 4))],
    "row": [((11.5, 32), (0.8, 7)), ((32, 32), (0.8, 7)), ((52.5, 32), (0.8, 7))],
    "column": [((32, 11.5), (7, 0.8)), ((32, 32), (7, 0.8)), ((32, 52.5), (7, 0.8))],
    "pyramid": [((32, 18), (5, 3)), ((18, 46), (3, 3)), ((46, 46), (3, 3))],
}
_RADII = {"small": 6.3, "large": 9.7}
_PORTRAIT = 3.0  # jitter of a portrait's one object, in pixels

_WORDS = {  # the synonyms in captions; the first is the plain one
    "circle": ("circle", "disc"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "diamond": ("diamond", "rhombus"),
    "cross": ("cross", "plus sign"),
    "small": ("small", "little", "tiny"),
    "large": ("large", "big"),
    "purple": ("purple", "violet"),
    "cyan": ("cyan", "turquoise"),
}
_BACKGROUND_PHRASES = {
    "plain": ("on a plain background", "on a flat backdrop", "over a plain surface"),
    "gradient": ("on a gradient background", "over a smooth gradient", "against a fading backdrop"),
    "striped": ("in front of stripes", "on a striped background", "against a backdrop of broad stripes"),
    "cloudy": ("on a cloudy background", "against a mottled backdrop", "over soft clouds"),
}


@dataclass(frozen=True)
class SceneObject:
    shape: str
    colour: str
    size: str
    fill: str


@dataclass(frozen=True)
class Scene:
    """What a caption can state about an image."""

    layout: str
    background: str
    objects: tuple[SceneObject, ...]

    def labels(self) -> list[int]:
        """One class index per entry of `ATTRIBUTES`; `ABSENT` for slots without an object."""
        return WORLD.labels(self, self.objects)


def centres(layout: str) -> list[tuple[float, float]]:
    """The mean centre (x, y) of each object of a layout in pixels, y downwards."""
    return [centre for centre, _ in _CENTRES[layout]]


def draw_scene(rng: np.random.Generator) -> Scene:
    """A random scene, of either split."""
    layout = LAYOUTS[rng.choice(len(LAYOUTS), p=LAYOUT_SHARE)]
    picks = rng.integers(0, [len(c) for c in OBJECT_ATTRIBUTES.values()], size=(LAYOUT_COUNT[layout], 4))
    objects = tuple(SceneObject(SHAPES[a], COLOURS[b], SIZES[c], FILLS[d]) for a, b, c, d in picks)
    return Scene(layout, BACKGROUNDS[rng.integers(len(BACKGROUNDS))], objects)


def write_caption(scene: Scene, rng: np.random.Generator) -> str:
    """A sentence that states all attributes of a scene, in one of several wordings."""
    wording = Wording(rng, _WORDS)
    one_of, word = wording.one_of, wording.word

    def phrase(o: SceneObject) -> str:
        size, colour, shape = word(o.size), word(o.colour), word(o.shape)
        if o.fill == "solid":
            text = one_of(
                (f"{size} {colour} {shape}", f"{size} solid {colour} {shape}", f"{colour} {shape} that is {size}")
            )
        else:
            text = one_of(
                (
                    f"{size} {o.fill} {colour} {shape}",
                    f"{size} {colour} {o.fill} {shape}",
                    f"{o.fill} {colour} {shape} that is {size}",
                )
            )
        return ("an " if text[0] in "aeiou" else "a ") + text

    a, b, c = [phrase(o) for o in scene.objects] + [""] * (3 - len(scene.objects))
    body = {
        "single": (f"{a}", f"one object, {a}", f"a picture of {a}"),
        "beside": (f"{a} to the left of {b}", f"{a} on the left and {b} on the right", f"{a} beside {b}"),
        "above": (f"{a} above {b}", f"{a} on top of {b}", f"{a} at the top and {b} at the bottom"),
        "row": (
            f"a row of {a}, {b} and {c}",
            f"from left to right, {a}, {b} and {c}",
            f"{a}, then {b}, then {c} in a row",
        ),
        "column": (
            f"a column of {a}, {b} and {c}",
            f"from top to bottom, {a}, {b} and {c}",
            f"{a} over {b} over {c} in a column",
        ),
        "pyramid": (
            f"{a} above the pair of {b} and {c}",
            f"a pyramid with {a} on top of {b} and {c}",
            f"below {a} stand {b} and {c}",
        ),
    }[scene.layout]
    where = one_of(_BACKGROUND_PHRASES[scene.background])
    text = one_of((f"{one_of(body)} {where}", f"{one_of(body)}, {where}", f"{where}, {one_of(body)}"))
    return text[0].upper() + text[1:] + "."


def _colour(rng: np.random.Generator, name: str) -> np.ndarray:
    if name == "white":
        return np.full(3, rng.uniform(0.92, 1.0))
    return rgb(_HUES[name] + rng.uniform(-0.012, 0.012), rng.uniform(0.82, 1.0), rng.uniform(0.85, 1.0))


def _muted(rng: np.random.Generator) -> np.ndarray:
    return rgb(rng.uniform(), rng.uniform(0.1, 0.4), rng.uniform(0.25, 0.55))


_Y, _X = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32) + 0.5


def _background(kind: str, rng: np.random.Generator) -> np.ndarray:
    colour, second = _muted(rng), _muted(rng)
    if kind != "plain":  # two distinguishable colours
        second = colour + np.sign(0.4 - colour.mean()) * rng.uniform(0.24, 0.36) + 0.3 * (second - second.mean())
    angle = rng.uniform(0, np.pi)
    along = _X * np.cos(angle) + _Y * np.sin(angle)
    if kind == "gradient":
        t = (along - along.min()) / (along.max() - along.min())
    elif kind == "striped":
        t = 0.5 + 0.5 * np.tanh(3 * np.sin(2 * np.pi * along / rng.uniform(11, 17) + rng.uniform(0, 2 * np.pi)))
    elif kind == "cloudy":
        t = 0.5 + 0.5 * np.tanh(1.5 * _smooth_noise(rng, 7))
    else:
        t = np.zeros_like(_X)
    return np.clip(colour + (second - colour) * t[..., None], 0, 1)


def _smooth_noise(rng: np.random.Generator, cells: int) -> np.ndarray:
    """Unit-variance noise on a `cells` x `cells` lattice, interpolated with a cosine kernel to the image's size."""
    coarse = rng.standard_normal((cells + 1, cells + 1))
    positions = np.linspace(0, cells, SIZE, endpoint=False)
    low = positions.astype(int)
    w = (1 - np.cos(np.pi * (positions - low))) / 2
    rows = coarse[low] * (1 - w)[:, None] + coarse[low + 1] * w[:, None]
    return rows[:, low] * (1 - w) + rows[:, low + 1] * w


def _coverage(shape: str, dx: np.ndarray, dy: np.ndarray, r: float) -> np.ndarray:
    """Anti-aliased coverage of a shape of radius `r` pixels, from its signed distance."""
    ax, ay = np.abs(dx), np.abs(dy)
    if shape == "circle":
        d = np.hypot(dx, dy) - r
    elif shape == "square":
        d = np.maximum(ax, ay) - 0.86 * r
    elif shape == "triangle":
        d = np.maximum(ax * 0.866 - (dy - 0.1 * r) * 0.5, dy - 0.1 * r) - 0.62 * r
    elif shape == "diamond":
        d = (ax + ay - 1.18 * r) / np.sqrt(2)
    else:
        arm = 0.36 * r
        d = np.minimum(np.maximum(ax - r, ay - arm), np.maximum(ax - arm, ay - r))
    return np.clip(0.5 - d, 0, 1)


def _fill(kind: str, rng: np.random.Generator) -> np.ndarray | None:
    """The share (0 to 1) of the darker second colour at each pixel, or None for a solid object."""
    phase_x, phase_y = rng.uniform(0, 4, 2)  # period 4 pixels, like a tokenizer's patch: a fill repeats one code
    if kind == "striped":
        t = (_X + phase_x) if rng.uniform() < 0.5 else (_Y + phase_y)
        return np.clip(1.4 * np.sin(2 * np.pi * t / 4) + 0.5, 0, 1)
    if kind == "dotted":
        near = np.hypot((_X + phase_x) % 4 - 2, (_Y + phase_y) % 4 - 2)
        return np.clip(1.8 - near, 0, 1)
    return None


def draw(s: Sample, portrait: bool = False) -> np.ndarray:
    """The image of a sample: (64, 64, 3) uint8. It consumes the sample's generator, so draw a sample only once.

    portrait: every object is large, and near its position.
    """
    rng = s.rng
    image = _background(s.scene.background, rng)
    for (centre, jitter), o in zip(_CENTRES[s.scene.layout], s.scene.objects, strict=True):
        x, y = np.asarray(centre) + rng.uniform(-1, 1, 2) * (_PORTRAIT if portrait else np.asarray(jitter))
        radius = _RADII["large" if portrait else o.size] * rng.uniform(0.95, 1.05)
        colour = _colour(rng, o.colour)
        texture = _fill(o.fill, rng)
        paint = np.broadcast_to(colour, image.shape)
        if texture is not None:
            paint = paint * (1 - 0.68 * texture[..., None])
        cover = _coverage(o.shape, _X - x, _Y - y, radius)[..., None]
        image = image * (1 - cover) + paint * cover
    image = image + 0.01 * _smooth_noise(rng, 16)[..., None] + 0.024 * rng.standard_normal(image.shape)
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


WORLD = DrawnWorld(
    name="scenes",
    size=SIZE,
    shared={"layout": LAYOUTS, "background": BACKGROUNDS},
    slot=OBJECT_ATTRIBUTES,
    slots=MAX_OBJECTS,
    positions=POSITIONS,
    describe=draw_scene,
    caption=write_caption,
    draw=draw,
)
ATTRIBUTES = WORLD.attributes
sample, items = WORLD.sample, WORLD.items
