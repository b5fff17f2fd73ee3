"""The published lines of GSD and SCD against the list of newer published numbers, one metric a row."""

from __future__ import annotations

import csv

import pytest
from commands import ROOT

from specbench.tables import literature

LIST = ROOT.parent / "shared" / "published" / "published2.csv"
METRICS = {"latency": "latency_s_mean", "nfe": "steps", "clip": "clip_score"}
PARAMETERS = {"G": "group_size"}


@pytest.mark.skipif(not LIST.is_file(), reason="the published numbers are not here")
@pytest.mark.parametrize(("name", "paper", "table"), [
    ("gsd_table1", "GSD", "Table 1"), ("scd_table1", "SCD", "main table"),
])  # fmt: skip
def test_every_number_of_the_list_is_in_its_table_with_its_grade(name: str, paper: str, table: str) -> None:
    with LIST.open(newline="", encoding="utf-8") as f:
        rows = [row for row in csv.DictReader(f) if (row["paper"], row["table"]) == (paper, table)]
    lines, found = literature.load(name), 0
    for row in (row for row in rows if "video" not in row["model"]):  # SCD's model of videos is not here
        given = dict(one.split("=") for one in row["params"].split())
        wanted = {"model": row["model"], "method": row["method"], "part": row["prompts"]}
        wanted |= {PARAMETERS.get(key, key): value for key, value in given.items()}
        [line] = [line for line in lines if all(line.cells[key] == value for key, value in wanted.items())]
        assert line.cells[METRICS.get(row["metric"], row["metric"])] == row["value"]
        assert (row["grade"], line.evidence, line.trusted) == ("S", "secondary", False)
        found += 1
    columns = {*METRICS.values(), "fid", "speedup_latency", "speedup_step"}
    assert found == sum(bool(line.cells[column]) for line in lines for column in columns)
