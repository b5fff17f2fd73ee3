"""One run from start to row, with a pipeline that has no model, and once with the real pipeline and random weights."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import checked, said
from fake_pipeline import TOKENS, FakePipeline, at
from PIL import Image

from specbench import data, metrics
from specbench.config import configuration, registry
from specbench.errors import UsageError
from specbench.harness import contact_sheet, pipeline, run, worker
from specbench.harness.pipeline import in_batches
from specbench.metrics import Score
from specbench.metrics.base import Images
from specbench.rows import provenance, remark_text, report_text, shown
from specbench.rows.columns import COLUMNS, TIMED_COLUMNS
from specbench.rows.csv_files import read_rows
from specbench.rows.journal import Journal, pixel_digest, read_records
from specbench.rows.remark import as_json, free, remark

FAST = {"metrics": "none", "n": "6"}
STEPS = [4, 5, 6, 7, 4, 5]  # steps of the fake's first six images
LOG_PROB = [-1 - i % 4 - 0.5 * (t % 2) for i in range(6) for t in range(TOKENS)]  # log-probabilities of their tokens


class Bench:
    """Runs configurations in one folder, and records what was decoded."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.pipelines: list[FakePipeline] = []

    def run(self, *overrides: str) -> dict[str, Any]:
        words = FAST | dict(word.split("=") for word in overrides)
        cfg = configuration.compose([f"{name}={value}" for name, value in words.items()])
        self.outcome = run.run(cfg, self.out, loader=self.load)
        return self.outcome.row

    def load(self, cfg: Any) -> Any:
        self.pipelines.append(FakePipeline(cfg))
        return self.pipelines[-1]

    @property
    def decoded(self) -> list[tuple[str, int]]:
        return [key for pipeline in self.pipelines for key in pipeline.decoded]

    def files(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.out)): p.read_bytes() for p in self.out.rglob("*.png")}

    def images(self, name: str = "records") -> dict[int, str]:
        """Index -> hash of the pixels, for the images of the method or of the baseline."""
        return {r.index: r.sha256 for r in read_records(self.out / f"{name}.jsonl")}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "run")


def test_a_run_writes_its_files(bench: Bench) -> None:
    row = bench.run()
    names = {p.name for p in bench.out.iterdir()} - {".lock"}
    assert names == {
        "config.yaml", "run.json", "run.log", "records.jsonl", "baseline.jsonl", "images", "baseline", "row.csv",
        "details.json", "contact_sheet.png",
    }  # fmt: skip
    assert read_rows(bench.outcome.folder.row) == [row]
    made, vanilla = (read_records(bench.out / f"{name}.jsonl") for name in ("records", "baseline"))
    assert [(r.index, r.steps, r.tokens, r.batch) for r in made] == [(i, s, TOKENS, 1) for i, s in enumerate(STEPS)]
    items = data.load(bench.outcome.config.prompts)
    assert [(r.prompt, r.id) for r in made] == [(item.prompt, item.id) for item in items]
    assert row["prompts_hash"] == data.prompts_hash(items)
    for record in made:
        with Image.open(bench.out / record.image) as image:
            assert pixel_digest(np.asarray(image)) == record.sha256
    # Warm-up of both, then the method and its baseline decode every prompt alternately: ABBA.
    abba = [(label, i) for i in range(6) for label in (("method", "vanilla"), ("vanilla", "method"))[i % 2]]
    assert bench.decoded == [("method", 0), ("vanilla", 0), *abba]
    assert [[r.timed for r in records] for records in (made, vanilla)] == [[1, 4, 5, 8, 9, 12], [2, 3, 6, 7, 10, 11]]
    assert len({r.session for r in [*made, *vanilla]}) == 1


