"""The parts of a table: its lines with their runs, its columns, its figure, and the printed lines next to its lines.

A paper's table is a file in conf/suite (see `catalog`) and, for its printed numbers, a file in `published/`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specbench.config import parameters, protocols, registry
from specbench.errors import UsageError
from specbench.rows.columns import METRICS, SHOWN, TIMED_COLUMNS, stderr_of
from specbench.rows.selection import spread_of
from specbench.tables import literature

DEFAULT_MODEL = "llamagen_scenes"
Values = Mapping[str, str]  # parameter -> its value as text
BATCH, TIMED = 16, 24  # defaults where runs of quality and of seconds are apart: images together, timed prompts
PAPERS_TIMED = 100  # timed prompts of a paper's table on a real model, if the paper does not state their number
MOST_DECIMALS = 8  # of a printed number
#: Parameters of the runs of quality. Only the timed runs decode one image at a time.
QUALITY = {"baseline": "false", "timing": "false"}


@dataclass(frozen=True)
class Column:
    """One column of a table. key: a column of measured rows; name: the column of published files, if it differs.

    The spread of a value is its standard error, or its standard deviation over the units in `std_over`; None: it is not
    shown. A metric's column names its backend; others have `measured_as`. published_as: the meaning of the paper's
    number in this column.
    """

    key: str
    label: str
    better: str  # "higher" or "lower"
    decimals: int  # minimum number of decimals; small values get three significant digits
    measured_as: str = ""
    published_as: str = ""
    name: str = ""
    std_over: str | None = ""
    published_spread: str = ""  # the published files' name of the spread, if it is not `spread`
    rounding: float = 0.0  # smaller values are rounding errors, printed as 0

    @property
    def spread(self) -> str:
        """The column with the spread of `key`; rows may not have it."""
        if self.std_over is None:
            return ""
        if self.std_over == "seeds":
            return spread_of(self.key)
        return f"{self.key.removesuffix('_mean')}_std" if self.std_over else stderr_of(self.key)

    @property
    def spread_is(self) -> str:
        return f"standard deviation over {self.std_over}" if self.std_over else "standard error"

    @property
    def backend(self) -> str | None:
        """The column with the name of the backend that computed the value."""
        return f"{self.key}_backend" if self.key in METRICS and not self.measured_as else None

    @property
    def printed(self) -> str:
        """The name of the column in published files."""
        return self.name or self.key

    @property
    def printed_spread(self) -> str:
        """The name of the column with the spread in published files."""
        return self.published_spread or self.spread


@dataclass(frozen=True)
class Line:
    """One line of a table: a run of ours (overrides; None: no run, for the reason `without`) and the printed lines that
    correspond to it.

    A printed line corresponds if it has all column values of `published`; None: no line does. elsewhere: the overrides
    for other models than the table's own, if they differ: by model, and "" for every other.
    """

    key: str
    label: str
    overrides: tuple[str, ...] | None
    published: Mapping[str, str] | None = None
    without: str = "No preset for this method yet."
    elsewhere: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def on(self, model: str, own_model: str) -> dict[str, str] | None:
        """The parameters on a model, in a table of `own_model`."""
        overrides = self.overrides
        if model != own_model:
            overrides = self.elsewhere.get(model, self.elsewhere.get("", overrides))
        return None if overrides is None else named(overrides)


@dataclass(frozen=True)
class Curve:
    """One curve of a figure: the keys of its lines, in order."""

    label: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """One row of axes in a figure; baseline: its reference line, if it is not the figure's."""

    label: str
    curves: tuple[Curve, ...]
    baseline: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its lines, curve by curve."""
        return tuple(key for curve in self.curves for key in curve.lines)


@dataclass(frozen=True)
class TableFigure:
    """Columns `y` against each of `x` (columns, or parameters of the runs, see `AXES`), with the reference line
    `baseline`. log: one y on a logarithmic axis, with zeros on a separate axis below, and each curve's name at its
    end."""

    x: tuple[str, ...]
    y: tuple[str, ...]
    baseline: str
    panels: tuple[Panel, ...]
    log: bool = False


@dataclass(frozen=True)
class Matched:
    """A comparison of every pair of a panel's curves, by the columns `y`, prompt by prompt, at equal x of the figure.
    lines_of: the table that has these lines and runs."""

    y: tuple[str, ...]
    lines_of: str = ""


@dataclass(frozen=True)
class Series:
    """Lists in column `key` of the rows, from entry `first` on, one curve per line, or bars. shares: also shows the
    contribution of the entries, which are numbers of tokens, to the gain over one token per step."""

    key: str
    x: str
    y: str
    first: int = 0
    bars: bool = False
    shares: bool = False


@dataclass(frozen=True)
class Maps:
    """Lists in column `key` of the rows, one number per token of a square image, as heat maps."""

    key: str
    label: str


@dataclass(frozen=True)
class Stack:
    """Columns that add up to a total, stacked in one bar per line."""

    keys: tuple[str, ...]
    label: str


#: Names of parameters in print.
SYMBOLS = {"cfg_scale": "guidance", "delta": "δ", "gamma": "γ", "lam": "λ", "epsilon": "ε"}
#: Labels of axes: parameters, and properties of a draft.
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
    """A test whether a statistic of the images (by its name in `specbench compare`) differs between the runs of two
    lines: the test of `specbench compare` over the images of the same prompts, such as the paired t-test of a mean."""

    statistic: str
    label: str
    line: str
    other: str


@dataclass(frozen=True)
class Table:
    """A table. protocol: the overrides that all its runs share; n: the number of prompts per run. Both apply to its own
    model and to other models; for a real model, the paper's protocol replaces the parameters that it states.
    paper: where it was printed. on_request: a table that takes long, and is drawn only if it is named."""

    id: str
    title: str
    n: int
    protocol: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    paper: str = "own comparison"
    remarks: tuple[str, ...] = ()
    figure: TableFigure | Series | Maps | Stack | None = None
    panels: tuple[Panel, ...] = ()  # the curves of its sweeps, from which a suite draws its own figure
    matched: Matched | None = None  # pairs of the figure's curves, printed instead of the lines
    tests: tuple[TableTest, ...] = ()
    rows_of: Literal["run", "bench", "probe"] = "run"  # the command whose rows it shows
    on_request: bool = False
    model: str = DEFAULT_MODEL  # measured unless another one is requested
    # with one of these, quality is measured in batches and seconds by further runs of `timed` prompts
    batch: int | None = None
    timed: int | None = None
    # only for `specbench suite`, see `Suite`; the first two: label -> parameters
    models: Mapping[str, Values] = field(default_factory=dict)
    prompts: Mapping[str, Values] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    metrics: str | None = None
    baseline: tuple[str, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)  # of its file

    def __post_init__(self) -> None:
        sizes = ("n", self.n, 0 if self.rows_of == "bench" else 1), ("batch", self.batch, 1), ("timed", self.timed, 0)
        for name, value, least in (*sizes, *(("a seed", seed, 0) for seed in self.seeds)):
            if value is not None and value < least:
                raise ValueError(f"{name} must be an integer of at least {least} (got {value})")

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

    def timed_prompts(self, n: int) -> int:
        """Prompts of the further runs that measure seconds; 0 if no column needs them."""
        return self.timed if self.timed is not None else min(n, TIMED) if self.in_seconds else 0

    @property
    def in_seconds(self) -> bool:
        """Whether it shows seconds."""
        return any(column.key in TIMED_COLUMNS for column in self.columns)

    def on(self, model: str, n: int | None = None, seeds: tuple[int, ...] = (), changes: Values | None = None) -> Suite:
        """What `specbench tables` runs: its lines on one model, with `n` prompts and each of the seeds (None, none: the
        defaults). changes: `batch`, `timed` and parameters of all runs that have them."""
        of_suites = {"models": self.models, "prompts": self.prompts, "seeds": self.seeds, "baseline": self.baseline}
        if several := [key for key, value in of_suites.items() if value]:
            raise UsageError(f"{self.id} names {several[0]}, which only a suite can have: specbench suite {self.id}")
        changes = dict(changes or {})
        timed = changes.pop("timed", None)
        table = self if timed is None else replace(self, timed=int(timed))
        protocol = None if model == self.model or parameters.world("model", model) else self.papers_protocol
        shared = {"n": str(self.n), **named(self.protocol)}
        shared |= {} if self.metrics is None else {"metrics": self.metrics}
        if protocol:
            stated = protocols.values(protocol, model, {})
            shared = {"protocol": protocol} | {name: value for name, value in shared.items() if name not in stated}
            own_batches = any("batch" in named(line.overrides or ()) for line in self.lines)
            if timed is None and self.in_seconds and not own_batches:
                table = replace(table, timed=protocols.read(protocol).timed or PAPERS_TIMED)
        if n is not None:
            shared["n"] = str(n)
        shared |= changes
        if self.rows_of == "bench":  # a benchmark has no n
            shared.pop("n", None)
        fixed = (*(["n"] if n is not None else []), *(["seed"] if seeds else []))
        if self.rows_of != "run" or (table.timed is None and not ("batch" in changes or self.batch)):
            return Suite(self, {"": {"model": model}}, {"": {}}, seeds, shared, fixed)
        shared |= {"batch": changes.get("batch", str(self.batch or BATCH)), **QUALITY}
        images = n or (protocols.values(protocol, model, {}).get("n", self.n) if protocol else self.n)
        timed_prompts = min(images, table.timed_prompts(images))
        return Suite(table, {"": {"model": model}}, {"": {}}, seeds, shared, (*fixed, *QUALITY), timed=timed_prompts)

    def no_run(self, line: Line, model: str, given: Mapping[str, str] | None = None) -> str:
        """Why a line has no run on a model, in a sentence; "" if it has one. given: parameters that a suite gives with
        the model."""
        values = line.on(model, self.model)
        if values is None:
            return line.without
        if self._paper_leaves_out(line, model):
            return f"The paper has no such line for {model}."
        known, shared = parameters.table(), named(self.protocol) | dict(given or {})
        if missing := sorted(name for name in values.keys() - parameters.possible(model) if name in known):
            return f"{model} has no parameter {missing[0]}."
        method = (shared | values).get("method", parameters.default_choice("method"))
        if method not in parameters.choices("method"):
            return ""  # composing the run says so
        if parameters.kind("method", method) not in ("any", parameters.kind("model", model)):
            return f"{model} has {parameters.kind('model', model)} tokens."
        return "" if _has_drafter(model, method, shared | values) else f"{model} has no such drafter."

    def _paper_leaves_out(self, line: Line, model: str) -> bool:
        """Whether the paper prints this model, but not in this line."""
        if line.published is None or model == self.model or self.id not in literature.available():
            return False
        printed = [row for row in literature.load(self.id) if row.model_name == model]
        return bool(printed) and not any(row.fits(line.published) for row in printed)

    @property
    def papers_protocol(self) -> str | None:
        """The protocol of the paper's own table."""
        names = parameters.choices("protocol")
        return next((name for name in names if self.id in protocols.read(name).serves), None)


