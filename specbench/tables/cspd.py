"""The tables of continuous speculative decoding (CSpD, arXiv 2411.11925), measured on the embedded pair of MAR models.

The paper's batches of 128 and 256 are not run; a batch of 64 replaces them. Runs of tables with a speed-up time vanilla
decoding of the same classes, too, in batches of the same size that alternate with the method's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbench.rows.seconds import is_timed
from specbench.tables.definitions import (
    FID,
    POINTS_ONLY,
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
_FEWER = {"1": " n=16", "8": " n=32"}
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
    measured_as="images per second over those of vanilla decoding, alternating batches of the same size",
    published_as="the paper does not state what is timed",
    name="speedup_latency",
)
_EXPECTED = row_column("speedup_expected", measured_as="from the acceptance rate and the draft's cost", std_over=None)
_STEPS = row_column(
    "speedup_step",
    measured_as="target passes of vanilla decoding over ours; of the released code 64 / (s + (64 - s) / γ, rounded up) "
    "whatever is accepted, s of the 64 tokens sampled without drafts: it keeps what follows a rejection",
    std_over=None,
)
_TRIES = row_column("residual_tries", "Tries", measured_as="proposals for the token after a rejection, of 100 at most")
_RELEASED = "method=cspd_paper"


def _table(name: str, title: str, columns: tuple[Column, ...], lines: Sequence[Line], *remarks: str) -> Table:
    models = "Measured and published lines are of different models: compare the lines of one model with each other."
    paper, remarks = "arXiv 2411.11925", (models, *remarks)
    timed = " timing=true" if any(is_timed(column.key) for column in columns) else ""
    return Table(name, title, paper, 64, f"seed=0{timed}", columns, tuple(lines), remarks, model="mar_scenes")


def _speed_lines() -> list[Line]:
    lines = []
    for gamma in _GAMMAS:
        for batch in ("1", "8", "64", "128", "256"):
            own = f"{_RELEASED} prefill=0.15 gamma={gamma} batch={batch}{_FEWER.get(batch, '')}"
            lines.append(
                Line(
                    f"cspd_{gamma}_{batch}",
                    f"CSpD, γ={gamma}, batch {batch}",
                    own if int(batch) <= 64 else None,
                    None if batch == "64" else {"gamma": gamma, "batch_size": batch},
                    "No run of this batch size; see the one of 64.",
                )
            )
    exact = "method=cspd gamma={} batch=64"
    return lines + [Line(f"exact_{g}_64", f"exact, γ={g}, batch 64", exact.format(g)) for g in _EXACT_GAMMAS]


def _alignment_lines() -> list[Line]:
    lines = []
    for gamma in _GAMMAS:
        for aligned, align, text in (("yes", "true", "aligned"), ("no", "false", "not aligned")):
            own = f"{_RELEASED} prefill=0.05 gamma={gamma} align={align} batch=64"
            printed = {"gamma": gamma, "alignment": aligned}
            lines.append(Line(f"{gamma}_{aligned}", f"γ={gamma}, {text}", own, printed))
    return lines


def _prefill_lines() -> list[Line]:
    lines = []
    for gamma in _GAMMAS:
        for share in ("0", "0.05", "0.15"):
            own = f"{_RELEASED} prefill={share} gamma={gamma} batch=64"
            label, printed = f"γ={gamma}, {float(share):.0%} without drafts", {"gamma": gamma, "prefill_ratio": share}
            lines.append(Line(f"{gamma}_{share}", label, own, printed))
    return lines


def _quality() -> Table:
    lines = []
    for part, key, text, scale in (
        ("w/o CFG", "none", "without guidance", "1"),
        ("w/ CFG", "on", "with guidance", "2"),
    ):
        for name, label, method in (
            ("vanilla", "target alone", "method=vanilla"),
            ("cspd", "CSpD, γ=8", f"{_RELEASED} prefill=0.05 gamma=8"),
        ):
            own = f"{method} cfg_scale={scale} batch=64 baseline=false"
            lines.append(Line(f"{name}_{key}", f"{label}, {text}", own, {"method_key": name, "part": part}))
    fid = "FID: 50,000 images of ImageNet's classes; the reference is not stated"
    columns = (
        replace(FID, published_spread="fid_std", published_as=fid),
        row_column(
            "inception_score",
            published_as="Inception-V3, 50,000 images",
            published_spread="inception_score_std",
        ),
    )
    table = _table(
        "cspd_table2",
        "CSpD, Table 2: quality with and without guidance",
        columns,
        lines,
        "All lines take the mean in the last diffusion step, as MAR's own sampler does (final_noise=false).",
    )
    return replace(table, n=200, protocol="seed=0 metrics=[scenes_fid,scenes_inception_score]")


def _figure(
    name: str, title: str, lines: Sequence[Line], figure: TableFigure | Series | Maps, column: Column = _ACCEPTANCE
) -> Table:
    """A figure: all its points are measured ones."""
    measured = [replace(line, published=None) for line in lines]
    return replace(_table(name, f"CSpD, {title}", (column,), measured, POINTS_ONLY), figure=figure)


def _over_gamma(column: str) -> TableFigure:
    shown = (("released, 15 % without drafts", "cspd", _GAMMAS[::-1]), ("exact (full paths)", "exact", _EXACT_GAMMAS))
    curves = tuple(Curve(label, tuple(f"{key}_{gamma}_64" for gamma in gammas)) for label, key, gammas in shown)
    return TableFigure(("gamma",), (column,), "", (Panel("batch 64", curves),))


def _sweep(
    name: str, title: str, x: str, values: Sequence[str], panel: str, curves: dict[str, dict[str, str]]
) -> Table:
    """Acceptance over a parameter, one curve for each label and its other parameters."""
    lines, drawn = [], []
    for label, others in curves.items():
        points = [_released(**(others | {x: value})) for value in values]
        lines += points
        drawn.append(Curve(label, tuple(line.key for line in points)))
    figure = TableFigure((x,), ("acceptance_rate",), "", (Panel(panel, tuple(drawn)),))
    return replace(_figure(name, title, lines, figure), n=32)  # a rate over thousands of drafts


def _released(**parameters: str) -> Line:
    own = " ".join(f"{name}={value}" for name, value in parameters.items())
    label = ", ".join(f"{SYMBOLS.get(name, name)}={value}" for name, value in parameters.items())
    return Line("_".join(parameters.values()), label, f"{_RELEASED} {own} batch=64 baseline=false")


_BATCHES_OF_64 = [line for line in _speed_lines() if line.key.endswith("_64")][::-1]
TABLES = (
    _table(
        "cspd_table1",
        "CSpD, Table 1: speed-up by draft length and batch size",
        (_ACCEPTANCE, _STEPS, _SPEEDUP, _EXPECTED),
        _speed_lines(),
        "The lines of CSpD are measured as its released code decodes, which is not lossless (`specbench audit`), with "
        "the first 15 % of an image sampled without drafts, as the paper's values must have been; the exact lines "
        "verify full paths.",
    ),
    _quality(),
    _table("cspd_table3", "CSpD, Table 3: what aligned trajectories gain", (_ACCEPTANCE,), _alignment_lines()),
    _table(
        "cspd_table4",
        "CSpD, Table 4: what a start without drafts gains",
        (_ACCEPTANCE, _STEPS, _SPEEDUP),
        _prefill_lines(),
    ),
    _figure("cspd_fig8", "Fig 8: acceptance by draft length", _BATCHES_OF_64, _over_gamma("acceptance_rate")),
    _figure(
        "cspd_fig11",
        "Fig 11: acceptance over the image",
        [line for line in _prefill_lines() if line.key.startswith("8_")],
        Series("acceptance_by_step", "step that generates the token", "acceptance rate"),
    ),
    _sweep(
        "cspd_fig13",
        "Fig 13: acceptance over guidance",
        "cfg_scale",
        ("1", "2", "3", "4", "6"),
        "5 % without drafts",
        {f"γ={gamma}": {"gamma": gamma} for gamma in ("4", "8", "16")},
    ),
    _sweep(
        "cspd_fig14",
        "Fig 14: acceptance over temperature",
        "temperature",
        ("0.5", "0.7", "0.85", "1", "1.2"),
        "γ=8, 5 % without drafts",
        {"without guidance": {"cfg_scale": "1"}, "with guidance": {"cfg_scale": "2"}},
    ),
    _figure(
        "cspd_fig15", "Fig 15: tries of the residual sampler", _BATCHES_OF_64, _over_gamma("residual_tries"), _TRIES
    ),
    _figure(
        "cspd_fig16",
        "Fig 16: where drafts are accepted",
        [line for line in _prefill_lines() if line.key == "8_0.05"],
        Maps("drafted_by_position", "share of accepted drafts"),
    ),
)
