"""Suites: one vanilla AR for all methods, any interruption, and a table with the same numbers as single runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml
from commands import Call, case, refused, row_of, said
from fake_pipeline import FakePipeline

from specbench.compare import wording
from specbench.config import parameters, registry
from specbench.errors import UsageError
from specbench.harness import run
from specbench.rows import selection
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import as_cells, read_rows
from specbench.rows.remark import as_json, free
from specbench.rows.shown import is_biased, unsteady
from specbench.tables import catalog, figures, filled, layout, table_runs
from specbench.tables.catalog import Source
from specbench.tables.definitions import TableFigure, named
from specbench.tables.table_runs import TablePlan

pytestmark = pytest.mark.usefixtures("drawn_once")

SUITE = {
    "seeds": [0, 1],
    "n": 4,
    "metrics": "none",
    "with": {"warmup": 0, "device": "cpu"},
    "columns": ["speedup_step", "accepted_length_mean"],
    "lines": {
        "sjd": {"label": "SJD", "method": "sjd"},
        "cool": {"label": "Cool-SD", "method": "cool_sd", "delta": [1.1, 2]},
    },
}
TESTS = [{"of": {"steps": "Steps"}, "pairs": [["sjd", "cool_2"]]}]
#: Columns that differ between two runs of one configuration.
ITS_OWN = {"run_id", "time", "baseline_run_id", "peak_memory_mib"}


class Counting(FakePipeline):
    """Counts the images that are decoded, and is interrupted at some of them."""

    decodes: ClassVar[list[tuple[str, int, int]]] = []  # method, seed, index
    stops: ClassVar[set[int]] = set()  # numbers of the decodes at which the user stops twice

    def decode(self, conditioning: list[str], keys: list[tuple[int, int]]) -> Any:
        method = "vanilla" if self.empty else str(self.cfg.method)
        if len(Counting.decodes) in Counting.stops:
            Counting.stops.remove(len(Counting.decodes))
            raise KeyboardInterrupt
        if not self.empty:
            method += str(self.cfg.own.get("delta", ""))
        Counting.decodes += [(method, *key) for key in keys]
        return super().decode(conditioning, keys)


@pytest.fixture
def suite(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite's file in the empty folder of `call`, whose pipeline counts."""
    monkeypatch.setattr(run, "_load_pipeline", Counting)
    monkeypatch.setattr(Counting, "decodes", [])
    monkeypatch.setattr(Counting, "stops", set())
    monkeypatch.setattr(registry, "weights_here", lambda cfg: None)
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(SUITE, sort_keys=False))
    return path


def _plan(content: Mapping[str, Any], out: Path) -> TablePlan:
    return table_runs.plan_suite(catalog.suite("x", Source("x", content)), out)


