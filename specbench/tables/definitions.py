"""Which runs a paper's table needs, which of their columns it shows, and which printed lines go next to them.

The tables of a paper are in its own module; a new one is one more entry there and one more file under `published/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specbench.config import parameters, protocols
from specbench.rows.columns import COLUMNS, SHOWN, stderr_of

DEFAULT_MODEL = "llamagen_scenes"


@dataclass(frozen=True)
class Column:
    """One column of a table. `key` and `spread` name columns of a measured row; published files use the same names."""

    key: str
    label: str
    better: str  # "higher" or "lower"
    decimals: int  # shown at least; small values get three significant digits
    spread: str | None = None  # the column with the spread of `key`; rows of older versions may lack it
    spread_is: str = ""  # what that spread is, for the note
    backend: str | None = None  # the column that names what computed the value
    measured_as: str = ""  # what our number in this column is, where no backend names it
    published_as: str = ""  # what the paper's number in this column is
    published: str = ""  # the published files' name of it, where that is not `key`
    published_spread: str = ""  # theirs of the spread, where that is not `spread`

    @property
    def printed(self) -> str:
        """The column of published files."""
        return self.published or self.key

    @property
    def printed_spread(self) -> str:
        """The column of published files with the spread."""
        return self.published_spread or self.spread or ""


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
    published: Mapping[str, str] | None
    without: str = "No preset for this method yet."
    elsewhere: tuple[str, ...] | None = None


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


@dataclass(frozen=True)
class TableFigure:
    """Columns `y` against `x`, a column or a parameter of the runs (`AXES`), next to the line `baseline`, if any."""

    x: str
    y: tuple[str, ...]
    baseline: str
    panels: tuple[Panel, ...]


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
SYMBOLS = {"cfg_scale": "guidance", "delta": "δ", "gamma": "γ", "lam": "λ"}
#: Names of parameters on an axis.
AXES = {
    "cfg_scale": "guidance scale",
    "gamma": "draft length γ (tokens)",
    "prefill": "share without drafts",
    "temperature": "temperature",
    "top_k": "K of top-K",
    "window": "window (tokens)",
}


@dataclass(frozen=True)
class TableTest:
    """Whether the means of a column differ between two lines, by Welch's t-test from the rows alone."""

    key: str
    spread: str  # the column with the standard deviation over images
    line: str
    other: str


@dataclass(frozen=True)
class Table:
    """A table. `protocol` are the overrides that all its runs share, `n` the number of prompts a run, with its own
    model; with others both are those of the paper's protocol, where there is one. `paper`: where it was printed;
    one that takes long is drawn `on_request` only, when it is named."""

    id: str
    title: str
    paper: str
    n: int
    protocol: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    remarks: tuple[str, ...] = ()
    figure: TableFigure | Series | Maps | Stack | None = None
    tests: tuple[TableTest, ...] = ()
    rows_of: Literal["run", "bench", "probe"] = "run"  # the command whose rows it shows
    on_request: bool = False
    model: str = DEFAULT_MODEL  # measured unless another is asked for

    def overrides(self, line: Line, model: str, n: int | None = None) -> list[str] | None:
        """The Hydra overrides of the run behind `line`, with `n` prompts (None: as many as it has); None where there is
        no run for it."""
        own = model == self.model
        if self.rows_of == "bench":
            return None if line.overrides is None else [f"model={model}", *line.overrides, *self.protocol]
        words = line.overrides if own or line.elsewhere is None else line.elsewhere
        if words is None or not {word.partition("=")[0] for word in words} <= parameters.possible(model):
            return None
        protocol = None if own else self.papers_protocol
        if protocol is None:
            own_words = [word for word in words if not (n and word.startswith("n="))]  # an asked n goes first
            given = {word.partition("=")[0] for word in own_words}
            shared = [word for word in (f"n={n or self.n}", *self.protocol) if word.partition("=")[0] not in given]
            return [f"model={model}", *own_words, *shared]
        asked = [f"n={n}"] if n else []
        return [f"model={model}", *words, f"protocol={protocol}", *asked, *(w for w in ALONE if w in self.protocol)]

    @property
    def papers_protocol(self) -> str | None:
        """The protocol that the paper's own table was made by."""
        names = parameters.choices("protocol")
        return next((name for name in names if self.id in protocols.read(name).serves), None)


def row_column(key: str, label: str = "", decimals: int | None = None, **more: str) -> Column:
    """A column of rows, with the title, the better side and the decimals that `rows.columns.SHOWN` gives, its standard
    error, and the backend of a metric. `label` and `decimals` replace the title and the decimals."""
    shown = SHOWN[key]
    defaults: dict[str, str] = {"spread": stderr_of(key), "spread_is": "standard error"}
    if f"{key}_backend" in COLUMNS:
        defaults["backend"] = f"{key}_backend"
    places = shown.decimals if decimals is None else decimals
    return Column(key, label or shown.title, shown.better, places, **{**defaults, **more})


QUALITY = (
    row_column("clip_score", published_as="CLIP ViT-B/32, plain cosine"),
    row_column("fid", published_as="FID: Inception-V3 features, 5,000 images against real COCO images"),
    row_column("image_reward", published_as="ImageReward"),
)
ACCEPTED_LENGTH = row_column(
    "accepted_length_mean",
    spread="accepted_length_std",
    spread_is="standard deviation over images",
    measured_as="generated tokens per target forward pass, mean over images",
    published_as="generated tokens per speculative round",
)
LATENCY = row_column(
    "latency_s_mean",
    decimals=2,
    spread="latency_s_std",
    spread_is="standard deviation over images",
    measured_as="decoding one image alone, without text encoding and pixel decoding",
    published_as="seconds per image; the paper does not state what is timed",
)
SPEEDUP = row_column(
    "speedup_latency",
    "Speed-up (×)",
    measured_as="mean latency of vanilla decoding of the same prompts, timed in the same run, over this one's",
    published_as="mean latency of the paper's vanilla line over this one's",
)
STEPS_SAVED = row_column(
    "step_compression",
    measured_as="tokens of an image over target passes",
    published="speedup_step",
    published_as="decoding steps of the paper's vanilla line over this one's",
)
FIRST_ACCEPT = row_column(
    "first_accept",
    measured_as="probability with which the rule keeps a draft's first candidate, mean over steps",
    published="acceptance_rate",
    published_as="mean acceptance probability of the first draft token",
)
PERPLEXITY = row_column(
    "perplexity", backend="", measured_as="of the emitted tokens under the guided target, before top-k and top-p"
)
ACCEPTANCE = row_column("acceptance_rate", measured_as="accepted over verified draft tokens")
ENTROPY = Column(  # of a probe
    "entropy",
    "Entropy (nats)",
    "lower",
    2,
    spread="entropy_stderr",
    spread_is="standard error",
    measured_as="of the guided distribution of a token, mean over tokens",
)
#: Protocols of the embedded runs: one image after the other, with vanilla decoding timed alongside; or in batches,
#: where seconds mean nothing.
ALONE = ("batch=1", "seed=0")
TOGETHER = ("batch=50", "seed=0", "baseline=false")
OTHER_MODELS = (
    "Measured and published lines follow different protocols, and are of different models where their "
    "names differ. Compare the methods of one model with each other, not a measured value with a published one."
)
