"""Shards of a run that are decoded separately, and their merging: the records, the scores and the row of the whole
run."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from commands import Call, row_of, said
from fake_pipeline import FakePipeline, at, interrupt

import specbench
from specbench.config import configuration, indices
from specbench.errors import UsageError
from specbench.harness import run
from specbench.rows.columns import COLUMNS
from specbench.rows.journal import read_records
from specbench.rows.provenance import RunMetadata

RUN = ["method=sjd", "n=20", "images_per_prompt=2", "metrics=scenes_reward", "warmup=0"]
#: Fields of a record and of a row: which process decoded, and when.
PROCESS = {"done", "session", "timed", "peak_memory_mib", "text_s", "pixels_s"}
#: Fields of a row: the same, and measurements over pairs in the order of decoding, where shards follow each other.
OF_PROCESS = {
    "run_id",
    "baseline_run_id",
    "time",
    "remarks",
    "text_s",
    "pixels_s",
    "text_s_stderr",
    "pixels_s_stderr",
    "peak_memory_mib",
}
IN_ORDER = {"drift", "speedup_shift", "timing_valid", "speedup_throughput_stderr", "speedup_latency_stderr"}


def execute(out: Path, *overrides: str, loader: Any = FakePipeline) -> None:
    run.run(configuration.compose([*RUN, *overrides]), out, loader=loader)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole run and its eight shards, two of which were interrupted and resumed."""
    folder = tmp_path_factory.mktemp("shards")
    execute(folder / "whole")
    for part in range(1, 9):
        words = (folder / str(part), f"shard={part}/8")
        if part in (2, 5):
            with pytest.raises(run.Stopped):
                execute(*words, loader=at(part - 1, interrupt))
        execute(*words)
    return folder


def shards(home: Path) -> list[Path]:
    return [home / str(part) for part in (3, 1, 2, 4, 5, 6, 8, 7)]  # in any order


def test_a_shard_has_every_eighth_prompt(home: Path) -> None:
    for part in range(1, 9):
        numbers = [record.index for record in read_records(home / str(part) / "records.jsonl")]
        prompts = sorted({indices.prompt_of(number) for number in numbers})
        assert prompts == list(range(part - 1, 20, 8))
        row = row_of(home / str(part))
        assert (row["n"], row["images"], row["shard"]) == (len(prompts), 2 * len(prompts), f"{part}/8")
        result = specbench.result(home / str(part))
        assert len(result.records) == result.row["images"] == len(numbers)


def test_a_shard_alternates_method_and_vanilla(home: Path) -> None:
    """Its own images, one after the other. Every eighth prompt of the whole run would always begin with the same
    side."""
    for part in (1, 4):
        method, vanilla = (read_records(home / str(part) / f"{name}.jsonl") for name in ("records", "baseline"))
        first = {a.index: (a.timed or 0, a.done) < (b.timed or 0, b.done) for a, b in zip(method, vanilla, strict=True)}
        order = sorted(first, key=lambda index: (indices.prompt_of(index), index))
        assert [first[index] for index in order] == [i % 2 == 0 for i in range(len(order))]


def test_shards_of_different_weights_or_devices_are_not_one_run(home: Path, tmp_path: Path) -> None:
    for name in ("weights", "device"):
        other = Path(shutil.copytree(home / "3", tmp_path / name))
        memory = RunMetadata.read(other / "run.json")
        sessions = {key: replace(process, **{name: "other"}) for key, process in memory.sessions.items()}
        memory.changed(sessions=sessions).write(other / "run.json")
        with pytest.raises(UsageError, match=name):
            run.merge([other, *(path for path in shards(home) if path.name != "3")], tmp_path / "new", run.Rescoring())
        assert not (tmp_path / "new").exists()


