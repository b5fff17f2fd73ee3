"""Rows from any mixture of sources, and the output of `specbench show` and `collect`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import Call, refused, row_of
from fake_pipeline import FakePipeline

from specbench.config import configuration
from specbench.errors import UsageError, decimal
from specbench.harness import run
from specbench.rows import baseline, collected, selection
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import as_read, read_rows
from specbench.rows.journal import read_records
from specbench.rows.remark import as_json, free, remark, remarks_of
from specbench.rows.remark_text import said
from specbench.rows.scores import Score, ScoreLine, Side, images_fingerprint, prompts_fingerprint
from specbench.storage.files import split_paths
from specbench.tables import report

SMALL = ("metrics=none", "n=2", "baseline=false", "device=cpu", "warmup=0")


def row(run_id: str, **cells: Any) -> dict[str, Any]:
    common = {"model": "llamagen_scenes", "method": "sjd", "n": 4, "seed": 0, "time": "2026-11-23T10:00:00+00:00"}
    return as_read(dict.fromkeys(COLUMNS) | common | {"run_id": run_id, "config_hash": "h"} | cells)


def test_the_default_is_the_folder_of_runs(call: Call) -> None:
    assert " runs" in refused(call, "show")
    assert call("run", "-m", "method=sjd", "window=8,16", *SMALL, "out=runs/g")[0] == 0
    assert call("run", "method=scd", *SMALL, "out=runs/one")[0] == 0
    out = call("show", "--where", "method=sjd", "--sort=-window", "--columns", "method,window,seeds")[1]
    assert [line.split() for line in out.splitlines()] == [
        ["method", "window", "seeds"],
        ["sjd", "16", "1"],
        ["sjd", "8", "1"],
    ]
    assert call("collect", "out=all.csv")[1] == "wrote all.csv: 3 rows\n"
    assert len(read_rows("all.csv")) == 3


def test_any_mixture_of_sources(call: Call, tmp_path: Path) -> None:
    assert call("run", "method=sjd", *SMALL, "out=grid/window=8,seed=1")[0] == 0
    run_row = row_of("grid/window=8,seed=1")
    collected.write(tmp_path / "a.csv", [row("a"), row("b", time="2026-11-22T10:00:00+00:00")])
    collected.write(tmp_path / "b.csv", [row("b", fid=5.0), row("c")])
    assert call("collect", "a.csv", "b.csv", "grid", "out=all.csv")[0] == 0
    stored = {row_read["run_id"]: row_read for row_read in read_rows("all.csv")}
    assert stored.keys() == {"a", "b", "c", run_row["run_id"]}
    assert stored["b"]["fid"] == 5.0  # the newer of two
    assert stored[run_row["run_id"]] == run_row
    shown = report.gather([Path("all.csv")], [], 0)
    assert run_row["run_id"] in {row_read["run_id"] for row_read in shown.rows}
    for words in (
        ["collect", "absent", "out=x.csv"],
        ["collect", "a.csv", "out=x.xls"],
        ["collect", "a.csv"],
    ):
        refused(call, *words)


def test_what_spreadsheets_do_to_rows(call: Call, tmp_path: Path) -> None:
    collected.write(tmp_path / "a.csv", [row("a", timing=True, baseline=False, timing_valid=True, batch=1)])
    text = (tmp_path / "a.csv").read_text()
    [wanted] = read_rows("a.csv")
    for true, false in (("TRUE", "FALSE"), ("True", "False"), ("true", "FALSE")):
        (tmp_path / "b.csv").write_text(text.replace("true", true).replace("false", false))
        assert read_rows("b.csv") == [wanted]
    for sign, name in ((";", "semicolons"), ("\t", "tabs")):
        (tmp_path / "b.csv").write_text(text.replace(",", sign))
        assert re.search(f"b.csv .*{name}", refused(call, "show", "b.csv"))
        assert re.search(f"b.csv .*{name}", refused(call, "collect", ".", "out=c.csv"))
    (tmp_path / "b.csv").write_text("run_id,n\na,4\n")
    assert "config_hash" in refused(call, "show", "b.csv")


def test_parquet_files_hold_rows_too(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    text = row("007", top_k=100, timing=True, steps=1e-7, remarks=as_json([free("a 'quoted' \"ü\"")]), model="null")
    rows = [row("a", fid=1.5, n=64, criterion="paper"), text]
    collected.write(tmp_path / "rows.parquet", rows)
    assert collected.read([tmp_path / "rows.parquet"])[0] == rows
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(UsageError, match="cannot read"):
        collected.read([tmp_path / "bad.parquet"])


def test_show_pools_seeds_and_groups(call: Call, tmp_path: Path) -> None:
    rows = [
        row(f"{m}{s}", method=m, seed=s, fid=v + s, delta=d)
        for m, v, d in (("sjd", 1.0, None), ("cool_sd", 4.0, 1.1))
        for s in (0, 2)
    ]
    collected.write(tmp_path / "all.csv", [*rows, row("x", method="sjd", seed=1, fid=9.0, commit="other")])
    groups = json.loads(call("show", "all.csv", "--format", "json", "--sort", "method,-seeds")[1])
    assert [(group["method"], group["seeds"], group["fid"]) for group in groups] == [
        ("cool_sd", 2, 5.0),
        ("sjd", 2, 2.0),
        ("sjd", 1, 9.0),  # another commit: never mixed
    ]
    assert "2.00 ± 1.41" in call("show", "all.csv", "--where", "method=sjd")[1]
    _, out, err = call("show", "all.csv", "--group-by", "method", "--format", "csv", "--columns", "method,fid,seeds")
    assert out.splitlines() == ["method,fid,seeds", "sjd,4.333333333333333,3", "cool_sd,5.0,2"]
    assert re.search(r"\bsjd\b.*\bcommit\b", err)
    assert len(call("show", "all.csv", "--no-pool")[1].splitlines()) == 1 + 5
    assert call("show", "all.csv", "--limit", "1", "--format", "md")[1].count("\n") == 3
    refused(call, "show", "all.csv", "--where", "method=scd")
    refused(call, "show", "all.csv", "--limit", "0")
    for conditions, means in (
        (("fid<3",), [2.0]),
        (("fid>3", "seeds=2"), [5.0]),
        (("seeds>=1", "method=sjd"), [9.0, 2.0]),
    ):
        words = [word for text in conditions for word in ("--where", text)]
        shown = json.loads(call("show", "all.csv", *words, "--format", "json", "--columns", "fid,fid_seed_std")[1])
        assert sorted(line["fid"] for line in shown) == sorted(means), conditions
        assert {line["fid_seed_std"] is None for line in shown if line["fid"] == 9.0} <= {True}
    assert "'nope'" in refused(call, "show", "all.csv", "--columns", "nope")


def test_what_only_some_rows_have_is_said(call: Call, tmp_path: Path) -> None:
    """Zero is not an empty cell. A group of unlike rows, or of which some lack a result, has a note."""
    made = [row("a", delta=0.0, fid=1.0), row("b", delta=None, fid=2.0), row("c", delta=0.0, fid=None, n=9)]
    groups, notes = selection.grouped(made, ["delta"], True)
    assert [(group["delta"], group["seeds"], group["fid"]) for group in groups] == [(0.0, 2, None), (None, 1, 2.0)]
    assert len(notes) == 2
    assert "n" in notes[0].split()
    assert "fid (1)" in notes[1]


def test_a_remark_of_some_seeds_names_them() -> None:
    both = remark("batches", batch=16)
    flat = [remark("free_text", "fid", number=number) for number in (40, 38)]
    rows = [row(str(s), seed=s, remarks=as_json([both, flat[s]])) for s in (0, 1)]
    pooled = remarks_of(selection.pooled(rows))
    assert [(r.code, r.column, r.values.get("seeds")) for r in pooled] == [
        ("runs", "", None),
        ("batches", "", None),
        ("of_seeds", "fid", "0"),
        ("of_seeds", "fid", "1"),
    ]
    assert pooled[2].values["values"] == {"number": 40}
    assert all(said(r) for r in pooled)


def test_a_run_that_was_collected_keeps_its_baseline(call: Call, tmp_path: Path) -> None:
    assert call("run", "method=sjd", *(word for word in SMALL if word != "baseline=false"), "out=d/x")[0] == 0
    assert call("collect", "d", "out=d/all.csv")[0] == 0
    lines = json.loads(call("show", "d", "--format", "json", "--columns", "method")[1])
    assert sorted(line["method"] for line in lines) == ["sjd", "vanilla"]
    (tmp_path / "d/x/scores.jsonl").write_text("damaged\n")
    _, out, err = call("show", "d", "--format", "json", "--columns", "method")
    assert [line["method"] for line in json.loads(out)] == ["sjd"]
    assert "d/x" in err


def test_the_baseline_of_a_grid_is_a_line_like_its_own_run(call: Call, tmp_path: Path) -> None:
    words = ["n=3", "metrics=none", "emitted_draws=8"]
    for out, more in (("g/1", ["delta=1.1"]), ("g/2", ["delta=2"]), ("g/3", ["delta=2", "seed=1"])):
        run.run(configuration.compose(["method=cool_sd", *more, *words]), str(tmp_path / out), loader=FakePipeline)
    run.run(configuration.compose(["method=vanilla", *words]), str(tmp_path / "own"), loader=FakePipeline)
    shown = json.loads(call("show", "g", "--format", "json", "--columns", "method,delta,seeds,accepted_length_mean")[1])
    assert [(line["method"], line["delta"], line["seeds"]) for line in shown] == [
        ("vanilla", None, 2),
        ("cool_sd", 1.1, 1),
        ("cool_sd", 2.0, 2),
    ]
    assert shown[0]["accepted_length_mean"] == 1
    columns = call("show", "g", "--format", "csv")[1].splitlines()[0].split(",")
    assert columns[:4] == ["model", "method", "delta", "n"]  # and not every parameter that vanilla AR does not have
    assert len(call("show", "g", "own", "--no-pool")[1].splitlines()) == 1 + 5  # seed 0 has its own run
    run_row = row_of("g/1")
    baseline_row, expected = baseline.baseline_row(tmp_path / "g/1", run_row), row_of("own")
    assert baseline_row is not None
    # The fake needs no time to decode.
    measured = ("peak_memory_mib", "text_s", "text_s_stderr", "pixels_s", "pixels_s_stderr")
    alike = COLUMNS.keys() - {"run_id", "baseline_run_id", "config_hash", "time", "remarks", *measured}
    assert {name: baseline_row[name] for name in alike} == {name: expected[name] for name in alike}
    assert (baseline_row["run_id"], baseline_row["baseline_run_id"]) == (f"{run_row['run_id']}/baseline",) * 2
    assert call("collect", "g", "out=all.csv")[1] == "wrote all.csv: 3 rows\n"  # only runs


def test_scores_of_a_baseline_need_the_same_scorer(tmp_path: Path) -> None:
    cfg = configuration.compose(["method=cool_sd", "n=3", "metrics=none"])
    folder = run.run(cfg, str(tmp_path), loader=FakePipeline).folder
    images = read_records(tmp_path / "baseline.jsonl")
    digests, prompts = images_fingerprint(one.sha256 for one in images), prompts_fingerprint(images)

    def add(value: float | None, backend: str, side: Side = "vanilla", images_digest: str = digests) -> None:
        columns = {"image_reward": Score(value, None, backend)}
        folder.open_scores().add(
            ScoreLine("m", side, 3, images_digest, prompts, "", columns, (), "0", "c", "2026-11-25")
        )

    run_row = row_of(str(tmp_path)) | {"image_reward_backend": "here"}
    for value, backend, more in ((1.0, "here", ()), (2.0, "here", ()), (None, "here", ()), (3.0, "here", ("method",)),
                                 (4.0, "here", ("vanilla", "others"))):  # fmt: skip
        add(value, backend, *more)
    baseline_row = baseline.baseline_row(tmp_path, run_row)
    assert baseline_row is not None
    assert baseline_row["image_reward"] == 2.0
    add(5.0, "elsewhere")
    baseline_row = baseline.baseline_row(tmp_path, run_row)
    assert baseline_row is not None
    assert baseline_row["image_reward"] is None  # not comparable


def test_conditions() -> None:
    rows = [row("0", method="a", fid=1.0), row("1", method="b", fid=2.0, delta=1.1), row("2", method="c", fid=3.0)]
    for text, numbers in (
        ("fid>=2", [1, 2]),
        ("fid<2", [0]),
        ("delta=", [0, 2]),
        ("delta!=", [1]),
        ("method=a,c", [0, 2]),
        ("delta=1.10", [1]),
    ):
        test = selection.condition(text)
        assert [int(candidate["run_id"]) for candidate in rows if test(candidate)] == numbers, text
    for text in ("fid", "nope=1", "fid>x", "=3"):
        with pytest.raises(UsageError):
            selection.condition(text)


def test_no_other_text_is_a_number(tmp_path: Path) -> None:
    """Python's float accepts underscores, infinities, blanks and the digits of every script."""
    for text, number in (("1", 1), ("-.5", -0.5), ("+1.e-3", 0.001), ("12.50", 12.5)):
        assert decimal(text) == number
    for text in ("1_0", "1e1_0", "inf", "nan", "\u0661\u0662", " 12", "0x10", "1,5"):
        with pytest.raises(ValueError, match="number"):
            decimal(text)
        (tmp_path / "rows.csv").write_text(f'run_id,config_hash,model,method,n,fid\na,h,m,sjd,4,"{text}"\n')
        with pytest.raises(UsageError, match="fid"):
            read_rows(tmp_path / "rows.csv")
        with pytest.raises(UsageError, match="number"):
            selection.condition(f"n<{text}")
        assert not any(selection.condition(f"n={text}")({"n": n}) for n in (10, 12)), text


