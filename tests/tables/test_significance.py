"""Tests between the lines of a table are paired image by image, with the runs of the rows that the table shows."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbench.cli import tables as cli
from specbench.compare import wording
from specbench.compare.comparison import STATISTICS, Comparison, Result
from specbench.harness.planned import PlannedRun
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import append_row, read_rows
from specbench.rows.paired import holm, paired
from specbench.tables import collect as collecting
from specbench.tables import layout, literature, table_runs
from specbench.tables.catalog import TABLES
from specbench.tables.collect import collect
from specbench.tables.definitions import TableTest

TABLE = TABLES["coolsd_significance"]
LINES = {line.key: line for line in TABLE.lines}
N = 40


def lengths(seed: int) -> np.ndarray:
    """Accepted lengths (N,) of the same prompts: mostly the prompts' effect, and a little of the method's."""
    prompt, of_method = np.random.default_rng(0).normal(2.5, 0.4, N), np.random.default_rng(seed).normal(0.0, 0.02, N)
    return prompt + of_method + 0.02 * seed


class Bench(collecting.Bench):
    """Decodes nothing: a run writes its number to its folder, and a comparison takes the lengths of these numbers."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def row(self, run: PlannedRun) -> Mapping[str, Any]:
        out = run.folder
        out.mkdir(parents=True, exist_ok=True)
        name = out / "run_id"
        if not name.exists():
            self.ran.append(out.name)
            name.write_text(f"run{len(self.ran)}")
        identity = {"run_id": name.read_text(), "config_hash": run.config_hash, "weights": run.weights, "n": N}
        values = lengths(int(name.read_text().removeprefix("run")))
        speed = {"accepted_length_mean": values.mean(), "accepted_length_std": values.std(ddof=1)}
        return dict.fromkeys(COLUMNS) | {"model": "llamagen_scenes"} | identity | speed

    def compare(self, a: Path, b: Path) -> Sequence[Mapping[str, Any]]:
        names = [(folder / "run_id").read_text() for folder in (a, b)]
        x, y = (lengths(int(name.removeprefix("run"))) for name in names)

        class Pass:
            def __init__(self, run_id: str) -> None:
                self.run_id = run_id

        results = [
            Result(s, "", paired(x, y), p_holm=1.0) for s in STATISTICS if s.name in ("accepted_length", "steps")
        ]
        return wording.rows(Comparison(Pass(names[0]), Pass(names[1]), ("A", "B"), N, (), tuple(results), ()))  # type: ignore[arg-type]


@pytest.fixture
def drawn(tmp_path: Path) -> Any:
    def call(bench: Bench, *words: str) -> str:
        code = cli.main([TABLE.id, *words], bench, tmp_path / "results", tmp_path / "runs")
        assert code in (0, 3)  # rows without scores are new, or existed before
        return (tmp_path / f"results/tables/{TABLE.id}.md").read_text()

    return call


def test_a_test_uses_the_pairs(drawn: Any, tmp_path: Path) -> None:
    """The former test used only means and standard deviations: t = 0.2, where the pairs give 5 and more."""
    bench = Bench()
    text = drawn(bench)
    # run 1 is Cool-SD, run 2 LANTERN++ with lengths greater by 0.02, except for noise of 0.02 * sqrt(2)
    test = paired(lengths(2), lengths(1)).test
    assert test is not None
    assert test.statistic < -2.5
    difference = (lengths(1) - lengths(2)).mean()
    expected = (
        f"{difference:+.3f} (95 % interval {test.low:+.3f} to {test.high:+.3f}), paired t(39) = {test.statistic:.2f}"
    )
    [line] = [line for line in text.splitlines() if line.startswith("Accepted length, ")]
    assert all(shown in line for shown in ("Cool-SD (δ=1.1)", "LANTERN++ (λ=2, k=10)", expected))
    assert "t = 18.11, p \\< 1e-60" in text
    assert "Steps per image, Cool-SD" in text
    assert len(bench.ran) == 2
    assert drawn(bench) == text  # nothing is decoded or compared a second time
    assert len(bench.ran) == 2
    assert len(wording.ROWS.read(tmp_path / f"results/{TABLE.id}_test.csv")) == 2


def test_a_table_compares_the_runs_of_another(drawn: Any, tmp_path: Path) -> None:
    """Its lines are runs of the other table, whose folders exist."""

    class Storing(Bench):
        def row(self, run: PlannedRun) -> Mapping[str, Any]:
            row = super().row(run)
            (run.folder / "row.csv").unlink(missing_ok=True)
            append_row(run.folder / "row.csv", row)
            return row

    def filled() -> table_runs.TablePlan:
        return collect(table_runs.plan(other, TABLE.model, None, results, runs), bench, print)

    bench, other = Storing(), replace(TABLE, id="other")
    drawn(bench)
    results, runs = tmp_path / "results", tmp_path / "runs"
    assert not filled().untested
    assert len(bench.ran) == 2
    (runs / f"tables/{TABLE.id}").rename(runs / "tables/elsewhere")
    for path in sorted((runs / "tables/elsewhere").rglob("row.csv")):  # the same lines, decoded another time
        decoy = runs / "tables/a" / path.parent.relative_to(runs / "tables/elsewhere")
        shutil.copytree(path.parent, decoy)
        (decoy / "run_id").write_text("run9")
        (decoy / "row.csv").write_text((decoy / "row.csv").read_text().replace("\nrun", "\nrun9"))
    (results / "other_test.csv").unlink()
    assert not filled().untested
    assert "run9" not in (results / "other_test.csv").read_text()
    shutil.rmtree(runs)
    (results / "other_test.csv").unlink()
    assert not filled().untested
    assert len(bench.ran) == 4  # without the folders they are decoded again