@dataclass(frozen=True)
class Cell:
    """A model, a set of prompts (both by their labels) and a seed of a suite."""

    model: str = ""
    prompts: str = ""
    seed: int | None = None  # None: the line's own

    @property
    def group(self) -> tuple[str, str]:
        """The part that stays when seeds are pooled."""
        return self.model, self.prompts

    def __str__(self) -> str:
        return ", ".join(filter(None, [*self.group, "" if self.seed is None else f"seed {self.seed}"]))


#: Parameters of the runs of a suite that measure seconds: no scores, and no statistics of the emitted distribution.
_SECONDS = {"batch": "1", "baseline": "true", "timing": "true", "metrics": "none", "emitted_draws": "0"}


@dataclass(frozen=True)
class Suite:
    """The lines of a table on models, sets of prompts (label -> parameters) and seeds.

    shared: parameters of all runs; fixed: those that no line replaces. baseline: the parameters of vanilla AR, which is
    decoded once per model, prompts and seed, for all lines; {}: each run decodes its own. timed: prompts of the further
    runs that measure seconds; 0: no such runs.
    """

    table: Table
    models: Mapping[str, Values]
    prompts: Mapping[str, Values]
    seeds: tuple[int, ...]
    shared: Values
    fixed: tuple[str, ...] = ()
    baseline: Values = field(default_factory=dict)
    timed: int = 0

    def cells(self) -> Iterator[Cell]:
        for model, prompts, seed in itertools.product(self.models, self.prompts, self.seeds or (None,)):
            yield Cell(model, prompts, seed)

    def model(self, cell: Cell) -> str:
        """The name of a cell's model."""
        return self.models[cell.model].get("model", self.table.model)

    def overrides(self, line: Line, cell: Cell, seconds: bool = False) -> list[str]:
        """The Hydra overrides of the run of a line: the model, the line's parameters, and the remaining shared ones."""
        model = self.model(cell)
        values = line.on(model, self.table.model) or {}
        model = values.get("model", model)  # a line may have its own
        if "seed" in values and "seed" in self.fixed:
            raise UsageError(f"line {line.key} has its own seed: leave seeds out")
        own = {name: value for name, value in of_world(model, values).items() if name not in self.fixed}
        shared = {**self.models[cell.model], **of_world(model, self.shared), **self.prompts[cell.prompts]}
        if cell.seed is not None:
            shared["seed"] = str(cell.seed)
        if seconds:
            own = own | _SECONDS | {name: value for name, value in own.items() if name == "batch"}
            own["n"] = str(self.timed)
        first = {"model": model} | own
        chosen = first | shared | first
        foreign = parameters.method_parameters() - parameters.in_preset(chosen) - first.keys()
        return as_overrides({name: value for name, value in chosen.items() if name not in foreign})


