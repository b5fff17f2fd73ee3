"""Which runs a paper's table needs, which of their columns it shows, and which printed lines go next to them.

The tables of a paper are in its own module; a new one is one more entry there and one more file under `published/`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specbench.config import parameters, protocols
from specbench.errors import UsageError
from specbench.rows.columns import METRICS, SHOWN, stderr_of

DEFAULT_MODEL = "llamagen_scenes"


@dataclass(frozen=True)
class Column:
    """One column of a table. `key` names a column of measured rows; published files use the same names, if not `name`.

    The spread of a value is its standard error, or its standard deviation over what `std_over` names; None: it is not
    shown. A metric's column names its backend; others have `measured_as`. `published_as`: the paper's
    number in this column.
    """

    key: str
    label: str
    better: str  # "higher" or "lower"
    decimals: int  # shown at least; small values get three significant digits
    measured_as: str = ""
    published_as: str = ""
    name: str = ""
    std_over: str | None = ""
    published_spread: str = ""  # the published files' name of the spread, where that is not `spread`
    rounding: float = 0.0  # smaller values are errors of floating point, printed as 0

    @property
    def spread(self) -> str:
        """The column with the spread of `key`; rows may lack it."""
        if self.std_over is None:
            return ""
        return f"{self.key.removesuffix('_mean')}_std" if self.std_over else stderr_of(self.key)

    @property
    def spread_is(self) -> str:
        return f"standard deviation over {self.std_over}" if self.std_over else "standard error"

    @property
    def backend(self) -> str | None:
        """The column that names what computed the value."""
        return f"{self.key}_backend" if self.key in METRICS and not self.measured_as else None

    @property
    def printed(self) -> str:
        """The column of published files."""
        return self.name or self.key

    @property
    def printed_spread(self) -> str:
        """The column of published files with the spread."""
        return self.published_spread or self.spread


@dataclass(frozen=True)
class Line:
    """One line: a run of ours (`overrides`; None = there is none, for the reason `without`) and the printed lines like
    it.

    A printed line belongs here when it has every column value of `published`; none does where that is None.
    `elsewhere`: the overrides for another model than the table's own, where they differ.
    """

    key: str
    label: str
    overrides: tuple[str, ...] | None
    published: Mapping[str, str] | None = None
    without: str = "No preset for this method yet."
    elsewhere: tuple[str, ...] | None = None

    def on(self, own_model: bool) -> dict[str, str] | None:
        """Its parameters on the table's own model, or on another one."""
        given = self.overrides if own_model or self.elsewhere is None else self.elsewhere
        return None if given is None else named(given)

    def of(self, model: str) -> str:
        """The model of its rows: the table's, or one that the line names."""
        return named(self.overrides or ()).get("model", model)


