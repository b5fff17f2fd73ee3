"""Our own experiments, besides the papers' tables: which rule pays, what Jacobi windows save, and what an
EAGLE-3-style drafter gains.

They take an hour or more on a CPU, so `specbench tables` runs them only when they are named; `make comparisons` does.
"""

from __future__ import annotations

from specbench.tables.definitions import (
    ACCEPTANCE,
    ACCEPTED_LENGTH,
    PERPLEXITY,
    QUALITY,
    SYMBOLS,
    TOGETHER,
    Curve,
    Line,
    Panel,
    Table,
    TableFigure,
    row_column,
)

_STEPS = (ACCEPTED_LENGTH, ACCEPTANCE, PERPLEXITY)

#: Curve label -> (overrides, (parameter, its values along the curve)).
_CURVES = {
    "UniformRSD": (("method=uniform_rsd",), ("delta", ("1.1", "1.25", "1.5", "2", "3"))),
    "Cool-SD, exponential": (("method=cool_sd",), ("delta", ("1.1", "1.5", "2", "3", "5"))),
    "Cool-SD, linear": (("method=cool_sd", "schedule=linear"), ("delta", ("1.1", "1.25", "1.5", "2", "3"))),
    "front RSD": (("method=front_rsd",), ("delta", ("0.3", "0.5", "1.1", "2", "4"))),
    "LANTERN++": (("method=lantern_pp",), ("lam", ("1.5", "2", "3", "5", "10"))),
    "LANTERN++, optimal residual": (
        ("method=lantern_pp", "resample=optimal"),
        ("lam", ("1.5", "2", "3", "5", "10")),
    ),
}
_SHAPES = {"chain of 5": ("drafter=eagle", "window=5"), "tree of 25": ("tree=mc_sim_7b_63",)}


def _tradeoff() -> Table:
    lines = [Line("vanilla", "vanilla", ("method=vanilla",), {})]
    panels = []
    for shape, words in _SHAPES.items():
        key = shape.split()[0]
        lines.append(Line(f"exact_{key}", f"exact, {shape}", ("method=eagle1", *words), {}))
        curves = []
        for label, (method, (name, values)) in _CURVES.items():
            keys = []
            for value in values:
                keys.append(f"{label}_{value}_{key}".replace(" ", "_").replace(",", "").replace("+", "p").lower())
                text = f"{label}, {SYMBOLS[name]}={value}, {shape}"
                lines.append(Line(keys[-1], text, (*method, *words, f"{name}={value}"), {}))
            curves.append(Curve(label, (f"exact_{key}", *keys)))
        panels.append(Panel(f"EAGLE-1, {shape}", tuple(curves)))
    return Table(
        id="rules_tradeoff",
        title="Which rule pays: quality against accepted length on the embedded model",
        paper="this project's own comparison",
        n=500,
        on_request=True,
        protocol=TOGETHER,
        columns=(*_STEPS, *QUALITY),
        lines=tuple(lines),
        figure=TableFigure(
            "accepted_length_mean", ("perplexity", "image_reward", "fid", "clip_score"), "vanilla", tuple(panels)
        ),
    )


def _jacobi() -> Table:
    methods = {
        "vanilla": ("method=vanilla",),
        "jacobi": ("method=jacobi",),
        "sjd": ("method=sjd",),
        "sjd, no refinement": ("method=sjd", "refine=false"),
        "sjd_isp": ("method=sjd_isp",),
        "scd, maximal": ("method=scd",),
        "scd, gumbel": ("method=scd", "coupling=gumbel"),
        "sjd_pac, no continuation": ("method=sjd_pac", "coupling=none"),
        "sjd_pac": ("method=sjd_pac",),
        "sjd_pac, comb": ("method=sjd_pac", "tree=comb"),
    }
    return Table(
        id="jacobi_windows",
        title="What Jacobi windows save: lossless decoding without a drafter network on the embedded model",
        paper="this project's own comparison",
        n=500,
        on_request=True,
        protocol=TOGETHER,
        columns=(*_STEPS, *QUALITY),
        lines=tuple(Line(k.replace(", ", "_").replace(" ", "_"), k, words, {}) for k, words in methods.items()),
    )


def _drafters() -> Table:
    chain, tree = _SHAPES["chain of 5"][1], _SHAPES["tree of 25"]
    shapes = {
        "EAGLE-1, chain of 5": ("drafter=eagle", chain),
        "EAGLE-3-style, chain of 5": ("drafter=eagle3", chain),
        "EAGLE-1, tree of 25": tree,
        "EAGLE-3-style, tree of 25": ("drafter=eagle3_tree", *tree),
    }
    return Table(
        id="eagle3_gain",
        title="What several layers gain a drafter of equal size: lossless decoding on the embedded model",
        paper="this project's own comparison",
        n=500,
        on_request=True,
        protocol=TOGETHER,
        columns=(*_STEPS, row_column("draft_tv", "TV of draft and target", 4, spread="")),
        lines=tuple(
            Line(k.replace(", ", "_").replace(" ", "_").lower(), k, ("method=eagle1", *words), {})
            for k, words in shapes.items()
        ),
    )


TRADEOFF = _tradeoff()
TABLES = (TRADEOFF, _jacobi(), _drafters())