def test_the_values_of_a_row(bench: Bench) -> None:
    row = bench.run()

    def stderr(values: Any) -> float:
        return float(np.std(values, ddof=1) / np.sqrt(len(values)))

    lengths = [TOKENS / s for s in STEPS]
    expected = {
        "method": "cool_sd", "delta": 1.1, "window": None, "n": 6, "tokens": TOKENS, "resolution": 8,
        "weights": "fake:0", "device": "cpu", "remarks": None, "fid": None, "fid_backend": None,
        "accepted_length_mean": np.mean(lengths),
        "accepted_length_std": np.std(lengths, ddof=1),
        "accepted_length_stderr": stderr(lengths),
        "steps": np.mean(STEPS),
        "steps_stderr": stderr(STEPS),
        "step_compression": TOKENS * 6 / sum(STEPS),
        "acceptance_rate": sum(TOKENS - s for s in STEPS) / sum(TOKENS for _ in STEPS),  # every step rejects a token
        "draft_acceptance_rate": sum(TOKENS - s for s in STEPS) / sum(5 * s for s in STEPS),
        "draft_tokens": 5.0,
        "latency_s_mean": np.mean(STEPS),  # one second per step
        "latency_s_std": np.std(STEPS, ddof=1),
        "latency_s_stderr": stderr(STEPS),
        "latency_s_p50": 5.0,
        "latency_s_p95": np.percentile(STEPS, 95),
        "tokens_per_s": TOKENS * 6 / sum(STEPS),
        "images_per_s": 6 / sum(STEPS),
        "baseline_latency_s": TOKENS,
        "speedup_latency": TOKENS / np.mean(STEPS),
        "speedup_step": TOKENS / np.mean(STEPS),
        # vanilla takes equally long for every image, so only the method's mean has an error: d(T / m) = -T / m^2 dm
        "baseline_latency_s_stderr": 0.0,
        "speedup_step_stderr": TOKENS / np.mean(STEPS) ** 2 * stderr(STEPS),
        "timing": "true", "timed_pairs": 6, "further_pairs": 0, "drift": 0.0, "speedup_shift": 0.0,
        "timing_valid": "true",
        "acceptance_by_depth": "[1.0,0.7742,0.4167,0.0]",  # 31, 31, 24 and 10 were verified
        "accepted_histogram": "[0.0,0.2258,0.4516,0.3226]",  # of 31 steps
        "first_accept": 0.5,
        "draft_tv": (sum(STEPS) / 4 + sum(STEPS[1::2]) / 8) / sum(STEPS),
        "draft_top1": 17 / 31,
        "draft_top3": 1.0,
        "draft_passes": 5 * np.mean(STEPS),  # the preset's tree is five deep
        "log_prob_mean": np.mean(LOG_PROB),
        "log_prob_std": np.std(LOG_PROB),
        "perplexity": np.exp(-np.mean(LOG_PROB)),
        "perplexity_stderr": np.exp(-np.mean(LOG_PROB)) * stderr(np.reshape(LOG_PROB, (6, -1)).mean(1)),
        "log_prob_stderr": stderr(np.reshape(LOG_PROB, (6, -1)).mean(1)),
        "perplexity_backend": "target:llamagen_scenes@0, cfg_scale 3, temperature 1",
        "emitted_tv": 0.1875, "emitted_kl": 0.375, "emitted_kl_stderr": stderr([0.25, 0.5] * 3),
        "emitted_kl_reverse": 0.75,
        "emitted_kl_optimal": 0.1875, "emitted_kl_ratio": 2.0, "emitted_kl_ratio_stderr": 0.0, "emitted_ratio_max": 2.0,
        "emitted_kl_backend": "target:llamagen_scenes@0, cfg_scale 3, temperature 1",
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["baseline_run_id"] == f"{row['run_id']}/baseline"
    assert row["peak_memory_mib"] > 0
    assert set(row) == set(COLUMNS)


def test_vanilla_is_its_own_baseline(bench: Bench) -> None:
    row = bench.run("method=vanilla")
    assert row["accepted_length_mean"] == row["step_compression"] == 1.0
    assert row["speedup_latency"] == row["speedup_step"] == 1.0
    assert row["speedup_latency_stderr"] == row["speedup_step_stderr"] == 0.0
    assert row["timed_pairs"] == 6
    assert row["baseline_run_id"] == row["run_id"]
    assert row["perplexity"] == pytest.approx(np.exp(-np.mean(LOG_PROB)))
    assert (row["accepted_histogram"], row["draft_passes"]) == ("[1.0]", 0)
    assert row["emitted_tv"] == row["emitted_kl"] == 0
    drafted = (
        "acceptance_rate draft_acceptance_rate acceptance_by_depth drafted_by_position first_accept draft_tv draft_top1"
        " draft_top3"
    )
    assert [row[c] for c in drafted.split()] == [None] * 8  # nothing was drafted
    assert not (bench.out / "baseline").exists()


def test_without_a_baseline_there_are_no_speedups_until_it_is_added(bench: Bench) -> None:
    row = bench.run("baseline=false", "warmup=0")
    assert row["latency_s_mean"] == np.mean(STEPS)
    assert [row[c] for c in ("speedup_latency", "speedup_step", "baseline_run_id", "baseline_latency_s")] == [None] * 4
    assert bench.decoded == [("method", i) for i in range(6)]  # no image twice, since there is no warm-up
    row = bench.run("warmup=0")
    assert row["speedup_step"] == TOKENS / np.mean(STEPS)
    assert bench.pipelines[1].decoded == [("vanilla", i) for i in range(6)]
    # The two passes are separate, so there are no pairs and no speed-up in seconds.
    assert (row["baseline_latency_s"], row["speedup_latency"], row["timed_pairs"]) == (TOKENS, None, None)
    assert "2 processes" in said(row)
    assert "6 of 6 images" in said(row)


def test_in_a_batch_there_is_no_latency(bench: Bench, tmp_path: Path) -> None:
    row = bench.run("batch=4")
    assert {row[c] for c in TIMED_COLUMNS} == {None}
    assert row["timing"] == "false"
    assert row["speedup_step"] == TOKENS / np.mean(STEPS)
    assert "batch 1" in said(row)
    assert [r.batch for r in read_records(bench.out / "records.jsonl")] == [4, 4, 4, 4, 2, 2]
    alone = Bench(tmp_path / "alone")
    row = alone.run("n=1")  # one image has no spread
    assert row["latency_s_mean"] == row["latency_s_p95"] == 4.0
    assert {row[name] for name in row if name.endswith(("_stderr", "_std"))} - {row["log_prob_std"]} == {None}
    alone.run()
    assert alone.images() == bench.images()


def test_the_same_run_again_only_restores_a_lost_sheet_or_row(bench: Bench) -> None:
    first = bench.run()
    assert not bench.outcome.nothing_left
    before = {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in bench.out.rglob("*") if p.name != "run.log" and p.is_file()
    }
    assert bench.run() == first
    assert bench.outcome.nothing_left
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in before}
    for path in (bench.outcome.folder.sheet, bench.outcome.folder.row):
        path.unlink()
        again = bench.run()
        assert path.exists()
        assert {k: v for k, v in again.items() if k != "time"} == {k: v for k, v in first.items() if k != "time"}
    assert len(bench.pipelines) == 1  # no second one was loaded


