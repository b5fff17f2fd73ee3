"""The tables: published digits stay as printed, measured values come only from rows, and nothing is run twice."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import overrides, python
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from specbench.cli import tables as cli
from specbench.compare.comparison import STATISTICS
from specbench.config import configuration, parameters, registry
from specbench.errors import UsageError
from specbench.harness.planned import PlannedRun
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import append_row, as_cells, read_rows
from specbench.rows.remark import Remark, as_json, free, remark
from specbench.rows.selection import pooled
from specbench.tables import (
    definitions,
    figures,
    layout,
    literature,
    render,
    table_runs,
)
from specbench.tables.catalog import TABLES
from specbench.tables.collect import Bench
from specbench.tables.definitions import named

TABLE = TABLES["coolsd_table1"]
Tables = Callable[..., int]
RUNS = [line for line in TABLE.lines if line.overrides is not None]
PLANNED = table_runs.plan(TABLE, TABLE.model, None, Path("absent")).runs


class FakeBench(Bench):
    """A harness that decodes nothing: every run returns a row that names it. `fail_at` makes the n-th run fail."""

    def __init__(self, **cells: Any) -> None:
        self.cells = cells
        self.ran: list[tuple[list[str], Path]] = []
        self.fail_at = 0

    def row(self, run: PlannedRun) -> Mapping[str, Any]:
        if len(self.ran) + 1 == self.fail_at:
            raise KeyboardInterrupt
        self.ran.append((list(run.overrides), run.folder))
        if run.rows_of != "run":
            return self._other_row(run)
        i = len(self.ran)
        identity = {
            "run_id": f"run{i}-{run.weights}-{' '.join(run.overrides)}",
            "config_hash": run.config_hash,
            "n": 64,
            "time": "2026-11-20T10:00:00+00:00",
        }
        origin = {"commit": "c0ffee", "weights": run.weights, "device": "cpu", "device_name": "A | processor_1"}
        scores = {name: 0.5 for metric in run.config.get("metrics") for name in parameters.metric_columns(metric)[:1]}
        scores |= {"clip_score": 0.7001 + i / 100, "clip_score_stderr": 0.0123, "fid": 7.5 + i, "image_reward": -0.25}
        scorers = {"clip_score": "two-tower", "fid": "classifier", "image_reward": "reader"}
        length = {"accepted_length_mean": 1.11 * i, "accepted_length_std": 0.2}
        speed = {"latency_s_mean": 0.4567 / i, "latency_s_std": 0.01, "speedup_latency": 1.0 * i}
        speed |= {"timing": "true", "timed_pairs": 64, "further_pairs": 0, "speedup_shift": 0.0, "timing_valid": "true"}
        backends = {f"{name}_backend": f"scenes {scorer}" for name, scorer in scorers.items()}
        model = {"model": "llamagen_scenes"}
        return dict.fromkeys(COLUMNS) | model | identity | origin | scores | backends | length | speed | self.cells

    def compare(self, a: Path, b: Path) -> tuple[()]:
        return ()

    @staticmethod
    def _other_row(run: PlannedRun) -> Mapping[str, Any]:
        values = {"config_hash": run.config_hash, "weights": run.weights, "model": "llamagen_scenes"}
        figures = {
            "bench": {"step_ms": 2.5, "forward_ms": 2.0, "draft_ms": 0.5},
            "probe": {"top_probabilities": "[0.3,0.5]", "entropy": 2.5},
        }[run.rows_of]
        return dict.fromkeys(table_runs.ROW_FILES[run.rows_of].columns) | values | figures


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """`specbench tables` in its own folder, with a fake harness."""

    def call(*words: str, bench: FakeBench | None = None) -> int:
        return cli.main(words, bench or FakeBench(), tmp_path / "results", tmp_path / "runs")

    return call


def _sheet(
    rows: Mapping[str, Mapping[str, str] | None], published: list[literature.PublishedRow] | None = None
) -> layout.TableSheet:
    printed = literature.load(TABLE.id) if published is None else published
    return layout.build(TABLE, "llamagen_scenes", rows, printed, {}, "specbench tables coolsd_table1")


def _row(**cells: str) -> dict[str, str]:
    row = FakeBench().row(PlannedRun(Path(), configuration.compose([]), weights="embedded:1"))
    return {k: "" if v is None else str(v) for k, v in row.items()} | cells


def _all_rows(**cells: str) -> dict[str, dict[str, str]]:
    return {line.key: _row(**cells) for line in RUNS}


def test_published_digits_stay_as_printed() -> None:
    """A mistyped digit in the CSV would change the ratio of the latencies."""
    rows = literature.load("coolsd_table1")
    assert len(rows) == 9
    first = rows[0].cells
    assert (first["clip_score"], first["accepted_length_mean"], first["latency_s_mean"]) == ("0.3330", "1.00", "170.14")
    assert rows[8].cells["image_reward"] == "-0.1353"
    vanilla = {r.model: float(r.cells["latency_s_mean"]) for r in rows if r.method_key == "vanilla"}
    for r in rows:
        ratio = vanilla[r.model] / float(r.cells["latency_s_mean"])
        assert float(r.cells["speedup_latency"]) == pytest.approx(ratio, abs=0.0101)


def test_only_the_papers_own_evidence_is_unmarked() -> None:
    rows = literature.load("coolsd_table1")
    assert all(r.trusted for r in rows)
    hint = [replace(r, evidence="secondary") if r.row_id.endswith(":06") else r for r in rows]
    sheet = _sheet({}, hint)
    marked = [e for e in sheet.entries if e.kind == "published" and e.marks]
    assert [e.row_id for e in marked] == ["coolsd_table1:06"]
    assert "'secondary': a hint" in dict(sheet.notes)[marked[0].marks[0]]
    for grade in ("seed", "seed+official_repo", "reconstructed", "paper"):
        assert replace(rows[0], evidence=grade).trusted
    for grade in ("official_repo", "quoted", "secondary", "lost", "", "seeded"):
        assert not replace(rows[0], evidence=grade).trusted


def test_every_printed_line_is_shown_once() -> None:
    for table in (TABLES[name] for name in literature.available()):
        published = literature.load(table.id)
        sheet = layout.build(table, table.model, {}, published, {}, "")
        shown = [e.row_id for e in sheet.entries if e.kind == "published" and e.row_id]
        tested = [p for p in published if p.cells["value_name"]]
        assert sorted(shown) == sorted(p.row_id for p in published if p not in tested), table.id
        assert all(f"{p.model})" in sheet.remarks[0] and p.cells["value"] in sheet.remarks[0] for p in tested), table.id
        names = {c.printed for c in table.columns if c.published_as}
        names |= {c.printed_spread for c in table.columns if c.std_over}
        assert names <= {*published[0].cells}, table.id


def test_two_printed_rows_for_one_line_are_an_error() -> None:
    rows = literature.load("coolsd_table1")
    with pytest.raises(UsageError, match="coolsd_table1.*01.*coolsd_table1.*01.*'Target Model'"):
        _sheet({}, [*rows, rows[0]])


def test_every_table_names_existing_columns_and_lines_and_its_runs_compose() -> None:
    compared = {statistic.name for statistic in STATISTICS} | set(parameters.choices("metrics")) | {"distribution"}
    for name, table in TABLES.items():
        with configuration.session():
            runs = [o for line in table.lines if (o := overrides(table, line, table.model))]
            hashes = {PlannedRun(Path(), configuration.compose(run)).config_hash for run in runs}
        assert len(hashes) == len(runs), f"two lines of {name} are the same run"
        columns = {*(COLUMNS if table.rows_of == "run" else table_runs.ROW_FILES[table.rows_of].columns)}
        used = {name for c in table.columns for name in (c.key, c.backend or c.key)}
        used |= {c.spread for c in table.columns if c.std_over}
        lines, named = {line.key for line in table.lines}, set[str]()
        assert len(lines) == len(table.lines), name
        if isinstance(table.figure, definitions.TableFigure):
            used |= {*table.figure.x, *table.figure.y}
            named |= {key for panel in table.figure.panels for key in (*panel.keys, panel.baseline)}
            named.add(table.figure.baseline)
        elif isinstance(table.figure, definitions.Stack):
            assert set(table.figure.keys) <= {c.key for c in table.columns}, name
        elif table.figure is not None:
            used.add(table.figure.key)
        assert used <= columns, name
        assert named <= {*lines, ""}, name
        assert {test.statistic for test in table.tests} <= compared, name


@pytest.mark.usefixtures("drawn_once")
def test_a_table_is_filled_by_another_command(tables: Tables, tmp_path: Path) -> None:
    sizes = [f"cfg_scale={s} n=64 seed=0 method=vanilla" for s in (1, 3)]
    for name, command, runs, more in (
        ("sjdpac_table4", "bench", ["method=vanilla batch=1", "method=sjd_pac window=64 batch=1"], " bench.images=0"),
        ("lantern_fig2c", "probe", sizes, ""),
        ("sjdpac_fig4", "probe", ["n=16 seed=0 method=vanilla"], ""),  # a line with the method of all lines
    ):
        bench = FakeBench()
        for _ in range(2):  # the second call finds the rows
            assert tables(name, bench=bench) == 0
            ran = [" ".join(overrides) for overrides, _ in bench.ran]
            assert ran == [f"model=llamagen_scenes {run}" for run in runs]
        assert len(table_runs.ROW_FILES[command].read(tmp_path / "results" / command / f"{name}.csv")) == len(runs)
        text = (tmp_path / "results" / "tables" / f"{name}.md").read_text()
        assert "| 2.50 |" in text  # step_ms, entropy
        assert all(f"specbench {command} model=llamagen_scenes {run}{more}" in text for run in runs)
        assert (tmp_path / "results" / "tables" / f"{name}.svg").is_file()


def test_a_line_of_two_tables_is_measured_once(tables: Tables, tmp_path: Path) -> None:
    bench = FakeBench()
    # each line has a run of quality and one of seconds; vanilla and SJD are of the same images
    for table, runs_so_far in (("sjd_table4", 2 * 4), ("coolsd_table2", 2 * (4 + 2))):
        tables(table, bench=bench)
        assert len(bench.ran) == runs_so_far
    (tmp_path / "results" / "sjd_table4.csv").unlink()
    tables("coolsd_table2", bench=bench)  # only the rows of Cool-SD are its own
    assert len(bench.ran) == 2 * (6 + 2)


def test_another_models_runs_follow_the_papers_protocol() -> None:
    table = TABLES["lantern_table3"]
    line = next(line for line in table.lines if line.key == "lantern_0.10_1000_1")
    embedded, real = (overrides(table, line, model) for model in ("llamagen_scenes", "llamagen_xl"))
    common = "method=lantern delta=0.1"
    assert embedded == f"model=llamagen_scenes {common} k=100 n=24 batch=1 emitted_draws=0 seed=0".split()
    quality = "emitted_draws=0 batch=16 baseline=false timing=false"
    assert real == f"model=llamagen_xl {common} k=1000 protocol=lantern_table3 {quality}".split()
    assert "k=1000, embedded 100" in line.label
    assert "n=8" in (overrides(table, line, "llamagen_xl", 8) or ())
    sizes = TABLES["sjd_table8"]  # a model with only one size does not have these lines
    for line, size in zip(sizes.lines, (512, 768, 1024), strict=True):
        assert overrides(sizes, line, "llamagen_xl") is None
        assert f"size={size}" in (overrides(sizes, line, "lumina_mgpt") or ())


def test_a_line_needs_a_drafter_that_was_trained_for_the_model() -> None:
    table = TABLES["relaxed"]
    lines = {line.key: line for line in table.lines}
    guided = lines["UniformRSD_1.3_EAGLE-1_guided_chain_of_5"]
    assert not table.no_run(guided, "llamagen_scenes")
    assert "no such drafter" in table.no_run(guided, "llamagen_textures")
    assert overrides(table, guided, "llamagen_textures") is None
    assert not table.no_run(lines["UniformRSD_1.3_EAGLE-1_chain_of_5"], "llamagen_textures")
    assert not table.no_run(guided, "llamagen_xl")  # whose drafters come from a folder


def test_another_world_has_its_own_prompts_and_its_metrics_of_the_same_names() -> None:
    table = TABLES["field"]
    values = [
        definitions.named(overrides(table, table.lines[0], model) or ())
        for model in ("llamagen_scenes", "llamagen_textures", "llamagen_xl")
    ]
    assert [v.get("data") for v in values] == ["scenes_geneval", None, None]
    metrics = ["[scenes_geneval,scenes_reward,scenes_clip]", "[textures_reward,textures_clip]", None]
    assert [v.get("metrics") for v in values] == metrics


def test_runs_of_a_real_model_have_no_prompts_or_scores_of_an_embedded_world() -> None:
    for table, model in itertools.product(TABLES.values(), ("llamagen_xl", "llamagen_3b", "mar_l")):
        for line in table.lines:
            for name, value in definitions.named(overrides(table, line, model) or ()).items():
                assert name not in ("data", "metrics") or "scenes" not in value, f"{table.id}: {name}={value}"


def test_several_seeds_are_pooled(tables: Tables, tmp_path: Path) -> None:
    bench = FakeBench()
    for _ in range(2):  # the second call finds the rows
        assert tables("coolsd_table1", "timed=0", "--seeds", "1,2,3", bench=bench) == 0
        assert len(bench.ran) == 3 * len(RUNS)
    assert [word for words, _ in bench.ran[:3] for word in words if "seed" in word] == ["seed=1", "seed=2", "seed=3"]
    text = (tmp_path / "results/tables/coolsd_table1.md").read_text()
    assert "2.22 ± 1.11" in text  # over 1.11, 2.22 and 3.33, each with 0.2 over images
    assert "mean over 3 seeds" in text
    assert "mean over 3 runs" in text
    assert tables("coolsd_significance", "--seeds", "1,2") == 0  # a test is of one seed
    with pytest.raises(UsageError, match="seed"):
        tables("sjd_table3", "--seeds", "1,2")
    with pytest.raises(UsageError, match="seed"):
        tables("relaxed_equal", "--seeds", "1,2")


def test_a_line_with_fewer_seeds_says_so(tables: Tables, tmp_path: Path) -> None:
    """One seed of three had its spread over images as the spread over seeds, and two were "the mean over 3 seeds"."""
    for finished, shown, note in ((4, "4.44", False), (5, "5.00 ± 0.78", True)):
        bench = FakeBench()
        bench.fail_at = finished + 1
        seeds = f"{finished}1,{finished}2,{finished}3"
        with pytest.raises(KeyboardInterrupt):
            tables("coolsd_table1", "timed=0", "--seeds", seeds, bench=bench)
        tables("coolsd_table1", "timed=0", "--seeds", seeds, "--no-run")
        lines = (tmp_path / "results/tables/coolsd_table1.md").read_text().splitlines()
        [second] = [line for line in lines if line.startswith(f"| {RUNS[1].label}")]
        assert f"**{shown}**" in second
        assert any("mean over 2 runs" in line for line in lines) == note


def test_a_missing_requested_score_ends_with_3(tables: Tables, capsys: Any) -> None:
    """lantern_table1 names its metrics, coolsd_table1 uses its model's."""
    empty = {"geneval": None, "clip_score": 0.5, "image_reward": None}
    empty["remarks"] = _remarks(free("no weights").about("geneval"), free("too few").about("fid"))
    assert tables("lantern_table1", bench=FakeBench(**empty)) == 3
    stderr = capsys.readouterr().err
    assert re.search(r"\bscenes_geneval\b.*\b3 of 3\b.*\(Speculative Decoding, Medusa, EAGLE-2\): no weights", stderr)
    assert "specbench: scenes_geneval " in stderr
    assert "specbench: scenes_clip " not in stderr
    assert tables("lantern_table1", bench=FakeBench()) == 0  # from the rows
    assert tables("coolsd_table1", bench=FakeBench(fid=None)) == 0
    assert re.search(r"\bscenes_fid\b.*\b6 of 6\b", capsys.readouterr().err)


