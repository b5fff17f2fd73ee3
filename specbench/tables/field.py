"""The table of the README: exact and relaxed methods next to each other, and their seconds in a table of their own.

It takes an hour on a CPU, so `specbench tables` runs it only when it is named; `make comparisons` does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from specbench.tables.definitions import (
    ACCEPTED_LENGTH,
    ALONE,
    EMITTED_KL,
    LATENCY,
    REWARD,
    SPEEDUP,
    STEPS_SAVED,
    TOGETHER,
    Line,
    Table,
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
_table = partial(
    Table,
    paper="this project's own comparison",
    lines=tuple(Line(name, label, f"method={name} {own}".strip()) for name, label, own in _METHODS),
    on_request=True,
)
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
