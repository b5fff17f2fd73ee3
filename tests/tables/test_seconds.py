"""A table prints the seconds of one machine only, and speed-ups with a valid timing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Call, overrides
from test_tables import FakeBench

from specbench.cli import tables as cli
from specbench.rows.columns import COLUMNS, OF_TIMING, SPEEDUPS, TIMED_COLUMNS
from specbench.rows.csv_files import append_row
from specbench.rows.paired import half_interval
from specbench.rows.remark import as_json, free
from specbench.rows.shown import MACHINE, shown
from specbench.tables import layout, literature, render, table_runs
from specbench.tables.catalog import TABLES

TABLE = TABLES["sjd_table4"]
LATENCY, SPEEDUP, STEPS = (
    [c.key for c in TABLE.columns].index(k) for k in ("latency_s_mean", "speedup_latency", "step_compression")
)
PAIRED = {"timed_pairs": "64", "further_pairs": "0", "drift": "0.01", "speedup_shift": "0.0", "timing_valid": "true"}
UNSTEADY = {"further_pairs": "32", "speedup_shift": "0.12", "timing_valid": "false"}


def row(name: str, **cells: str) -> dict[str, str]:
    made = {"run_id": name, "baseline_run_id": f"{name}/baseline", "device_name": "A", "device": "cpu", "threads": "1"}
    made |= {"latency_s_mean": "0.5", "speedup_latency": "1.5", "step_compression": "3"}
    return made | PAIRED | cells


def vanilla(**cells: str) -> dict[str, str]:
    vanilla_cells = {"baseline_run_id": "v", "speedup_latency": "1", "step_compression": "1"}
    return row("v") | vanilla_cells | cells


def printed(rows: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[tuple[str, str, str], str]]:
    """Line -> (latency, speed-up and step compression as printed, note of the speed-up)."""
    sheet = layout.build(TABLE, "llamagen_scenes", rows, [], {}, "")
    notes = dict(sheet.notes)
    lines = {}
    for line, entry in zip(TABLE.lines, [e for e in sheet.entries if e.kind == "measured"], strict=True):
        shown = tuple(entry.cells[i].value for i in (LATENCY, SPEEDUP, STEPS))
        lines[line.key] = (shown, " ".join(notes[mark] for mark in entry.cells[SPEEDUP].marks))
    return lines


def test_which_seconds_are_marked() -> None:
    """Vanilla's speed-up is 1 by definition."""
    cells_of = printed({"vanilla": vanilla(), "sjd": row("a")})
    assert cells_of["vanilla"] == (("0.500", "1.00", "1.00"), "")
    assert cells_of["sjd"] == (("0.500", "1.50", "3.00"), "")
    few = {"timed_pairs": "1", "drift": "", "speedup_shift": "", "timing_valid": "false"}
    for cells, latency, why in (
        (UNSTEADY, "0.500", "over 64 pairs with vanilla, 32 of them measured again, the speed-up was not steady"),
        (dict.fromkeys(PAIRED, ""), "0.500", "0 timed pairs are too few for an error."),
        (few, "0.500", "1 timed pairs are too few for an error."),
    ):
        values, note = printed({"vanilla": vanilla(), "jacobi": row("b", **cells)})["jacobi"]
        assert values == (latency, "1.50", "3.00"), why
        assert why in note
    unpaired = printed({"vanilla": vanilla(**dict.fromkeys(PAIRED, ""))})
    assert unpaired["vanilla"][0] == ("0.500", "1.00", "1.00")


def test_a_column_has_the_seconds_of_one_machine() -> None:
    """Those of the machine of most lines. The seconds of the other lines are marked."""
    for name, shown_name in MACHINE.items():
        rows = {"vanilla": vanilla(), "jacobi": row("a"), "sjd": row("b"), "sjd_isp": row("c", **{name: "other"})}
        cells_of = printed(rows)
        assert [cells_of[key][0] for key in ("jacobi", "sjd")] == [("0.500", "1.50", "3.00")] * 2, name
        values, note = cells_of["sjd_isp"]
        assert values == ("0.500", "1.50", "3.00"), name
        assert sum(bool(cells_of[key][1]) for key in rows) == 1
        assert f"{shown_name} other instead of " in note
        assert cells_of["vanilla"][0][1] == "1.00"
    # two unpaired rows of two threads do not remove a paired one from the column
    unpaired = {**dict.fromkeys(PAIRED, ""), "threads": "2"}
    cells_of = printed({"vanilla": vanilla(**unpaired), "jacobi": row("a", **unpaired), "sjd": row("b")})
    assert not cells_of["sjd"][1]
    assert cells_of["jacobi"][1]
    assert not cells_of["vanilla"][1]  # its speed-up is 1 on every machine


