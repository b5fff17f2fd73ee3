"""Our own experiments, besides the papers' tables: which rule pays, what Jacobi windows save, and what an
EAGLE-3-style drafter gains.

They take an hour or more on a CPU, so `specbench tables` runs them only when they are named; `make comparisons` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from specbench.tables.definitions import (
    ACCEPTANCE,
    ACCEPTED_LENGTH,
    CLIP,
    EMITTED_KL,
    PERPLEXITY,
    QUALITY_AGAINST,
    REWARD,
    STEPS_SAVED,
    SYMBOLS,
    TOGETHER,
    Curve,
    Line,
    Matched,
    Panel,
    Table,
    TableFigure,
    TableTest,
    row_column,
)

_STEPS = (ACCEPTED_LENGTH, STEPS_SAVED, ACCEPTANCE, EMITTED_KL, PERPLEXITY)
_QUALITY = (CLIP, REWARD)  # n is too small for a Fréchet distance
_table = partial(Table, paper="this project's own comparison", n=500, on_request=True, protocol=TOGETHER)

#: Curve label -> (overrides, parameter, its values along the curve).
_CURVES: dict[str, tuple[str, str, Sequence[str]]] = {
    "UniformRSD": ("method=uniform_rsd", "delta", ("1.1", "1.25", "1.5", "2", "3")),
    "Cool-SD, exponential": ("method=cool_sd", "delta", ("1.1", "1.5", "2", "3", "5")),
    "Cool-SD, linear": ("method=cool_sd schedule=linear", "delta", ("1.1", "1.25", "1.5", "2", "3")),
    "front RSD": ("method=cool_sd floor=1.0 nu=2.0", "delta", ("0.3", "0.5", "1.1", "2", "4")),
    "LANTERN++": ("method=lantern_pp", "lam", ("1.5", "2", "3", "5", "10")),
    "LANTERN++, optimal residual": ("method=lantern_pp resample=optimal", "lam", ("1.5", "2", "3", "5", "10")),
}
_CHAIN, _TREE = "drafter=eagle window=5", "tree=mc_sim_7b_63"


def _key(label: str) -> str:
    return label.replace(", ", "_").replace(" ", "_").lower()


def _tradeoff() -> Table:
    lines = [Line("vanilla", "vanilla", "method=vanilla")]
    panels = []
    for shape, overrides in (("chain of 5", _CHAIN), ("tree of 25", _TREE)):
        suffix = shape.split()[0]
        exact = Line(f"exact_{suffix}", f"exact, {shape}", f"method=eagle1 {overrides}")
        lines.append(exact)
        curves = []
        for label, (method, name, values) in _CURVES.items():
            points = [
                Line(
                    _key(f"{label}_{value}_{suffix}".replace("+", "p")),
                    f"{label}, {SYMBOLS[name]}={value}, {shape}",
                    f"{method} {overrides} {name}={value}",
                )
                for value in values
            ]
            lines += points
            curves.append(Curve(label, (exact.key, *(line.key for line in points))))
        panels.append(Panel(f"EAGLE-1, {shape}", tuple(curves)))
    y = ("emitted_kl", "image_reward", "clip_score")
    return _table(
        "rules_tradeoff",
        "Which rule pays: quality against accepted length on the embedded model",
        columns=(*_STEPS, *_QUALITY),
        lines=tuple(lines),
        remarks=(
            "Perplexity is no distance from the target: a rule that sharpens its distribution has less than vanilla "
            "decoding. Rows without a KL divergence are older than the column, and the figure leaves them out of its "
            "axis.",
        ),
        figure=TableFigure(QUALITY_AGAINST, y, "vanilla", tuple(panels)),
    )


#: Curve label -> (overrides, parameter, its values along the curve), on chains of 5.
_RELAXED: dict[str, tuple[str, str, Sequence[str]]] = {
    "UniformRSD": ("rule=uniform", "delta", ("1.3", "1.7", "2.6", "4")),
    "Cool-SD, exponential": ("rule=cool", "delta", ("0.8", "1.1", "2")),
    "Cool-SD, exponential, Eq. 11": ("rule=cool resample=vanilla", "delta", ("1.1", "2")),
    "Cool-SD, linear": ("rule=cool schedule=linear", "delta", ("1.1", "1.5", "3")),
    "Cool-SD, linear, Eq. 11": ("rule=cool schedule=linear resample=vanilla", "delta", ("1.5", "3")),
    "LANTERN++": ("rule=lantern_pp", "lam", ("1.5", "3", "10")),
    "typical": ("rule=typical", "epsilon", ("0.3", "0.09", "0.01")),
    "fixed neighbourhoods": ("rule=neighbourhood", "group", ("2", "5", "20")),
    "mentored": ("rule=mentored", "budget", ("0.01", "0.06", "0.25")),
    "band, decay 0": ("rule=band decay=0.0", "strength", ("0.37", "0.73", "1.25")),
    "band": ("rule=band decay=0.5", "strength", ("0.2", "0.4", "0.69", "0.98")),
    "band, block verification": ("rule=band decay=0.5 verification=block", "strength", ("0.2", "0.4", "0.69")),
}
#: Panel -> the overrides of its draft, and its curves: UniformRSD against the band.
_UNIFORM, _BAND = ("rule=uniform", "delta", ("1.3", "2.6")), ("rule=band decay=0.5", "strength", ("0.2", "0.69"))
_ELSEWHERE: dict[str, tuple[str, dict[str, tuple[str, str, Sequence[str]]]]] = {
    "EAGLE-1 guided, chain of 5": (
        "method=eagle_chain drafter_weights=embedded:guided",
        {"UniformRSD": _UNIFORM, "band": _BAND},
    ),
    "EAGLE-1 steps300, chain of 5": (
        "method=eagle_chain drafter_weights=embedded:steps300",
        {"UniformRSD": _UNIFORM, "band": _BAND},
    ),
    "EAGLE-1, tree of 25": ("method=eagle1", {"UniformRSD": _UNIFORM, "band": _BAND}),
    "SJD, window of 16": ("method=sjd", {"UniformRSD": _UNIFORM, "band": _BAND}),
}


def _frontier() -> Table:
    lines, panels = [], []
    for shape, (method, relaxed) in {"EAGLE-1, chain of 5": ("method=eagle_chain", _RELAXED), **_ELSEWHERE}.items():
        exact = Line(_key(f"exact_{shape}"), f"exact, {shape}", method)
        lines.append(exact)
        curves = []
        for label, (rule, name, values) in relaxed.items():
            points = [
                Line(
                    _key(f"{shape}_{label}_{value}".replace("+", "p").replace(".", "")),
                    f"{label}, {SYMBOLS.get(name, name)}={value}, {shape}",
                    f"{method} {rule} {name}={value}",
                )
                for value in values
            ]
            lines += points
            curves.append(Curve(label, (exact.key, *(line.key for line in points))))
        panels.append(Panel(shape, tuple(curves)))
    return _table(
        "frontier",
        "The frontier of relaxed rules: divergence against steps saved on the embedded model",
        n=16,
        protocol="batch=32 seed=0 baseline=false metrics=none",
        columns=(
            STEPS_SAVED,
            ACCEPTED_LENGTH,
            EMITTED_KL,
            row_column("emitted_kl_ratio"),
            row_column("emitted_ratio_max", std_over=None),
        ),
        lines=tuple(lines),
        remarks=(
            "With 32 images the error of a step compression hides differences below a fifth in KL at equal steps. The "
            "ratio to the least possible KL is of the same nodes at the same acceptance, and has no such error. For "
            "equal steps: the table frontier_equal, and specbench probe drafter=eagle.",
        ),
        figure=TableFigure(("step_compression",), ("emitted_kl", "emitted_kl_ratio"), "", tuple(panels)),
    )


#: UniformRSD's delta -> a band's strength with as many tokens per round (specbench probe drafter=eagle).
_EQUAL_TOKENS = {"1.3": "0.2", "1.7": "0.4", "2.6": "0.69"}


def _frontier_equal() -> Table:
    lines, tests = [], []
    for delta, strength in _EQUAL_TOKENS.items():
        uniform = Line(f"uniform_{delta}", f"UniformRSD, δ={delta}", f"method=eagle_chain rule=uniform delta={delta}")
        band = Line(f"band_{strength}", f"band, strength={strength}", f"method=band decay=0.5 strength={strength}")
        lines += [uniform, band]
        tests += [
            TableTest(statistic, label, band.key, uniform.key)
            for statistic, label in (("emitted_kl", "Emitted KL"), ("steps", "Steps"), ("scenes_reward", "Reward"))
        ]
    return _table(
        "frontier_equal",
        "The band and UniformRSD at equal tokens per round: chains of 5 on the embedded model",
        n=120,
        protocol="batch=40 seed=0 baseline=false metrics=scenes_reward",
        columns=(STEPS_SAVED, EMITTED_KL, row_column("emitted_kl_ratio"), REWARD),
        lines=tuple(lines),
        remarks=(
            "Nothing here is interpolated: each strength is the one that gives a band as many tokens per round as "
            "UniformRSD has when both are replayed on the same chains (specbench probe drafter=eagle). The paired test "
            "of the steps says how equal they are in these runs.",
        ),
        tests=tuple(tests),
    )


_WINDOWS = {
    "vanilla": "method=vanilla",
    "jacobi": "method=jacobi",
    "sjd": "method=sjd",
    "sjd, no refinement": "method=sjd refine=false",
    "sjd_isp": "method=sjd_isp",
    "scd, maximal": "method=scd",
    "scd, gumbel": "method=scd coupling=gumbel",
    "sjd_pac, no continuation": "method=sjd_pac coupling=none",
    "sjd_pac": "method=sjd_pac",
    "sjd_pac, comb": "method=sjd_pac tree=comb",
}
_DRAFTERS = {
    "EAGLE-1, chain of 5": _CHAIN,
    "EAGLE-3-style, chain of 5": _CHAIN.replace("eagle", "eagle3"),
    "EAGLE-1, tree of 25": _TREE,
    "EAGLE-3-style, tree of 25": f"drafter=eagle3_tree {_TREE}",
}
TRADEOFF = _tradeoff()
#: Between exact decoding and the strongest relaxation of every curve.
_EQUAL = {
    "EAGLE-1, chain of 5": (("accepted_length_mean", 2.2), ("step_compression", 2.1)),
    "EAGLE-1, tree of 25": (("accepted_length_mean", 2.65), ("step_compression", 2.57)),
}
TABLES = (
    TRADEOFF,
    replace(
        TRADEOFF,
        id="rules_equal",
        title="Which rule pays, at equal accepted length and at equal step compression",
        matched=Matched(("emitted_kl", "perplexity", "image_reward"), _EQUAL),
    ),
    _frontier(),
    _frontier_equal(),
    _table(
        "jacobi_windows",
        "What Jacobi windows save: lossless decoding without a drafter network on the embedded model",
        columns=(*_STEPS, *_QUALITY),
        lines=tuple(Line(_key(label), label, own) for label, own in _WINDOWS.items()),
    ),
    _table(
        "eagle3_gain",
        "What several layers gain a drafter of equal size: lossless decoding on the embedded model",
        columns=(*_STEPS, row_column("draft_tv", "TV of draft and target", 4, std_over=None)),
        lines=tuple(Line(_key(label), label, f"method=eagle1 {own}") for label, own in _DRAFTERS.items()),
    ),
)