def _has_drafter(model: str, method: str, values: Mapping[str, str]) -> bool:
    """Whether the drafter of a line was trained for an embedded model. True for real models."""
    world, weights = parameters.world("model", model), values.get("drafter_weights", "embedded")
    if world is None or not registry.is_embedded(weights):
        return True
    network = registry.drafter_network(values.get("drafter") or parameters.method_choices(method)["drafter"])
    return network is None or network.path(weights, world).is_file()


def named(overrides: Iterable[str]) -> dict[str, str]:
    """Parameter -> its value as text. Of repeated parameters, the last one counts."""
    return dict(override.split("=", 1) for override in overrides)


def as_overrides(values: Mapping[str, str]) -> list[str]:
    """The inverse of `named`."""
    return [f"{name}={value}" for name, value in values.items()]


def of_world(model: str, values: Mapping[str, str]) -> dict[str, str]:
    """Parameters for a model: prompts of another embedded world are left out, so that the model's own defaults count.
    Metrics of another world become the model's own metrics of the same name, or are left out if it has none."""
    world = parameters.world("model", model)
    fitting = dict(values)
    if "data" in values and parameters.world("data", values["data"]) not in (None, world):
        del fitting["data"]
    if "metrics" in values:
        names = values["metrics"].strip("[]").split(",")
        own = [_of_world(name, world) for name in names]
        if own != names:
            fitting["metrics"] = f"[{','.join(filter(None, own))}]"
            if not any(own):
                del fitting["metrics"]
    return fitting


