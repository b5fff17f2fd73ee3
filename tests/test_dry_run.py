"""Dry runs: what the runs would do, with times from this machine's rows alone. Nothing is run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import reproduce_table
import yaml
from commands import ROOT, TOGETHER, Call, python

from specbench.bench import devices, plan
from specbench.cli.images import reference
from specbench.cli.run import of_jobs
from specbench.config import configuration
from specbench.errors import UsageError
from specbench.harness import run
from specbench.harness.planned import PlannedRun
from specbench.rows.csv_files import append_row, read_rows
from specbench.tables import forecast, gpu_hours, suites
from specbench.tables.catalog import TABLES
from specbench.tables.gpu_hours import Planner

SMALL = ("metrics=none", "device=cpu", "warmup=0", "batch=2", "timing=true")


@pytest.fixture
def dry(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call` with a constant estimate of the memory, which takes no time."""
    gb = {"peak_estimate_gb": 3.5, "runtime_estimate_gb": 1.0, "all_weights_gb": 2.0, "state_gb": 0.25}
    gb |= {"resolution": 64, "tokens": 256}
    monkeypatch.setattr(plan, "plan", lambda cfg: gb)
    return call


def test_a_dry_run_does_nothing_and_knows_nothing_of_a_new_machine(dry: Call, tmp_path: Path) -> None:
    code, out, _ = dry("run", "--dry-run", "method=sjd", "n=4", *SMALL, "out=one")
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[2:])
    assert lines["decode"] == "8 images, 0 of 8 exist"  # the baseline's, too
    several = dry("run", "--dry-run", "method=sjd", "n=4", "images_per_prompt=3", *SMALL, "out=one")[1]
    assert "decode    24 images, 0 of 24 exist" in several
    assert lines["time"] == "unknown for 1 of 1 runs: no run here has such a row of this machine"
    assert lines["disk"].startswith("at most ")
    assert lines["memory"].startswith(
        "2 GB of weights and 0.25 GB of caches, about 2.5 GB at the peak (llamagen_scenes, "
    )
    assert lines["download"] == "nothing"


def test_time_is_from_rows_of_this_machine(dry: Call) -> None:
    assert dry("run", "method=sjd", "n=4", *SMALL, "out=one")[0] == 0  # 5.5 s an image, 16 s of vanilla
    code, out, _ = dry("run", "--dry-run", "method=sjd", "n=6", "seed=3", *SMALL, "out=two")
    assert code == 0
    assert "time      unknown" in out  # no row of vanilla
    assert dry("run", "method=vanilla", "n=4", *SMALL, "out=base")[0] == 0
    out = dry("run", "--dry-run", "method=sjd", "n=6", *SMALL, "out=two")[1]
    assert "time      0:02:09 of decoding, one run after the other, without scoring\n" in out  # 6 * (5.5 + 16)
    out = dry("run", "--dry-run", "method=sjd", "window=8", "n=6", *SMALL, "out=two")[1]
    assert "(1 estimated from the same method with other parameters)" in out
    out = dry("run", "--dry-run", "method=sjd", "n=6", *SMALL, "out=one")[1]
    assert "decode    4 images, 8 of 12 exist" in out
    assert "time      0:00:43" in out
    assert "finished" in dry("run", "--dry-run", "method=sjd", "n=4", *SMALL, "out=one")[1]


