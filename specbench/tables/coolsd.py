"""The tables and figures of Cool-SD (arXiv 2601.09212), measured on the embedded model."""

from __future__ import annotations

from functools import partial

from specbench.tables import comparisons
from specbench.tables.definitions import (
    ACCEPTED_LENGTH,
    ALONE,
    LATENCY,
    OTHER_MODELS,
    POINTS_ONLY,
    QUALITY,
    SPEEDUP,
    STEPS_SAVED,
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


def _line(method: str, label: str, **printed: str) -> Line:
    """A method whose relaxation `delta`, if any, is the published one."""
    delta = printed.get("delta")
    key, own = (f"{method}_{delta}", f"method={method} delta={delta}") if delta else (method, f"method={method}")
    return Line(key, label, own, {"method_key": method, **printed})


_VANILLA, _SJD = _line("vanilla", "Target Model"), _line("sjd", "SJD")
_LANTERN_PP = _line("lantern_pp", "LANTERN++ (λ=2, k=10)", **{"lambda": "2", "k": "10"})
_COOL = tuple(_line("cool_sd", f"Cool-SD (δ={delta})", delta=delta) for delta in ("1.1", "2"))


def _tradeoff(name: str, title: str, *curves: str) -> Table:
    """A figure of quality against accepted length, from the rows of `comparisons` on the static tree."""
    source = comparisons.TRADEOFF
    assert isinstance(source.figure, TableFigure)
    panel = next(panel for panel in source.figure.panels if "tree" in panel.label)
    chosen = tuple(curve for curve in panel.curves if curve.label in curves)
    keys = {"vanilla", *(key for curve in chosen for key in curve.lines)}
    y = ("fid", "image_reward", "clip_score")
    return Table(
        name,
        f"Cool-SD, {title}",
        PAPER,
        source.n,
        source.protocol,
        (ACCEPTED_LENGTH, STEPS_SAVED, *QUALITY),
        tuple(line for line in source.lines if line.key in keys),
        (POINTS_ONLY,),
        TableFigure(source.figure.x, y, "vanilla", (Panel(panel.label, chosen),)),
    )


TABLES = (
    _alone(
        "coolsd_table1",
        "Cool-SD, Table 1: quality and speed of speculative decoding and its relaxations",
        columns=(*QUALITY, ACCEPTED_LENGTH, LATENCY, SPEEDUP),
        lines=(
            _VANILLA,
            _line("eagle1", "EAGLE-1"),
            _LANTERN_PP,
            _line("uniform_rsd", "UniformRSD (δ=1.1)", delta="1.1"),
            *_COOL,
        ),
        remarks=(OTHER_MODELS, _PROTOCOL),
    ),
    _alone(
        "coolsd_table2",
        "Cool-SD, Table 2: Cool-SD next to SJD, which needs no drafter",
        columns=(*QUALITY, SPEEDUP),
        lines=(_VANILLA, _SJD, *_COOL),
        remarks=(OTHER_MODELS, _PROTOCOL),
    ),
    _together(
        "coolsd_table3",
        "Cool-SD, Table 3: total variation between the target and its trained drafter",
        columns=(
            row_column(
                "draft_tv",
                "Total variation",
                measured_as="between the drafter's and the target's distribution of the first draft token, mean",
                published_as="mean over tokens",
                name="tv_distance",
            ),
        ),
        lines=(
            Line("eagle", "TV(target, EAGLE-1 head)", "method=eagle_chain window=1", {"method_key": "tv_target_draft"}),
        ),
        remarks=(OTHER_MODELS, "Published: MS-COCO 2017 training captions, 1,000 images."),
    ),
    _together(
        "coolsd_significance",
        "Cool-SD, Appendix C.4: is the gain in accepted length real?",
        n=500,
        columns=(ACCEPTED_LENGTH,),
        lines=(
            Line("cool_sd_1.1", "Cool-SD (δ=1.1)", "method=cool_sd delta=1.1"),
            Line("lantern_pp", "LANTERN++ (λ=2, k=10)", "method=lantern_pp"),
        ),
        tests=(
            TableTest("accepted_length", "Accepted length", "cool_sd_1.1", "lantern_pp"),
            TableTest("steps", "Steps of an image", "cool_sd_1.1", "lantern_pp"),
        ),
        remarks=(OTHER_MODELS, "The paper compares 1,000 images and does not name its t-test."),
    ),
    _tradeoff(
        "coolsd_fig3", "Fig 3: quality against accepted length", "Cool-SD, exponential", "UniformRSD", "LANTERN++"
    ),
    _tradeoff(
        "coolsd_fig4",
        "Fig 4: LANTERN++ with and without the optimal residual distribution",
        "LANTERN++",
        "LANTERN++, optimal residual",
    ),
    _tradeoff(
        "coolsd_fig5",
        "Fig 5: how the relaxation falls over a draft's positions",
        "Cool-SD, exponential",
        "Cool-SD, linear",
        "UniformRSD",
    ),
)