def test_comparisons_are_drawn_when_they_are_named(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = FakeBench(perplexity=3.0, acceptance_rate=0.5, fid_stderr=0.4, image_reward_stderr=0.01)
    requested = {table.id for table in TABLES.values() if table.paper == "this project's own comparison"}
    assert {table.id for table in cli.by_default()} == set(TABLES) - requested
    tables("coolsd_fig5", bench=bench)
    folder = tmp_path / "results" / "tables"
    picture = (folder / "coolsd_fig5.svg").read_text()
    for text in ("Cool-SD, linear", "UniformRSD", "tree of 25", "Pareto front", "higher is better"):
        assert text in picture
    with Image.open(folder / "coolsd_fig5.png") as opened:
        assert opened.width > 1000
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda drawn, path, **how: path.suffix == ".png" or save(drawn, path, **how))
    tables("coolsd_fig5", bench=bench)
    assert len(bench.ran) == len(TABLES["coolsd_fig5"].lines)
    assert (folder / "coolsd_fig5.svg").read_text() == picture  # the same rows give the same file


def test_a_pareto_front_has_the_points_that_no_other_dominates() -> None:
    g = random.Random(0)
    assert figures.pareto_front([], down=True) == []
    for down in (False, True):
        points = [(float(g.randrange(8)), float(g.randrange(8))) for _ in range(40)]
        sign = -1 if down else 1
        above = [{p for p in points if p[0] >= x and sign * p[1] >= sign * y} - {(x, y)} for x, y in points]
        beaten = {point for point, better in zip(points, above, strict=True) if better}
        assert figures.pareto_front(points, down) == sorted(set(points) - beaten)