def test_missing_files_are_downloads(dry: Call) -> None:
    words = ("model=llamagen_xl", "method=sjd,eagle1", "data=parti", "metrics=clip_b32", "n=2", "device=cpu")
    code, out, _ = dry("run", "-m", "--dry-run", *words)
    assert code == 0
    downloads = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("download")]
    assert "123.1 kB  PartiPrompts.tsv" in [line.strip() for line in downloads]
    assert any(line.startswith("eagle/ of llamagen_xl from ") for line in downloads)
    steps = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith(("first", "then"))]
    assert steps == [
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
    assert out.splitlines()[0] == "dry run of my in runs/suites/my: 8 runs, nothing is decoded"
    # of each seed: 3 + 3 of quality, 2 of vanilla and 2 pairs that are timed
    assert f"decode    {2 * (6 + 2 + 4)} images" in out
    out = dry("tables", "eagle3_gain", "--dry-run")[1]
    assert "4 runs, nothing is decoded" in out
    assert f"decode    {4 * TABLES['eagle3_gain'].n} images" in out
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


# --- on a GPU that is not here ----------------------------------------------------------------------------------------

#: A step of discrete tokens that reads 4.8 GB, 1 ms on an H200, and starts 1,000 kernels.
STEP = {
    "peak_estimate_gb": 30.0,
    "runtime_estimate_gb": 1.0,
    "all_weights_gb": 2.0,
    "state_gb": 0.25,
    "dtype": "bfloat16",
    "resolution": 256,
    "tokens": 256,
    "reads_gb": {"step": 4.8},
    "tera_operations": {"step": 0.1},
    "launches": {"layers": 900, "outside": 100, "by_kernel": {"mm": 1000}, "parts": {"forward": 1000}},
}


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A step of known size, instead of one on fake tensors."""
    fields = {**STEP}
    monkeypatch.setattr(plan, "plan", lambda cfg: {**fields, "engine": cfg["engine"]})
    return fields


def seconds(*words: str, model: str = "llamagen_xl", device: str = "h200") -> list[float]:
    """The least and the most seconds of an image."""
    [gpu] = devices.named(device).values()
    return list(Planner(Path("none")).seconds(configuration.compose([f"model={model}", *words]), gpu))


def test_hours_are_from_bytes_launches_and_tokens_a_step(step: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    vanilla = seconds("method=vanilla", "engine=graph")
    assert vanilla == pytest.approx(
        [256 * 1.5e-3, 256 * (2e-3 + 5e-3)]
    )  # 1,000 launches at 1.5 us are longer than 1 ms
    assert seconds("method=vanilla") == pytest.approx([256 * 4e-3, 256 * (2e-3 + 12e-3)])  # the host starts each
    assert seconds("method=vanilla", "engine=graph", "batch=4") == pytest.approx([x / 4 for x in vanilla])
    printed = 2.73  # tokens a step of Cool-SD (delta 1.1) on LlamaGen-XL, coolsd_table1
    cool = seconds("method=cool_sd", "delta=1.1", "engine=graph")
    assert cool == pytest.approx([x / printed for x in vanilla])
    step["reads_gb"] = {"step": 48.0}
    assert seconds("method=vanilla", "engine=graph")[0] == pytest.approx(256 * 10e-3)  # now the bytes are longer
    step["tera_operations"] = {"step": 98.9}
    assert seconds("method=vanilla", "engine=graph")[0] == pytest.approx(256 * 0.1)  # and now the arithmetic
    assert seconds("method=vanilla", "dtype=float32", device="h100")[0] == pytest.approx(256 * 0.1)  # of the plan
    counts = {"triton": None, "graph": {"layers": 2000, "outside": 0}}  # without Triton, the counts of the graph engine
    monkeypatch.setattr(plan, "plan", lambda cfg: {**STEP, "launches": counts[cfg["engine"]]})
    assert seconds("method=vanilla", "engine=triton") == pytest.approx([256 * 3e-3, 256 * (2e-3 + 10e-3)])


def test_tokens_a_step_are_printed_ones_then_the_embedded_models_then_bounds(tmp_path: Path) -> None:
    def known(*words: str, model: str = "llamagen_xl", tokens: int = 256) -> tuple[float, float]:
        rates = gpu_hours.tokens_per_step(configuration.compose([f"model={model}", *words]), tokens, 6, tmp_path)
        return rates.low, rates.high

    assert known("method=vanilla") == (1, 1)
    assert known("method=cool_sd", "delta=2") == (3.34, 3.34)
    assert known("method=cool_sd", "delta=1.5") == (2.73, 3.34)  # not printed: everything that is, of the method
    assert known("method=sjd") == (1.63, 1.73)
    least, most = known("method=sjd", model="llamagen_xl_512", tokens=1024)
    assert (least, most) == (1.63, 1.69)
    assert known("method=gsd", model="lumina_mgpt", tokens=2353)[1] == 3.76  # others print 637 to 899 steps
    assert known("method=lantern", "delta=0.1", "k=100") == (1.26, 2.89)  # k=1000 alone is printed with a length
    assert known("method=uniform_rsd") == (1, 6)
    row = {"model": "llamagen_scenes", "method": "uniform_rsd", "config_hash": "x", "run_id": "y"}
    for name, value in (("a", 2.25), ("b", 2.5)):
        append_row(tmp_path / f"{name}.csv", row | {"accepted_length_mean": value})
    assert known("method=uniform_rsd") == (2.25, 2.5)


def test_continuous_tokens_cost_between_all_drafts_kept_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's pass reads 4.8 GB, which takes 1 ms, the drafter's pass 0.48 GB; steps of the heads and launches
    cost nothing."""

    def planned(cfg: Mapping[str, Any]) -> dict[str, Any]:
        size = 4.8 if cfg["model"] == "mar_l" else 0.48
        read = {"forward": size, "diffusion_step": 0.0}
        none = {"forward": {"layers": 0, "outside": 0}, "diffusion_step": 0}
        empty = dict.fromkeys(read, 0.0)
        return {"dtype": "float32", "tokens": 256, "reads_gb": read, "tera_operations": empty, "launches": none}

    monkeypatch.setattr(plan, "plan", planned)
    alone = seconds("method=vanilla", model="mar_l")
    assert alone == pytest.approx([0.256, 0.512])
    with_drafts = seconds("method=cspd_paper", "gamma=16", "prefill=0.25", model="mar_l")
    assert with_drafts[0] == pytest.approx((64 * 1 + 192 * 0.1 + 12 * 1) * 1e-3)
    assert with_drafts[1] == pytest.approx((256 * (2 + 0.2) + 2) * 1e-3)  # each token drafted, and drawn again
    stops = seconds("method=cspd", "gamma=16", model="mar_l")
    assert stops[1] == pytest.approx((256 * (2 + 16 * 0.2 + 2) + 2) * 1e-3)  # a draft and a pass for every token


def test_a_run_on_a_gpu_is_planned_without_a_gpu(
    step: dict[str, Any], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ("model=llamagen_xl", "method=eagle1", "data=coco2017", "metrics=[fid,clip_b32]", "n=10", "device=cuda")
    code, out, _ = call("run", "--dry-run", *words, "engine=graph", "device_for=4090")
    assert code == 0
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    said = {name: [text for key, text in lines if key == name] for name, _ in lines}
    least, most = (10 * (256 / 2.42 + 256) * each / 60 for each in (4.8 / 1008, 2 * 4.8 / 1008 + 5e-3))
    assert said["gpu"][0].startswith(f"rtx4090: {least:.2g} to {most:.2g} min; about 30 of 24 GB, does not fit")
    assert "tokens a step: printed for llamagen_xl in coolsd_table1" in said["basis"]
    assert said["disk"][0].startswith("at most 4.1 MB of images")  # 20 of 256 x 256 x 3 bytes, and their records
    sizes = dict(reversed(text.rsplit("  ", 1)) for text in said["download"] if "  " in text)
    assert sizes["t2i_XL_stage1_256.pt"].strip() == "3.1 GB"
    assert sizes["*.safetensors|*.bin"] == "size unknown"
    # 3.112 + 0.288 + 11.402 (text) + 1.068 (coco2017) + 0.096 (fid) + 0.605 (clip)
    assert said["download"][-1].startswith("16.6 GB in total")
    assert said["licence"][0].startswith("Chameleon Research License")
    assert said["login"][0].endswith("unknown for jadohu/llamagen_drafter")
    assert said["missing"][0].startswith("fid stays empty: n < 16 x 2048 features")
    assert said["first"] + said["then"] == [
        "specbench fetch model=llamagen_xl drafter=eagle_tree",
        "specbench fetch data=coco2017",
        "specbench fetch metrics=fid,clip_b32",
        "specbench reference data=coco2017 images=/not/there/data/coco2017/val2017 metrics=fid",
        f"specbench run {shlex.join(words)} engine=graph",
    ]


def test_without_a_dry_run_an_absent_gpu_stays_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = configuration.compose(["device=cuda", "engine=graph"])
    with pytest.raises(UsageError, match="device=cuda needs CUDA"):
        run.check(config)
    [planned] = forecast.dry_run([PlannedRun(Path("one"), config)]).runs
    assert planned.fault == ""


def test_a_device_for_no_dry_run_costs_one_sentence(call: Call) -> None:
    for words in (("run",), ("tables", "sjd_table3"), ("suite", "glance")):
        for more, sentence in (
            (["device_for=h100"], "goes with --dry-run"),
            (["device_for=h1000", "--dry-run"], "h100?"),
        ):
            code, _, err = call(*words, *more)
            assert (code, sentence in err) == (2, True), words


def test_a_network_that_nobody_publishes_is_trained_before_its_table(step: dict[str, Any], call: Call) -> None:
    out = call("run", "--dry-run", "model=emu3", "method=eagle2", "data=parti", "metrics=none", "n=1")[1]
    steps = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith(("first", "then"))]
    assert steps[:3] == [
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


def test_the_commands_of_the_page_are_planned_unchanged(
    step: dict[str, Any], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    step["reads_gb"] |= {"forward": 1.6, "diffusion_step": 0.1}
    step["tera_operations"] |= {"forward": 0.1, "diffusion_step": 0.0}
    launches = {"forward": {"layers": 300, "outside": 40}, "diffusion_step": 70}
    monkeypatch.setattr(plan, "plan", lambda cfg: step | ({"launches": launches} if "mar" in cfg["model"] else {}))
    monkeypatch.setenv("HOME", "/home/of/the/reader")  # where the page's folders are
    monkeypatch.delenv("SPECBENCH_HOME")
    for title, commands in SECTIONS.items():
        steps: list[str] = []
        for words in commands:
            assert words[0] == "specbench"
            if words[1] == "reference":
                assert reference.read(words[2:]) is not None
            elif words[1] != "suite":
                code, out, err = call(*words[1:], *[] if "--dry-run" in words else ["--dry-run"])
                assert code == 0, (words, err)
                said = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith(("first", "then"))]
                steps += said if words[1] == "tables" else []
        if title != "Before":  # the page's commands are those that the dry runs of its tables say
            assert {planned for planned in steps if "images=DIR" not in planned} == {
                " ".join(words) for words in commands
            }, title
    assert sum(map(len, SECTIONS.values())) >= 20


def test_the_pages_rehearsal_runs(tmp_path: Path) -> None:
    [words] = [words[1:] for words in SECTIONS["Before"] if words[1] == "suite"]
    done = python(TOGETHER, json.dumps([words]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "small" / suites.ROWS)
    assert [row["method"] for row in rows] == ["vanilla", "eagle1", "lantern_pp", "uniform_rsd", "cool_sd", "cool_sd"]
    assert {(row["model"], row["n"]) for row in rows} == {("llamagen_xl", 2)}


def test_the_figures_of_the_page_match_the_forecast() -> None:
    """The hours may differ by 15 %, because versions of PyTorch have different kernels."""
    drawn = dict(re.findall(r"^\| `(\w+ --model \w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(drawn) == [f"{table} --model {model}" for table, model, _ in reproduce_table.LINES]
    for line in reproduce_table.LINES:
        count, *_, fetched, _ = drawn[f"{line[0]} --model {line[1]}"].split(" | ")
        todo = reproduce_table.planned(*line)
        passes = sum(run.config.images * (2 if run.config.wants_baseline else 1) for run in todo.missing)
        assert (count, fetched) == (f"{passes:,}", reproduce_table.fetched(todo))
    for line in (("sjd_table3", "llamagen_xl", None), ("cspd_table2", "mar_l", None)):
        [computed] = reproduce_table.lines([line])
        cells = computed.strip("| ").split(" | ")[1:], drawn[f"{line[0]} --model {line[1]}"].split(" | ")
        assert cells[0][-1] == cells[1][-1]
        for now, then in zip(*(row[1 : 1 + len(reproduce_table.GPUS)] for row in cells), strict=True):
            assert now.split()[-1] == then.split()[-1] == "h"
            ends = [[float(word) for word in text.split() if word[0].isdigit()] for text in (now, then)]
            assert ends[0] == pytest.approx(ends[1], rel=0.15)
