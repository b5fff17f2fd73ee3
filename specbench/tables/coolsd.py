"""The tables and figures of Cool-SD (arXiv 2601.09212), measured on the embedded model."""

from __future__ import annotations

from functools import partial

from specbench.tables import comparisons
from specbench.tables.definitions import (
    ACCEPTED_LENGTH,
    ALONE,
    LATENCY,
    OTHER_MODELS,
    QUALITY,
    SPEEDUP,
    TOGETHER,
    Line,
    Panel,
    Table,
    TableFigure,
    TableTest,
    row_column,
)

PAPER = "arXiv 2601.09212"
_alone = partial(Table, paper=PAPER, n=64, protocol=ALONE)
_together = partial(Table, paper=PAPER, n=100, protocol=TOGETHER)
_PROTOCOL = (
    "Published protocol: MS-COCO 2017 validation captions, 5,000 images, one A100-SXM4-40GB; "
    "temperature, top-k, guidance scale and draft length are not stated."
)
_VANILLA = Line("vanilla", "Target Model", ("method=vanilla",), {"method_key": "vanilla"})
_SJD = Line("sjd", "SJD", ("method=sjd",), {"method_key": "sjd"})
_LANTERN_PP = Line(
    "lantern_pp",
    "LANTERN++ (λ=2, k=10)",
    ("method=lantern_pp",),
    {"method_key": "lantern_pp", "lambda": "2", "k": "10"},
)


def _cool(delta: str) -> Line:
    words, printed = ("method=cool_sd", f"delta={delta}"), {"method_key": "cool_sd", "delta": delta}
    return Line(f"cool_sd_{delta}", f"Cool-SD (δ={delta})", words, printed)


def _tradeoff(name: str, label: str, title: str, curves: tuple[str, ...]) -> Table:
    """A figure of quality against accepted length, from the rows of `comparisons` on the static tree."""
    drawn = comparisons.TRADEOFF
    assert isinstance(drawn.figure, TableFigure)
    panel = next(panel for panel in drawn.figure.panels if "tree" in panel.label)
    chosen = tuple(curve for curve in panel.curves if curve.label in curves)
    keys = {"vanilla", *(key for curve in chosen for key in curve.lines)}
    return Table(
        id=name,
        title=f"Cool-SD, {label}: {title}",
        paper=PAPER,
        n=drawn.n,
        protocol=drawn.protocol,
        columns=(ACCEPTED_LENGTH, *QUALITY),
        lines=tuple(line for line in drawn.lines if line.key in keys),
        remarks=("The paper draws its points and prints no values: nothing published to compare with.",),
        figure=TableFigure(
            drawn.figure.x, ("fid", "image_reward", "clip_score"), "vanilla", (Panel(panel.label, chosen),)
        ),
    )


TABLES = (
    _alone(
        id="coolsd_table1",
        title="Cool-SD, Table 1: quality and speed of speculative decoding and its relaxations",
        columns=(*QUALITY, ACCEPTED_LENGTH, LATENCY, SPEEDUP),
        lines=(
            _VANILLA,
            Line("eagle1", "EAGLE-1", ("method=eagle1",), {"method_key": "eagle1"}),
            _LANTERN_PP,
            Line(
                "uniform_rsd_1.1",
                "UniformRSD (δ=1.1)",
                ("method=uniform_rsd", "delta=1.1"),
                {"method_key": "uniform_rsd", "delta": "1.1"},
            ),
            _cool("1.1"),
            _cool("2"),
        ),
        remarks=(OTHER_MODELS, _PROTOCOL),
    ),
    _alone(
        id="coolsd_table2",
        title="Cool-SD, Table 2: Cool-SD next to SJD, which needs no drafter",
        columns=(*QUALITY, SPEEDUP),
        lines=(_VANILLA, _SJD, _cool("1.1"), _cool("2")),
        remarks=(OTHER_MODELS, _PROTOCOL),
    ),
    _together(
        id="coolsd_table3",
        title="Cool-SD, Table 3: total variation between the target and its trained drafter",
        columns=(
            row_column(
                "draft_tv",
                "Total variation",
                measured_as="between the drafter's and the target's distribution of the first draft token, mean",
                published="tv_distance",
                published_as="mean over tokens",
            ),
        ),
        lines=(
            Line(
                "eagle",
                "TV(target, EAGLE-1 head)",
                ("method=eagle_chain", "window=1"),
                {"method_key": "tv_target_draft"},
            ),
        ),
        remarks=(OTHER_MODELS, "Published: MS-COCO 2017 training captions, 1,000 images."),
    ),
    _together(
        id="coolsd_significance",
        title="Cool-SD, Appendix C.4: is the gain in accepted length real?",
        n=500,
        columns=(ACCEPTED_LENGTH,),
        lines=(
            Line("cool_sd_1.1", "Cool-SD (δ=1.1)", ("method=cool_sd", "delta=1.1"), None),
            Line("lantern_pp", "LANTERN++ (λ=2, k=10)", ("method=lantern_pp",), None),
        ),
        tests=(TableTest("accepted_length_mean", "accepted_length_std", "cool_sd_1.1", "lantern_pp"),),
        remarks=(OTHER_MODELS, "The paper compares 1,000 images and does not name its t-test."),
    ),
    _tradeoff(
        "coolsd_fig3",
        "Fig 3",
        "quality against accepted length",
        ("Cool-SD, exponential", "UniformRSD", "LANTERN++"),
    ),
    _tradeoff(
        "coolsd_fig4",
        "Fig 4",
        "LANTERN++ with and without the optimal residual distribution",
        ("LANTERN++", "LANTERN++, optimal residual"),
    ),
    _tradeoff(
        "coolsd_fig5",
        "Fig 5",
        "how the relaxation falls over a draft's positions",
        ("Cool-SD, exponential", "Cool-SD, linear", "UniformRSD"),
    ),
)