def test_a_front_covers_all_curves_and_is_on_the_better_side() -> None:
    """A front is drawn as stairs: to the right of a point, the curve has the next point's quality."""
    table = TABLES["lantern_fig5"]
    assert isinstance(table.figure, definitions.TableFigure)
    first, second, *_ = table.figure.panels[0].curves
    values = [(2.0, 5.0, 0.5), (3.0, 6.0, 0.7)], [(2.5, 4.0, 0.6), (2.8, 7.0, 0.4)]
    rows: dict[str, Any] = {}
    for curve, points in zip((first, second), values, strict=True):
        for key, (x, fid, clip) in zip(curve.lines[1:], points, strict=False):
            rows[key] = _row(accepted_length_mean=str(x), fid=str(fid), clip_score=str(clip))
    drawn = figures._curves(table.figure, table, rows)
    fronts = [line for a in drawn.axes[:2] for line in a.lines if "Pareto" in str(line.get_label())]
    points_of_fronts = [[tuple(map(float, p)) for p in line.get_xydata()] for line in fronts]
    assert points_of_fronts == [[(2.5, 4.0), (3.0, 6.0)], [(3.0, 0.7)]]
    assert all(line.get_drawstyle() == "steps-pre" for line in fronts)


@pytest.mark.usefixtures("drawn_once")
def test_lists_of_rows_are_drawn(tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of figure, from cells as rows have them. A row without its list is left out."""
    drawn: dict[str, list[Any]] = {"bar": [], "barh": [], "plot": [], "imshow": []}
    for name, calls in drawn.items():
        plain = getattr(Axes, name)
        monkeypatch.setattr(Axes, name, lambda *a, _p=plain, _c=calls, **k: (_c.append((a[1:], k)), _p(*a, **k))[1])
    histogram, by_step, by_position = "[0.5,0.25,0.25]", "[null,0.5,1.0]", json.dumps([0.0, 0.25, 0.5, 1.0])
    lists = {"accepted_histogram": histogram, "acceptance_by_step": by_step, "drafted_by_position": by_position}
    bench = FakeBench(gamma=4, **lists)
    for name in ("sjdpac_fig1", "cspd_fig11", "cspd_fig16", "cspd_fig8"):
        tables(name, bench=bench)
        drawing = (tmp_path / "results" / "tables" / f"{name}.svg").read_text()
        assert "Pareto front" not in drawing  # a sweep of a parameter has none
    shares, gains = [call[0][1] for call in drawn["bar"]][::2][:2]
    assert shares == [0.5, 0.25, 0.25]
    assert gains == pytest.approx([0, 1 / 3, 2 / 3])  # one and two tokens beyond a step's first
    [by_step_plot, *_] = [call[0] for call in drawn["plot"] if "label" in call[1]]
    assert by_step_plot[0] == [0, 1, 2]
    assert math.isnan(by_step_plot[1][0])
    assert by_step_plot[1][1:] == [0.5, 1.0]
    assert drawn["imshow"][0][0][0].tolist() == [[0.0, 0.25], [0.5, 1.0]]
    tables("sjdpac_table4", bench=bench)
    bars = [(call[0][1], call[0][3]) for call in drawn["barh"]]
    assert bars[0] == ([2.0, 2.0], [0.0, 0.0])
    assert bars[1] == ([0.5, 0.5], [2.0, 2.0])  # it begins where the first ends
    for name in ("cspd_fig16", "sjdpac_table4"):
        assert figures.draw(TABLES[name], {line.key: None for line in TABLES[name].lines}, tmp_path, "none")


def test_a_long_label_of_a_vertical_axis_is_broken_between_words() -> None:
    label = "KL divergence of the emitted distribution from the target's"
    lines = figures.wrapped(label).split("\n")
    assert " ".join(lines) == label
    assert max(map(len, lines)) <= 32
    assert figures.wrapped("FID") == "FID"


def test_every_axis_of_a_figure_has_a_label() -> None:
    for name, table in TABLES.items():
        if isinstance(table.figure, definitions.TableFigure):
            labelled = definitions.AXES.keys() | {column.key for column in table.columns}
            assert {*table.figure.x} <= labelled, name


def test_a_spread_is_shown_for_the_rows_that_have_it() -> None:
    row = _row(accepted_length_std="0.2", n="64", accepted_length_stderr="0.5")
    t = 1.998341  # the quantile of Student's t with 63 degrees of freedom, from a table
    assert figures.point(row, "accepted_length_mean", "clip_score") == pytest.approx(
        (1.11, 0.7101, t * 0.5, t * 0.0123)
    )
    assert layout.half_width(_row(), "fid") == 0
    seeds = as_cells(pooled([{"fid": value, "fid_stderr": 9.0, "n": 64} for value in (1.0, 2.0, 3.0)]))
    assert layout.half_width(seeds, "fid") == pytest.approx(4.302653 * 1 / 3**0.5)  # t with 2 degrees of freedom
    [index] = [i for i, c in enumerate(TABLE.columns) if c.key == "speedup_latency"]
    rows = _all_rows() | {"eagle1": _row(speedup_latency_stderr="0.034")}
    sheet = _sheet(rows)
    shown = {e.method: e.cells[index].spread for e in sheet.entries if e.kind == "measured"}
    assert {shown.pop("EAGLE-1"), *shown.values()} == {"0.03", ""}
    assert "± its standard error" in dict(sheet.notes)[sheet.headers[index].marks[0]]
    assert "± its" not in dict(_sheet(_all_rows()).notes)[_sheet(_all_rows()).headers[index].marks[0]]


def test_numbers() -> None:
    for text, decimals, shown in (
        ("170.1449", 2, "170.14"),
        ("1", 2, "1.00"),
        ("0.04567", 2, "0.0457"),
        ("-0.0763", 4, "-0.0763"),
        ("0", 2, "0.00"),
        ("0.4567", 2, "0.457"),
        ("1e-12", 2, "0.00000000"),
        ("2.675", 2, "2.67"),
    ):
        assert layout.number(text, decimals) == shown, text
    named = r"of row run1-.* of table coolsd_table1 is not a finite number \(.*\): remove"
    for bad, column in itertools.product(("nan", "inf", "-inf", "fast"), ("fid", "latency_s_std")):
        with pytest.raises(UsageError, match=named):
            _sheet({"vanilla": _row(**{column: bad})})


def test_measured_and_published_never_share_a_line() -> None:
    sheet = _sheet(_all_rows())
    printed = {p.row_id: p for p in literature.load(TABLE.id)}
    for e in sheet.entries:
        if e.kind == "published" and e.row_id:
            assert e.model in ("Lumina-mGPT 7B", "LlamaGen-XL")
            assert [c.value for c in e.cells] == [printed[e.row_id].cells[c.key] for c in TABLE.columns]
        elif e.kind == "measured" and e.row_id:
            assert e.model == "llamagen_scenes"
            assert [c.value for c in e.cells] == ["0.7101", "8.50", "-0.2500", "1.11", "0.457", "1.00"]
            assert [c.spread for c in e.cells] == ["0.0123", "", "", "0.20", "0.010", ""]


def test_a_missing_cell_has_a_note_that_says_why() -> None:
    sheet = _sheet({"vanilla": _row(image_reward="")})
    notes = dict(sheet.notes)

    def why(method: str, kind: str, model: str, column: int) -> str:
        [entry] = [e for e in sheet.entries if (e.method, e.kind, e.model) == (method, kind, model)]
        assert entry.cells[column].value == ""
        return " ".join(notes[m] for m in entry.cells[column].marks)

    unmeasured = why("Target Model", "measured", "llamagen_scenes", 2)
    missing = why("EAGLE-1", "measured", "llamagen_scenes", 0)
    absent = why("Cool-SD (δ=2)", "published", "Lumina-mGPT 7B", 3)
    assert "specbench tables coolsd_table1" in missing
    assert why("Cool-SD (δ=2)", "published", "Lumina-mGPT 7B", 0) == absent
    assert len({unmeasured, missing, absent} - {""}) == 3
    assert all(cell.value or cell.marks for e in sheet.entries for cell in e.cells)


def test_every_backend_is_named_with_its_lines() -> None:
    def note(sheet: layout.TableSheet, label: str) -> str:
        [header] = [h for h in sheet.headers if h.label == label]
        return dict(sheet.notes)[header.marks[0]]

    assert "measured by scenes classifier; " in note(_sheet(_all_rows()), "Fréchet distance")
    rows = _all_rows() | {"eagle1": _row(fid_backend="Inception-V3")}
    mixed = note(_sheet(rows), "Fréchet distance")
    assert "measured by Inception-V3 (EAGLE-1)" in mixed
    assert "measured by scenes classifier (Target Model, LANTERN++ (λ=2, k=10), UniformRSD (δ=1.1), " in mixed
    assert "backend not recorded" in note(_sheet(_all_rows(fid_backend="")), "Fréchet distance")


def test_rows_of_different_origin_are_pointed_out() -> None:
    for column, word in (("device_name", "devices"), ("commit", "commits")):
        rows = _all_rows()
        assert not any(f" different {word}" in r for r in _sheet(rows).remarks)
        rows["eagle1"] |= {column: "another"}
        assert any(f" different {word}" in remark for remark in _sheet(rows).remarks)
    facts = dict(_sheet(_all_rows() | {"eagle1": _row(commit="decade", time="2026-11-22T01:00:00+00:00")}).facts)
    expected = {
        "Device": "A | processor_1, cpu",
        "Commit": "c0ffee / decade",
        "Date": "2026-11-20 to 2026-11-22",
        "Command": "specbench tables coolsd_table1",
    }
    assert facts.items() >= expected.items()
    assert "Device" not in dict(_sheet({}).facts)


def test_the_difference_from_the_paper_is_of_the_same_model() -> None:
    """Measured minus published if the model is the printed one. No line of another model has a difference."""
    table, published = TABLES["lantern_table3"], literature.load("lantern_table3")
    line = next(line for line in table.lines if line.key == "lantern_0.10_1000_1")
    row = _row(accepted_length_mean="1.80", accepted_length_stderr="0.02", speedup_latency="1.10", clip_score="0.31")
    rows = {line.key: row | {"fid": "", "speedup_latency_stderr": ""}}
    for model in ("llamagen_scenes", "llamagen_xl_512"):
        assert not [e for e in layout.build(table, model, rows, published, {}, "").entries if e.kind == "difference"]
    sheet = layout.build(table, "llamagen_xl", rows, published, {}, "")
    [entry] = [e for e in sheet.entries if e.kind == "difference"]
    speed, length, fid, clip = entry.cells
    assert (length.value, length.spread) == ("+0.05", "0.04")  # 1.80 - 1.75; 2.00 * 0.02
    assert (speed.value, speed.spread, clip.value) == ("-0.07", "", "-0.0108")  # 1.10 - 1.17, 0.31 - 0.3208
    assert (fid.value, bool(fid.marks)) == ("", True)
    assert sheet.entries[sheet.entries.index(entry) - 1].kind == "published"
    shown = layout.printed(sheet)
    [line] = [line for line in shown.lines if line[0].value == entry.method]
    cells = zip(shown.headers, line, strict=True)
    minus = [cell.value for header, cell in cells if header.source.startswith("measured minus published")]
    assert minus == ["-0.07", "+0.05", "-0.0108"]
    assert "difference" in render.as_csv(sheet)
    table, published = TABLES["sjd_table4"], literature.load("sjd_table4")
    entries = layout.build(table, "anole", {"sjd": _row(clip_score="0.3")}, published, {}, "").entries
    assert [e.cells[-1].value for e in entries if e.kind == "difference"] == [""]  # cosines times 100


PROCESSES = remark("processes", processes=2, timed=False)


def _remarks(*remarks: Remark) -> str:
    """The cell of a row with these remarks."""
    return json.dumps(as_json(remarks))


def test_notes_of_rows_about_a_column_are_in_its_head_once() -> None:
    """Notes about columns that the table does not have are not in its head: their numbers would give a note for each
    row."""
    sheet = _sheet({"eagle1": _row(remarks=_remarks(PROCESSES, free("of 9 pictures").about("perplexity")))})
    [entry] = [e for e in sheet.entries if e.kind == "measured" and e.marks]
    assert entry.method == "EAGLE-1"
    assert "decoded in 2 processes" in dict(sheet.notes)[entry.marks[0]]
    assert "perplexity" not in dict(sheet.notes)[entry.marks[0]]
    cut = {"vanilla": 3, "eagle1": 1}
    remarks = {key: remark("cut_captions", "clip_score", cut=n, captions=5, tokens=77) for key, n in cut.items()}
    remarks["cool_sd_2"] = remark("negative", "clip_score")
    sheet = _sheet({key: _row(remarks=_remarks(PROCESSES, about)) for key, about in remarks.items()})
    [head] = [dict(sheet.notes)[header.marks[0]] for header in sheet.headers if header.label == "CLIP score"]
    assert re.search(r"\b1 to 3 of 5 captions .* \(2 of 3 lines\); .* \(1 of 3 lines\)", head)
    assert not [text for _, text in sheet.notes if "clip_score: " in text]
    # A line without the value.
    sheet = _sheet({"eagle1": _row(clip_score="", remarks=_remarks(free("no weights").about("clip_score")))})
    [unscored] = [e.cells[0] for e in sheet.entries if e.kind == "measured" and e.row_id]
    assert "no weights" in dict(sheet.notes)[unscored.marks[0]]


def test_more_notes_than_letters() -> None:
    notes = layout.Notes()
    marks = [notes.mark(f"note {i}") for i in range(60)]
    assert (marks[0], marks[25:29], len(set(marks))) == ("a", ["z", "aa", "ab", "ac"], 60)
    assert notes.mark("note 3") == "d"


def test_markdown_and_latex_are_tables_of_equal_lines() -> None:
    sheet = _sheet(_all_rows(fid_backend="a | b", device_name="50% & #1_{x} ~^\\"))
    text = render.markdown(sheet)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(TABLE.lines)
    columns = 1 + 3 * len(TABLE.columns)  # measured, and two published models
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {1 + columns}
    assert "| Target Model | **0.7101 ± 0.0123** | 0.3330 | 0.3162 | **8.50** | 28.99 | 21.08 |" in text
    assert "| 0.6855 | -0.0763 | **1.11 ± 0.20** | 1.00 ± 0.00 | 1.00 ± 0.00 |" in text
    assert "a \\| b" in text

    text = render.latex(sheet)
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 2 + len(TABLE.lines)
    spans = re.findall(r"\\multicolumn\{(\d)\}", lines[0])
    assert 1 + sum(map(int, spans)) == columns
    assert {1 + len(re.findall(r"(?<!\\)&", line)) for line in lines[1:]} == {columns}
    assert rf"\begin{{tabular}}{{l{'r' * (columns - 1)}}}" in text
    printed = r" & $-$0.0763 & \textbf{1.11 $\pm$ 0.20} & 1.00 $\pm$ 0.00 & 1.00 $\pm$ 0.00 & "
    assert printed in text
    assert r"50\% \& \#1\_\{x\} \textasciitilde{}\textasciicircum{}\textbackslash{}" in text
    ends = "begin{table begin{tabular end{tabular begin{minipage end{minipage end{table"
    assert re.findall(r"\\((?:begin|end)\{\w+)", text) == ends.split()
    bare = re.sub(r"\\[\\{}%]", "", text)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0


def test_long_form_has_every_cell() -> None:
    sheet = _sheet({"vanilla": _row()})
    rows = list(csv.DictReader(render.as_csv(sheet).splitlines()))
    assert len(rows) == (3 * len(TABLE.lines) - 2) * len(TABLE.columns)
    [cell] = [r for r in rows if r["row_id"] == "coolsd_table1:09" and r["column"] == "Latency (s)"]
    assert (cell["value"], cell["spread"], cell["evidence"], cell["kind"]) == ("3.72", "0.27", "seed", "published")
    assert all(r["value"] or r["note"] for r in rows)


def test_the_first_call_runs_and_the_second_does_not(
    tables: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stop in the middle loses and repeats nothing, and the list shows the state."""

    def state() -> str:
        capsys.readouterr()
        tables("--list", TABLE.id, bench=FakeBench())
        return capsys.readouterr().out.rpartition(" rows  ")[0]

    assert state().split() == ["coolsd_table1", "no", "rows", f"0/{len(PLANNED)}"]
    bench, results = FakeBench(), tmp_path / "results"
    bench.fail_at = 3
    with pytest.raises(KeyboardInterrupt):
        tables("coolsd_table1", bench=bench)
    assert len(read_rows(results / "coolsd_table1.csv")) == 2
    assert state().split() == ["coolsd_table1", "partial", f"2/{len(PLANNED)}"]
    bench.fail_at = 0
    assert tables("coolsd_table1", bench=bench) == 0
    assert state().split() == ["coolsd_table1", "complete", f"{len(PLANNED)}/{len(PLANNED)}"]
    assert [tuple(words) for words, _ in bench.ran] == [run.overrides for run in PLANNED]
    assert len({out for _, out in bench.ran}) == len(PLANNED)
    assert all(out.is_relative_to(tmp_path / "runs" / "tables" / "coolsd_table1") for _, out in bench.ran)
    first = (results / "tables/coolsd_table1.md").read_text()
    assert tables("coolsd_table1", bench=bench) == 0
    assert len(bench.ran) == len(PLANNED) == len(read_rows(results / "coolsd_table1.csv"))
    assert (results / "tables/coolsd_table1.md").read_text() == first
    assert (results / "tables/coolsd_table1.tex").is_file()


def test_a_stopped_run_continues_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folders(n: int) -> list[Path]:
        return [run.folder for run in table_runs.plan(TABLE, TABLE.model, n, tmp_path).runs]

    [first, *_] = table_runs.plan(TABLES["relaxed_equal"], "llamagen_scenes", 3, Path("absent")).runs
    assert str(first.folder).startswith("runs/tables/relaxed/llamagen_scenes/vanilla-")
    of_eight = folders(8)
    assert of_eight == folders(8)
    assert not {*of_eight} & {*folders(9)}
    monkeypatch.setattr(registry, "weights_label", lambda cfg: "new")
    assert not {*of_eight} & {*folders(8)}


def test_rows_of_another_configuration_or_of_other_weights_do_not_count(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(cfg: Mapping[str, Any]) -> str:
        raise FileNotFoundError

    tables(TABLE.id)
    for words, weights, runs in (
        (("--n", "8"), registry.weights_label, len(PLANNED)),
        ((), lambda cfg: "embedded:2", len(PLANNED)),
        ((), absent, 0),  # weights that cannot be known without loading do not matter
    ):
        monkeypatch.setattr(registry, "weights_label", weights)
        bench = FakeBench()
        tables(TABLE.id, *words, bench=bench)
        assert len(bench.ran) == runs
    assert len(read_rows(tmp_path / "results/coolsd_table1.csv")) == 3 * len(PLANNED)


def test_the_weights_of_a_run_are_known_before_loading(tmp_path: Path) -> None:
    """Retrained weights make old rows stale. A wrong prediction would run every table again each time."""
    from specbench.harness.pipeline import Pipeline

    def weights(*arguments: str) -> str | None:
        return registry.weights_here(configuration.compose(arguments))

    words = ["method=cool_sd", f"weights={tmp_path}"]
    assert weights(*words) is None
    for path in registry.ASSETS.glob("scenes_*.safetensors"):
        shutil.copy(path, tmp_path)
    label = weights(*words)
    assert label is not None
    pipeline = Pipeline.load(configuration.compose(words))
    assert pipeline.weights == pipeline.vanilla().weights == label
    assert weights("method=vanilla", f"weights={tmp_path}") == label.split("+")[0]
    assert weights("method=cool_sd", "weights=random") == "random"
    with (tmp_path / "scenes_eagle.safetensors").open("ab") as file:
        file.write(b"!")
    assert weights(*words) not in (None, label)
    assert weights("method=vanilla", f"weights={tmp_path}") == label.split("+")[0]


def test_a_row_of_another_run_is_refused(tables: Tables, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{len(PLANNED)} of {len(PLANNED)} runs"):
        tables(TABLE.id, bench=FakeBench(config_hash="other"))
    assert not (tmp_path / "results/coolsd_table1.csv").exists()


def test_without_runs_the_existing_rows_are_drawn(tables: Tables, tmp_path: Path) -> None:
    bench, drawn = FakeBench(), tmp_path / "results/tables/coolsd_table1.md"
    tables(TABLE.id, "--no-run", bench=bench)
    assert not bench.ran
    text = drawn.read_text()
    assert "specbench tables coolsd\\_table1" in text
    assert "21.08" in text
    tables(TABLE.id)
    path = tmp_path / "results/coolsd_table1.csv"
    append_row(path, read_rows(path)[0] | {"run_id": "later", "fid": 99.99})
    tables(TABLE.id, "--no-run")
    assert "**99.99**" in drawn.read_text()  # the newest row that fits


def test_the_list_does_not_use_hydra(
    tables: Tables, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composing with Hydra used to take ten seconds. A model of another kind has other tables."""
    monkeypatch.setattr(configuration.hydra, "compose", None)
    # also tables that are drawn only on request
    suited = [t for t in TABLES.values() if t.model == definitions.DEFAULT_MODEL]
    some = list(TABLES.values())[::4]  # for a model, whose thousand runs are composed again
    for words, listed in (
        ([], list(TABLES.values())),
        (["--model", "llamagen_xl", "--n", "9"], [table for table in some if table in suited]),
        (["--model", "lumina_mgpt"], [table for table in some if table in suited]),
        (["--model", "mar_b"], [table for table in some if table not in suited]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cli, "TABLES", {table.id: table for table in some} if words else TABLES)
            tables("--list", *words)
        *lines, _, hint = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == [table.id for table in listed] != []
        assert all(f"rows  {table.title}" in line for line, table in zip(lines, listed, strict=True))
        assert [
            table for line, table in zip(lines, listed, strict=True) if "hours" in line.rpartition(table.title)[2]
        ] == [table for table in listed if table.on_request]
        assert hint.endswith(" ".join(["specbench tables ID", *words]))
    hints = []
    for words in (["--model", "llamagen_xl", "--n", "9", "--seeds", "1,2"], ["n=9", "model=llamagen_xl", "seeds=2,1"]):
        tables("coolsd_table1", "--list", *words)
        hints.append(capsys.readouterr().out.splitlines()[-1])
    assert hints[0] == hints[1]
    assert hints[0].endswith(" --model llamagen_xl --n 9 --seeds 1,2")


def test_a_table_without_runs_is_not_called_complete(
    tables: Tables, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded model draws one size, so SJD's table over sizes has no run. It was called "complete" with 0/0
    rows."""
    tables("--list", "sjd_table8")
    assert capsys.readouterr().out.split("0/0")[0].split() == ["sjd_table8", "needs", "--model"]
    bare = replace(TABLE, lines=tuple(replace(line, overrides=None, elsewhere={}) for line in TABLE.lines))
    monkeypatch.setattr(cli, "TABLES", {**TABLES, TABLE.id: bare})
    tables("--list", TABLE.id)
    assert capsys.readouterr().out.split("0/0")[0].split() == [TABLE.id, "published", "only"]


def test_a_line_has_parameters_of_each_model() -> None:
    """1,000 of LlamaGen's 16,384 codes are 6 % of them, and this line's label says 6 %. The small
    codebooks need other k."""
    table = TABLES["relaxed"]
    line = next(line for line in table.lines if "6 %" in line.label)
    for model, codes in (("llamagen_scenes", 512), ("llamagen_textures", 8192), ("llamagen_xl", 16384)):
        words = definitions.named(overrides(table, line, model) or [])
        assert words["model"] == model
        assert abs(int(words["k"]) / codes - 0.061) < 0.001


def test_another_model_has_its_own_files(tables: Tables, tmp_path: Path) -> None:
    tables(TABLE.id, "--model", "llamagen_xl", "--format", "csv,md")
    written = {p.name for p in (tmp_path / "results/tables").iterdir()}
    assert written == {"coolsd_table1.llamagen_xl.csv", "coolsd_table1.llamagen_xl.md"}


def test_mistakes_are_short_errors(tables: Tables, tmp_path: Path) -> None:
    for words, sentence in (
        (["nope"], "unknown table 'nope' .*coolsd_table1"),
        (["--format", "latx"], r"unknown format .latx. .*did you mean latex\?"),
        (["--format", ","], "--format names no format .*md, latex, csv"),
        (["--n", "0"], r"--n must be an integer of at least 1 \(got 0\)"),
        (["--n", "many"], "--n must be an integer of at least 1"),
        (["n=0"], r"n must be an integer of at least 1 \(got 0\)"),
        (["n=2", "--n", "2"], "give only one"),
        (["--model", "mar_b", "model=mar_b"], "give only one"),
        (["--seeds", "1", "seeds=1"], "give only one"),
        (["n=2", "n=3"], "'n' is given twice"),
        (["seed=3"], "write seeds=3"),
        (["--model", "nope"], "unknown model 'nope' .*llamagen_scenes"),
    ):
        with pytest.raises(UsageError, match=sentence):
            tables(*words)
    assert not list(tmp_path.iterdir())


def test_a_complete_table_is_drawn_without_torch(tables: Tables, tmp_path: Path) -> None:
    tables(TABLE.id)  # the second process finds nothing to run
    code = (
        "import sys; from specbench.cli.tables import main; main(['coolsd_table1'])\n"
        "heavy = {'torch', 'transformers', 'specbench.harness.pipeline', 'specbench.harness.run'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    process = python(code, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "wrote results/tables/coolsd_table1.md" in process.stdout


def test_a_parameter_of_a_table_reaches_the_lines_that_have_it(tmp_path: Path) -> None:
    def drafters(**changes: str) -> dict[str, str | None]:
        plan = table_runs.plan(TABLES["coolsd_table2"], "llamagen_scenes", None, tmp_path, changes=changes)
        return {run.key: named(run.overrides).get("drafter_weights") for run in plan.runs if not run.seconds}

    found = drafters(drafter_weights="embedded")
    assert found.pop("sjd") is None
    assert "embedded" in found.values()
    for changes, name in (({"gamma": "8"}, "gamma"), ({"method": "jacobi"}, "method")):
        with pytest.raises(UsageError, match=name):
            drafters(**changes)
    for word in ("out=x", "seed=8", "timed=-1", "nope=1"):
        with pytest.raises(UsageError, match=word.partition("=")[0]):
            cli._changes([word])


def test_a_published_pair_is_compared_with_the_drafter_that_it_names() -> None:
    table, printed = TABLES["cspd_table3"], literature.load("cspd_table3")
    for weights, drafter in (("", "MAR-B"), ("official:mar_l", "MAR-L")):
        row = _row(acceptance_rate="0.5", drafter_weights=weights)
        sheet = layout.build(table, "mar_h", {line.key: row for line in table.lines}, printed, {}, "")
        models = {entry.model for entry in sheet.entries if entry.kind == "difference"}
        assert len(models) == 1
        assert drafter in models.pop().partition(" and ")[2]
    with pytest.raises(UsageError, match="official"):
        registry.official_target("official:nope")
    assert (registry.official_target("official:mar_l"), registry.official_target("a/folder")) == ("mar_l", "")


def test_several_tables_that_fail_keep_the_exit_code_of_bad_input(tables: Tables) -> None:
    with pytest.raises(UsageError, match="coolsd_table1.*coolsd_table2"):
        tables("coolsd_table1", "coolsd_table2", bench=FakeBench(config_hash="other"))
