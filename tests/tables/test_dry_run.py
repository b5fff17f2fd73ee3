"""Dry runs: what the runs would do, with hours from measured steps alone. Nothing is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import reproduce_table
import yaml
from commands import ROOT, Call, case, refused

from specbench import cli
from specbench.bench import devices, needs, steps
from specbench.bench.benchmark_rows import COLUMNS
from specbench.bench.steps import MeasuredStep
from specbench.cli.images import reference
from specbench.cli.run import of_jobs
from specbench.config import configuration, parameters
from specbench.errors import UsageError
from specbench.harness import run
from specbench.harness.planned import PlannedRun
from specbench.rows.csv_files import append_row, read_rows
from specbench.storage.csv_text import csv_text
from specbench.tables import forecast
from specbench.tables.catalog import TABLES
from specbench.tables.forecast import Planner, without_method

SMALL = ("metrics=none", "device=cpu", "warmup=0", "batch=2", "timing=true")
#: A plan of known size, instead of one on fake tensors.
PLAN = needs.Needs(
    *("a model", "vanilla", "none", "exact", 1, "bfloat16", "eager"),
    resolution=256,
    rows=2,
    tokens=256,
    context=128,
    nodes=1,
    reads_gb={"forward": 1.6},
    weights_gb={"target": 2.0},
    all_weights_gb=2.0,
    state_gb=0.25,
    prefill_estimate_gb=1.0,
    step_estimate_gb=1.0,
    pixels_estimate_gb=1.0,
    runtime_estimate_gb=1.0,
    peak_estimate_gb=30.0,
)


@pytest.fixture
def dry(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call` with plans that take no time."""
    monkeypatch.setattr(needs, "plan", lambda cfg: PLAN)
    return call


def said(out: str) -> dict[str, list[str]]:
    """The lines of a dry run by their first word."""
    by_name: dict[str, list[str]] = {}
    for name, _, text in (line.partition(" ") for line in out.splitlines()[1:]):
        by_name.setdefault(name, []).append(text.strip())
    return by_name


def commands(out: str) -> list[str]:
    lines = said(out)
    return lines.get("first", []) + lines.get("then", [])


# --- measured steps ---------------------------------------------------------------------------------------------------


def benchmark(folder: Path, name: str = "mine", **cells: Any) -> None:
    """A file with one row of `specbench bench`."""
    row = {"model": "llamagen_scenes", "method": "sjd", "drafter": "sjd", "batch": 1, "nodes": 17, "engine": "eager"}
    row |= {"step_ms": 10, "vanilla_step_ms": 4, "weights_gb": 0.01, "device": "cpu", "device_name": "A CPU"} | cells
    (folder / "bench").mkdir(parents=True, exist_ok=True)
    (folder / "bench" / f"{name}.csv").write_text(csv_text(COLUMNS, [row]))


def step(engine: str = "graph", device: str = "h200", width: int = 1, gb: float = 1.6, network: bool = False) -> Any:
    return MeasuredStep("planned", device, device, engine, width, network, False, gb)


def nearest(planned: MeasuredStep, results: Path = ROOT / "results") -> tuple[str, float]:
    found = steps.nearest(steps.read(results), planned)
    assert found
    return found[0].name, found[1]


def test_the_nearest_step_has_the_size_the_engine_and_the_width() -> None:
    """Of the committed checks of an H200."""
    assert nearest(step("triton")) == ("XL vanilla", 0.900836)
    assert nearest(step("eager")) == ("XL vanilla", 3.0403)  # the kernels of the graph engine are the same
    assert nearest(step("triton", width=33)) == ("XL SJD 32", 1.75567)
    assert nearest(step("graph", width=26, network=True))[0] == "XL EAGLE-1, tree of 26"
    assert nearest(step("triton", gb=15.54)) == ("7B vanilla", 4.77893)
    assert nearest(step("triton", width=65, gb=20.0))[0] == "7B SJD-PAC 64"
    [h200, h100] = (nearest(step("triton", device=name))[1] for name in ("h200", "h100"))
    assert h100 == pytest.approx(h200 * 4800 / 3350)


