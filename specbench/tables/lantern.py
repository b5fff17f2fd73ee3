"""The tables and figures of LANTERN (arXiv 2410.03355), measured on the embedded model, whose codebook of 512 leaves
room for neighbourhoods a tenth as large as the paper's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from specbench.tables.definitions import (
    ACCEPTED_LENGTH,
    ALONE,
    ENTROPY,
    FIRST_ACCEPT,
    OTHER_MODELS,
    QUALITY,
    SPEEDUP,
    TOGETHER,
    Curve,
    Line,
    Panel,
    Series,
    Table,
    TableFigure,
    row_column,
)

PAPER = "arXiv 2410.03355"
_alone = partial(Table, paper=PAPER, n=64, protocol=ALONE)
_together = partial(Table, paper=PAPER, n=50, protocol=TOGETHER)
_CLIP = QUALITY[0]
_FID = replace(QUALITY[1], published_as="FID: Inception-V3 features, 30,000 images against real COCO images")
#: The paper's k -> ours: of 16,384 codes, and of 512.
_K = {"100": "10", "300": "30", "1000": "100"}
_LABELS = {k: f"k={k}, embedded {ours}" for k, ours in _K.items()}
_NEIGHBOURS = (
    "k counts nearest codes of a codebook: the paper's has 16,384, the embedded one 512, so k = 10, 30 and 100 "
    "correspond to the paper's 100, 300 and 1,000."
)


def _lantern(delta: str, k: str, temperature: str = "1") -> Line:
    """delta and k as the paper prints them."""
    words, there = (("method=lantern", f"delta={float(delta):g}", f"k={count}") for count in (_K[k], k))
    greedy = ("temperature=0",) if temperature == "0" else ()
    label = f"LANTERN (δ={float(delta):g}, {_LABELS[k]})" + (", greedy" if greedy else "")
    printed = {"method_key": "lantern", "delta": delta, "k": k}
    key = f"lantern_{delta}_{k}_{temperature}"
    return Line(key, label, (*words, *greedy), printed, elsewhere=(*there, *greedy))


def _speed() -> tuple[Line, ...]:
    lines = []
    for temperature, deltas in (("0", ("0.05", "0.20")), ("1", ("0.10", "0.40"))):
        part, greedy = {"part": f"tau={temperature}"}, ("temperature=0",) if temperature == "0" else ()
        of = ", greedy" if greedy else ""
        for method, label in (("vanilla", "Vanilla AR"), ("eagle2", "EAGLE-2")):
            words = (f"method={method}", *greedy)
            lines.append(Line(f"{method}_{temperature}", label + of, words, {"method_key": method, **part}))
        lines += [_lantern(delta, "1000", temperature) for delta in deltas]
    return tuple(lines)


def _bounds() -> tuple[Line, ...]:
    lines = []
    for part, proximity, bound, delta in (
        ("latent proximity", "l2", "tvd", "0.2"),
        ("latent proximity", "l2", "tvd", "0.05"),
        ("latent proximity", "cosine", "tvd", "0.2"),
        ("latent proximity", "random", "tvd", "0.2"),
        ("distribution distance", "l2", "jsd", "0.2"),
        ("distribution distance", "l2", "tvd", "0.4"),
    ):
        label = f"LANTERN ({proximity} neighbours, {bound.upper()} bound, δ={delta})"
        words = ("method=lantern", f"delta={delta}", f"proximity={proximity}", f"bound={bound}")
        printed = {"part": part, "proximity": proximity, "bound": bound, "delta": delta}
        key, there = f"{proximity}_{bound}_{delta}", (*words, "k=1000")
        lines.append(Line(key, label, (*words, f"k={_K['1000']}"), printed, elsewhere=there))
    return tuple(lines)


def _grid() -> Table:
    lines, panels = [], []
    for temperature in ("0", "1"):
        greedy = ("temperature=0",) if temperature == "0" else ()
        of = ", greedy" if greedy else ""
        first = [
            Line(f"{method}_{temperature}", label + of, (f"method={method}", *greedy), None)
            for method, label in (("vanilla", "vanilla"), ("eagle2", "EAGLE-2"))
        ]
        lines += first
        curves = []
        for k in _K:
            row = [_lantern(delta, k, temperature) for delta in ("0.05", "0.1", "0.2", "0.4")]
            lines += row
            curves.append(Curve(f"LANTERN, {_LABELS[k]}", (first[1].key, *(line.key for line in row))))
        panels.append(Panel(f"temperature {temperature}", tuple(curves), baseline=first[0].key))
    return _together(
        id="lantern_fig5",
        title="LANTERN, Fig 5: quality against accepted length over k and δ",
        columns=(ACCEPTED_LENGTH, _FID, _CLIP),
        lines=tuple(replace(line, published=None) for line in lines),
        remarks=("The paper draws its points and prints no values: nothing published to compare with.", _NEIGHBOURS),
        figure=TableFigure("accepted_length_mean", ("fid", "clip_score"), "vanilla_1", tuple(panels)),
    )


TABLES = (
    Table(
        id="lantern_table1",
        title="LANTERN, Table 1: accepted length of three drafters, greedy",
        paper=PAPER,
        n=50,
        protocol=(*TOGETHER, "temperature=0"),
        columns=(ACCEPTED_LENGTH,),
        lines=tuple(
            Line(method, label, (f"method={method}",), {"method_key": method})
            for method, label in (("sd", "Speculative Decoding"), ("medusa", "Medusa"), ("eagle2", "EAGLE-2"))
        ),
        remarks=(OTHER_MODELS, "Vicuna-7B writes text: the paper quotes it from the paper of EAGLE-2."),
    ),
    _together(
        id="lantern_table2",
        title="LANTERN, Table 2: acceptance of the first draft token over k and δ",
        columns=(FIRST_ACCEPT,),
        lines=(
            Line("eagle2", "EAGLE-2", ("method=eagle2",), {"method_key": "eagle2"}),
            *(_lantern(delta, k) for k in _K for delta in ("0.05", "0.1", "0.2", "0.4")),
        ),
        remarks=(OTHER_MODELS, _NEIGHBOURS),
    ),
    _alone(
        id="lantern_table3",
        title="LANTERN, Table 3: speed and quality, greedy and sampling",
        columns=(SPEEDUP, ACCEPTED_LENGTH, _FID, _CLIP),
        lines=_speed(),
        remarks=(OTHER_MODELS, _NEIGHBOURS),
    ),
    _together(
        id="lantern_table4",
        title="LANTERN, Table 4: which neighbours, and what is bounded",
        columns=(ACCEPTED_LENGTH, _FID, _CLIP),
        lines=_bounds(),
        remarks=(OTHER_MODELS, _NEIGHBOURS, "The paper prints its first line a second time, among the bounds."),
    ),
    _together(
        id="lantern_fig2a",
        title="LANTERN, Fig 2(a): how often the drafter's top tokens contain the target's top-1 token",
        columns=tuple(
            row_column(
                f"draft_top{k}",
                measured_as="with the target's top-1 token, at a draft's first position, mean over steps",
            )
            for k in (1, 3)
        ),
        lines=(
            Line("sd", "independent draft model", ("method=sd",), None),
            Line("eagle", "EAGLE-1 head", ("method=eagle1",), None),
            Line("medusa", "Medusa heads", ("method=medusa",), None),
        ),
        remarks=("The paper draws its bars and prints no values: nothing published to compare with.",),
    ),
    Table(
        id="lantern_fig2c",
        title="LANTERN, Fig 2(c): the mass of the most probable tokens",
        paper=PAPER,
        n=64,
        protocol=("seed=0", "method=vanilla"),
        columns=(ENTROPY,),
        lines=tuple(Line(f"cfg_{scale}", f"guidance {scale}", (f"cfg_scale={scale}",), None) for scale in ("1", "3")),
        remarks=("The paper draws its bars and prints no values: nothing published to compare with.",),
        figure=Series("top_probabilities", "most probable tokens", "their mean mass", first=1),
        rows_of="probe",
    ),
    _grid(),
)