@dataclass(frozen=True)
class Curve:
    """One curve of a figure: the keys of the lines along it."""

    label: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """One row of a figure's axes; `baseline`: its reference line, if that is not the figure's."""

    label: str
    curves: tuple[Curve, ...]
    baseline: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its lines, of one curve after the other."""
        return tuple(key for curve in self.curves for key in curve.lines)


@dataclass(frozen=True)
class TableFigure:
    """Columns `y` against each of `x`, columns or parameters of the runs (`AXES`), next to the line `baseline`. `log`:
    one y on a logarithmic axis, its zeros on a line of their own below, and every curve named where it ends."""

    x: tuple[str, ...]
    y: tuple[str, ...]
    baseline: str
    panels: tuple[Panel, ...]
    log: bool = False


@dataclass(frozen=True)
class Matched:
    """Columns `y`: every pair of a panel's curves is compared by them, prompt by prompt, at equal x of the figure.
    `lines_of`: the table whose lines and runs these are."""

    y: tuple[str, ...]
    lines_of: str = ""


@dataclass(frozen=True)
class Series:
    """Lists in column `key` of the rows, entry by entry from `first` on, one curve per line, or bars. `shares`: also
    the contribution of the entries, numbers of tokens, to the gain over one token per step."""

    key: str
    x: str
    y: str
    first: int = 0
    bars: bool = False
    shares: bool = False


@dataclass(frozen=True)
class Maps:
    """Lists in column `key` of the rows, one number for every token of a square image, as heat maps."""

    key: str
    label: str


@dataclass(frozen=True)
class Stack:
    """Columns that add up to something, piece by piece in a bar for every line."""

    keys: tuple[str, ...]
    label: str


#: Names of parameters in print.
SYMBOLS = {"cfg_scale": "guidance", "delta": "δ", "gamma": "γ", "lam": "λ", "epsilon": "ε"}
#: Names of parameters, and of properties of a draft, on an axis.
AXES = {
    "batch": "images decoded together",
    "cfg_scale": "guidance scale",
    "draft_tokens": "draft tokens of a step",
    "draft_tv": "total variation of draft and target",
    "gamma": "draft length γ (tokens)",
    "prefill": "share without drafts",
    "temperature": "temperature",
    "top_k": "K of top-K",
    "window": "window (tokens)",
}


@dataclass(frozen=True)
class TableTest:
    """Whether a statistic of the images, as `specbench compare` calls it, differs between the runs of two lines: by the
    test of `specbench compare` over the images of the same prompts, such as the paired t-test of a mean."""

    statistic: str
    label: str
    line: str
    other: str


@dataclass(frozen=True)
class Table:
    """A table. `protocol` are the overrides that all its runs share, `n` the number of prompts a run, with its own
    model and others of an embedded world; a real model has the paper's protocol instead, where there is one. `paper`:
    where it was printed; one that takes long is drawn `on_request` only, when it is named."""

    id: str
    title: str
    paper: str
    n: int
    protocol: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    remarks: tuple[str, ...] = ()
    figure: TableFigure | Series | Maps | Stack | None = None
    panels: tuple[Panel, ...] = ()  # the curves of its sweeps, of which a suite draws a figure of its own
    matched: Matched | None = None  # pairs of the figure's curves, which are printed instead of the lines
    tests: tuple[TableTest, ...] = ()
    needs: tuple[str, ...] = ()  # columns without which a row of an older version is measured again
    rows_of: Literal["run", "bench", "probe"] = "run"  # the command whose rows it shows
    on_request: bool = False
    model: str = DEFAULT_MODEL  # measured unless another is asked for

    @property
    def compared_panels(self) -> list[Panel]:
        """The panels whose curves are compared at equal values."""
        if self.matched is None or not isinstance(self.figure, TableFigure):
            return []
        return [panel for panel in self.figure.panels if len(panel.curves) > 1]

    @property
    def comparisons(self) -> list[tuple[Panel, str, str]]:
        """(panel, x, y): every pair of the panel's curves is compared by column y at equal x."""
        xs = self.figure.x if isinstance(self.figure, TableFigure) else ()
        ys = self.matched.y if self.matched else ()
        return list(itertools.product(self.compared_panels, xs, ys))

    def overrides(self, line: Line, model: str, n: int | None = None, seed: int | None = None) -> list[str] | None:
        """The Hydra overrides of the run behind `line`, with `n` prompts and `seed` (None: its own); None where there
        is no run for it."""
        own = model == self.model
        given = line.on(own)
        if given is None or ("model" in given and not own):
            return None
        model = line.of(model)
        if not given.keys() <= parameters.possible(model):
            return None
        if seed is not None and "seed" in given:
            raise UsageError(f"line {line.key} of {self.id} has a seed of its own: leave --seeds out")
        asked = {name: str(value) for name, value in (("n", n), ("seed", seed)) if value is not None}
        protocol = None if own or parameters.world("model", model) else self.papers_protocol
        shared = {"protocol": protocol} if protocol else {"n": str(self.n), **named(self.protocol)}
        if self.rows_of == "bench":  # which counts no prompts
            asked, shared = ({name: one for name, one in some.items() if name != "n"} for some in (asked, shared))
        mine = {name: one for name, one in given.items() if name not in asked}
        first = {"model": model} | mine | asked
        return as_overrides(of_world(model, first | shared | first))

    @property
    def papers_protocol(self) -> str | None:
        """The protocol that the paper's own table was made by."""
        names = parameters.choices("protocol")
        return next((name for name in names if self.id in protocols.read(name).serves), None)