def test_the_difference_from_the_paper() -> None:
    table, published = TABLES["lantern_table3"], literature.load("lantern_table3")
    columns = [c.key for c in table.columns]
    unpaired = row("a", accepted_length_mean="1.80", **dict.fromkeys(PAIRED, ""))
    sheet = layout.build(table, "llamagen_xl", {"lantern_0.10_1000_1": unpaired}, published, {}, "")
    [entry] = [e for e in sheet.entries if e.kind == "difference"]
    assert entry.cells[columns.index("accepted_length_mean")].value == "+0.05"
    assert entry.cells[columns.index("speedup_latency")].value


def test_the_shown_values_of_a_row() -> None:
    """In the printed report of a run, in `specbench show`, on the report's page and on cards."""
    values: dict[str, Any] = {"timed_pairs": 64, "further_pairs": 64, "speedup_shift": 0.2, "timing_valid": "false"}
    values |= {"latency_s_mean": 2.0, "latency_s_p95": 3.0, "speedup_latency": 1.5, "speedup_latency_stderr": 0.1}
    values |= {"steps": 5.0, "emitted_kl": 1e-14, "emitted_kl_stderr": 1e-15, "emitted_tv": 0.2}
    shown_values = shown(values)
    assert {name for name in values if shown_values[name] is None} == {"emitted_kl_stderr"}
    assert (shown_values["emitted_kl"], shown_values["emitted_tv"], shown_values["timed_pairs"]) == (0.0, 0.2, 64)


def test_show_counts_the_invalid_timings(call: Call, tmp_path: Path) -> None:
    cells = row("a", **UNSTEADY) | {"model": "m", "method": "sjd", "config_hash": "c"}
    append_row(tmp_path / "rows.csv", dict.fromkeys(COLUMNS) | cells)
    append_row(tmp_path / "rows.csv", dict.fromkeys(COLUMNS) | cells | PAIRED | {"run_id": "b", "seed": "1"})
    code, out, err = call(
        "show", "rows.csv", "--no-pool", "--format", "csv", "--columns", "run_id,latency_s_mean,speedup_latency,steps"
    )
    assert (code, out.splitlines()[1:]) == (0, ["a,0.5,1.5,", "b,0.5,1.5,"])
    assert "1 of 2 rows" in err


def test_every_speed_up_in_seconds_is_a_timed_column() -> None:
    assert {*SPEEDUPS, *OF_TIMING} < TIMED_COLUMNS < set(COLUMNS)
    seconds = {name for name in COLUMNS if "latency" in name or name.endswith("_per_s")}
    assert seconds <= TIMED_COLUMNS


@pytest.mark.parametrize(("table", "runs"), [("sjd_table4", True), ("sjd_table9", False)])
def test_a_row_without_seconds_does_not_fill_a_table_of_seconds(table: str, runs: bool, tmp_path: Path) -> None:
    """Timed and untimed runs have one configuration hash. A table of seconds runs an untimed line again."""

    first = FakeBench(timing="false", **dict.fromkeys(TIMED_COLUMNS & {"latency_s_mean", "speedup_latency"}))
    if not runs:
        assert cli.main([table], first, tmp_path / "results", tmp_path / "runs") == 0
    else:  # such rows cannot fill it
        for run in table_runs.plan(TABLES[table], "llamagen_scenes", None, tmp_path / "results").runs:
            append_row(table_runs.store(TABLES[table], tmp_path / "results"), first.row(run))
    again = FakeBench()
    assert cli.main([table], again, tmp_path / "results", tmp_path / "runs") == 0
    assert bool(again.ran) is runs
    third = FakeBench()
    assert cli.main([table], third, tmp_path / "results", tmp_path / "runs") == 0
    assert third.ran == []


def test_the_speed_ups_of_cspd_must_be_requested() -> None:
    """Their batches are not timed by default."""
    for name in ("cspd_table1", "cspd_table4"):
        table = TABLES[name]
        assert "timing=true" in (overrides(table, table.lines[0], "mar_scenes") or [])
    assert "timing=true" not in TABLES["cspd_table3"].protocol


def with_seconds(name: str, timed: Mapping[str, str], **cells: str) -> dict[str, str]:
    """A printed row whose seconds come from a further run."""
    quality = {"run_id": name, "device_name": "Q", "device": "cpu", "commit": "q", "time": "2026-11-29", "n": "1024"}
    runs = [SimpleNamespace(seconds=False, row=quality | cells), SimpleNamespace(seconds=True, row=timed)]
    return dict(table_runs.pooled_row(runs, in_batches=False) or {})  # type: ignore[arg-type]


