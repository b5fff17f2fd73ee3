"""The tables of SJD (arXiv 2410.01699), measured on the embedded model.

Another seed's captions replace the paper's second set of prompts (PartiPrompts): the model has one world only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specbench.tables.definitions import (
    ALONE,
    LATENCY,
    OTHER_MODELS,
    OTHER_PROMPTS,
    PERPLEXITY,
    POINTS_ONLY,
    REWARD,
    SJD_CLIP,
    SJD_FID,
    SPEEDUP,
    STEPS_SAVED,
    TOGETHER,
    Curve,
    Line,
    Maps,
    Panel,
    Table,
    TableFigure,
    row_column,
    two_prompt_sets,
)

_alone = partial(Table, paper="arXiv 2410.01699", n=64)
_together = partial(Table, paper="arXiv 2410.01699", n=100, protocol=TOGETHER)
_DECODERS = (
    ("vanilla", "auto-regression"),
    ("jacobi", "Jacobi decoding"),
    ("sjd", "SJD"),
    ("sjd_isp", "SJD, horizontal repetition"),
)
_LINES = tuple(Line(name, label, f"method={name}", {"method_key": name}) for name, label in _DECODERS)
_TOP_K = {"10": "10", "100": "100", "2000": "512"}
_WINDOWS = tuple(
    Line(window, f"SJD, window {window}", f"method=sjd window={window}") for window in ("4", "8", "16", "32", "64")
)
_QUALITY = (SJD_CLIP, REWARD, STEPS_SAVED)
_CLIP_100 = "The paper's CLIP scores are cosines times 100."
_VOCABULARY = "The embedded codebook has 512 codes, all of which may be sampled next to the paper's K = 2000."


def _over_top_k(decoders: Sequence[tuple[str, str]], printed: bool = False) -> tuple[Line, ...]:
    return tuple(
        Line(
            f"{name}_{k}",
            f"{label}, K={k}",
            f"method={name} top_k={ours}",
            {"method_key": name, "top_k": k} if printed else None,
            elsewhere=f"method={name} top_k={k}",
        )
        for name, label in decoders
        for k, ours in _TOP_K.items()
    )


def _compression(x: str, panel: str, curves: Sequence[Curve]) -> TableFigure:
    return TableFigure((x,), ("step_compression",), "", (Panel(panel, tuple(curves)),))


TABLES = (
    _alone(
        "sjd_table3",
        "SJD, Table 3: LlamaGen with and without SJD on two sets of prompts",
        protocol="batch=1",
        columns=(SPEEDUP, STEPS_SAVED, SJD_FID, SJD_CLIP),
        lines=two_prompt_sets((("vanilla", "LlamaGen", "vanilla"), ("sjd", "LlamaGen with SJD", "sjd"))),
        remarks=(OTHER_MODELS, _CLIP_100, OTHER_PROMPTS),
    ),
    _alone(
        "sjd_table4",
        "SJD, Table 4: four decoders",
        protocol=ALONE,
        columns=(LATENCY, SPEEDUP, STEPS_SAVED, SJD_FID, SJD_CLIP),
        lines=_LINES,
        remarks=(OTHER_MODELS, _CLIP_100),
    ),
    _alone(
        "sjd_table5",
        "SJD, Table 5: four decoders on other prompts",
        protocol="batch=1 seed=1",
        columns=(LATENCY, SPEEDUP, STEPS_SAVED, SJD_CLIP),
        lines=_LINES,
        remarks=(OTHER_MODELS, _CLIP_100, OTHER_PROMPTS),
    ),
    _together(
        "sjd_table6",
        "SJD, Table 6: perplexity of four decoders over top-K",
        columns=(PERPLEXITY,),
        lines=_over_top_k(_DECODERS, printed=True),
        remarks=(
            OTHER_MODELS,
            _VOCABULARY,
            "A small K leaves likely tokens only, so that the perplexity before top-K falls with K.",
        ),
    ),
    _together(
        "sjd_table7",
        "SJD, Table 7: quality of three decoders over top-K",
        columns=_QUALITY,
        lines=_over_top_k(_DECODERS[:3]),
        remarks=("The paper's values are lost, and it has HPSv2 instead of the reward.", _VOCABULARY),
    ),
    _together(
        "sjd_table8",
        "SJD, Table 8: quality over the image size",
        columns=_QUALITY,
        lines=tuple(
            Line(
                size,
                f"SJD, {size} pixels",
                None,
                without="The model generates images of one size.",
                elsewhere=f"method=sjd size={size}",
            )
            for size in ("512", "768", "1024")
        ),
        remarks=("The paper's values are lost; that its ablation is of the size is a guess.",),
    ),
    _together(
        "sjd_table9",
        "SJD, Table 9: quality over the window's length",
        columns=_QUALITY,
        lines=_WINDOWS,
        remarks=("The paper's values are lost; that its ablation is of the window is a guess.",),
    ),
    _together(
        "sjd_fig6",
        "SJD, Fig 6: step compression over top-K",
        columns=(STEPS_SAVED,),
        lines=_over_top_k(_DECODERS[1:3]),
        remarks=(POINTS_ONLY, _VOCABULARY),
        figure=_compression(
            "top_k",
            "window 16",
            [Curve(label, tuple(f"{name}_{k}" for k in _TOP_K)) for name, label in _DECODERS[1:3]],
        ),
    ),
    _together(
        "sjd_fig8",
        "SJD, Fig 8: step compression over the window's length",
        columns=(STEPS_SAVED,),
        lines=_WINDOWS,
        remarks=(POINTS_ONLY,),
        figure=_compression("window", "SJD", [Curve("SJD", tuple(line.key for line in _WINDOWS))]),
    ),
    _together(
        "sjd_fig13",
        "SJD, Fig 13: where drafts are accepted",
        columns=(STEPS_SAVED,),
        lines=tuple(Line(name, label, f"method={name}") for name, label in _DECODERS[2:]),
        remarks=("The paper draws the accepted length of strips; this is the share of images, position by position.",),
        figure=Maps("drafted_by_position", "share of accepted drafts"),
    ),
    _together(
        "sjd_table10",
        "SJD, Table 10: how new positions are initialised",
        columns=_QUALITY,
        lines=tuple(
            Line(init, f"SJD, {text}", f"method=sjd init={init}", {"init": text})
            for init in ("horizontal_sample", "vertical_sample", "horizontal_repeat", "vertical_repeat", "random")
            for text in [init.replace("_", " ")]
        ),
        remarks=(
            OTHER_MODELS,
            _CLIP_100,
            "The paper takes prompts with simple patterns, not listed there, and has HPSv2 instead of the reward.",
        ),
    ),
    _together(
        "sjd_table11",
        "SJD, Table 11: log-probability of the tokens",
        n=500,
        columns=(
            row_column(
                "log_prob_mean",
                "Log-probability of a token (nats)",
                decimals=3,
                measured_as="natural logarithm, under the guided target before top-k and top-p",
                published_as="mean and spread over the tokens of all images; the logarithm's base is not stated",
                name="token_logprob_mean",
                std_over="tokens",
                published_spread="token_logprob_std",
            ),
        ),
        lines=_LINES[::2],
        remarks=(OTHER_MODELS,),
    ),
)
