"""The tables of SJD-PAC (arXiv 2603.18599), measured on the embedded model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from specbench.tables.definitions import (
    ENTROPY,
    OTHER_MODELS,
    QUALITY,
    SPEEDUP,
    STEPS_SAVED,
    TOGETHER,
    Column,
    Line,
    Series,
    Stack,
    Table,
)

PAPER = "arXiv 2603.18599"
_together = partial(Table, paper=PAPER, n=100, protocol=TOGETHER)
_CLIP = replace(QUALITY[0], published_as="cosines times 100; the released code takes CLIP ViT-B/16")
_FID = replace(QUALITY[1], published_as="FID; the released code takes pytorch-fid against the images of COCO val2017")
_METHODS = (
    ("vanilla", "vanilla", "vanilla"),
    ("eagle2", "EAGLE", "eagle2"),
    ("sjd", "SJD", "sjd"),
    ("lantern_pp", "LANTERN++", "lantern_pp"),
    ("gsd", "GSD", "gsd"),
    ("", "SJD2", "sjd2"),
    ("sjd_pac", "SJD-PAC", "sjd_pac"),
)

#: Arguments of the runs whose tree is larger than the preset's window.
_ROOM = {(4, 4): ("window=96",)}


def _main() -> tuple[Line, ...]:
    lines = []
    for part, seed, data in (("MS-COCO 2017", "0", "coco2017"), ("PartiPrompts", "1", "parti")):
        for method, label, key in _METHODS:
            of = "" if seed == "0" else ", other prompts"
            words = (f"method={method}", f"seed={seed}") if method else None
            there = (f"method={method}", f"data={data}") if method else None
            lines.append(Line(f"{key}_{seed}", label + of, words, {"method_key": key, "part": part}, elsewhere=there))
    return tuple(lines)


TABLES = (
    Table(
        id="sjdpac_table1",
        title="SJD-PAC, Table 1: main comparison on two sets of prompts",
        paper=PAPER,
        n=64,
        protocol=("batch=1",),
        columns=(STEPS_SAVED, SPEEDUP, _FID, _CLIP),
        lines=_main(),
        remarks=(
            OTHER_MODELS,
            "The paper's CLIP scores are cosines times 100. SJD2 needs a fine-tuned target.",
            "Instead of PartiPrompts, the embedded model takes other captions of its own world (seed 1).",
        ),
    ),
    _together(
        id="sjdpac_table2",
        title="SJD-PAC, Table 2: what proactive drafting and adaptive continuation gain",
        columns=(STEPS_SAVED,),
        lines=(
            Line("sjd_32", "SJD, window 32", ("method=sjd", "window=32"), {"method_key": "sjd", "window": "32"}),
            Line(
                "pd_32",
                "with proactive drafting",
                ("method=sjd_pac", "coupling=none", "window=32"),
                {"method_key": "sjd_pd", "window": "32"},
            ),
            Line(
                "pac_32",
                "with adaptive continuation, too",
                ("method=sjd_pac", "window=32"),
                {"method_key": "sjd_pac", "window": "32"},
            ),
            Line(
                "pac_64",
                "the same, window 64",
                ("method=sjd_pac", "window=64"),
                {"method_key": "sjd_pac", "window": "64"},
            ),
        ),
        remarks=(OTHER_MODELS,),
    ),
    _together(
        id="sjdpac_table3",
        title="SJD-PAC, Table 3: width K and depth D of the proactive tree",
        columns=(STEPS_SAVED,),
        lines=tuple(
            Line(
                f"{width}_{depth}",
                f"K={width}, D={depth}",
                ("method=sjd_pac", f"width={width}", f"depth={depth}", *_ROOM.get((width, depth), ())),
                None,
            )
            for width, depth in ((2, 3), (3, 3), (4, 3), (5, 3), (4, 2), (4, 4))
        ),
        remarks=(
            "The paper's values are lost; it calls K = 4 and D = 3 best.",
            "A full tree of K = 4 and D = 4 has 84 nodes: its window is 96, that of the others 64.",
        ),
    ),
    Table(
        id="sjdpac_table4",
        title="SJD-PAC, Table 4: milliseconds of a step, part by part",
        paper=PAPER,
        n=0,
        protocol=("batch=1",),
        columns=tuple(
            Column(f"{part}_ms", f"{label} (ms)", "lower", 2)
            for part, label in (
                ("step", "Step"),
                ("forward", "Target's pass"),
                ("draft", "Drafting"),
                ("verify", "Verification"),
                ("commit", "Caches"),
                ("rest", "Rest"),
            )
        ),
        lines=(
            Line("vanilla", "vanilla", ("method=vanilla",), None),
            Line("sjd_pac", "SJD-PAC, window 64", ("method=sjd_pac", "window=64"), None),
        ),
        remarks=("The paper's values are lost. Medians over steps in the middle of the image.",),
        figure=Stack(("forward_ms", "draft_ms", "verify_ms", "commit_ms", "rest_ms"), "milliseconds of a step"),
        rows_of="bench",
    ),
    Table(
        id="sjdpac_fig4",
        title="SJD-PAC, Fig 4: which earlier tokens the next one depends on",
        paper=PAPER,
        n=16,
        protocol=("seed=0", "method=vanilla"),
        columns=(ENTROPY,),
        lines=(Line("image", "images", (), None),),
        remarks=(
            "Total variation between a token's distribution and the one where the position that gives it does not "
            "attend to the keys and values of the position at that distance before it; 16 is the row above. The values "
            "of the paper's curves are in the authors' script: 0.32, 0.06, 0.042 and 0.024 at distances 1, 3, 5, 15.",
        ),
        figure=Series("tv_by_distance", "distance (tokens)", "total variation", first=1),
        rows_of="probe",
    ),
    _together(
        id="sjdpac_fig1",
        title="SJD-PAC, Fig 1: tokens of a step, and what they gain",
        n=500,
        columns=(STEPS_SAVED,),
        lines=(
            Line("sjd", "SJD", ("method=sjd",), None),
            Line("sjd_pac", "SJD-PAC", ("method=sjd_pac",), None),
        ),
        remarks=("The paper's bars are approximate: their numbers are those typed into the authors' script.",),
        figure=Series(
            "accepted_histogram",
            "tokens of a step, its own among them",
            "share of the steps",
            1,
            bars=True,
            shares=True,
        ),
    ),
)
