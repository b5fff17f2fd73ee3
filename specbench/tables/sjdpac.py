"""The tables of SJD-PAC (arXiv 2603.18599), measured on the embedded model."""

from __future__ import annotations

from functools import partial

from specbench.tables.definitions import (
    ENTROPY,
    OTHER_MODELS,
    OTHER_PROMPTS,
    SJD_CLIP,
    SJD_FID,
    SPEEDUP,
    STEPS_SAVED,
    TOGETHER,
    Column,
    Line,
    Series,
    Stack,
    Table,
    two_prompt_sets,
)

_table = partial(Table, paper="arXiv 2603.18599")
_together = partial(_table, n=100, protocol=TOGETHER, columns=(STEPS_SAVED,))
_METHODS = (
    ("vanilla", "vanilla", "vanilla"),
    ("eagle2", "EAGLE", "eagle2"),
    ("sjd", "SJD", "sjd"),
    ("lantern_pp", "LANTERN++", "lantern_pp"),
    ("gsd", "GSD", "gsd"),
    ("gsd variant=printed rule=neighbourhood", "GSD, static groups", "gsd_static"),
    ("", "SJD2", "sjd2"),
    ("sjd_pac", "SJD-PAC", "sjd_pac"),
)
_PARTS = {
    "step": "Step",
    "forward": "Target's pass",
    "draft": "Drafting",
    "verify": "Verification",
    "commit": "Caches",
    "rest": "Rest",
}


def _window(key: str, label: str, overrides: str, method: str, window: str) -> Line:
    return Line(key, label, f"{overrides} window={window}", {"method_key": method, "window": window})


TABLES = (
    _table(
        "sjdpac_table1",
        "SJD-PAC, Table 1: main comparison on two sets of prompts",
        n=64,
        protocol="batch=1",
        columns=(STEPS_SAVED, SPEEDUP, SJD_FID, SJD_CLIP),
        lines=two_prompt_sets(_METHODS),
        remarks=(
            OTHER_MODELS,
            "The paper's CLIP scores are cosines times 100. SJD2 needs a fine-tuned target.",
            OTHER_PROMPTS,
        ),
    ),
    _together(
        "sjdpac_table2",
        "SJD-PAC, Table 2: what proactive drafting and adaptive continuation gain",
        lines=(
            _window("sjd_32", "SJD, window 32", "method=sjd", "sjd", "32"),
            _window("pd_32", "with proactive drafting", "method=sjd_pac coupling=none", "sjd_pd", "32"),
            _window("pac_32", "with adaptive continuation, too", "method=sjd_pac", "sjd_pac", "32"),
            _window("pac_64", "the same, window 64", "method=sjd_pac", "sjd_pac", "64"),
        ),
        remarks=(OTHER_MODELS,),
    ),
    _together(
        "sjdpac_table3",
        "SJD-PAC, Table 3: width K and depth D of the proactive tree",
        lines=tuple(
            Line(
                f"{width}_{depth}",
                f"K={width}, D={depth}",
                f"method=sjd_pac width={width} depth={depth}" + (" window=96" if width == depth == 4 else ""),
            )
            for width, depth in ((2, 3), (3, 3), (4, 3), (5, 3), (4, 2), (4, 4))
        ),
        remarks=(
            "The paper's values are lost; it calls K = 4 and D = 3 best.",
            "A full tree of K = 4 and D = 4 has 84 nodes: its window is 96, that of the others 64.",
        ),
    ),
    _table(
        "sjdpac_table4",
        "SJD-PAC, Table 4: milliseconds of a step, part by part",
        n=0,
        protocol="batch=1",
        columns=tuple(
            Column(f"{part}_ms", f"{label} (ms)", "lower", 2, std_over=None) for part, label in _PARTS.items()
        ),
        lines=(
            Line("vanilla", "vanilla", "method=vanilla"),
            Line("sjd_pac", "SJD-PAC, window 64", "method=sjd_pac window=64"),
        ),
        remarks=("The paper's values are lost. Medians over steps in the middle of the image.",),
        figure=Stack(("forward_ms", "draft_ms", "verify_ms", "commit_ms", "rest_ms"), "milliseconds of a step"),
        rows_of="bench",
    ),
    _table(
        "sjdpac_fig4",
        "SJD-PAC, Fig 4: which earlier tokens the next one depends on",
        n=16,
        protocol="seed=0 method=vanilla",
        columns=(ENTROPY,),
        lines=(Line("image", "images", ""),),
        remarks=(
            "Total variation between a token's distribution and the one where the position that gives it does not "
            "attend to the keys and values of the position at that distance before it; 16 is the row above. The values "
            "of the paper's curves are in the authors' script: 0.32, 0.06, 0.042 and 0.024 at distances 1, 3, 5, 15.",
        ),
        figure=Series("tv_by_distance", "distance (tokens)", "total variation", first=1),
        rows_of="probe",
    ),
    _together(
        "sjdpac_fig1",
        "SJD-PAC, Fig 1: tokens of a step, and what they gain",
        n=500,
        lines=(Line("sjd", "SJD", "method=sjd"), Line("sjd_pac", "SJD-PAC", "method=sjd_pac")),
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
