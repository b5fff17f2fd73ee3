"""Table 1 of GSD (arXiv 2508.07747) and the main table of SCD (arXiv 2510.24211), measured on the embedded model. The
published values are second-hand."""

from __future__ import annotations

from functools import partial

from specbench.tables.definitions import (
    OTHER_MODELS,
    OTHER_PROMPTS,
    PASSES,
    SJD_CLIP,
    SJD_FID,
    SPEEDUP,
    STEPS_SAVED,
    Line,
    Table,
)

_table = partial(Table, n=64, protocol="batch=1", columns=(PASSES, STEPS_SAVED, SPEEDUP, SJD_FID, SJD_CLIP))
_GROUPS = {"COCO2017 val": ("10", "25"), "PartiPrompts": ("3", "50")}


def _gsd() -> tuple[Line, ...]:
    """The lines of GSD's table: a set of prompts, then the other one."""
    lines = []
    for part, seed, data in (("COCO2017 val", "0", "coco2017"), ("PartiPrompts", "1", "parti")):
        own, there = f"seed={seed}", f"data={data}"
        suffix = ", other prompts" if seed == "1" else ""
        methods = [("vanilla", "vanilla", "method=vanilla"), ("sjd", "SJD", "method=sjd")]
        methods += [(f"gsd_{g}", f"GSD, groups of {g}", f"method=gsd group={g}") for g in _GROUPS[part]]
        for key, label, overrides in methods:
            method, _, group = key.partition("_")
            printed = {"part": part, "method_key": method, "group_size": group}
            lines.append(
                Line(
                    f"{key}_{seed}", f"{label}{suffix}", f"{overrides} {own}", printed, elsewhere=f"{overrides} {there}"
                )
            )
        lines.append(Line(f"amplify_{seed}", f"SJD, amplified{suffix}", None, {"part": part, "method_key": "amplify"}))
    return tuple(lines)


def _scd(key: str, label: str, overrides: str, method: str) -> Line:
    return Line(key, label, f"{overrides} seed=0", {"method": method}, elsewhere=f"{overrides} data=coco2017")


TABLES = (
    _table(
        "gsd_table1",
        "GSD, Table 1: groups of tokens on two sets of prompts",
        paper="arXiv 2508.07747",
        lines=_gsd(),
        remarks=(OTHER_MODELS, OTHER_PROMPTS, "GSD is measured as its released code decodes; group= is its G."),
    ),
    _table(
        "scd_table1",
        "SCD, main table: coupled Jacobi windows",
        paper="arXiv 2510.24211",
        lines=(
            _scd("vanilla", "vanilla", "method=vanilla", "vanilla"),
            _scd("sjd_64", "SJD, window 64", "method=sjd window=64", "SJD"),
            _scd("scd_mc", "SCD, maximal coupling", "method=scd window=64", "SCD-MC"),
            _scd("scd_gs", "SCD, Gumbel coupling", "method=scd window=64 coupling=gumbel", "SCD-GS"),
            _scd("gsd_10", "GSD, groups of 10", "method=gsd group=10", "GSD"),
        ),
        remarks=(OTHER_MODELS, "SCD is measured in its exact variant. On Janus-Pro the paper's windows are 32."),
    ),
)