def test_eight_shards_are_one_run(home: Path, tmp_path: Path) -> None:
    merged = run.merge(shards(home), tmp_path / "merged", run.Rescoring()).folder.path
    for name in ("records.jsonl", "baseline.jsonl"):
        of_shards, whole = ([asdict(r) for r in read_records(folder / name)] for folder in (merged, home / "whole"))
        assert [{k: v for k, v in r.items() if k not in PROCESS} for r in of_shards] == [
            {k: v for k, v in r.items() if k not in PROCESS} for r in whole
        ]
        lines = [json.loads(line)["index"] for line in (merged / name).read_text().splitlines()]
        assert lines == [r["index"] for r in sorted(whole, key=lambda r: (indices.prompt_of(r["index"]), r["index"]))]
    scores = [
        [
            {k: v for k, v in json.loads(line).items() if k not in ("time", "check")}
            for line in path.read_text().splitlines()
        ]
        for path in (merged / "scores.jsonl", home / "whole" / "scores.jsonl")
    ]
    assert scores[0] == scores[1]
    of_shards, whole = row_of(merged), row_of(home / "whole")
    compared = [name for name in COLUMNS if name not in OF_PROCESS | IN_ORDER]
    assert {name: of_shards[name] for name in compared} == {name: whole[name] for name in compared}


def test_the_merged_row_says_that_memory_was_too_small(home: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(home / "3", tmp_path / "3"))
    RunMetadata.read(other / "run.json").changed(smallest_batch=2).write(other / "run.json")
    merged = run.merge([other, *shards(home)[1:]], tmp_path / "merged", run.Rescoring())
    assert "batches of 2" in said(merged.row)


def test_a_rescoring_adds_metrics_and_changes_where_they_are_read() -> None:
    config = configuration.compose(["method=sjd", "metrics=scenes_clip"])
    changed = run.Rescoring(["scenes_reward"], {"metrics_dir": "here"}).of(config)
    assert (list(changed.metrics), changed.metrics_dir) == (["scenes_clip", "scenes_reward"], "here")
    assert run.Rescoring().of(config) == config


def test_an_interrupted_merge_continues(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    run.merge(shards(home), out, run.Rescoring())
    first = (out / "records.jsonl").read_bytes()
    (out / "records.jsonl").write_bytes(first[: len(first) // 2])
    (out / "row.csv").unlink()
    run.merge(shards(home), out, run.Rescoring())
    assert (out / "records.jsonl").read_bytes() == first
    assert (out / "row.csv").is_file()
    run.merge(shards(home), out, run.Rescoring(metrics=["scenes_clip"]))
    run.merge(shards(home), out, run.Rescoring())  # drops no score
    assert run.stored(out).metrics == ("scenes_reward", "scenes_clip")


def test_the_command_merges_and_names_missing_shards(home: Path, tmp_path: Path, call: Call) -> None:
    folders = [str(path) for path in shards(home)]
    other = tmp_path / "other"
    execute(other, "shard=3/8", "seed=1")
    for arguments, message in (
        ([*folders[:-1], f"out={tmp_path}/new"], "shard 7/8 is missing"),
        ([*folders[1:], str(other), f"out={tmp_path}/new"], "seed"),
        ([*folders, str(home / "whole"), f"out={tmp_path}/new"], "not a shard"),
        ([*folders, str(tmp_path / "nothing"), f"out={tmp_path}/new"], "no run"),
        ([*folders, str(shutil.copytree(home / "1", tmp_path / "again")), f"out={tmp_path}/new"], "9 folders"),
        (folders, "out="),
    ):
        code, _, err = call("merge", *arguments)
        assert (code, err.count("\n"), message in err) == (2, 1, True), err
        assert not (tmp_path / "new").exists()
    code, out, err = call("merge", *folders, f"out={tmp_path}/new")
    assert code == 0, err
    assert "tokens a step" in out


def test_more_shards_than_prompts(tmp_path: Path, call: Call) -> None:
    code, _, err = call("run", "method=sjd", "n=2", "shard=3/8", f"out={tmp_path}/run")
    assert (code, "shard=3/8" in err) == (2, True)
    for wrong in ("9/8", "0/8", "1", "a/b"):
        code, _, err = call("run", "method=sjd", "n=20", f"shard={wrong}", f"out={tmp_path}/run")
        assert (code, "shard" in err, (tmp_path / "run").exists()) == (2, True, False)