def test_own_benchmarks_are_nearer_than_those_of_another_device(tmp_path: Path) -> None:
    assert steps.nearest(steps.read(tmp_path), step()) is None
    own = {"device": "cuda", "device_name": "NVIDIA GeForce RTX 4090", "engine": "graph", "recorded_step_ms": 5}
    benchmark(tmp_path, "own", **own, vanilla_recorded_step_ms=2, weights_gb=1.6, by_nodes='{"1": 1, "64": 9}')
    benchmark(tmp_path, "cpu")
    (tmp_path / "bench" / "other.csv").write_text("a,b\n1,2\n")  # a file with other content
    assert nearest(step(device="rtx4090"), tmp_path) == ("llamagen_scenes vanilla, batch 1", 2.0)
    assert nearest(step(device="rtx4090", width=17), tmp_path)[1] == 5.0
    assert nearest(step(device="rtx4090", width=64), tmp_path)[1] == 9.0
    assert nearest(step("eager", "cpu", gb=0.01), tmp_path)[1] == 4.0
    assert steps.nearest(steps.read(tmp_path), MeasuredStep("mar", "cpu", "cpu", "eager", 1, False, True, 0.01)) is None


def test_names_of_drivers_are_known() -> None:
    names = {"NVIDIA A100-SXM4-40GB": "a100_40", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H200": "h200"}
    names |= {"NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA L40S": "l40s", "AMD EPYC": "AMD EPYC"}
    assert {name: devices.of_name(name) for name in names} == names


def test_hours_are_images_times_steps(dry: Call, tmp_path: Path) -> None:
    benchmark(tmp_path)
    row = {"run_id": "y", "config_hash": "x", "method": "sjd", "accepted_length_mean": 2.0}
    append_row(tmp_path / "one.csv", row | {"model": "llamagen_textures"})
    planner = Planner(tmp_path)
    cfg = configuration.compose(["method=sjd", "window=16", "device=cpu"])
    # ten images with 256 tokens, two a step, and five of vanilla AR
    assert planner.hours(cfg, (10, 5), "cpu") == pytest.approx((10 * 128 * 10 + 5 * 256 * 4) / 3.6e6)
    assert planner.hours(cfg, (0, 5), "cpu") == pytest.approx(5 * 256 * 4 / 3.6e6)
    assert planner.hours(cfg, (10, 0), "h200") is None
    append_row(tmp_path / "two.csv", row | {"model": "llamagen_scenes", "run_id": "z", "accepted_length_mean": 4.0})
    assert Planner(tmp_path).hours(cfg, (10, 0), "cpu") == pytest.approx(10 * 64 * 10 / 3.6e6)  # of this model
    other = configuration.compose(["method=scd", "window=16", "device=cpu"])  # no row: a token a step
    assert Planner(tmp_path).hours(other, (1, 0), "cpu") == pytest.approx(256 * 10 / 3.6e6)


def test_a_plan_is_computed_once(dry: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in's model may change while its name and parameters stay."""
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    made: list[str] = []

    def counted(cfg: Any) -> needs.Needs:
        made.append(cfg.method)
        return PLAN

    monkeypatch.setattr(needs, "plan", counted)
    cfg = configuration.compose(["method=sjd"])
    assert [Planner(tmp_path).plan(cfg) for _ in range(2)] == [PLAN, PLAN]
    assert Planner(tmp_path).plan(cfg.changed(seed=5)) == PLAN  # of the same shapes
    assert made == ["sjd"]
    Planner(tmp_path).plan(cfg.changed(batch=2))
    assert made == ["sjd", "sjd"]
    monkeypatch.setattr(parameters, "plugins_of", lambda cfg: ["mine 1.0"])
    for _ in range(2):
        Planner(tmp_path).plan(cfg)
    assert made == ["sjd"] * 4


def test_the_baseline_of_a_run_is_vanilla_with_one_token_a_pass() -> None:
    cfg = without_method(configuration.compose(["model=mar_scenes", "method=vanilla", "iterations=16"]))
    assert (cfg.method, cfg.drafter, cfg.get("iterations")) == ("vanilla", "none", None)
    assert "window" not in without_method(configuration.compose(["method=sjd"]))


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_dry_run_does_nothing_and_knows_nothing_of_a_new_machine(dry: Call, tmp_path: Path) -> None:
    code, out, _ = dry("run", "--dry-run", "method=sjd", "n=4", *SMALL, "out=one")
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    lines = said(out)
    assert lines["decode"] == ["8 images, 0 of 8 exist"]  # the baseline's, too
    several = dry("run", "--dry-run", "method=sjd", "n=4", "images_per_prompt=3", *SMALL, "out=one")[1]
    assert said(several)["decode"] == ["24 images, 0 of 24 exist"]
    assert lines["time"] == ["cpu: unknown"]
    assert "specbench bench" in lines["basis"][0]
    assert all(number in lines["memory"][0] for number in ("2 GB", "0.25 GB", "30 GB"))
    assert lines["download"] == ["nothing"]


def test_existing_images_are_not_decoded_again(dry: Call, tmp_path: Path) -> None:
    benchmark(tmp_path / "results")
    assert dry("run", "method=sjd", "n=4", *SMALL, "out=one")[0] == 0
    lines = said(dry("run", "--dry-run", "method=sjd", "n=6", *SMALL, "out=one")[1])
    assert lines["decode"] == ["4 images, 8 of 12 exist"]
    assert "sjd" in lines["basis"][0]
    assert "finished" in dry("run", "--dry-run", "method=sjd", "n=4", *SMALL, "out=one")[1]


def test_missing_files_are_downloads(dry: Call) -> None:
    words = ("model=llamagen_xl", "method=sjd,eagle1", "data=parti", "metrics=clip_b32", "n=2", "device=cpu")
    code, out, _ = dry("run", "-m", "--dry-run", *words)
    assert code == 0
    downloads = said(out)["download"]
    assert "123.1 kB  PartiPrompts.tsv" in downloads
    assert any(line.startswith("eagle/ of llamagen_xl from ") for line in downloads)
    assert commands(out) == [
        "specbench fetch model=llamagen_xl drafter=eagle_tree",
        "specbench fetch data=parti",
        "specbench fetch metrics=clip_b32",
        f"specbench run -m {shlex.join(words)}",
    ]


def test_suites_and_tables_have_dry_runs(dry: Call, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"n": 3, "seeds": [0, 1], "timed": 2, "metrics": "none", "lines": {"sjd": {"method": "sjd"}}}
    Path("my.yaml").write_text(yaml.safe_dump(spec))
    code, out, _ = dry("suite", "my.yaml", "--dry-run")
    assert code == 0
    assert "8 runs" in out.splitlines()[0]
    # of each seed: 3 + 3 of quality, 2 of vanilla and 2 pairs that are timed
    assert said(out)["decode"][0].startswith(f"{2 * (6 + 2 + 4)} images")
    out = dry("tables", "eagle3_gain", "--dry-run")[1]
    assert said(out)["decode"][0].startswith(f"{4 * TABLES['eagle3_gain'].n} images")
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_a_run_on_a_gpu_is_planned_without_a_gpu(dry: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "results").symlink_to(ROOT / "results")
    words = ("model=llamagen_xl", "method=eagle1", "data=coco2017", "metrics=[fid,clip_b32]", "n=10", "device=cuda")
    code, out, _ = dry("run", "--dry-run", *words, "engine=graph", "device_for=4090")
    assert code == 0
    lines = said(out)
    assert [text.partition(":")[0] for text in lines["time"]] == ["rtx4090"]
    assert "XL EAGLE-1, tree of 26" in lines["basis"][0]
    assert "XL vanilla" in lines["basis"][0]
    assert "rtx4090 (24 GB)" in lines["memory"][0]  # too small
    assert "4.1 MB" in lines["disk"][0]  # 20 of 256 x 256 x 3 bytes, and their records
    sizes = {name: size for size, name in (text.rsplit("  ", 1) for text in lines["download"] if "  " in text)}
    assert sizes["t2i_XL_stage1_256.pt"] == "3.1 GB"
    assert sizes["*.safetensors|*.bin"] == "size unknown"
    # 3.112 + 0.288 + 11.402 (text) + 1.068 (coco2017) + 0.096 (fid) + 0.605 (clip)
    assert lines["download"][-1].startswith("16.6 GB")
    assert any("Chameleon Research License" in text for text in lines["download"])
    assert "missing" not in lines
    assert commands(out) == [
        "specbench fetch model=llamagen_xl drafter=eagle_tree",
        "specbench fetch data=coco2017",
        "specbench fetch metrics=fid,clip_b32",
        "specbench reference data=coco2017 images=/dev/null/there/data/coco2017/val2017 metrics=fid",
        f"specbench run {shlex.join(words)} engine=graph",
    ]
    every = said(dry("run", "--dry-run", *words)[1])["time"]
    assert [text.partition(":")[0] for text in every] == list(devices.DEVICES)


def test_without_a_dry_run_an_absent_gpu_stays_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = configuration.compose(["device=cuda", "engine=graph"])
    with pytest.raises(UsageError, match="device=cuda"):
        run.check(config)
    [planned] = forecast.dry_run([PlannedRun(Path("one"), config)]).runs
    assert planned.fault is None


def test_a_device_for_no_dry_run_is_an_error(call: Call) -> None:
    for words in (("run",), ("tables", "sjd_table3"), ("suite", "glance")):
        for more, name in ((["device_for=h100"], "--dry-run"), (["device_for=h1000", "--dry-run"], "h100")):
            code, _, err = call(*words, *more)
            assert (code, name in err) == (2, True), words


def test_a_network_that_nobody_publishes_is_trained_before_its_table(dry: Call) -> None:
    out = dry("run", "--dry-run", "model=emu3", "method=eagle2", "data=parti", "metrics=none", "n=1")[1]
    assert commands(out)[:3] == [
        "specbench fetch model=emu3",
        "specbench fetch data=parti",
        "specbench train drafter=eagle model=emu3",
    ]


def test_images_and_records_take_no_more_than_said(call: Call, tmp_path: Path) -> None:
    words = ("model=mar_scenes", "method=cspd", "n=2", "metrics=none", "device=cpu", "warmup=0", "out=one")
    assert call("run", *words)[0] == 0
    files = [*tmp_path.glob("one/*/*.png"), *tmp_path.glob("one/*.jsonl")]
    todo = of_jobs(configuration.grid([*words[:-1], "out=two"], False), False, tmp_path)
    assert len(files) >= 5
    assert sum(path.stat().st_size for path in files) <= forecast.dry_run(todo.runs).disk[0]


# --- docs/reproduce.md ------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8")
#: The commands of each of its sections.
SECTIONS = {
    text.partition("\n")[0]: [
        shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
    ]
    for text in PAGE.split("\n## ")[1:]
}


def test_the_commands_of_the_page_are_planned_unchanged(dry: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/the/reader")  # where the page's folders are
    monkeypatch.delenv("SPECBENCH_HOME")
    for title, listed in SECTIONS.items():
        planned: list[str] = []
        for words in listed:
            assert words[0] == "specbench"
            if words[1] == "reference":
                assert reference.read(words[2:]) is not None
            elif words[1] != "suite":
                code, out, err = dry(*words[1:], *[] if "--dry-run" in words else ["--dry-run"])
                assert code == 0, (words, err)
                planned += commands(out) if words[1] == "tables" else []
        if title != "Before":  # the page's commands are those that the dry runs of its tables say
            assert {line for line in planned if "images=DIR" not in line} == {" ".join(words) for words in listed}, (
                title
            )
    assert sum(map(len, SECTIONS.values())) >= 20


@pytest.mark.usefixtures("drawn_once")
def test_the_pages_rehearsal_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [words] = [words[1:] for words in SECTIONS["Before"] if words[1] == "suite"]
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 0
    rows = read_rows(tmp_path / "small/suite.csv")
    assert [row["method"] for row in rows] == ["vanilla", "eagle1", "lantern_pp", "uniform_rsd", "cool_sd", "cool_sd"]
    assert {(row["model"], row["n"]) for row in rows} == {("llamagen_xl", 2)}


def test_the_counts_of_the_page_are_those_of_the_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path))
    drawn = dict(re.findall(r"^\| `(\w+ --model \w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(drawn) == [f"{table} --model {model}" for table, model, _ in reproduce_table.LINES]
    for line in reproduce_table.LINES:
        count, *_, fetched, _ = drawn[f"{line[0]} --model {line[1]}"].split(" | ")
        todo = reproduce_table.planned(*line)
        passes = sum(run.config.images * (2 if run.config.wants_baseline else 1) for run in todo.missing)
        assert (count, fetched) == (f"{passes:,}", reproduce_table.fetched(todo))


# --- what the runs refuse ---------------------------------------------------------------------------------------------

MISTAKES = """
prompts=none.txt n=2
prompts=twice.csv n=1
prompts=two.txt n=3
prompts=two.txt n=2 shard=3/3
prompts=two.txt method=sjd n=2 window=5 out=done
prompts=two.txt method=sjd n=2 out=suite
prompts=two.txt method=sjd n=2 out=two.txt
prompts=two.txt n=2 out=done/images
prompts=two.txt n=2 out=two.txt/folder
model=lumina_mgpt size=256
model=lumina_mgpt instruction=draw
-m prompts=two.txt n=2,3
-m prompts=two.txt method=sjd,cool_sd n=2 out=done
"""


def test_a_dry_run_refuses_what_the_run_refuses(dry: Call, tmp_path: Path) -> None:
    """With the same sentence, and without a report."""
    Path("two.txt").write_text("one\ntwo\n")
    Path("twice.csv").write_text("id,prompt\n1,one\n1,two\n")
    Path("suite").mkdir()
    Path("suite/suite.yaml").touch()
    assert dry("run", "prompts=two.txt", "method=sjd", "n=2", *SMALL, "out=done")[0] == 0
    before = {*tmp_path.rglob("*")}
    for line in MISTAKES.strip().splitlines():
        words = [*line.split(), "metrics=none", "device=cpu"]
        words += [] if "out=" in line else ["out=new"]
        with case(line):
            sentence = refused(dry, "run", *words)
            assert refused(dry, "run", *words, "--dry-run") == sentence
            assert {*tmp_path.rglob("*")} == before
    assert dry("run", "prompts=two.txt", "method=sjd", "n=2", *SMALL, "out=done", "--dry-run")[0] == 0


def test_lines_of_a_suite_and_a_table_that_would_be_refused_are_an_error(dry: Call) -> None:
    """The others are listed, since they would run; files that can be fetched are no mistake."""
    lines = {"a": {"method": "sjd"}, "b": {"method": "sjd", "prompts": "none.txt", "data": "prompts"}}
    Path("my.yaml").write_text(yaml.safe_dump({"n": 1, "metrics": "none", "lines": lines}))
    code, out, err = dry("suite", "my.yaml", "--dry-run")
    assert (code, "none.txt" in err, "a-" in out) == (2, True, True)
    assert commands(out) == ["specbench suite my.yaml"]  # its folder does not exist yet
    assert dry("suite", "my.yaml")[0] == 2
    lines["b"] = {"method": "sjd", "data": "parti"}
    Path("my.yaml").write_text(yaml.safe_dump({"n": 1, "metrics": "none", "lines": lines}))
    assert dry("suite", "my.yaml", "--dry-run")[0] == 0
    code, out, err = dry("tables", "eagle3_gain", "data=prompts", "prompts=none.txt", "--dry-run")
    assert (code, "none.txt" in err, out.startswith("dry run")) == (2, True, True)


def test_what_a_model_refuses_is_known_from_its_shapes(dry: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a model of a plug-in that checks its parameters when it is loaded."""

    def refuse(cfg: Any) -> dict[str, Any]:
        raise UsageError("no such size")

    monkeypatch.setattr(needs, "size", refuse)
    assert "no such size" in refused(dry, "run", "n=1", "metrics=none", "device=cpu", "--dry-run")


def test_a_missing_library_is_known_before_anything_starts(dry: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words in (["workers=2"], ["log=wandb"], ["ray_address=auto"]):
        for more in ([], ["--dry-run"]):
            assert words[0].partition("=")[0] in refused(dry, "run", "n=2", "metrics=none", "out=a/b", *words, *more)
            assert not Path("a").exists()
