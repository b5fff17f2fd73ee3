"""Which runs a paper's table needs, which of their columns it shows, and which printed lines stand beside them.

A new table is one more entry of `TABLES` and one more file under `published/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_MODEL = "llamagen_scenes"


@dataclass(frozen=True)
class Column:
    """One column of a table. `key` and `spread` name columns of a measured row; published files use the same names."""

    key: str
    label: str
    better: str  # "up" or "down"
    decimals: int  # shown at least; small values get three significant digits
    spread: str | None = None  # the column with the spread of `key`; rows of older versions may lack it
    spread_is: str = ""  # what that spread is, for the note
    backend: str | None = None  # the column that names what computed the value
    measured_as: str = ""  # what our number in this column is, where no backend says it
    published_as: str = ""  # what the paper's number in this column is
    published: str = ""  # the published files' name of it, where that is not `key`

    @property
    def printed(self) -> str:
        """The column of published files."""
        return self.published or self.key


@dataclass(frozen=True)
class Line:
    """One line: a run of ours (`overrides`; None = there is none, for the reason `without`) and the printed lines like
    it.

    A printed line belongs here when it has every column value of `published`; none does where that is None.
    """

    key: str
    label: str
    overrides: tuple[str, ...] | None
    published: Mapping[str, str] | None
    without: str = "No preset for this method yet."


@dataclass(frozen=True)
class Curve:
    """One curve of a figure: the keys of the lines along it."""

    label: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """One row of a figure's axes."""

    label: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Figure:
    """Quality columns `y` against column `x`, beside the line `baseline`."""

    x: str
    y: tuple[str, ...]
    baseline: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Table:
    """A table. `protocol` are the overrides that all its runs share; `n` is the number of prompts a run. `paper` says
    where it was printed; one that takes long is drawn `on_request` only, when it is named."""

    id: str
    title: str
    paper: str
    n: int
    protocol: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    remarks: tuple[str, ...] = ()
    figure: Figure | None = None
    on_request: bool = False
    model: str = DEFAULT_MODEL  # measured unless another is asked for

    def overrides(self, line: Line, model: str, n: int) -> list[str] | None:
        """The Hydra overrides of the run behind `line`; None where there is no preset for it."""
        if line.overrides is None:
            return None
        return [f"model={model}", *line.overrides, f"n={n}", *self.protocol]


QUALITY = (
    Column(
        "clip_score",
        "CLIP score",
        "up",
        4,
        spread="clip_score_stderr",
        spread_is="standard error",
        backend="clip_score_backend",
        published_as="CLIP ViT-B/32, plain cosine",
    ),
    Column(
        "fid",
        "Fréchet distance",
        "down",
        2,
        spread="fid_stderr",
        spread_is="standard error",
        backend="fid_backend",
        published_as="FID: Inception-V3 features, 5,000 pictures against real COCO images",
    ),
    Column(
        "image_reward",
        "Reward",
        "up",
        4,
        spread="image_reward_stderr",
        spread_is="standard error",
        backend="image_reward_backend",
        published_as="ImageReward",
    ),
)
ACCEPTED_LENGTH = Column(
    "accepted_length_mean",
    "Accepted length",
    "up",
    2,
    spread="accepted_length_std",
    spread_is="standard deviation over pictures",
    measured_as="generated tokens per target forward pass, mean over pictures",
    published_as="generated tokens per speculative round",
)
_SPEED = (
    ACCEPTED_LENGTH,
    Column(
        "latency_s_mean",
        "Latency (s)",
        "down",
        2,
        spread="latency_s_std",
        spread_is="standard deviation over pictures",
        measured_as="decoding one picture alone, without text encoding and pixel decoding",
        published_as="seconds per picture; the paper does not say what is inside",
    ),
    Column(
        "speedup_latency",
        "Speed-up (×)",
        "up",
        2,
        spread="speedup_latency_stderr",
        spread_is="standard error",
        measured_as="mean latency of vanilla decoding of the same prompts, timed in the same run, over this one's",
        published_as="mean latency of the Target Model line over this one's",
    ),
)

TABLES: dict[str, Table] = {
    t.id: t
    for t in (
        Table(
            id="coolsd_table1",
            title="Cool-SD, Table 1: quality and speed of speculative decoding and its relaxations",
            paper="arXiv 2601.09212",
            n=64,
            protocol=("batch=1", "seed=0"),
            columns=QUALITY + _SPEED,
            lines=(
                Line("vanilla", "Target Model", ("method=vanilla",), {"method_key": "vanilla"}),
                Line("eagle1", "EAGLE-1", ("method=eagle1",), {"method_key": "eagle1"}),
                Line(
                    "lantern_pp",
                    "LANTERN++ (λ=2, k=10)",
                    ("method=lantern_pp",),
                    {"method_key": "lantern_pp", "lambda": "2", "k": "10"},
                ),
                Line(
                    "uniform_rsd_1.1",
                    "UniformRSD (δ=1.1)",
                    ("method=uniform_rsd", "delta=1.1"),
                    {"method_key": "uniform_rsd", "delta": "1.1"},
                ),
                Line(
                    "cool_sd_1.1",
                    "Cool-SD (δ=1.1)",
                    ("method=cool_sd", "delta=1.1"),
                    {"method_key": "cool_sd", "delta": "1.1"},
                ),
                Line(
                    "cool_sd_2", "Cool-SD (δ=2)", ("method=cool_sd", "delta=2"), {"method_key": "cool_sd", "delta": "2"}
                ),
            ),
            remarks=(
                "Measured and published lines follow different protocols, and are of different models where their "
                "names differ. What can be compared is how the methods of one model stand to each other, not a "
                "measured figure with a published one.",
                "Published protocol: MS-COCO 2017 validation captions, 5,000 pictures, one A100-SXM4-40GB; "
                "temperature, top-k, guidance scale and draft length are not stated.",
            ),
        ),
    )
}