def _rows(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = read_rows(out / "suite.csv")
    return {(row["method"], row["delta"], row["seed"]): row for row in rows}


def test_a_suite_that_is_stopped_twice_has_the_numbers_of_single_runs(call: Call, suite: Path) -> None:
    Counting.stops |= {4, 20}
    for _ in range(2):
        code, _, err = call("suite", "my.yaml", "out=s", "batch=2")
        assert code == 130
        assert err.splitlines()[-1].endswith("specbench resume s")
    code, out, _ = call("status", "s")
    assert "s: 8 runs, " in out
    assert " not started; " in out
    code, _, err = call("resume", "s")
    assert code == 0, err
    assert len(Counting.decodes) == len(set(Counting.decodes)) == 2 * 4 * 4  # nothing twice: 2 seeds, 4 lines, 4 images
    decodes, rows = list(Counting.decodes), _rows(Path("s"))
    assert len(rows) == 8
    assert call("resume", "s")[0] == 0
    assert Counting.decodes == decodes
    for (method, delta, seed), row in rows.items():
        if seed == 0:
            continue  # the same run again
        words = [
            f"method={method}",
            f"seed={seed}",
            *([f"delta={delta}"] if delta else []),
            f"out=single-{row['run_id']}",
        ]
        words += "n=4 batch=2 metrics=none warmup=0 device=cpu timing=false".split()
        assert call("run", *words)[0] == 0
        single = row_of(f"single-{row['run_id']}")
        differing = {name for name in row if row[name] != single[name]} - ITS_OWN
        # a single run decodes its own baseline, which its configuration says
        assert differing <= {"config_hash", "remarks"}, (method, differing)
        vanilla = rows["vanilla", None, seed]["run_id"]
        assert row["baseline_run_id"] == vanilla
        assert row["speedup_step"] == (1 if method == "vanilla" else pytest.approx(16 / 5.5))


def test_another_suite_has_another_folder(call: Call, suite: Path) -> None:
    words = ("n=1", "out=s", "seeds=0", "--no-run")
    for _ in range(2):
        assert call("suite", "my.yaml", *words)[0] == 0
    definition = Path("s/suite.yaml").read_bytes()
    shutil.copy(suite, "other.yaml")
    message = refused(call, "suite", "other.yaml", *words)
    assert "suite my" in message
    assert "out=" in message
    assert Path("s/suite.yaml").read_bytes() == definition
    Path("s/suite.yaml").write_text("lines: 1\n")  # no command can continue it
    assert call("suite", "other.yaml", *words)[0] == 0


def test_one_table_with_pooled_seeds_and_tests_against_vanilla(call: Call, suite: Path) -> None:
    suite.write_text(yaml.safe_dump(SUITE | {"columns": ["speedup_step", "perplexity"]}, sort_keys=False))
    code, out, _ = call("suite", "my.yaml", "out=s")
    assert code == 0
    _, _, *lines = [line for line in out.splitlines() if line.startswith("| ")]
    names = ["vanilla", "SJD", "Cool-SD, δ=1.1", "Cool-SD, δ=2"]
    assert [re.split(r"<| \|", line)[0] for line in lines] == [f"| {name}" for name in names]
    assert "decoded in batches" not in out
    assert "| 2.91 ± 0.00 |" in lines[1]  # 16 / 5.5 in both seeds
    assert "mean over 2 seeds" in out
    assert "mean over 2 runs" in out
    for name in ("suite.md", "suite.tex", "suite.png", "suite.csv", "compared.csv", "suite.yaml"):
        assert (Path("s") / name).is_file()
    compared = (Path("s") / "compared.csv").read_text()
    # every method against its own vanilla: for every seed, and for the mean over seeds
    assert compared.count("accepted_length,") == 9
    assert call("suite", "my.yaml", "out=s")[0] == 0
    assert (Path("s") / "compared.csv").read_text() == compared
    suite.write_text(yaml.safe_dump(SUITE | {"tests": TESTS, "seeds": [0]}, sort_keys=False))
    _, out, _ = call("suite", "my.yaml", "out=s")
    [tested] = [line for line in out.splitlines() if line.startswith("Steps, SJD minus Cool-SD")]
    assert re.search(r"llamagen\\_scenes.* \+0\.000 .*\b4 pairs", tested)


def test_a_star_is_of_the_test_against_vanilla(tmp_path: Path) -> None:
    """A test between two lines used to replace the test of the second one against vanilla AR. With several seeds, the
    star is of the difference of the means, and its family has no tests of single seeds."""
    for seeds in ([0], [0, 1]):
        content = SUITE | {"columns": ["perplexity"], "tests": TESTS, "seeds": seeds}
        plan = _plan(content, tmp_path)
        ids = {planned.folder: f"{planned.key}-{planned.cell.seed}" for planned in plan.runs}
        vanilla = {p.folder: ids[p.reference] if p.reference else "" for p in plan.runs}
        plan = plan.with_rows({f: {"run_id": ids[f], "baseline_run_id": vanilla[f]} for f in ids})
        members: dict[str, list[Any]] = {}
        for planned in plan.runs:
            members.setdefault(planned.key, []).append(planned)
        of_seeds = {key: " / ".join(run.row["run_id"] for run in runs) for key, runs in members.items()}
        common = dict.fromkeys(wording.COLUMNS, "") | {"statistic": "log_prob_mean"}
        pairs = [(of_seeds["vanilla"], of_seeds["sjd"], "0.01"), (of_seeds["cool_2"], of_seeds["sjd"], "0.9")]
        pairs += [("vanilla-0", "sjd-0", "0.7")] if len(seeds) > 1 else []
        rows = [common | {"run_a": a, "run_b": b, "p": p} for a, b, p in pairs]
        adjusted = plan.adjusted(rows)
        assert [row["tests"] for row in adjusted] == ["2", "2", "1"][: len(rows)]
        plan = replace(plan, compared=tuple(adjusted))
        assert filled._p_values(plan, members, plan.suite.table.columns) == {("sjd", "perplexity"): 0.02}


@pytest.mark.parametrize(("n", "starred"), [(1023, False), (1024, True)])
def test_a_biased_distance_has_no_star(n: int, starred: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan({**SUITE, "seeds": [0], "columns": ["fid"]}, tmp_path)
    row = dict.fromkeys(COLUMNS, "") | {"fid": "9", "fid_backend": "scenes-classifier@1", "n": str(n), "images": str(n)}
    plan = plan.with_rows({run.folder: row for run in plan.runs})
    monkeypatch.setattr(filled, "_p_values", lambda *_: {("sjd", "fid"): 0.001})
    entries = {entry.method: entry.cells[0] for entry in filled.build(plan, "")[0].entries}
    assert (layout.DIFFERS in entries["SJD"].marks) == starred
    assert entries["SJD"].value == "9.00"


def test_a_report_of_a_suite_shows_its_runs_and_nothing_else(call: Call, suite: Path) -> None:
    """With more prompts, then the report: the decoded images stay."""
    call("suite", "my.yaml", "out=s", "seeds=0", "n=2")
    before = len(Counting.decodes)
    assert call("suite", "my.yaml", "out=s", "seeds=0", "n=4")[0] == 0
    assert len(Counting.decodes) == 2 * before == len(set(Counting.decodes))
    call("run", "method=eagle1", "n=1", "metrics=none", "baseline=false", "out=other", "device=cpu")
    code, out, err = call("report", "s", "out=s.html")
    assert code == 0, err
    assert "4 runs, 16 images, 0 audits" in out
    page = Path("s.html").read_text()
    assert "eagle1" not in page.partition('"rows"')[2].partition('"audits"')[0]
    assert page.count('"speedup_step"') >= 4  # the trade-off's axis, which a run without a baseline does not have


def test_timed_runs_alternate_with_vanilla(call: Call, suite: Path) -> None:
    assert call("suite", "my.yaml", "out=s", "seeds=0", "timed=2")[0] == 0
    rows = read_rows("s/suite.csv")
    timed = [row for row in rows if row["timing"] == "true"]
    assert len(timed) == len(rows) // 2 == 4
    assert {row["n"] for row in timed} == {2}
    assert all(row["timed_pairs"] == 2 and row["latency_s_mean"] for row in timed if row["method"] != "vanilla")
    assert all(row["latency_s_mean"] is None for row in rows if row not in timed)
    methods = [method for method, _, _ in Counting.decodes[16:]]
    assert methods.count("vanilla") == 2 * 4  # its own images, and next to each of three methods


def test_a_line_with_its_own_sampling_has_its_own_vanilla(tmp_path: Path) -> None:
    lines: dict[str, Any] = {"sjd": {"method": "sjd", "temperature": [0.9, 0.5]}, "top": {"method": "sjd", "window": 8}}
    lines["few"] = {"method": "sjd", "window": 4, "n": 3}
    plan = _plan({"n": 2, "timed": 1, "lines": lines}, tmp_path)
    quality = [planned for planned in plan.runs if not planned.timed]
    vanillas = [planned for planned in quality if planned.reference is None]
    assert {planned.label for planned in vanillas} == {
        "vanilla",
        "vanilla, temperature=0.5",
        "vanilla, temperature=0.9",
    }
    references = {planned.key: planned.reference for planned in quality}
    assert references["sjd_0.5"] != references["sjd_0.9"]
    assert references["top"] is not None
    assert [planned.config.n for planned in quality if planned.key == "few"] == [3]
    assert {planned.config.n for planned in plan.runs if planned.timed} == {1}  # seconds have their own prompts
    # one printed line for all seeds and seconds: each run of such a vanilla AR was a line
    keys = [key for key in _plan({"timed": 1, "seeds": [0, 1], "lines": lines}, tmp_path).lines if "vanilla" in key]
    assert keys == ["vanilla_temperature=0.9", "vanilla_temperature=0.5", "vanilla"]


def test_a_shared_parameter_reaches_the_lines_where_it_has_an_effect(tmp_path: Path) -> None:
    lines = {"exact": {"method": "sjd"}, "window": {"method": "scd"}, "threshold": {"method": "sjd_threshold"}}
    plan = _plan({"with": {"rule": "uniform", "tau": 0.9}, "lines": lines}, tmp_path)
    taken = {run.key: {"rule", "tau"} & named(run.overrides).keys() for run in plan.runs}
    assert taken == {"vanilla": set(), "exact": {"rule"}, "window": {"rule"}, "threshold": {"rule", "tau"}}
    with pytest.raises(UsageError, match="tau"):
        _plan({"with": {"tau": 0.9}, "lines": {"sjd": {"method": "sjd"}}}, tmp_path)
    with pytest.raises(UsageError, match="tau"):
        _plan({"lines": {"sjd": {"method": "sjd", "tau": 0.9}}}, tmp_path)


def test_methods_of_other_models_are_left_out_and_named(tmp_path: Path) -> None:
    content = {
        "models": ["llamagen_scenes", "mar_scenes"],
        "lines": {"sjd": {"method": "sjd"}, "cspd": {"method": "cspd", "gamma": 2}},
    }
    plan = _plan(content, tmp_path)
    assert {(planned.key, planned.cell.model) for planned in plan.runs} == {
        ("vanilla", "llamagen_scenes"),
        ("sjd", "llamagen_scenes"),
        ("vanilla", "mar_scenes"),
        ("cspd", "mar_scenes"),
    }
    assert len(plan.left_out) == 2


def test_a_real_model_takes_nothing_from_the_embedded_world_of_a_suite(tmp_path: Path) -> None:
    content = {**catalog.shipped("glance").content, "models": ["llamagen_scenes", "llamagen_xl"]}
    plan = _plan(content, tmp_path)
    configs = {run.cell.model: run.config for run in plan.runs if not run.timed}
    assert configs["llamagen_scenes"].data.startswith("scenes")
    assert configs["llamagen_xl"].data == "parti"
    assert not [name for name in configs["llamagen_xl"].metrics if "scenes" in name]
    assert any("llamagen_xl" in text for text in plan.left_out)


def test_a_line_of_more_prompts_is_compared_over_those_of_vanilla(call: Call, suite: Path) -> None:
    """It used to end the suite with an error about different prompts."""
    lines = {"few": {"method": "vanilla"}, "sjd": {"method": "sjd", "n": 4}}
    suite.write_text(yaml.safe_dump(SUITE | {"lines": lines, "n": 2, "seeds": [0]}, sort_keys=False))
    code, _, err = call("suite", "my.yaml", "out=s")
    assert code == 0, err
    assert {(row["method"], row["n"]) for row in read_rows("s/suite.csv")} == {("vanilla", 2), ("sjd", 4)}


def test_a_suite_ends_with_the_missing_values(call: Call, suite: Path) -> None:
    code, _, err = call("suite", "my.yaml", "metrics=clip_b32", "seeds=0", "n=1", "out=there")
    assert code == 3
    assert re.search(r"\bclip_b32\b.*\b4 of 4\b", err.splitlines()[-1])
    assert call("suite", "my.yaml", "metrics=clip_b32", "seeds=0", "n=1", "out=there", "--no-run")[0] == 0


ONE: dict[str, Any] = {"lines": {"a": {"method": "sjd"}}}
DRAWN = {**ONE, "columns": ["fid", "speedup_step"]}
BAD: list[tuple[Mapping[str, Any], str]] = [
    ({}, "is not a suite"),
    ({"lines": []}, "lines must be a mapping"),
    ({"lines": {}}, "it has no lines"),
    ({"lines": {"a": {"method": {"b": 1}}}}, "a: method must be a text"),
    ({"line": {}}, "did you mean lines?"),
    ({"lines": {"a": {"method": "sjd", "elsewhere": {"lamagen_xl": {"window": 4}}}}}, "unknown model 'lamagen_xl'"),
    ({"lines": {"a": {"method": "sjd"}}, "n": 0}, "n must be an integer of at least 1 (got 0)"),
    ({"lines": {"a": {"method": "sjd"}}, "columns": ["nope"]}, "unknown column 'nope'"),
    ({"lines": {"a": {"method": "sjd"}}, "columns": [{"fid": {"colour": 1}}]}, "columns: fid has no 'colour'"),
    ({"lines": {"a": {"method": "sjd"}}, "seeds": [1, 1]}, "seeds contains one seed twice"),
    ({"lines": {"a": {"method": "sjd"}}, "defaults": ["nope"]}, "unknown suite 'nope'"),
    ({"lines": {"a": {"method": "sjd"}}, "figure": {"x": "n"}}, "figure needs x and y"),
    (
        {"lines": {"a": {"method": "sjd"}}, "figure": {"maps": {"a": 1}}},
        "figure: maps has no 'a' (choose from: ",
    ),
    ({"lines": {"a": {"method": "sjd"}}, "rows_of": "audit"}, "rows_of must be one of run, bench, probe"),
    ({**ONE, "rows_of": ["run"], "columns": [{"steps": {"better": "lower"}}]}, "rows_of must be one of run"),
    ({**ONE, "columns": [3]}, "a column is its name"),
    ({**ONE, "columns": [{"fid": {"std_over": "zz"}}]}, "columns: fid: std_over must be images, tokens"),
    ({**ONE, "columns": [{"fid": {"decimals": -3}}]}, "columns: fid: decimals must be 0 to 8 (got -3)"),
    ({**ONE, "columns": [{"fid_backend": {"better": "lower"}}]}, "columns: fid_backend holds no number"),
    ({**ONE, "remarks": {"a": "b"}}, "remarks, 1 must be text"),
    ({**ONE, "matched": 3}, "matched must be a mapping"),
    ({**ONE, "matched": {"y": [], "lines_of": "nope"}}, "matched: lines_of: unknown suite 'nope'"),
    ({**ONE, "panels": {"p": 3}}, "panels: p must be a mapping"),
    ({**ONE, "tests": "foo"}, "tests must be a mapping"),
    ({**ONE, "tests": {"of": {"steps": "S"}, "pairs": [["a", "b"]]}}, "tests: unknown line 'b'"),
    ({**ONE, "tests": {"of": {"stepz": "S"}, "pairs": [["a", "vanilla"]]}}, "tests: unknown statistic 'stepz'"),
    ({**ONE, "figure": "foo"}, "figure must be a mapping"),
    ({**DRAWN, "figure": {"stack": {"keys": ["nosuch"], "label": "s"}}}, "figure: stack: unknown column 'nosuch'"),
    ({**DRAWN, "figure": {"maps": {"key": "fid", "label": "m"}}}, "figure: key: unknown column of lists 'fid'"),
    ({**DRAWN, "figure": {"series": {"key": "fid", "x": "n", "y": "m"}}}, "figure: key: unknown column of lists"),
    ({**DRAWN, "figure": {"x": "fid_backend", "y": "fid"}}, "figure: x: unknown column 'fid_backend'"),
    ({**DRAWN, "figure": {"x": "window", "y": "image_reward"}}, "figure: y: unknown column 'image_reward'"),
    ({**ONE, "metrics": "none", "figure": {"x": "window", "y": "fid"}}, "figure: y: unknown column 'fid'"),
    ({**DRAWN, "figure": {"x": "window", "y": "fid", "baseline": "b"}}, "figure: baseline: unknown line 'b'"),
    ({**DRAWN, "figure": {"x": "window", "y": "fid", "curves": {"c": ["b"]}}}, "figure: c: unknown line 'b'"),
    ({**ONE, "with": {"n": 4}}, "write n: at the top"),
    ({**ONE, "with": {"baseline": True}}, "leave baseline out"),
    ({**ONE, "with": {"timing": True}}, "write timed: N at the top"),
    ({"lines": {"a": None}}, "no line of bad has a run"),
    ({"lines": {"a": {"method": "nope"}}}, "line a on llamagen_scenes: unknown method 'nope'"),
    ({"lines": {"a": {"method": "sjd", "seed": 1}}, "seeds": [0]}, "line a has its own seed"),
    ({"lines": {"a": {"method": "sjd"}, "b": {"method": "sjd"}}}, "lines a and b of bad are the same run"),
]


def test_a_bad_file_is_a_short_error(call: Call) -> None:
    for content, sentence in BAD:
        with case(content):
            Path("bad.yaml").write_text(yaml.safe_dump(content))
            assert sentence in refused(call, "suite", "bad.yaml", "out=s")
            assert not Path("s").exists()
    for text in ("a: [", "- 1", "a: &a [*a]", "\x00", "a: " + "[" * 3000):
        Path("bad.yaml").write_text(text)
        refused(call, "suite", "bad.yaml")


def test_vanilla_of_the_suite_can_be_named(tmp_path: Path) -> None:
    """The suite adds its line."""
    tests = {"of": {"steps": "Steps"}, "pairs": [["a", "vanilla"]]}
    content = {**DRAWN, "figure": {"x": "speedup_step", "y": "fid", "baseline": "vanilla"}, "tests": tests}
    plan = _plan(content, tmp_path)
    assert {run.key for run in plan.runs} == {"vanilla", "a"}
    settings = {"baseline": False, "timing": True}  # what its runs do
    assert _plan({**DRAWN, "timed": 2, "with": settings}, tmp_path).suite.timed == 2


def test_a_dry_run_names_the_lines_without_a_run(call: Call) -> None:
    """It named none, and a suite without any run ended with exit code 0."""
    Path("my.yaml").write_text(yaml.safe_dump({"lines": {"a": {"method": "sjd"}, "b": None}}))
    _, out, _ = call("suite", "my.yaml", "--dry-run")
    [line] = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert line.startswith("left out: b has no run on llamagen_scenes")
    Path("my.yaml").write_text(yaml.safe_dump({"lines": {"a": None}}))
    assert "no line of my has a run (a has no run" in refused(call, "suite", "my.yaml", "--dry-run")


def test_no_text_of_a_suite_reaches_the_terminal_as_a_code(call: Call) -> None:
    content = {
        "title": "a\x1b[31mred\x07",
        "paper": "b\x1b]0;c\x07\nd",
        "lines": {"e\x1b[2J": {"method": "nope\x1b[1m"}},
    }
    Path("bad.yaml").write_text(yaml.safe_dump(content))
    err = refused(call, "suite", "bad.yaml")
    content["lines"] = {"e\x1b[2J": {"method": "sjd"}}
    Path("good.yaml").write_text(yaml.safe_dump(content))
    code, out, more = call("suite", "good.yaml", "dry_run=true")
    assert "\x1b" not in err + out + more
    assert "\x07" not in err + out + more
    suite = catalog.suite("good", catalog.of_file(Path("good.yaml")))
    assert (suite.table.title, suite.table.paper) == ("a?[31mred?", "b?]0;c? d")
    assert code in (0, 2)


def test_every_shipped_suite_can_be_read_and_has_a_description() -> None:
    for name, line in parameters.choices(catalog.GROUP).items():
        assert line.endswith("."), f"the first comment of suite/{name} is no whole sentence: {line!r}"
        source = catalog.shipped(name)
        if source.content.get("rows_of", "run") == "run" and "matched" not in source.content:
            suite = catalog.suite(name, source)
            assert suite.table.lines
            assert suite.shared["batch"] != "1"
            assert suite.shared["baseline"] == "false"
        else:
            with pytest.raises(UsageError, match="tables"):
                catalog.suite(name, source)


def test_a_grid_knows_its_jobs(call: Call) -> None:
    words = ["method=sjd", "window=8,16", "n=2", "metrics=none", "baseline=false", "device=cpu"]
    assert call("run", "-m", *words, "out=g")[0] == 0
    Path("g/window=16/row.csv").unlink()
    first, second = json.loads(call("status", "g", "--json")[1])
    assert (first["state"], second["state"]) == ("stopped", "finished")
    shutil.rmtree("g/window=16")
    _, out, _ = call("status", "g")
    head = out.splitlines()[0]
    for text in ("g: 2 runs", "1 finished", "1 not started", "2 of 4 images", "specbench resume g"):
        assert text in head
    assert call("resume", "g")[0] == 0
    assert row_of("g/window=16")["window"] == 16


def test_pooled_rows_have_the_spread_between_seeds() -> None:
    common = {"method": "sjd", "fid_stderr": 0.5, "steps": 8, "threads": 1, "commit": "a"}
    rows = [
        {**common, "seed": seed, "fid": fid, "remarks": as_json(map(free, texts))}
        for seed, fid, texts in ((0, 1.0, "xy"), (1, 3.0, "yz"))
    ]
    [group] = selection.groups(rows)
    pooled = selection.pooled(group)
    assert (pooled["fid"], pooled["fid_stderr"], pooled["steps"]) == (2.0, None, 8)
    assert pooled[selection.spread_of("fid")] == pytest.approx(2**0.5)
    assert (pooled["seed"], pooled["threads"], said(pooled)) == (
        "0 / 1",
        1,
        "mean over 2 runs; x (seed 0); y; z (seed 1)",
    )
    assert len(selection.groups([rows[0], {**rows[1], "commit": "b"}])) == 2  # never mixed
    assert len(selection.groups([rows[0], {**rows[1], "device_name": "b"}])) == 2
    assert selection.groups([{**rows[0], "time": "1"}, {**rows[0], "time": "2", "fid": 9.0}])[0][0]["fid"] == 9.0


def test_seconds_have_the_spread_of_as_many_seeds() -> None:
    """A suite used to drop the spread of speed-ups between seeds. Seconds of fewer seeds have none, and a note."""
    quality = [SimpleNamespace(seconds=False, row={"fid": fid, "remarks": ""}) for fid in ("1", "3")]
    seconds = [SimpleNamespace(seconds=True, row={"speedup_latency": value}) for value in ("2", "4")]
    spread = selection.spread_of("speedup_latency")
    whole, part = (table_runs.pooled_row([*quality, *timed], True) or {} for timed in (seconds, seconds[:1]))  # type: ignore[list-item]
    assert (float(whole["speedup_latency"]), float(whole[spread])) == (3, pytest.approx(2**0.5))
    assert (part["speedup_latency"], part.get(spread)) == ("2", None)
    assert (said(whole), said(part)) == ("mean over 2 runs", "mean over 2 runs; runs in seconds: 1")


def test_counts_of_several_seeds_can_be_read() -> None:
    """A mean of 1024.0 images or 24.0 pairs ended the table with an internal error."""
    common = {"fid_backend": "scenes-classifier@1", "n": "1024", "images": "1024", "speedup_shift": "0.2"}
    rows = [{**common, "seed": str(i), "timed_pairs": n, "timing_valid": "false"} for i, n in enumerate(("24", "48"))]
    row = as_cells(selection.pooled(rows))
    assert row["images"] == "1024"
    assert not is_biased(row, "fid")
    assert unsteady(row)["pairs"] == 36


def test_lists_of_several_seeds_are_averaged() -> None:
    """They were joined to "[..] / [..]", which no figure could read."""
    rows = [
        {
            "seed": 0,
            "accepted_histogram": "[0.5,0.5]",
            "acceptance_by_step": "[null,0.5]",
            "acceptance_by_depth": "[1]",
        },
        {"seed": 1, "accepted_histogram": "[0.25,0.25,0.5]", "acceptance_by_step": "[null,1.0]"},
    ]
    row = as_cells(selection.pooled(rows))
    assert figures._list(row, "accepted_histogram") == [0.375, 0.375, 0.25]  # it was 0 for the first seed
    assert row["acceptance_by_step"] == "[null, 0.75]"
    assert row["acceptance_by_depth"] == ""
    damaged = selection.pooled([{"accepted_histogram": text} for text in ('["a"]', "[1", "[" * 9999)])
    assert damaged["accepted_histogram"].startswith('["a"] / [1 / [[')


def test_a_run_that_fails_does_not_stop_the_others_or_the_table(call: Call, suite: Path, monkeypatch: Any) -> None:
    def load(cfg: Mapping[str, Any]) -> Counting:
        if cfg.method == "sjd":
            raise UsageError("no such thing")
        return Counting(cfg)

    monkeypatch.setattr(run, "_load_pipeline", load)
    code, out, err = call("suite", "my.yaml", "out=s", "seeds=0", "n=2")
    assert code == 2
    assert all(text in err.splitlines()[-1] for text in ("1 of 4", " my ", "(SJD on llamagen_scenes, seed 0)"))
    assert "| Cool-SD, δ=2 | " in out
    assert "specbench resume s" in out
    assert "Over 2 pairs" not in out


def test_both_commands_take_a_key_or_refuse_it(tmp_path: Path) -> None:
    """`specbench suite` and `specbench tables` read the same files. A key changes the runs or the drawing, or it is an
    error; the columns, lines and texts are in other tests."""
    one = {**{key: value for key, value in SUITE.items() if key != "seeds"}, "metrics": None}

    def runs(command: str, more: Mapping[str, Any]) -> set[str]:
        source = Source("x", {**one, **more})
        if command == "suite":
            plan = table_runs.plan_suite(catalog.suite("x", source), tmp_path)
        else:
            table = catalog.table("x", source)
            plan = table_runs.plan(table, table.model, None, tmp_path)
        return {" ".join(sorted(run.overrides)) for run in plan.runs}

    for key, value in {
        "n": 7, "metrics": ["scenes_clip"], "batch": 8, "timed": 3, "model": "llamagen_textures", "with": {"top_k": 9},
    }.items():  # fmt: skip
        for command in ("suite", "tables"):
            assert runs(command, {key: value}) != runs(command, {}), (command, key)
    of_suites = {"models": ["llamagen_textures"], "prompts": ["scenes"], "seeds": [3], "baseline": {"method": "jacobi"}}
    for key, value in of_suites.items():
        assert runs("suite", {key: value}) != runs("suite", {}), key
        with pytest.raises(UsageError, match=f"names {key}"):
            runs("tables", {key: value})
    curves = {"x": "speedup_step", "y": "accepted_length_mean"}
    with pytest.raises(UsageError, match="pairs of curves"):
        runs("suite", {"figure": curves, "matched": {"y": "accepted_length_mean"}})
    for log in (False, True):
        plan = _plan({**one, "figure": {**curves, "log": log}}, tmp_path)
        [drawn] = [filled.build(plan, "")[1].figure]
        assert isinstance(drawn, TableFigure)
        assert drawn.log == log


def test_a_label_names_the_values_of_its_line() -> None:
    """Of a single value as of a list, of the panel and of all lines; other braces stay."""
    lines = {
        "one": {"label": "SJD {window}", "method": "sjd", "window": 8},
        "two": {"label": "{window} of {method}, {n}", "method": "sjd", "window": [4, 8], "n": 3},
        "all": {"label": "T={temperature} {x} {}", "method": "sjd", "init": ["random", "repeat"]},
        "no": {"label": "{baseline}", "method": "sjd", "window": 2, "baseline": False},
    }
    made = catalog.suite("mine", Source("mine", {"lines": lines, "with": {"temperature": 0.7}}))
    assert [line.label for line in made.table.lines] == [
        "SJD 8",
        "4 of sjd, 3",
        "8 of sjd, 3",
        *(f"T=0.7 {{x}} {{}}, init={init}" for init in ("random", "repeat")),
        "false",
    ]
    for label in ("{window}", "{label}{delta}"):
        content = {"lines": {"a": {"label": label, "method": "sjd_pac"}}}
        with pytest.raises(UsageError, match="window|delta"):
            catalog.suite("mine", Source("mine", content))


def test_a_line_with_a_model_of_its_own_has_that_models_metrics_and_prompts() -> None:
    source = {"lines": {"a": {"method": "sjd"}, "b": {"method": "sjd", "model": "llamagen_fashion"}}}
    shared = {"with": {"data": "scenes_geneval", "metrics": ["scenes_geneval", "scenes_reward"]}}
    suite = catalog.table("own", Source("own.yaml", source | shared)).on("llamagen_scenes")
    [cell] = suite.cells()
    first, second = (named(suite.overrides(line, cell)) for line in suite.table.lines)
    assert (first["metrics"], first["data"]) == ("[scenes_geneval,scenes_reward]", "scenes_geneval")
    assert second["metrics"] == "[fashion_reward]"
    assert "data" not in second