def test_more_prompts_continue_where_the_first_run_ended(bench: Bench) -> None:
    small = bench.run("n=2")
    large = bench.run("n=4")
    abba = [("method", 2), ("vanilla", 2), ("vanilla", 3), ("method", 3)]
    assert bench.pipelines[1].decoded == [("method", 2), ("vanilla", 2), *abba]
    assert (small["n"], large["n"]) == (2, 4)
    assert small["run_id"] == large["run_id"]
    assert small["config_hash"] != large["config_hash"]
    assert read_rows(bench.outcome.folder.row) == [large]
    again = bench.run("n=2")  # over the first two; the others stay
    assert again["accepted_length_mean"] == small["accepted_length_mean"]
    assert len(bench.images()) == 4
    assert len(bench.pipelines) == 2


def test_another_configuration_is_refused_and_named(bench: Bench) -> None:
    bench.run()
    before = bench.files()
    with pytest.raises(UsageError, match="delta=1.1.*seed=0.*delta=2.0.*seed=3"):
        bench.run("delta=2", "seed=3")
    with pytest.raises(UsageError, match="method=cool_sd.*method=sd.*window=5"):
        bench.run("method=sd", "rule=cool")
    assert bench.files() == before


def test_other_weights_and_other_prompts_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run("n=2")
    with monkeypatch.context() as patch:
        patch.setattr(FakePipeline, "weights", "fake:1")
        with pytest.raises(UsageError, match="fake:0.*fake:1"):
            bench.run("n=3")
    with monkeypatch.context() as patch:  # trained again: a finished run is not valid for the new weights
        patch.setattr(run, "_load_pipeline", FakePipeline)
        patch.setattr(registry, "weights_here", lambda cfg: "embedded:2")
        with pytest.raises(UsageError, match="fake:0.*embedded:2"):
            run.run(bench.outcome.config, bench.out)
    prompts = data.load(bench.outcome.config.changed(n=3).prompts)
    for other in (replace(prompts[1], prompt="else"), replace(prompts[1], id="else")):
        monkeypatch.setattr(data, "load", lambda cfg: [prompts[0], other, prompts[2]])  # noqa: B023
        with pytest.raises(UsageError, match="index 1"):
            bench.run("n=3")


