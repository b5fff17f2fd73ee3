"""The tables of continuous speculative decoding (CSpD, arXiv 2411.11925), measured on the embedded pair of MAR models.

The paper's batches of 128 and 256 are not run; a batch of 64 replaces them. Every run times vanilla decoding
of the same classes in batches of the same size.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.tables.definitions import (
    QUALITY,
    SYMBOLS,
    Column,
    Curve,
    Line,
    Maps,
    Panel,
    Series,
    Table,
    TableFigure,
    row_column,
)

_GAMMAS = ("32", "16", "8", "4")
#: One image after the other takes long on a CPU, and the latencies hardly differ.
_FEWER = {"1": ("n=16",), "8": ("n=32",)}
#: Exact verification sees a copy of the image for every drafted token: on a CPU only a short draft is affordable.
_EXACT_GAMMAS = ("2",)
_ACCEPTANCE = row_column(
    "acceptance_rate",
    decimals=2,
    measured_as="accepted over verified draft tokens",
    published_as="α, of all draft tokens",
)
_SPEEDUP = row_column(
    "speedup_throughput",
    "Speed-up (×)",
    measured_as="images per second over those of vanilla decoding, batches of the same size",
    published="speedup_latency",
    published_as="the paper does not state what is timed",
)
_EXPECTED = row_column("speedup_expected", spread="", measured_as="from the acceptance rate and the draft's cost")
_STEPS = row_column("speedup_step", spread="", measured_as="target passes of vanilla decoding over ours")
_REMARKS = ("Measured and published lines are of different models: compare the lines of one model with each other.",)
_RELEASED = "method=cspd_paper"
_EXACT = ("method=cspd",)


def _table(name: str, title: str, columns: tuple[Column, ...], lines: list[Line], *remarks: str) -> Table:
    return Table(
        id=name,
        title=title,
        paper="arXiv 2411.11925",
        n=64,
        protocol=("seed=0",),
        columns=columns,
        lines=tuple(lines),
        remarks=(*_REMARKS, *remarks),
        model="mar_scenes",
    )


def _speed() -> Table:
    lines = []
    for gamma in _GAMMAS:
        for batch in ("1", "8", "64", "128", "256"):
            printed = None if batch == "64" else {"gamma": gamma, "batch_size": batch}
            label, own = f"CSpD, γ={gamma}, batch {batch}", int(batch) <= 64
            words = (
                (_RELEASED, "prefill=0.15", f"gamma={gamma}", f"batch={batch}", *_FEWER.get(batch, ())) if own else None
            )
            without = "No run of this batch size; see the one of 64."
            lines.append(Line(f"cspd_{gamma}_{batch}", label, words, printed, without))
    for gamma in _EXACT_GAMMAS:
        exact = (*_EXACT, f"gamma={gamma}", "batch=64")
        lines.append(Line(f"exact_{gamma}_64", f"exact, γ={gamma}, batch 64", exact, None))
    return _table(
        "cspd_table1",
        "CSpD, Table 1: speed-up by draft length and batch size",
        (_ACCEPTANCE, _STEPS, _SPEEDUP, _EXPECTED),
        lines,
        "The lines of CSpD are measured as its released code decodes, which is not lossless (`specbench audit`), with "
        "the first 15 % of an image sampled without drafts, as the paper's values must have been; the exact lines "
        "verify full paths.",
    )


def _alignment() -> Table:
    lines = []
    for gamma in _GAMMAS:
        for word, align in (("yes", "true"), ("no", "false")):
            words = (_RELEASED, "prefill=0.05", f"gamma={gamma}", f"align={align}", "batch=64")
            label = f"γ={gamma}, {'aligned' if word == 'yes' else 'not aligned'}"
            lines.append(Line(f"{gamma}_{word}", label, words, {"gamma": gamma, "alignment": word}))
    return _table("cspd_table3", "CSpD, Table 3: what aligned trajectories gain", (_ACCEPTANCE,), lines)


def _prefill() -> Table:
    lines = []
    for gamma in _GAMMAS:
        for share in ("0", "0.05", "0.15"):
            words = (_RELEASED, f"prefill={share}", f"gamma={gamma}", "batch=64")
            label = f"γ={gamma}, {float(share):.0%} without drafts"
            lines.append(Line(f"{gamma}_{share}", label, words, {"gamma": gamma, "prefill_ratio": share}))
    columns = (_ACCEPTANCE, _STEPS, _SPEEDUP)
    return _table("cspd_table4", "CSpD, Table 4: what a start without drafts gains", columns, lines)


def _quality() -> Table:
    lines = []
    for part, guidance, scale in (("w/o CFG", "none", "1"), ("w/ CFG", "on", "2")):
        for name, label, words in (
            ("vanilla", "target alone", ("method=vanilla", "final_noise=true")),
            ("cspd", "CSpD, γ=8", (_RELEASED, "prefill=0.05", "gamma=8")),
        ):
            of = "with guidance" if scale == "2" else "without guidance"
            given = (*words, f"cfg_scale={scale}", "batch=64", "baseline=false")
            lines.append(Line(f"{name}_{guidance}", f"{label}, {of}", given, {"method_key": name, "part": part}))
    columns = (
        replace(
            QUALITY[1],
            published_spread="fid_std",
            published_as="FID: 50,000 images of ImageNet's classes; the reference is not stated",
        ),
        row_column(
            "inception_score",
            published_as="Inception-V3, 50,000 images",
            published_spread="inception_score_std",
        ),
    )
    table = _table("cspd_table2", "CSpD, Table 2: quality with and without guidance", columns, lines)
    return replace(
        table,
        n=200,
        protocol=("seed=0", "metrics=[scenes_fid,scenes_inception_score]"),
        remarks=(
            *table.remarks,
            "The paper's target takes the mean in its last diffusion step; drafts need a density, so here the target "
            "alone samples that step, too (final_noise).",
        ),
    )


_BY_GAMMA = ("4", "8", "16", "32")
_POINTS = "The paper draws its points and prints no values: nothing published to compare with."


def _figure(
    name: str, title: str, columns: tuple[Column, ...], lines: list[Line], figure: TableFigure | Series | Maps
) -> Table:
    """A figure: all its points are measured ones."""
    drawn = _table(name, title, columns, [replace(line, published=None) for line in lines], _POINTS)
    return replace(drawn, figure=figure)


def _by_length() -> Table:
    lines = [line for line in _speed().lines if line.key.endswith("_64")][::-1]
    curves = (
        Curve("released, 15 % without drafts", tuple(f"cspd_{gamma}_64" for gamma in _BY_GAMMA)),
        Curve("exact (full paths)", tuple(f"exact_{gamma}_64" for gamma in _EXACT_GAMMAS)),
    )
    figure = TableFigure("gamma", ("acceptance_rate",), "", (Panel("batch 64", curves),))
    return _figure("cspd_fig8", "CSpD, Fig 8: acceptance by draft length", (_ACCEPTANCE,), lines, figure)


def _by_step() -> Table:
    lines = [line for line in _prefill().lines if line.key.startswith("8_")]
    figure = Series("acceptance_by_step", "step that generates the token", "acceptance rate")
    return _figure("cspd_fig11", "CSpD, Fig 11: acceptance over the image", (_ACCEPTANCE,), lines, figure)


def _by_position() -> Table:
    lines = [line for line in _prefill().lines if line.key == "8_0.05"]
    figure = Maps("drafted_by_position", "share of accepted drafts")
    return _figure("cspd_fig16", "CSpD, Fig 16: where drafts are accepted", (_ACCEPTANCE,), lines, figure)


def _released(**parameters: str) -> Line:
    words = tuple(f"{name}={value}" for name, value in parameters.items())
    label = ", ".join(f"{SYMBOLS.get(name, name)}={value}" for name, value in parameters.items())
    return Line("_".join(parameters.values()), label, (_RELEASED, *words, "batch=64", "baseline=false"), None)


def _by_guidance() -> Table:
    lines, curves = [], []
    for gamma in ("4", "8", "16"):
        points = [_released(gamma=gamma, cfg_scale=scale) for scale in ("1", "2", "3", "4", "6")]
        lines += points
        curves.append(Curve(f"γ={gamma}", tuple(line.key for line in points)))
    figure = TableFigure("cfg_scale", ("acceptance_rate",), "", (Panel("5 % without drafts", tuple(curves)),))
    drawn = _figure("cspd_fig13", "CSpD, Fig 13: acceptance over guidance", (_ACCEPTANCE,), lines, figure)
    return replace(drawn, n=32)  # a rate over thousands of drafts


def _by_temperature() -> Table:
    lines, curves = [], []
    for scale, name in (("1", "without guidance"), ("2", "with guidance")):
        points = [_released(cfg_scale=scale, temperature=t) for t in ("0.5", "0.7", "0.85", "1", "1.2")]
        lines += points
        curves.append(Curve(name, tuple(line.key for line in points)))
    figure = TableFigure("temperature", ("acceptance_rate",), "", (Panel("γ=8, 5 % without drafts", tuple(curves)),))
    drawn = _figure("cspd_fig14", "CSpD, Fig 14: acceptance over temperature", (_ACCEPTANCE,), lines, figure)
    return replace(drawn, n=32)


def _tries() -> Table:
    lines = [line for line in _speed().lines if line.key.endswith("_64")][::-1]
    column = row_column(
        "residual_tries", "Tries", measured_as="proposals for the token after a rejection, of 100 at most"
    )
    curves = tuple(
        Curve(label, tuple(f"{key}_{gamma}_64" for gamma in gammas))
        for key, label, gammas in (
            ("cspd", "released, 15 % without drafts", _BY_GAMMA),
            ("exact", "exact (full paths)", _EXACT_GAMMAS),
        )
    )
    figure = TableFigure("gamma", ("residual_tries",), "", (Panel("batch 64", curves),))
    return _figure("cspd_fig15", "CSpD, Fig 15: tries of the residual sampler", (column,), lines, figure)


TABLES = (
    _speed(),
    _quality(),
    _alignment(),
    _prefill(),
    _by_length(),
    _by_step(),
    _by_guidance(),
    _by_temperature(),
    _tries(),
    _by_position(),
)