def _of_world(name: str, world: str | None) -> str:
    """A metric, or set of metrics, for a model of this world; "" if it has none of the name."""
    other = {parameters.world("metrics", metric) for metric in parameters.declared("metrics", name)} - {None, world}
    if not other:
        return name
    own = f"{world}{name.removeprefix(str(other.pop()))}" if world else ""
    return own if own in parameters.choices("metrics") else ""


def row_column(key: str, label: str = "", decimals: int | None = None, **more: Any) -> Column:
    """A column of rows with the title, the better direction and the decimals of `rows.columns.SHOWN`; `label` and
    `decimals` replace them."""
    shown = SHOWN[key]
    digits = shown.decimals if decimals is None else decimals
    return Column(key, label or shown.title, shown.better, digits, **{"rounding": shown.resolution, **more})


#: Columns of tables that say more than `rows.columns.SHOWN`; the last one belongs to a probe.
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
        row_column("emitted_kl_reverse", "Reverse KL (nats)"),
        row_column("acceptance_rate", measured_as="accepted over verified draft tokens"),
        row_column("draft_acceptance_rate", measured_as="accepted over all drafted tokens"),
        Column("entropy", "Entropy (nats)", "lower", 2, "of the guided distribution of a token, mean over tokens"),
    )
}
#: Remarks of several tables, by their names in conf/suite.
REMARKS = {
    "other_models": "Measured and published values follow different protocols, and are of different models where their "
    "names differ. Compare the methods of one model with each other, not a measured value with a published one.",
    "one_model": "Measured and published values are of different models: compare the values of one model with each "
    "other.",
    "points_only": "The paper draws its points and prints no values: nothing published to compare with.",
    "bars_only": "The paper draws its bars and prints no values: nothing published to compare with.",
    "other_prompts": "Instead of PartiPrompts, the embedded model takes other captions of its own world (seed 1).",
}
