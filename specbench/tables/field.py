"""The table of the README: exact and relaxed methods next to each other, their seconds in a table of their own, and
newer methods.

It takes an hour on a CPU, so `specbench tables` runs it only when it is named; `make comparisons` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from specbench.tables.definitions import (
    ACCEPTED_LENGTH,
    ALONE,
    EMITTED_KL,
    LATENCY,
    PERPLEXITY,
    REWARD,
    SPEEDUP,
    STEPS_SAVED,
    TOGETHER,
    Line,
    Table,
    TableTest,
    row_column,
)

_METHODS = (
    ("vanilla", "vanilla", ""),
    ("sjd", "SJD", ""),
    ("scd", "SCD", ""),
    ("sjd_pac", "SJD-PAC", ""),
    ("eagle1", "EAGLE-1", ""),
    ("uniform_rsd", "UniformRSD (δ=1.1)", "delta=1.1"),
    ("cool_sd", "Cool-SD (δ=1.1)", "delta=1.1"),
    ("lantern_pp", "LANTERN++ (λ=2, k=10)", "lam=2 k=10"),
)
_NEWER = (
    ("vanilla", "vanilla", ""),
    ("sjd", "SJD", ""),
    ("gsd", "GSD, as released", "emitted_draws=0"),
    ("sjd_threshold", "SJD++, reuse above τ=0.5", ""),
    ("sjd_entropy", "SJD, acceptance by entropy", ""),
    ("sjd_sv", "SJD-SV, α=0.8", ""),
    ("jacobi_built_in", "Jacobi mode of Lumina-mGPT 2", ""),
    ("zipar", "ZipAR, window 8", ""),
    ("pjd", "PJD, c=6", ""),
    ("eagle2", "EAGLE-2, as released", "variant=released emitted_draws=0"),
    ("vvs", "VVS, interval 5", "emitted_draws=0"),
    ("eagle_adaptive", "EAGLE, adaptive tree", "emitted_draws=0"),
)
_PROMPT_FOLLOWING = (
    *_METHODS,
    ("uniform_rsd_3", "UniformRSD (δ=3)", "method=uniform_rsd delta=3"),
    ("cool_sd_3", "Cool-SD (δ=3)", "method=cool_sd delta=3"),
)
_TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def _lines(methods: Sequence[tuple[str, str, str]]) -> tuple[Line, ...]:
    """Lines of (key, label, overrides); the key is the preset where the overrides name none."""
    return tuple(
        Line(key, label, own if "method=" in own else f"method={key} {own}".strip()) for key, label, own in methods
    )


_table = partial(Table, paper="this project's own comparison", lines=_lines(_METHODS), on_request=True)
TABLES = (
    _table(
        "field",
        "Steps and quality: exact and relaxed methods on the embedded model",
        n=500,
        protocol=TOGETHER,
        columns=(STEPS_SAVED, replace(ACCEPTED_LENGTH, std_over=""), EMITTED_KL, REWARD),
        needs=("emitted_tv",),
        remarks=("SJD, SCD, SJD-PAC and EAGLE-1 are exact, the last three lines are not (specbench audit).",),
    ),
    _table(
        "field_newer",
        "Steps and quality: newer methods on the embedded model",
        n=64,
        protocol="batch=32 seed=0 baseline=false metrics=scenes_reward",
        columns=(STEPS_SAVED, replace(ACCEPTED_LENGTH, std_over=""), EMITTED_KL, PERPLEXITY, REWARD),
        lines=_lines(_NEWER),
        remarks=(
            "SJD, EAGLE-2 and the adaptive tree are exact, the others are not (specbench audit). The divergence is "
            "empty where what is emitted has no known distribution: rows in parallel, segments, and tokens without "
            "verification. Of GSD and of trees by EAGLE it is not measured, because it is slow there.",
        ),
    ),
    _table(
        "prompt_following",
        "Prompt following by task: exact and relaxed methods on the embedded model",
        n=480,
        protocol="data=scenes_geneval batch=48 seed=0 baseline=false emitted_draws=0 "
        "metrics=[scenes_geneval,scenes_reward]",
        columns=(STEPS_SAVED, row_column("geneval"), *(row_column(f"geneval_{task}") for task in _TASKS), REWARD),
        lines=_lines(_PROMPT_FOLLOWING),
        needs=("geneval",),
        remarks=(
            "GenEval's tasks on captions of scenes, as the embedded reader sees them. The reader scores 0.99 on images "
            "that show what their captions state, and 0.89 on the same after the tokenizer, which is the most that any "
            "method can reach (docs/metrics.md).",
        ),
        tests=tuple(
            TableTest(statistic, label, line, "eagle1")
            for statistic, label in (("scenes_geneval", "Prompt following"), ("scenes_reward", "Reward"))
            for line in ("uniform_rsd_3", "cool_sd_3")
        ),
    ),
    _table(
        "field_seconds",
        "Seconds: exact and relaxed methods on the embedded model",
        n=24,
        protocol=f"{ALONE} timing=true metrics=none",
        columns=(replace(LATENCY, std_over=""), SPEEDUP, STEPS_SAVED),
        remarks=(
            "A small model on a CPU is bound by arithmetic: a pass over 16, 32 and 64 tokens takes about 1.3, 1.9 and "
            "3.2 times as long as one over a single token (results/bench/cpu.csv), and drafting comes on top. Saved "
            "steps are not saved seconds here, and these seconds say nothing about a GPU.",
        ),
    ),
)