def test_a_file_of_prompts_can_be_extended_at_its_end(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "my.txt"
    file.write_text("one\ntwo\nthree\n")
    first = bench.run(f"prompts={file}", "n=2")
    assert (first["data"], first["split"], first["prompts"]) == ("prompts", None, str(file))
    assert [(r.id, r.prompt) for r in read_records(bench.out / "records.jsonl")] == [("1", "one"), ("2", "two")]
    assert f", prompts, n=2, {first['device_name']}" in bench.outcome.report()
    file.write_text("one\ntwo\n3\n4\n")
    assert bench.run(f"prompts={file}", "n=2") == first  # the first two have not changed
    assert bench.outcome.nothing_left
    assert bench.run(f"prompts={file}", "n=4")["prompts_hash"] != first["prompts_hash"]
    assert bench.decoded.count(("method", 3)) == 1
    file.write_text("one\n2\n3\n4\n")
    for n in (2, 4, 3):  # finished or not
        with pytest.raises(UsageError, match="prompts"):
            bench.run(f"prompts={file}", f"n={n}")
    file.unlink()
    assert bench.run(f"prompts={file}", "n=4")["n"] == 4  # everything was decoded while the prompts existed
    with pytest.raises(UsageError, match="file"):
        bench.run(f"prompts={file}", "n=5")


@pytest.mark.parametrize(
    ("timing", "batch", "warm"),
    [("false", 4, []), ("true", 3, [0, 1, 2]), ("true", 4, [0, 1, 2, 3, 4, 5]), ("true", 9, range(6))],
)
def test_only_a_timed_run_has_a_warm_up(bench: Bench, timing: str, batch: int, warm: Sequence[int]) -> None:
    """Of each size of its batches: an engine records its graphs for each size."""
    bench.run(f"batch={batch}", "baseline=false", f"timing={timing}")
    assert bench.decoded == [("method", i) for i in [*warm, *range(6)]]


def test_no_warm_up_is_between_the_batches_of_pairs(bench: Bench) -> None:
    bench.run("batch=4", "timing=true")
    method, vanilla = ([(label, i) for i in range(6)] for label in ("method", "vanilla"))
    assert bench.decoded == [*method, *vanilla, *method[:4], *vanilla[:4], *vanilla[4:], *method[4:]]


def test_a_timed_run_decodes_batch_by_batch(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without a baseline. The results of a stream, whose rows take the next image, have no seconds of a
    batch."""
    sizes: list[int] = []

    def stream(self: FakePipeline, prompts: list[str], *more: Any) -> Any:
        sizes.append(len(prompts))
        return in_batches(self, prompts, *more)

    monkeypatch.setattr(FakePipeline, "stream", stream)
    row = bench.run("batch=4", "baseline=false", "timing=true")
    assert sizes == [4, 2]
    expected = [sum(STEPS[:4]), sum(STEPS[4:])]
    assert [row[f"batch_s_p{p}"] for p in (50, 95)] == pytest.approx(np.percentile(expected, (50, 95)))
    fewer = bench.run("batch=4", "baseline=false", "timing=true", "n=5")  # with one of two images of a batch
    assert fewer["batch_s_p50"] == pytest.approx(row["batch_s_p50"])
    sizes.clear()
    Bench(tmp_path / "untimed").run("batch=4", "baseline=false")
    assert sizes == [6]


def test_the_folder_of_a_data_set_may_move(bench: Bench, tmp_path: Path) -> None:
    table = "Prompt\tCategory\n" + "".join(f"prompt {i}\tx\n" for i in range(9))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "PartiPrompts.tsv").write_text(table)
    first = bench.run("data=parti", f"data_dir={tmp_path}/a", "n=2")
    more = bench.run("data=parti", f"data_dir={tmp_path}/b", "n=3")
    # the warm-up, and one more prompt
    assert [label for label, _ in bench.pipelines[1].decoded] == ["method", "vanilla"] * 2
    assert str(tmp_path) not in bench.outcome.folder.row.read_text()
    assert first["prompts_hash"] != more["prompts_hash"]
    (tmp_path / "b" / "PartiPrompts.tsv").write_text(table.replace("prompt", "Prompt"))
    with pytest.raises(UsageError, match="prompts"):
        bench.run("data=parti", f"data_dir={tmp_path}/b", "n=4")


def test_a_prompt_names_no_file(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "my.json"
    file.write_text(json.dumps([{"id": "../../out", "prompt": "/etc/passwd"}, {"id": "/tmp/x", "prompt": "x" * 9999}]))
    bench.run(f"prompts={file}", "n=2", "baseline=false")
    assert {p.name for p in (bench.out / "images").iterdir()} == {"00000.png", "00001.png"}
    assert {p.name for p in tmp_path.iterdir()} == {"my.json", "run"}
    with Image.open(bench.outcome.folder.sheet) as sheet_:
        assert sheet_.size[1] < 1000  # the long prompt is cut


def test_a_deleted_picture_is_decoded_again_and_a_changed_one_refused(bench: Bench) -> None:
    bench.run()
    before = bench.files()
    (bench.out / "images/00003.png").unlink()
    bench.run()
    assert bench.pipelines[1].decoded == [("method", 3)] * 2
    assert bench.files() == before
    (bench.out / "images/00003.png").write_bytes(before["images/00002.png"])
    with pytest.raises(UsageError, match="00003.png"):
        bench.run("n=7")


def test_the_folder_of_something_else_is_not_changed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of another process, with other files, or of a run that cannot start, which leaves nothing."""
    inner = Bench(bench.out)

    def shared(cfg: Any) -> Any:
        with pytest.raises(UsageError, match="process"):
            inner.run()
        return FakePipeline(cfg)

    def failing(cfg: Any) -> Any:
        raise UsageError("no weights")

    monkeypatch.setattr(bench, "load", shared)
    bench.run()
    assert inner.decoded == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="thesis.tex"):
        Bench(tmp_path / "other").run()
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["thesis.tex"]
    absent = Bench(tmp_path / "new")
    monkeypatch.setattr(absent, "load", failing)
    with pytest.raises(UsageError, match="weights"):
        absent.run()
    assert not absent.out.exists()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Killed between the two halves of the pair of prompt 3, which begins with vanilla: that half cannot get a partner
    any more. The order continues with the index of the prompt."""
    calm, bench = Bench(tmp_path / "calm"), Bench(tmp_path / "run")
    undisturbed = calm.run("warmup=0")
    victim = partial(run.run, calm.outcome.config, bench.out, loader=at(3, kill))
    killed = multiprocessing.get_context("fork").Process(target=victim)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert (len(bench.images()), len(bench.images("baseline"))) == (3, 4)
    assert not (bench.out / "row.csv").exists()
    before = (bench.out / "records.jsonl").read_bytes()

    row = bench.run("warmup=0")
    assert (bench.out / "records.jsonl").read_bytes().startswith(before)
    again = [("method", 4), ("vanilla", 4), ("vanilla", 5), ("method", 5), ("method", 3)]
    assert bench.decoded == again
    for name in ("records", "baseline"):
        assert bench.images(name) == calm.images(name)
    assert row["timed_pairs"] == 5
    assert row["speedup_latency"] == pytest.approx(5 * TOKENS / (sum(STEPS) - STEPS[3]))
    assert row["latency_s_mean"] == np.mean(STEPS)
    assert "decoded in 2 processes" in said(row)
    assert "1 of 6 images" in said(row)
    settled = set(row) - {"run_id", "time", "remarks", "peak_memory_mib", "baseline_run_id"} - TIMED_COLUMNS
    assert {k: row[k] for k in settled} == {k: undisturbed[k] for k in settled}


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def score(
        names: list[str],
        images: Images,
        items: list[data.Item],
        context: metrics.ScoringContext,
        cached: metrics.Outputs,
    ) -> dict[str, Score]:
        calls.append((names, [images[i] for i in range(len(images))], items))
        return {"fid": Score(12.5, None, "scenes-x@1", (free("few"),)), "image_reward": Score.unmeasured("no weights")}

    monkeypatch.setattr(metrics, "score", score)
    return calls


def test_metrics_see_the_pictures_beside_their_prompts(bench: Bench, scorer: list[Any]) -> None:
    row = bench.run("metrics=[scenes_fid,scenes_reward]")
    assert len(scorer) == 2  # the method's images, and vanilla's next to them
    for (names, images, items), empty in zip(scorer, (False, True), strict=True):
        assert names == ["scenes_fid", "scenes_reward"]
        pipeline = FakePipeline(bench.outcome.config, empty=empty)
        for item, image in zip(items, images, strict=True):
            assert (image == pipeline.pixels(pipeline.decode([item.prompt], [(0, item.index)]).tokens)[0]).all()
    assert (row["fid"], row["fid_stderr"], row["fid_backend"]) == (12.5, None, "scenes-x@1")
    assert (row["image_reward"], row["image_reward_backend"]) == (None, None)
    assert said(row) == "fid: few; image_reward: no weights"
    assert read_rows(bench.outcome.folder.row) == [row]


def test_a_run_never_has_all_its_pictures_in_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sheet shows the first few images, and `metrics` reads the images without outputs in batches."""
    monkeypatch.setattr(contact_sheet, "LIMIT", 2)
    read: list[int] = []
    image = Journal.image
    monkeypatch.setattr(Journal, "image", lambda self, index: (read.append(index), image(self, index))[1])
    bench.run("baseline=false")
    assert read == [0, 1]
    row = bench.run("baseline=false", "metrics=scenes_fid")
    assert re.search(r"scenes_classifier\.safetensors\b.* 64x64 .* 8x8", said(row))
    assert sorted(read) == [0, 0, 0, 1, 1, 1, 2, 3, 4, 5]


def test_missing_measurements_are_reported_before_decoding(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    row = bench.run("metrics=[hpsv2,scenes_fid]", "metrics_dir=nowhere")
    stderr = capsys.readouterr().err
    assert stderr.index("hpsv2 cannot be measured here: ") < stderr.index("loading")
    assert row["hpsv2"] is None
    assert "hpsv2: " in said(row)


def test_the_report_names_what_was_written(bench: Bench) -> None:
    row = bench.run()
    text = bench.outcome.report()
    assert f"{row['accepted_length_mean']:.2f} ±" in text
    assert str(bench.outcome.folder.row) in text
    assert bench.outcome.folder.sheet.name in text
    assert "3.10 ± 0.29x" in text
    assert re.search(rf"3\.10 ± {row['speedup_latency_stderr']:.2f}x .*\b6 pairs", text)
    assert "0.3750 ± 0.0559" in text
    assert "0.1875 ± 0.0280" in text
    assert len(text.splitlines()) <= 10
    untimed = replace(bench.outcome, row=row | dict.fromkeys(("speedup_latency", "speedup_throughput"))).report()
    assert "6 pairs" not in untimed


def test_saved_steps_need_no_vanilla_run(bench: Bench) -> None:
    row = bench.run("baseline=false", "timing=false")
    assert row["speedup_step"] is None
    assert f"{row['step_compression']:.2f}" in bench.outcome.report().splitlines()[1]


def test_a_report_marks_what_is_doubtful(bench: Bench) -> None:
    row = bench.run() | {"timed_pairs": 3, "timing_valid": "false", "speedup_latency_stderr": None}
    row["remarks"] = as_json([remark("not_timed"), remark("negative", "clip_score"), remark("biased", "fid")])
    text = report_text.report(row, bench.outcome.config)
    assert shown.doubt(row, "speedup_latency") in text
    for told in (remark("not_timed"), remark("negative", "clip_score")):
        assert remark_text.said(told) in text
    assert "fid: " not in text  # told in another line


def test_a_report_says_how_long_a_step_takes(bench: Bench) -> None:
    """A step compression of 2.4 at 0.6 times the speed: a step takes four times as long."""
    row = bench.run() | {"speedup_step": 2.4, "speedup_latency": 0.6, "speedup_throughput": 0.6}
    assert report_text.step_cost(row) == pytest.approx(4.0)
    assert "4.00x" in report_text.report(row, bench.outcome.config)
    equal = row | {"speedup_latency": 2.35, "speedup_throughput": 2.35}
    assert "a step takes" not in report_text.report(equal, bench.outcome.config)


def test_a_run_reports_how_it_spent_its_time(bench: Bench) -> None:
    """Only of this start; the parts sum to the whole."""
    bench.run()
    older, made = Journal(bench.out / "records.jsonl"), Journal(bench.out / "baseline.jsonl")
    images = [replace(r, decode_s=2.0, text_s=0.25, pixels_s=0.25, draft_s=0.5) for r in older.records.values()]
    images += [replace(r, decode_s=1.0, text_s=0.25, pixels_s=0.25) for r in made.records.values()]
    session = images[0].session
    late = [replace(r, done=100.0 + i) for i, r in enumerate(images)]
    spent = report_text.TimeSpent(began=101.0, decoded=131.0, scored=136.0, ended=137.5)
    one = bench.outcome.folder.metadata().sessions[session]
    sessions = {session: replace(one, loaded_s=2.0, workers=1)}
    parts = spent.parts("cool_sd", late, sessions)  # five images of the method, six of vanilla
    assert parts == {
        "loading": 2.0, "drafting": 2.5, "cool_sd": 10.0, "vanilla": 9.0, "warm-up and statistics": 6.5,
        "scoring": 5.0, "the rest": 1.5,
    }  # fmt: skip
    assert sum(parts.values()) == spent.ended - spent.began
    # The seconds of images that were decoded at the same time do not add up.
    together = {session: replace(one, loaded_s=2.0, workers=2)}
    for records, process_info in ((late, together), ([], sessions)):
        assert spent.parts("cool_sd", records, process_info) == {"decoding": 30.0, "scoring": 5.0, "the rest": 1.5}
    assert bench.outcome.spent
    assert bench.outcome.spent in bench.outcome.report()
    bench.run()
    assert (bench.outcome.nothing_left, bench.outcome.spent) == (True, "")


def test_the_sheet_holds_every_picture_enlarged() -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 0, 255), (0, 255, 255)]
    pictures = [np.full((64, 64, 3), c, np.uint8) for c in colours]
    caption = "a very long caption that needs more than a single line to be shown beneath so small a picture"
    cells = [contact_sheet.SheetCell(caption, [("vanilla", p), ("cool_sd", p[::-1])]) for p in pictures]
    page = np.asarray(contact_sheet.draw("title", cells))
    for colour in colours:
        assert (page == colour).all(-1).sum() == 2 * 192 * 192  # three times as large, twice, nothing blurred or hidden
    assert page.shape[1] <= contact_sheet.WIDTH
    cells = [contact_sheet.SheetCell("short", [("cool_sd", pictures[0])])]
    plain, longer = (np.asarray(contact_sheet.draw("title", cells, remarks)) for remarks in ([], ["a remark"]))
    assert (plain == colours[0]).all(-1).sum() == 192 * 192
    # A remark is a line between the title and the images.
    assert (longer.shape[1], longer.shape[0] - plain.shape[0]) == (plain.shape[1], 18)
    assert (longer[-200:] == plain[-200:]).all()
    assert (longer[:40] == plain[:40]).all()
    assert (longer[40:58] < 255).any()


