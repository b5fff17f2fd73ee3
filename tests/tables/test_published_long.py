"""The published lines of newer papers against the list of newer published numbers, which has one metric per row."""

from __future__ import annotations

import csv

import pytest
from commands import ROOT, case

from specbench.tables import literature

LIST = ROOT.parent / "shared" / "published" / "published2.csv"
METRICS = {
    "latency": "latency_s_mean", "nfe": "steps", "clip": "clip_score", "clip_cos": "clip_score",
    "tpf": "accepted_length_mean",
}  # fmt: skip
#: Parameters that have their own column; `x` holds the text of the others.
PARAMETERS = {name: name for name in ("window", "delta", "k", "cfg", "top_k")} | {"G": "group_size"}
GRADES = {"S": "secondary", "P": "paper"}


CASES: list[tuple[str, str, list[str]]] = [
    ("gsd_table1", "GSD", ["Table 1"]),
    ("gsd_table2", "GSD", ["Table 2"]),
    ("scd_table1", "SCD", ["main table"]),
    ("zipar_table1", "ZipAR", ["main tables"]),
    ("pjd_table1", "PJD", ["Table 1", "ablation"]),
    ("vvs_table1", "VVS", ["Table 1"]),
    ("entropy_table1", "Entropy-aware decoding", ["Table 1"]),
    ("entropy_table2", "Entropy-aware decoding", ["Table 2", "ablation"]),
]


@pytest.mark.skipif(not LIST.is_file(), reason="the published numbers are not here")
def test_every_number_of_the_list_is_in_its_table_with_its_grade() -> None:
    for name, paper, tables in CASES:
        with case(name):
            with LIST.open(newline="", encoding="utf-8") as f:
                rows = [row for row in csv.DictReader(f) if row["paper"] == paper and row["table"] in tables]
            lines, num_compared = literature.load(name), 0
            for row in (row for row in rows if "video" not in row["model"]):  # SCD's video model is not included
                params = [param.partition("=") for param in row["params"].split()]
                expected = {
                    "model": row["model"],
                    "method": row["method"],
                    "part": row["prompts"],
                    "table": row["table"],
                }
                expected |= {PARAMETERS[key]: value for key, _, value in params if key in PARAMETERS}
                expected["x"] = "" if all(key in PARAMETERS for key, *_ in params) else row["params"]
                [line] = [line for line in lines if all(line.cells[key] == value for key, value in expected.items())]
                column = METRICS.get(row["metric"], row["metric"])
                if column in line.cells:
                    assert line.cells[column] == row["value"]
                else:
                    assert f"{row['metric']} {row['value']}" in line.cells["note"]
                assert (GRADES[row["grade"]], row["grade"] == "P") == (line.evidence, line.trusted)
                num_compared += column in line.cells
            columns = {*METRICS.values(), "fid", "speedup_latency", "speedup_step", "inception_score", "hpsv2"}
            assert num_compared == sum(bool(line.cells[column]) for line in lines for column in columns)