def named(overrides: Iterable[str]) -> dict[str, str]:
    """Parameter -> its value as text; the last one counts."""
    return dict(override.split("=", 1) for override in overrides)


def as_overrides(values: Mapping[str, str]) -> list[str]:
    """The inverse of `named`."""
    return [f"{name}={value}" for name, value in values.items()]


def of_world(model: str, values: Mapping[str, str]) -> dict[str, str]:
    """Parameters without prompts and metrics of an embedded world that is not the model's: a real model has the
    defaults of its own instead."""
    worlds = (None, parameters.world("model", model))

    def fits(name: str, value: str) -> bool:
        if name == "data":
            return parameters.world(name, value) in worlds
        sets = value.strip("[]").split(",") if name == "metrics" else ()
        return all(parameters.world(name, one) in worlds for some in sets for one in parameters.declared(name, some))

    return {name: value for name, value in values.items() if fits(name, value)}


def row_column(key: str, label: str = "", decimals: int | None = None, **more: Any) -> Column:
    """A column of rows with the title, the better side and the decimals that `rows.columns.SHOWN` gives; `label` and
    `decimals` replace them."""
    shown = SHOWN[key]
    digits = shown.decimals if decimals is None else decimals
    return Column(key, label or shown.title, shown.better, digits, **{"rounding": shown.resolution, **more})


#: Columns as tables show them, where that is more than `rows.columns.SHOWN` says; the last one is of a probe.
STANDARD = {
    column.key: column
    for column in (
        row_column("clip_score", published_as="CLIP ViT-B/32, plain cosine"),
        row_column("fid", published_as="FID: Inception-V3 features, 5,000 images against real COCO images"),
        row_column("image_reward", published_as="ImageReward"),
        row_column(
            "accepted_length_mean",
            measured_as="generated tokens per target forward pass, mean over images",
            published_as="generated tokens per speculative round",
            std_over="images",
        ),
        row_column(
            "latency_s_mean",
            decimals=2,
            measured_as="decoding one image alone, without text encoding and pixel decoding; each line in a run of its"
            " own, so that lines are to be compared by their speed-ups",
            published_as="seconds per image; the paper does not state what is timed",
            std_over="images",
        ),
        row_column(
            "speedup_latency",
            "Speed-up (×)",
            measured_as="mean latency of vanilla decoding over this one's, prompt by prompt one directly after the"
            " other",
            published_as="mean latency of the paper's vanilla line over this one's",
        ),
        row_column(
            "step_compression",
            measured_as="tokens of an image over target passes",
            published_as="decoding steps of the paper's vanilla line over this one's",
            name="speedup_step",
        ),
        Column("steps", "Target passes of an image", "lower", 1, published_as="NFE, forward passes of an image"),
        row_column(
            "first_accept",
            measured_as="probability with which the rule keeps a draft's first candidate, mean over steps",
            published_as="mean acceptance probability of the first draft token",
            name="acceptance_rate",
        ),
        row_column("perplexity", measured_as="of the emitted tokens under the guided target, before top-k and top-p"),
        row_column(
            "emitted_kl",
            "Emitted KL (nats)",
            measured_as="KL divergence between what a token is emitted from and the target, mean over all tokens: "
            "0 is lossless",
        ),
        row_column("acceptance_rate", measured_as="accepted over verified draft tokens"),
        Column("entropy", "Entropy (nats)", "lower", 2, "of the guided distribution of a token, mean over tokens"),
    )
}
#: Remarks that several tables have, by the names that conf/suite gives them.
REMARKS = {
    "other_models": "Measured and published lines follow different protocols, and are of different models where their "
    "names differ. Compare the methods of one model with each other, not a measured value with a published one.",
    "one_model": "Measured and published lines are of different models: compare the lines of one model with each "
    "other.",
    "points_only": "The paper draws its points and prints no values: nothing published to compare with.",
    "bars_only": "The paper draws its bars and prints no values: nothing published to compare with.",
    "other_prompts": "Instead of PartiPrompts, the embedded model takes other captions of its own world (seed 1).",
}