def test_the_real_pipeline_with_random_weights(tmp_path: Path) -> None:
    model = ["model=llamagen_xl", "reduced=true", "weights=random", "dtype=float32", "device=cpu"]
    words = [*model, "data=scenes", "n=2", "warmup=0", "metrics=none", "method=sd", "window=2", "cfg_scale=1"]
    row = run.run(configuration.compose(words), tmp_path / "one").row
    assert row["weights"] == "random"
    assert row["tokens"] == 16
    assert row["accepted_length_mean"] >= 1.0
    assert row["steps"] <= 16
    assert 1 < row["perplexity"] < 70  # the codebook has 64 tokens, and a distribution is seldom uniform
    assert row["draft_passes"] == 2 * row["steps"]
    batched = run.run(configuration.compose([*words, "batch=2", "baseline=false"]), tmp_path / "two").row
    assert batched["steps"] == row["steps"]
    hashes = [[r.sha256 for r in read_records(tmp_path / name / "records.jsonl")] for name in ("one", "two")]
    assert hashes[0] == hashes[1]


def test_errors_that_are_reported_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, sentence in (
        (["weights=random", "tree=nope"], "unknown tree 'nope'"),
        (["weights=random", "method=sd", "rule=cool", "schedule=linear", "window=8"], "schedule=linear"),
        (["weights=."], "has no scenes_target.safetensors"),
    ):
        with pytest.raises(UsageError, match=sentence):
            run.check(configuration.compose(words))
    run.check(configuration.compose(["weights=random"]))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system cannot start a peak again")
