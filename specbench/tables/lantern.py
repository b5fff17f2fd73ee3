"""The tables and figures of LANTERN (arXiv 2410.03355), measured on the embedded model, whose codebook of 512 leaves
room for neighbourhoods a tenth as large as the paper's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from specbench.tables.definitions import (
    ACCEPTED_LENGTH,
    ALONE,
    BARS_ONLY,
    CLIP,
    ENTROPY,
    FID,
    FIRST_ACCEPT,
    OTHER_MODELS,
    POINTS_ONLY,
    QUALITY_AGAINST,
    SPEEDUP,
    STEPS_SAVED,
    TOGETHER,
    Curve,
    Line,
    Panel,
    Series,
    Table,
    TableFigure,
    row_column,
)

_table = partial(Table, paper="arXiv 2410.03355")
_together = partial(_table, n=50, protocol=TOGETHER)
_FID = replace(FID, published_as="FID: Inception-V3 features, 30,000 images against real COCO images")
#: The paper's k -> ours: of 16,384 codes, and of 512.
_K = {"100": "10", "300": "30", "1000": "100"}
_LABELS = {k: f"k={k}, embedded {ours}" for k, ours in _K.items()}
_DELTAS = ("0.05", "0.1", "0.2", "0.4")
_NEIGHBOURS = (
    "k counts nearest codes of a codebook: the paper's has 16,384, the embedded one 512, so k = 10, 30 and 100 "
    "correspond to the paper's 100, 300 and 1,000."
)


def _lantern(delta: str, k: str, temperature: str = "1") -> Line:
    """delta and k as the paper prints them."""
    rule = f"method=lantern delta={float(delta):g} k="
    end, greedy = _greedy(temperature)
    label = f"LANTERN (δ={float(delta):g}, {_LABELS[k]}){greedy}"
    printed = {"method_key": "lantern", "delta": delta, "k": k}
    own, there = (f"{rule}{count}{end}" for count in (_K[k], k))
    return Line(f"lantern_{delta}_{k}_{temperature}", label, own, printed, elsewhere=there)


def _greedy(temperature: str) -> tuple[str, str]:
    """What a temperature adds to the overrides and to the label."""
    return (" temperature=0", ", greedy") if temperature == "0" else ("", "")


def _plain(method: str, label: str, temperature: str) -> Line:
    end, greedy = _greedy(temperature)
    printed = {"method_key": method, "part": f"tau={temperature}"}
    return Line(f"{method}_{temperature}", label + greedy, f"method={method}{end}", printed)


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
        rule = f"method=lantern delta={delta} proximity={proximity} bound={bound} k="
        printed = {"part": part, "proximity": proximity, "bound": bound, "delta": delta}
        lines.append(Line(f"{proximity}_{bound}_{delta}", label, f"{rule}100", printed, elsewhere=f"{rule}1000"))
    return tuple(lines)


def _grid() -> Table:
    lines, panels = [], []
    for temperature in ("0", "1"):
        vanilla, exact = (_plain(*method, temperature) for method in (("vanilla", "vanilla"), ("eagle2", "EAGLE-2")))
        lines += [vanilla, exact]
        curves = []
        for k in _K:
            points = [_lantern(delta, k, temperature) for delta in _DELTAS]
            lines += points
            curves.append(Curve(f"LANTERN, {_LABELS[k]}", (exact.key, *(line.key for line in points))))
        panels.append(Panel(f"temperature {temperature}", tuple(curves), baseline=vanilla.key))
    return _together(
        "lantern_fig5",
        "LANTERN, Fig 5: quality against accepted length over k and δ",
        columns=(ACCEPTED_LENGTH, STEPS_SAVED, _FID, CLIP),
        lines=tuple(replace(line, published=None) for line in lines),
        remarks=(POINTS_ONLY, _NEIGHBOURS),
        figure=TableFigure(QUALITY_AGAINST, ("fid", "clip_score"), "vanilla_1", tuple(panels)),
    )


TABLES = (
    _table(
        "lantern_table1",
        "LANTERN, Table 1: accepted length of three drafters, greedy",
        n=50,
        protocol=f"{TOGETHER} temperature=0",
        columns=(ACCEPTED_LENGTH,),
        lines=tuple(
            Line(method, label, f"method={method}", {"method_key": method})
            for method, label in (("sd", "Speculative Decoding"), ("medusa", "Medusa"), ("eagle2", "EAGLE-2"))
        ),
        remarks=(OTHER_MODELS, "Vicuna-7B writes text: the paper quotes it from the paper of EAGLE-2."),
    ),
    _together(
        "lantern_table2",
        "LANTERN, Table 2: acceptance of the first draft token over k and δ",
        columns=(FIRST_ACCEPT,),
        lines=(
            Line("eagle2", "EAGLE-2", "method=eagle2", {"method_key": "eagle2"}),
            *(_lantern(delta, k) for k in _K for delta in _DELTAS),
        ),
        remarks=(OTHER_MODELS, _NEIGHBOURS),
    ),
    _table(
        "lantern_table3",
        "LANTERN, Table 3: speed and quality, greedy and sampling",
        n=64,
        protocol=ALONE,
        columns=(SPEEDUP, ACCEPTED_LENGTH, _FID, CLIP),
        lines=tuple(
            line
            for temperature, deltas in (("0", ("0.05", "0.20")), ("1", ("0.10", "0.40")))
            for line in (
                _plain("vanilla", "Vanilla AR", temperature),
                _plain("eagle2", "EAGLE-2", temperature),
                *(_lantern(delta, "1000", temperature) for delta in deltas),
            )
        ),
        remarks=(OTHER_MODELS, _NEIGHBOURS),
    ),
    _together(
        "lantern_table4",
        "LANTERN, Table 4: which neighbours, and what is bounded",
        columns=(ACCEPTED_LENGTH, _FID, CLIP),
        lines=_bounds(),
        remarks=(OTHER_MODELS, _NEIGHBOURS, "The paper prints its first line a second time, among the bounds."),
    ),
    _together(
        "lantern_fig2a",
        "LANTERN, Fig 2(a): how often the drafter's top tokens contain the target's top-1 token",
        columns=tuple(
            row_column(
                f"draft_top{k}",
                f"Top-{k} agreement",
                decimals=3,
                measured_as="with the target's top-1 token, at a draft's first position, mean over steps",
            )
            for k in (1, 3)
        ),
        lines=(
            Line("sd", "independent draft model", "method=sd"),
            Line("eagle", "EAGLE-1 head", "method=eagle1"),
            Line("medusa", "Medusa heads", "method=medusa"),
        ),
        remarks=(BARS_ONLY,),
    ),
    _table(
        "lantern_fig2c",
        "LANTERN, Fig 2(c): the mass of the most probable tokens",
        n=64,
        protocol="seed=0 method=vanilla",
        columns=(ENTROPY,),
        lines=tuple(Line(f"cfg_{scale}", f"guidance {scale}", f"cfg_scale={scale}") for scale in ("1", "3")),
        remarks=(BARS_ONLY,),
        figure=Series("top_probabilities", "most probable tokens", "their mean mass", first=1),
        rows_of="probe",
    ),
    _grid(),
)