def test_names_of_cells_are_arguments(call: Call) -> None:
    """A cell of a grid is named by its overrides: with commas, which separate folders, and an equals sign."""
    words = ("run", "-m", "method=cool_sd", "delta=1,2", "nu=0.5,0.7", *SMALL, "n=3")
    words = tuple(word for word in words if word != "n=2")
    assert call(*words, "out=g")[0] == 0
    cells = [f"g/delta={d},nu={v}" for d, v in ((1, 0.5), (2, 0.7))]
    assert split_paths(",".join([*cells, "g"])) == [*cells, "g"]
    assert split_paths("a,,b") == ["a", "", "b"]
    code, out, err = call("report", f"runs={','.join(cells)}", cells[0], "out=r.html")
    assert code == 0, err
    assert "2 runs, 6 images" in out
    assert call("status", cells[0])[1].startswith(f"{cells[0]}: cool_sd on llamagen_scenes, n=3: finished")
    assert "nothing left to do" in call("resume", cells[0])[1]
    assert "3 pairs" in call("compare", *cells)[1]
    assert call("collect", *cells, "out=g/delta=1,nu=0.5/all.csv")[0] == 0
    assert call("show", "g/delta=1,nu=0.5/all.csv", "--columns", "delta,nu")[0] == 0
    again = ("run", "method=cool_sd", "delta=1", "nu=0.5", *SMALL[:1], "n=3", *SMALL[2:], f"out={cells[0]}")
    assert "nothing left to do" in call(*again)[1]