def test_rows_without_their_images_are_decoded_again(drawn: Any, tmp_path: Path) -> None:
    """Committed rows have no pairs. A comparison of runs other than the rows' does not count."""
    bench = Bench()
    drawn(bench)
    comparisons = tmp_path / f"results/{TABLE.id}_test.csv"
    for path in (tmp_path / "runs").rglob("run_id"):
        path.unlink()
    comparisons.write_text(comparisons.read_text().replace("run2", "older"))
    plan = table_runs.plan(TABLE, TABLE.model, None, tmp_path / "results")
    assert not plan.missing
    assert len(plan.untested) == 2
    assert "not measured yet" in drawn(bench, "--no-run")
    text = drawn(bench)
    assert len(bench.ran) == 4
    assert "not measured yet" not in text
    assert {row["run_id"] for row in read_rows(tmp_path / f"results/{TABLE.id}.csv")} == {
        "run1",
        "run2",
        "run3",
        "run4",
    }
    assert not table_runs.plan(TABLE, TABLE.model, None, tmp_path / "results").untested


def test_several_tests_of_a_table_are_adjusted() -> None:
    """With fifteen tests of equal methods, every second table had a p-value below 0.05."""
    rows = {"cool_sd_1.1": {"run_id": "b"}, "lantern_pp": {"run_id": "a"}}
    common = {"run_a": "a", "run_b": "b", "pairs": "9", "df": "8", "low": "0.1", "high": "0.9", "test_statistic": "3"}
    cells = [
        common | {"statistic": statistic, "difference": "0.5", "p": p}
        for statistic, p in (("accepted_length", "0.03"), ("steps", "0.02"))
    ]
    cells = [dict.fromkeys(wording.COLUMNS, "") | cell for cell in cells]
    remarks = layout.build(TABLE, "m", rows, [], {}, "", wording.readjusted(cells)).remarks[:2]
    assert ["p = 0.03 (0.04 by Holm" in text for text in remarks] == [True, False]
    assert ["p = 0.02 (0.04 by Holm" in text for text in remarks] == [False, True]
    alone = layout.build(TABLE, "m", rows, [], {}, "", wording.readjusted(cells[:1])).remarks[0]
    assert "p = 0.03, over 9 pairs" in alone
    # equal pairs have no test
    equal = {"statistic": "steps", "run_a": "a", "run_b": "b", "pairs": "9", "difference": "-2.0", "p": ""}
    [_, steps, *_] = layout.build(TABLE, "m", rows, literature.load(TABLE.id), {}, "", [equal]).remarks
    for name in ("Steps per image", "Cool-SD (δ=1.1)", "LANTERN++ (λ=2, k=10)", "-2.000", "9 pairs"):
        assert name in steps
    assert "p = " not in steps.split("published")[0]


def test_a_p_value_has_one_family_wherever_it_is_printed() -> None:
    """The same p used to have Holm's adjustment over a comparison in the file, and over a table's tests in the
    table."""
    names = ("accepted_length", "steps", "latency_s", "log_prob_mean")
    p = ("0.01", "0.02", "0.03", "0.04")
    cells = dict.fromkeys(wording.COLUMNS, "") | {"tests": "4"}
    rows = [cells | {"statistic": name, "p": p_value, "p_holm": "0.04"} for name, p_value in zip(names, p)]
    alone = {row["statistic"]: row for row in rows}
    family = [i for i, row in enumerate(rows) if row["statistic"] in ("accepted_length", "steps")]
    adjusted = {row["statistic"]: row for row in wording.readjusted(rows, family)}
    p_of_family = [float(alone[name]["p"]) for name in ("accepted_length", "steps")]
    assert [float(adjusted[name]["p_holm"]) for name in ("accepted_length", "steps")] == holm(p_of_family)
    assert [adjusted[name]["tests"] for name in ("accepted_length", "steps")] == ["2", "2"]
    assert {name: row for name, row in adjusted.items() if row["tests"] != "2"} == {
        name: row for name, row in alone.items() if name not in ("accepted_length", "steps")
    }
    assert wording.readjusted(rows)[0]["tests"] == str(sum(bool(row["p"]) for row in rows))


def test_a_test_is_named_by_its_statistic() -> None:
    """The distance between distributions has no degrees of freedom."""
    pair = ("cool_sd_1.1", "lantern_pp")
    table = replace(
        TABLE,
        tests=tuple(TableTest(name, name, *pair) for name in ("steps", "scenes_fid", "distribution")),
    )
    rows = {"cool_sd_1.1": {"run_id": "b"}, "lantern_pp": {"run_id": "a"}}
    common = {"run_a": "a", "run_b": "b", "pairs": "9", "difference": "0.5", "low": "0.1", "high": "0.9"}
    cells = [
        common | {"statistic": "steps", "df": "8", "test_statistic": "3", "p": "0.02"},
        common | {"statistic": "scenes_fid", "df": "7", "test_statistic": "2.5", "p": "0.01"},
        common | {"statistic": "distribution", "df": "", "test_statistic": "0.013", "p": "0.03"},
    ]
    cells = wording.readjusted([dict.fromkeys(wording.COLUMNS, "") | cell for cell in cells])
    steps, frechet, energy = layout.build(table, "m", rows, [], {}, "", cells).remarks[:3]
    assert "paired t(8) = 3.00, p = 0.02 (0.04 by Holm" in steps
    assert "paired t(7) = 2.50, p = 0.01 (0.03 by Holm" in frechet
    assert "energy distance 0.013, p = 0.03 (0.04 by Holm" in energy