def test_seconds_of_further_runs_have_their_own_machine() -> None:
    """They were printed under the machine, commit and date of the runs of quality, and compared by these machines."""
    about = {"commit": "t", "time": "2026-11-27", "n": "24", "threads": "1"}
    remarks = as_json([free("a disturbed machine")])
    timed = [row("t1", remarks=json.dumps(remarks), **about), row("t2", **about)]
    rows = {"vanilla": with_seconds("v", vanilla(**about)), "jacobi": with_seconds("a", timed[0], device_name="R")}
    rows["sjd"] = with_seconds("b", timed[1])
    assert layout.doubts(TABLE, rows) == {}
    sheet = layout.build(TABLE, "llamagen_scenes", rows, [], {}, "")
    facts = dict(sheet.facts)
    assert (facts["Device"], facts["Commit"], facts["Date"]) == ("Q / R, cpu", "q", "2026-11-29")
    assert facts["Seconds"] == "A, cpu, threads 1; t; 2026-11-27"
    assert "Seconds: A, cpu" in render.markdown(sheet)
    marked = [entry.method for entry in sheet.entries if entry.marks]
    assert marked == [line.label for line in TABLE.lines if line.key == "jacobi"]
    assert [text for _, text in sheet.notes if "a disturbed machine" in text]
    # the other way round: one machine decodes all images, and another one times a line
    rows["jacobi"] = with_seconds("a", timed[0] | {"device_name": "B"})
    assert {key for key, _ in layout.doubts(TABLE, rows)} == {"jacobi"}
    assert not layout.comparable(TABLE, rows)["jacobi"]["latency_s_mean"]  # type: ignore[index]
    same = with_seconds("v", {**vanilla(), "device_name": "Q", "device": "cpu", "commit": "q", "time": "2026-11-29"})
    same_facts = dict(layout.facts([{**same, "threads": "1"}]))
    assert "Seconds" not in same_facts


def test_the_interval_of_seconds_is_over_their_own_prompts() -> None:
    """It had the degrees of freedom of the images of quality."""
    errors = {"latency_s_stderr": "0.1", "speedup_latency_stderr": "0.1"}
    made = with_seconds("a", row("t", n="24", timed_pairs="6", **errors), fid="5", fid_stderr="0.1")
    for key, n in (("latency_s_mean", 24), ("speedup_latency", 6), ("fid", 1024)):
        assert layout.half_width(made, key) == half_interval(n, 0.1), key
    assert layout.half_width(row("t", n="24", timed_pairs="48", **errors), "speedup_latency") == half_interval(48, 0.1)


def test_the_seconds_of_a_table_are_of_one_machine_if_they_can_be(tmp_path: Path) -> None:
    """A newer row of another table on another machine was taken for one line. And scored rows of a timed run, whose
    seconds are the same, were not taken."""
    table, bench = TABLES["coolsd_table1"], FakeBench()
    runs = {run.key: run for run in table_runs.plan(table, table.model, None, tmp_path).runs if run.seconds}

    def add(file: str, key: str, device: str, scored: bool = False) -> None:
        made = {**bench.row(runs[key]), "device_name": device, "run_id": f"{key} {file} {device}"}
        made |= {"config_hash": runs[key].scored if scored else runs[key].config_hash}
        append_row(tmp_path / f"{file}.csv", made)

    def chosen() -> dict[str, str | None]:
        plan = table_runs.plan(table, table.model, None, tmp_path)
        return {run.key: run.row and run.row["run_id"] for run in plan.runs if run.seconds}

    add("a", "vanilla", "A")
    add("z", "vanilla", "B")  # the last file
    assert chosen()["vanilla"] == "vanilla z B"
    for key in ("eagle1", "lantern_pp"):
        add("a", key, "A")
    add("z", "uniform_rsd_1.1", "B")  # the only one of its line
    first = chosen()
    assert (first["vanilla"], first["eagle1"]) == ("vanilla a A", "eagle1 a A")
    assert (first["uniform_rsd_1.1"], first["cool_sd_2"]) == ("uniform_rsd_1.1 z B", None)
    add(table.id, "vanilla", "A", scored=True)  # the table's own file comes first
    add(table.id, "cool_sd_2", "A", scored=True)
    assert (chosen()["vanilla"], chosen()["cool_sd_2"]) == ("vanilla coolsd_table1 A", "cool_sd_2 coolsd_table1 A")
