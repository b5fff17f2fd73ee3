"""Tables of newer methods, measured on the embedded model: GSD's ablation (arXiv 2508.07747), ZipAR (2412.04062),
SJD-SV (2609.13245), PJD (2606.05703), VVS (2511.13587) and entropy-aware decoding (2510.09012). Most published values
are second-hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from specbench.tables.definitions import (
    LATENCY,
    OTHER_MODELS,
    OTHER_PROMPTS,
    PASSES,
    QUALITY,
    SJD_CLIP,
    SJD_FID,
    SPEEDUP,
    STEPS_SAVED,
    Line,
    Table,
    row_column,
)

_SECONDS = replace(LATENCY, published_as="seconds per image; what is timed is not known")
_FID = replace(SJD_FID, published_as="FID; the tool is not known")
_CLIP = replace(SJD_CLIP, published_as="cosines times 100; the model is not known")
_COSINE = replace(SJD_CLIP, published_as="plain cosines")
_table = partial(Table, n=64, protocol="batch=1")
_METHOD, _OTHER = "No preset for this variant.", "What was varied is not known well enough to run it."


def _line(
    key: str, label: str, overrides: str | None, without: str = _METHOD, part: str = "COCO2017 val", **printed: str
) -> Line:
    """A line on one of two sets of prompts, of the runs seed 0 and 1 with the embedded model; printed: the cells of its
    printed lines, beside the prompts."""
    seed, data = ("1", "parti") if part == "PartiPrompts" else ("0", "coco2017")
    data += " caption=longest" if part.endswith("longest") else ""
    own, there = (f"{overrides} {one}" if overrides else None for one in (f"seed={seed}", f"data={data}"))
    return Line(f"{key}_{seed}", label, own, {"part": part, **printed}, without, there)


_parti = partial(_line, part="PartiPrompts")
_longest = partial(_line, part="COCO2017 val longest")


def _segments() -> tuple[Line, ...]:
    """The lines of SJD-SV."""
    lines = []
    for line in (_line, _parti):
        lines += [line("vanilla", "vanilla", "method=vanilla", method="vanilla"),
                  line("sjd", "SJD", "method=sjd", method="SJD"),
                  line("sv_0.8", "SJD-SV, α=0.8", "method=sjd_sv", method="SJD-SV", x="alpha=0.8")]  # fmt: skip
    lines += [
        _parti(f"sv_{a}", f"SJD-SV, α={a}", f"method=sjd_sv alpha={a}", method="SJD-SV", x=f"alpha={a}")
        for a in ("0.9", "0.7", "0.6", "0.5")
    ]
    lines += [_parti("sv_1", "SJD-SV, α=1", "method=sjd_sv alpha=1", method="SJD-SV", x="suffix all (alpha=1)")]
    fixed = ("no fallback", *(f"fixed suffix {n}" for n in range(1, 5)))
    lines += [_parti(f"sv_{x}", f"SJD-SV, {x}", None, method="SJD-SV", x=x) for x in fixed]
    lines += [
        _parti(name.lower(), name, None, without=_OTHER, method=name)
        for name in ("GSD", "GSD-SV", "LANTERN", "LANTERN-SV")
    ]
    other = "baseline of the table (not identified)"
    lines += [_parti("sv", "SJD-SV, α not stated", None, without=_OTHER, method="SJD-SV", x="")]
    lines += [_parti("baseline", other, None, without=_OTHER, method=other)]
    return tuple(lines)


TABLES = (
    _table(
        "gsd_table2",
        "GSD, Table 2: how tokens are grouped",
        paper="arXiv 2508.07747",
        columns=(PASSES, STEPS_SAVED, SPEEDUP, SJD_CLIP),
        lines=(
            _parti("sjd", "SJD", "method=sjd", method="SJD"),
            _parti(
                "static",
                "static groups of nearest codes",
                "method=gsd variant=printed rule=neighbourhood",
                method_key="gsd_static",
            ),
            _parti("draft", "ranks of the draft", None, method_key="gsd_by_draft"),
            _parti(
                "ranks",
                "ranks of the target, without the bound on distances",
                "method=gsd group=50 distance=1000",
                method_key="gsd_by_target",
            ),
            _parti("gsd_50", "GSD, groups of 50", "method=gsd group=50", method_key="gsd"),
        ),
        remarks=(OTHER_MODELS, OTHER_PROMPTS, "How the paper's static groups are made is not known."),
    ),
    _table(
        "zipar_table1",
        "ZipAR, main tables: rows of the image in parallel",
        paper="arXiv 2412.04062",
        columns=(PASSES, STEPS_SAVED, SPEEDUP, *(replace(column, published_as="") for column in QUALITY)),
        lines=(
            Line("vanilla", "vanilla", "method=vanilla seed=0", {"method": "vanilla"}, elsewhere="method=vanilla"),
            Line("zipar", "ZipAR", "method=zipar seed=0", {"method": "ZipAR"}, elsewhere="method=zipar"),
            *(
                Line(
                    f"zipar_{w}",
                    f"ZipAR, window {w}",
                    f"method=zipar window={w} seed=0",
                    elsewhere=f"method=zipar window={w}",
                )
                for w in (4, 12)
            ),
            Line(
                "zipar_released",
                "ZipAR, as released",
                "method=zipar variant=released seed=0",
                elsewhere="method=zipar variant=released",
            ),
        ),
        remarks=(
            OTHER_MODELS,
            "The paper's windows differ by model; the code has 8 for LlamaGen and 16 for Lumina-mGPT. Nothing is "
            "verified, so the passes depend on the window alone.",
        ),
    ),
    _table(
        "sjdsv_table1",
        "SJD-SV, main tables and ablations: verification in segments",
        paper="arXiv 2609.13245",
        columns=(PASSES, STEPS_SAVED, SPEEDUP, _SECONDS, _FID, _CLIP),
        lines=_segments(),
        remarks=(
            OTHER_MODELS,
            OTHER_PROMPTS,
            "SJD's windows are 16. The account may have exchanged the labels of GSD and LANTERN with segments. It also "
            "has acceptance rates: 60.53 % of SJD, 64.16 % of SJD-SV.",
        ),
    ),
    _table(
        "pjd_table1",
        "PJD, Table 1: rows in parallel under Jacobi decoding",
        paper="arXiv 2606.05703",
        columns=(PASSES, STEPS_SAVED, SPEEDUP, _SECONDS, _FID, _CLIP, row_column("inception_score")),
        lines=(
            _line("vanilla", "vanilla", "method=vanilla", method="vanilla"),
            _line("sjd", "SJD", "method=sjd", method="SJD"),
            _line("gsd", "GSD", "method=gsd", method="GSD"),
            *(_line(f"pjd_{c}", f"PJD, c={c}", f"method=pjd t_ctx={c}", method="PJD", x=f"c={c}") for c in (6, 9, 11)),
            Line(
                "pjd_16_0",
                "PJD, c=16",
                None,
                {"part": "COCO2017 val", "method": "PJD", "x": "c=16"},
                "A row of the embedded model has 16 tokens.",
                elsewhere="method=pjd t_ctx=16 data=coco2017",
            ),
        ),
        remarks=(OTHER_MODELS, "Our PJD is an interpretation of what is known of it (docs/methods.md)."),
    ),
    _table(
        "vvs_table1",
        "VVS, Table 1: verification skipped in some rounds",
        paper="arXiv 2511.13587",
        columns=(
            STEPS_SAVED,
            row_column("accepted_length_mean", published_as="tokens per target pass", std_over="images"),
            SPEEDUP,
            _FID,
            _COSINE,
        ),
        lines=(
            _longest("vanilla", "vanilla", "method=vanilla", method="vanilla"),
            _longest("eagle2", "EAGLE-2", "method=eagle2 variant=released", method="EAGLE-2"),
            *(
                _longest(
                    f"lantern_{d}",
                    f"LANTERN, δ={d}",
                    f"method=lantern variant=released delta={d}",
                    method="LANTERN",
                    delta=d,
                )
                for d in ("0.3", "0.2")
            ),
            *(
                _longest(
                    f"vvs_{i}",
                    f"VVS, interval {i}, δ={d}",
                    f"method=vvs interval={i} delta={d}",
                    method="VVS uniform",
                    delta=d,
                )
                for i, d in (("4", "0.2"), ("2", "0.1"))
            ),
        ),
        remarks=(
            OTHER_MODELS,
            "The account also has precision and recall: the rows of specbench/tables/published hold them.",
        ),
    ),
    _table(
        "entropy_table1",
        "Entropy-aware decoding, Table 1: the temperature by entropy",
        paper="arXiv 2510.09012",
        columns=(_FID, _CLIP, row_column("hpsv2", published_as="HPS v2 times 100")),
        lines=(
            _line("vanilla", "vanilla", "method=vanilla", method="vanilla"),
            _line(
                "entropy",
                "temperature by entropy",
                "method=vanilla temperature=1.4 entropy_temperature=[2.5,3,0.6]",
                method="entropy temperature",
            ),
        ),
        remarks=(
            OTHER_MODELS,
            "The constants are those of the code for LlamaGen; those for Lumina-mGPT are not known.",
        ),
    ),
    _table(
        "entropy_table2",
        "Entropy-aware decoding, Table 2: acceptance by entropy in SJD",
        paper="arXiv 2510.09012",
        columns=(PASSES, STEPS_SAVED, SPEEDUP, _SECONDS, _FID, _CLIP),
        lines=(
            _line("vanilla", "vanilla", "method=vanilla", table="Table 2", method="vanilla"),
            _line("sjd", "SJD", "method=sjd", table="Table 2", method="SJD"),
            _line("entropy", "SJD, acceptance by entropy", "method=sjd_entropy", table="Table 2", x="scale+random"),
            _line("scale", "the same, threshold not random", None, table="ablation", x="scale only"),
            _line("random", "the same, as in the ablation", None, "As above.", table="ablation", x="scale+random"),
        ),
        remarks=(OTHER_MODELS, "SJD's windows are 16."),
    ),
)