def test_the_peak_of_the_resident_memory_can_start_again() -> None:
    """64 MiB that were unmapped do not count. The heap would not do: it may hold as much that is free and resident."""
    cpu = torch.device("cpu")
    worker.reset_peak_memory(cpu)
    before = worker.peak_memory_mib(cpu)
    with mmap.mmap(-1, 64 << 20) as block:
        block.write(b"1" * len(block))
        assert worker.peak_memory_mib(cpu) > before + 32
    worker.reset_peak_memory(cpu)
    assert worker.peak_memory_mib(cpu) < before + 32


def test_the_threads_of_an_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on a CPU, unless the environment says how many."""
    monkeypatch.setattr(registry, "find", lambda *_: lambda *_: None)
    cfg = configuration.compose(["device=cpu"])
    threads: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    for more, model, expected in (("2", "llamagen_scenes", []), (None, "llamagen_xl", []), (None, "mar_scenes", [1])):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if more:
            monkeypatch.setenv("OMP_NUM_THREADS", more)
        pipeline.load_model(cfg.changed(model=model))
        assert threads == expected


def test_an_engine_needs_its_device_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configuration.compose(["device=cuda", "engine=triton"])
    with pytest.raises(UsageError, match="engine=eager"):
        pipeline.engine_of(cfg, torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="engine=graph"):
        pipeline.engine_of(cfg, torch.device("cuda"))
    assert type(pipeline.engine_of(cfg.changed(engine="graph"), torch.device("cuda"))).__name__ == "Graphs"


PROCESS = provenance.DecodingProcess("1", "c", "cpu", "A", "2", "", "3.11", 1, "random", 8, 4, 1, "", 7, "now", 0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": 5},
        {"sessions": {"a": 1}},
        {"sessions": {"a": {"workers": 1}}},
        {"sessions": {"a": asdict(PROCESS) | {"loaded_s": "0.5"}}},
    ],
)
def test_a_run_json_that_no_run_wrote_is_an_error(change: dict[str, Any], tmp_path: Path) -> None:
    """Even with a correct checksum."""
    file = tmp_path / "run.json"
    provenance.RunMetadata("one", sessions={"a": PROCESS}).write(file)
    assert provenance.RunMetadata.read(file).run_id == "one"
    values = {name: value for name, value in json.loads(file.read_text()).items() if name != "check"}
    file.write_text(checked(values))
    assert provenance.RunMetadata.read(file).run_id == "one"
    file.write_text(checked(values | change))
    with pytest.raises(UsageError, match="run.json"):
        provenance.RunMetadata.read(file)
