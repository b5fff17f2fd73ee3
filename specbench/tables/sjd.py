"""The tables of SJD (arXiv 2410.01699), measured on the embedded model.

Another seed's captions replace the paper's second set of prompts (PartiPrompts): the model has one world only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from specbench.tables.definitions import (
    ALONE,
    LATENCY,
    OTHER_MODELS,
    PERPLEXITY,
    QUALITY,
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
)

PAPER = "arXiv 2410.01699"
_alone = partial(Table, paper=PAPER, n=64, protocol=ALONE)
_together = partial(Table, paper=PAPER, n=100, protocol=TOGETHER)
_CLIP = replace(QUALITY[0], published_as="cosines times 100; the released code takes CLIP ViT-B/16")
_FID = replace(QUALITY[1], published_as="FID; the released code takes pytorch-fid against the images of COCO val2017")
_REWARD = QUALITY[2]
_DECODERS = (
    ("vanilla", "auto-regression"),
    ("jacobi", "Jacobi decoding"),
    ("sjd", "SJD"),
    ("sjd_isp", "SJD, horizontal repetition"),
)
_TOP_K = (("10", "top_k=10"), ("100", "top_k=100"), ("2000", "top_k=512"))
_WINDOWS = tuple(
    Line(window, f"SJD, window {window}", ("method=sjd", f"window={window}"), None)
    for window in ("4", "8", "16", "32", "64")
)
_DRAWN = "The paper draws its points and prints no values: nothing published to compare with."
_CLIP_100 = "The paper's CLIP scores are cosines times 100."
_VOCABULARY = "The embedded codebook has 512 codes, all of which may be sampled next to the paper's K = 2000."
_OTHER_PROMPTS = "Instead of PartiPrompts, the embedded model takes other captions of its own world (seed 1)."


def _decoders(*words: str) -> tuple[Line, ...]:
    return tuple(Line(name, label, (f"method={name}", *words), {"method_key": name}) for name, label in _DECODERS)


def _two_sets() -> tuple[Line, ...]:
    lines = []
    for part, seed, data in (("MS-COCO 2017", "0", "coco2017"), ("PartiPrompts", "1", "parti")):
        for name, label in (("vanilla", "LlamaGen"), ("sjd", "LlamaGen with SJD")):
            of = "" if seed == "0" else ", other prompts"
            words, there = (f"method={name}", f"seed={seed}"), (f"method={name}", f"data={data}")
            printed = {"method_key": name, "part": part}
            lines.append(Line(f"{name}_{seed}", label + of, words, printed, elsewhere=there))
    return tuple(lines)


def _over_top_k(decoders: tuple[tuple[str, str], ...], printed: bool) -> tuple[Line, ...]:
    return tuple(
        Line(
            f"{name}_{k}",
            f"{label}, K={k}",
            (f"method={name}", word),
            {"method_key": name, "top_k": k} if printed else None,
            elsewhere=(f"method={name}", f"top_k={k}"),
        )
        for name, label in decoders
        for k, word in _TOP_K
    )


TABLES = (
    Table(
        id="sjd_table3",
        title="SJD, Table 3: LlamaGen with and without SJD on two sets of prompts",
        paper=PAPER,
        n=64,
        protocol=("batch=1",),
        columns=(SPEEDUP, STEPS_SAVED, _FID, _CLIP),
        lines=_two_sets(),
        remarks=(OTHER_MODELS, _CLIP_100, _OTHER_PROMPTS),
    ),
    _alone(
        id="sjd_table4",
        title="SJD, Table 4: four decoders",
        columns=(LATENCY, SPEEDUP, STEPS_SAVED, _FID, _CLIP),
        lines=_decoders(),
        remarks=(OTHER_MODELS, _CLIP_100),
    ),
    Table(
        id="sjd_table5",
        title="SJD, Table 5: four decoders on other prompts",
        paper=PAPER,
        n=64,
        protocol=("batch=1", "seed=1"),
        columns=(LATENCY, SPEEDUP, STEPS_SAVED, _CLIP),
        lines=_decoders(),
        remarks=(OTHER_MODELS, _CLIP_100, _OTHER_PROMPTS),
    ),
    _together(
        id="sjd_table6",
        title="SJD, Table 6: perplexity of four decoders over top-K",
        columns=(PERPLEXITY,),
        lines=_over_top_k(_DECODERS, True),
        remarks=(
            OTHER_MODELS,
            _VOCABULARY,
            "A small K leaves likely tokens only, so that the perplexity before top-K falls with K.",
        ),
    ),
    _together(
        id="sjd_table7",
        title="SJD, Table 7: quality of three decoders over top-K",
        columns=(_CLIP, _REWARD, STEPS_SAVED),
        lines=_over_top_k(_DECODERS[:3], False),
        remarks=("The paper's values are lost, and it has HPSv2 instead of the reward.", _VOCABULARY),
    ),
    _together(
        id="sjd_table8",
        title="SJD, Table 8: quality over the image size",
        columns=(_CLIP, _REWARD, STEPS_SAVED),
        lines=tuple(
            Line(
                size,
                f"SJD, {size} pixels",
                None,
                None,
                "The model generates images of one size.",
                elsewhere=("method=sjd", f"size={size}"),
            )
            for size in ("512", "768", "1024")
        ),
        remarks=("The paper's values are lost; that its ablation is of the size is a guess.",),
    ),
    _together(
        id="sjd_table9",
        title="SJD, Table 9: quality over the window's length",
        columns=(_CLIP, _REWARD, STEPS_SAVED),
        lines=_WINDOWS,
        remarks=("The paper's values are lost; that its ablation is of the window is a guess.",),
    ),
    _together(
        id="sjd_fig6",
        title="SJD, Fig 6: step compression over top-K",
        columns=(STEPS_SAVED,),
        lines=_over_top_k(_DECODERS[1:3], False),
        remarks=(_DRAWN, _VOCABULARY),
        figure=TableFigure(
            "top_k",
            ("step_compression",),
            "",
            (
                Panel(
                    "window 16",
                    tuple(Curve(label, tuple(f"{name}_{k}" for k, _ in _TOP_K)) for name, label in _DECODERS[1:3]),
                ),
            ),
        ),
    ),
    _together(
        id="sjd_fig8",
        title="SJD, Fig 8: step compression over the window's length",
        columns=(STEPS_SAVED,),
        lines=_WINDOWS,
        remarks=(_DRAWN,),
        figure=TableFigure(
            "window", ("step_compression",), "", (Panel("SJD", (Curve("SJD", tuple(w.key for w in _WINDOWS)),)),)
        ),
    ),
    _together(
        id="sjd_fig13",
        title="SJD, Fig 13: where drafts are accepted",
        columns=(STEPS_SAVED,),
        lines=(
            Line("sjd", "SJD", ("method=sjd",), None),
            Line("sjd_isp", "SJD, horizontal repetition", ("method=sjd_isp",), None),
        ),
        remarks=("The paper draws the accepted length of strips; this is the share of images, position by position.",),
        figure=Maps("drafted_by_position", "share of accepted drafts"),
    ),
    _together(
        id="sjd_table10",
        title="SJD, Table 10: how new positions are initialised",
        columns=(_CLIP, _REWARD, STEPS_SAVED),
        lines=tuple(
            Line(
                init,
                f"SJD, {init.replace('_', ' ')}",
                ("method=sjd", f"init={init}"),
                {"init": init.replace("_", " ")},
            )
            for init in ("horizontal_sample", "vertical_sample", "horizontal_repeat", "vertical_repeat", "random")
        ),
        remarks=(
            OTHER_MODELS,
            _CLIP_100,
            "The paper takes prompts with simple patterns, which it does not list, and has HPSv2 instead of the "
            "reward.",
        ),
    ),
    _together(
        id="sjd_table11",
        title="SJD, Table 11: log-probability of the tokens",
        n=500,
        columns=(
            row_column(
                "log_prob_mean",
                spread="log_prob_std",
                spread_is="standard deviation over tokens",
                measured_as="natural logarithm, under the guided target before top-k and top-p",
                published="token_logprob_mean",
                published_spread="token_logprob_std",
                published_as="mean and spread over the tokens of all images; the logarithm's base is not stated",
            ),
        ),
        lines=tuple(
            Line(name, label, (f"method={name}",), {"method_key": name})
            for name, label in (("vanilla", "auto-regression"), ("sjd", "SJD"))
        ),
        remarks=(OTHER_MODELS,),
    ),
)
