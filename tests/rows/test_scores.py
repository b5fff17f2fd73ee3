"""Scores have a journal: nothing in it is lost or replaced, and the row answers the request."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Call, row_of, said
from fake_pipeline import FakePipeline, at, interrupt
from light_metrics import Light
from light_metrics import light_metrics as light_metrics  # a fixture
from PIL import Image

import specbench
from specbench.compare import comparison, passes
from specbench.config import configuration
from specbench.errors import UsageError
from specbench.harness import contact_sheet, run, status
from specbench.harness.folder import stored
from specbench.harness.planned import PlannedRun
from specbench.rows import provenance
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import as_cells
from specbench.rows.differences import differences
from specbench.rows.journal import pixel_digest, read_records, to_line
from specbench.rows.scores import ScoreJournal
from specbench.storage.csv_text import csv_lines
from specbench.tables.collect import Bench

SPEEDUPS = ("speedup_latency", "speedup_throughput", "speedup_step", "baseline_latency_s", "baseline_run_id")


@pytest.fixture
def weights(light_metrics: dict[str, str]) -> dict[str, str]:
    return light_metrics


def files_of(folder: str) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in Path(folder).iterdir() if p.is_file() and p.name not in ("run.log", ".lock")}


def lines(folder: str = "first") -> list[tuple[str, str, int]]:
    """Metric, side and number of images of every score."""
    return [(score.metric, score.side, score.n) for score in ScoreJournal(Path(folder) / "scores.jsonl")]


def start(call: Call, *words: str) -> tuple[dict[str, Any], str]:
    """Starts a run in the folder `first`. Returns its row, and everything that was printed."""
    code, out, err = call("run", "out=first", *([] if any(word[:2] == "n=" for word in words) else ["n=6"]), *words)
    assert code == (3 if " has no value: " in err else 0), err
    return row_of("first"), out + err


def columns_of(row: dict[str, Any], *columns: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith(columns)}


def test_evaluate_adds_a_metric_and_a_run_has_the_requested_ones(call: Call, weights: dict[str, str]) -> None:
    before, _ = start(call, "metrics=[fid,clip_b32]")
    first = (Path("first") / "row.csv").read_bytes()
    assert call("evaluate", "first", "metrics=image_reward")[0] == 0
    after, both_bytes = row_of("first"), (Path("first") / "row.csv").read_bytes()
    assert columns_of(after, "fid", "clip_score") == columns_of(before, "fid", "clip_score")
    assert after["image_reward"] is not None
    assert said(after).count("few") == 3
    assert list(stored(Path("first")).metrics) == ["fid", "clip_b32", "image_reward"]
    score_lines = lines()
    for words in (["metrics=[fid,clip_b32]"], ["metrics=[clip_b32,fid]"], ["metrics=none"], ["metrics=[fid,clip_b32]"]):
        row, _ = start(call, *words)
        assert {c for c in ("fid", "clip_score", "image_reward") if row[c] is not None} == (
            {"fid", "clip_score"} if words != ["metrics=none"] else set()
        )
    assert (Path("first") / "row.csv").read_bytes() == first
    assert "nothing left to do" in start(call, "metrics=[fid,clip_b32]")[1]
    assert call("evaluate", "first", "metrics=image_reward")[0] == 0
    assert (Path("first") / "row.csv").read_bytes() == both_bytes
    assert lines() == score_lines  # nothing was computed again
    assert status.of_run(Path("first")).state == "finished"


def test_two_metrics_of_one_column_are_both_stored(call: Call, weights: dict[str, str]) -> None:
    before, _ = start(call, "metrics=[fid,clip_b32]")
    after, _ = start(call, "metrics=fid_clean")
    assert after["fid_backend"].startswith("fid_clean")
    assert after["clip_score"] is None
    assert call("evaluate", "first", "metrics=[fid,clip_b32]")[0] == 0
    assert columns_of(row_of("first"), "fid", "clip") == columns_of(before, "fid", "clip")
    assert list(stored(Path("first")).metrics) == ["fid", "clip_b32"]
    weights["fid"] = "broken"
    again, _ = start(call, "metrics=fid")
    assert (again["fid"], said(again)) == (None, "fid: these pictures are too small")
    del weights["fid"]  # it cannot be measured here any more: the newest value stays
    again, _ = start(call, "metrics=fid")
    assert again["fid"] == before["fid"]


def test_a_smaller_n_is_another_row_and_the_larger_one_comes_back(call: Call, weights: dict[str, str]) -> None:
    start(call, "metrics=fid", "n=8")
    files = files_of("first")
    shown, _ = start(call, "n=4", "metrics=clip_b32")
    cfg = configuration.compose(["n=4", "metrics=clip_b32"])
    alone = run.run(cfg, "alone", loader=FakePipeline).row
    columns = set(COLUMNS) - {"run_id", "baseline_run_id", "time", "peak_memory_mib"}
    columns -= {c for c in columns if c.startswith(("text_s", "pixels_s"))}
    assert {c: shown[c] for c in columns} == {c: alone[c] for c in columns}
    assert status.of_run(Path("first")).n == 4
    assert "nothing left to do" not in start(call, "metrics=fid", "n=8")[1]  # the row was replaced again
    after = files_of("first")
    assert {p for p in files if p.name != "run.json" and files[p] != after[p]} == {Path("first/scores.jsonl")}
    assert after[Path("first/scores.jsonl")].startswith(files[Path("first/scores.jsonl")])


def test_a_larger_n_scores_its_own_images(call: Call, weights: dict[str, str]) -> None:
    start(call, "metrics=[fid,clip_b32]")
    del weights["clip_b32"]
    after, _ = start(call, "n=8", "metrics=[fid,clip_b32]", "baseline=false")
    assert (after["n"], after["fid"] is None, after["clip_score"]) == (8, False, None)
    assert "clip_score: no weights of clip_b32" in said(after)
    assert {after[c] for c in SPEEDUPS} == {None}
    assert ("clip_b32", "method", 6) in lines()


def test_report_and_sheet_state_the_loss_of_quality(
    call: Call, weights: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        contact_sheet, "save", lambda path, title, cells, remarks: (drawn.append(remarks), path.touch())
    )
    row, printed = start(call, "metrics=[clip_b32,kid]")
    clip_text, kid_text, count = drawn[0]
    for name, text in (("clip_score", clip_text), ("kid", kid_text)):
        assert text.startswith(f"{name} {row[name]:.4f}, vanilla {row[name] - row[f'{name}_difference']:.4f}, ")
        [difference] = differences(row, [name])
        assert all(sentence in text for sentence in difference.sentences())
        assert difference.sentences()[0] in printed
    assert count in printed


def test_a_baseline_is_scored_and_chosen(call: Call, weights: dict[str, str]) -> None:
    """One run answers how much quality is lost."""
    before, printed = start(call, "metrics=[clip_b32,kid]")
    assert lines()[-2:] == [("clip_b32", "difference", 6), ("kid", "difference", 6)]
    sides = [read_records(Path("first") / name) for name in ("records.jsonl", "baseline.jsonl")]
    shown = [np.array([float(np.asarray(Image.open(Path("first") / r.image)).mean()) for r in side]) for side in sides]
    apart = shown[0] - shown[1]
    assert before["clip_score_difference"] == pytest.approx(apart.mean())
    assert before["clip_score_difference_stderr"] == pytest.approx(apart.std(ddof=1) / 6**0.5)
    assert f"difference {apart.mean():+.4f} (95 % interval" in printed
    half = 2.570581836 * apart.std(ddof=1) / 6**0.5  # Student's t with 5 degrees of freedom
    assert f"{apart.mean() - half:+.4f} to {apart.mean() + half:+.4f}" in printed
    code, out, _ = call("compare", "first/baseline", "first")
    assert code == 0
    assert "clip_b32" in out
    [gap] = [r.paired for r in comparison.compare(*(passes.read(f"first{end}") for end in ("/baseline", ""))).results
               if r.statistic.name == "clip_b32"]  # fmt: skip
    assert gap.difference == pytest.approx(before["clip_score_difference"])
    assert gap.test is not None
    assert (gap.test.high - gap.test.low) / 2 == pytest.approx(half)
    [clip, _] = differences(before, ["clip_score", "kid"])
    assert clip.p == pytest.approx(gap.test.p)
    alone, _ = start(call, "metrics=[clip_b32,kid]", "baseline=false")
    assert {alone[c] for c in (*SPEEDUPS, "clip_score_difference", "kid_difference_stderr")} == {None}
    assert alone["clip_score"] == before["clip_score"]
    assert start(call, "metrics=[clip_b32,kid]")[0] == before
    assert call("run", "method=vanilla", "n=6", "metrics=clip_b32", "out=vanilla")[0] == 0
    assert row_of("vanilla")["clip_score_difference"] is None


def test_other_weights_and_references_have_their_own_lines(call: Call, weights: dict[str, str]) -> None:
    first, _ = start(call, "metrics=[fid,kid]")
    second, _ = start(call, "metrics=[fid,kid]", "reference=other.npz")
    assert all(second[f"{column}_backend"].endswith("other.npz") for column in ("fid", "kid"))
    third, _ = start(call, "metrics=[fid,kid]", "metrics_dir=nowhere", "reference=other.npz")
    assert (third["fid"], third["kid"]) == (second["fid"], second["kid"])
    before_lines = lines()
    fourth, _ = start(call, "metrics=[fid,kid]")
    assert fourth == first
    weights["fid"] = "2"
    assert start(call, "metrics=[fid,kid]")[0]["fid_backend"].startswith("fid@2")
    assert lines()[: len(before_lines)] == before_lines
    assert [metric for metric, *_ in lines()[len(before_lines) :]] == ["fid"] * 3  # its two sides, and their difference


def test_a_result_is_the_row_of_the_last_request(call: Call, weights: dict[str, str]) -> None:
    """Also if a later request had another reference, and if a metric has a note instead of a value."""
    weights["fid"] = "broken"
    first, _ = start(call, "metrics=[fid,kid]")
    start(call, "metrics=kid", "reference=other.npz")
    assert start(call, "metrics=[fid,kid]")[0] == first
    assert (first["fid"], "these pictures are too small" in said(first)) == (None, True)
    assert dict(specbench.result("first").row) == first


def test_scores_of_other_images_do_not_count(call: Call, weights: dict[str, str]) -> None:
    before, _ = start(call, "metrics=[fid,clip_b32]", "baseline=false")
    journal = Path("first/records.jsonl")
    made = read_records(journal)
    picture = np.zeros((8, 8, 3), np.uint8)
    Image.fromarray(picture).save(Path("first") / made[2].image)
    made[2] = replace(made[2], sha256=pixel_digest(picture))
    journal.write_bytes(b"".join(map(to_line, made)))
    del weights["clip_b32"]
    after, _ = start(call, "metrics=[fid,clip_b32]", "baseline=false")
    assert after["fid"] not in (None, before["fid"])
    assert after["clip_score"] is None


def test_a_bad_reference_leaves_the_folder_as_it_was(call: Call, weights: dict[str, str], monkeypatch: Any) -> None:
    start(call, "metrics=fid")
    files = files_of("first")

    def fingerprint(self: Light) -> str:
        raise UsageError("there is no file bad.npz")

    with monkeypatch.context() as patch:
        patch.setattr(Light, "fingerprint", fingerprint)
        assert call("run", "out=first", "n=6", "metrics=kid", "reference=bad.npz")[0] == 2
    assert files_of("first") == files


def test_a_stopped_request_has_a_row_of_the_finished_part(
    call: Call, weights: dict[str, str], monkeypatch: Any
) -> None:
    before, _ = start(call, "metrics=fid", "baseline=false")
    with monkeypatch.context() as patch:
        patch.setattr(run, "_load_pipeline", at(7, interrupt))
        assert call("run", "out=first", "n=12", "metrics=fid", "baseline=false")[0] == 130
    part = row_of("first")
    assert (part["n"], part["fid"], status.of_run(Path("first")).state) == (8, None, "stopped")
    assert call("resume", "first")[0] == 0
    assert (row_of("first")["n"], row_of("first")["fid"] is None) == (12, False)
    assert start(call, "metrics=fid", "baseline=false")[0]["fid"] == before["fid"]


def test_a_run_stopped_while_scoring_is_not_finished(call: Call, weights: dict[str, str], monkeypatch: Any) -> None:
    def stop(self: Light) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Light, "scorer", stop)
        assert call("run", "out=first", "n=4", "metrics=fid", "baseline=false")[0] == 130
    assert status.of_run(Path("first")).state == "stopped"
    assert call("resume", "first")[0] == 0
    assert status.of_run(Path("first")).state == "finished"


def test_a_table_gets_its_own_row_from_a_folder_that_has_more(call: Call, weights: dict[str, str]) -> None:
    planned = PlannedRun(Path("first"), configuration.compose(["n=4", "metrics=fid", "baseline=false"]))
    first = Bench().row(planned)
    assert call("evaluate", "first", "metrics=clip_b32")[0] == 0
    assert row_of("first")["clip_score"] is not None
    again = Bench().row(planned)
    assert planned.fits(as_cells(again))
    assert dict(again) == dict(first)


def test_a_request_has_one_row_whatever_was_requested_before(tmp_path: Path, weights: dict[str, str]) -> None:
    """Random requests for one folder: journals only grow, and a repeated request gives the same bytes."""
    choice = random.Random(7)
    plain = configuration.compose(["metrics=none", "n=4", "warmup=0", "device=cpu"])
    sets: list[list[str]] = [[], ["fid"], ["fid_clean", "clip_b32"], ["fid", "clip_b32"], ["kid"], ["kid", "clip_b16"]]
    journals = ("records.jsonl", "baseline.jsonl", "scores.jsonl")
    again = 0
    for number in range(4):
        folder, row_of_request, journal_bytes = tmp_path / str(number), dict[str, bytes](), dict[str, bytes]()
        for _ in range(25):
            request = {
                "n": choice.choice([3, 4, 5]),
                "metrics": choice.choice(sets),
                "baseline": choice.random() < 0.5,
                "reference": choice.choice([None, "a.npz"]),
            }
            cfg = plain.changed(**request)
            if choice.random() < 0.2 and (folder / "row.csv").exists():
                (folder / "row.csv").unlink()
            if choice.random() < 0.2:
                shutil.rmtree(folder / "scores", ignore_errors=True)
            row = run.run(cfg, folder, loader=FakePipeline).row
            assert row["config_hash"] == provenance.config_hash(cfg)
            for name in journals:
                now = (folder / name).read_bytes() if (folder / name).exists() else b""
                assert now.startswith(journal_bytes.get(name, b""))
                journal_bytes[name] = now
            text, key = (folder / "row.csv").read_bytes(), json.dumps(request)
            # more processes may have joined since
            if key in row_of_request and b"decoded in" not in row_of_request[key] + text:
                assert text == row_of_request[key]
                again += 1
            row_of_request[key] = text
    assert again > 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "pictures"
    made.mkdir()
    for i in range(3):
        Image.fromarray(np.full((8, 8, 3), 40 * i, np.uint8)).save(made / f"{i}.png")
    (tmp_path / "prompts.tsv").write_text("id\tprompt\n" + "".join(f"{i}\tprompt {i}\n" for i in range(4)))
    return made


def columns_of_file(path: str = "scored/pictures.csv") -> dict[str, list[str]]:
    columns, numbered = csv_lines(Path(path))
    return {name: [line[name] for _, line in numbered] for name in columns}


def scored(call: Call, *words: str) -> dict[str, Any]:
    code, _, err = call("evaluate", "pictures", "out=scored", *words)
    assert code == 0, err
    return row_of("scored")


def test_scores_of_pictures_join(call: Call, folder: Path, weights: dict[str, str]) -> None:
    words = ("prompts=prompts.tsv", "partial=true")
    before = scored(call, "metrics=[clip_b32,kid]", *words)
    after = scored(call, "metrics=image_reward", "partial=true")  # the prompts are remembered
    earlier = [c for c in before if before[c] is not None and c not in ("time", "remarks")]
    assert {c: after[c] for c in earlier} == {c: before[c] for c in earlier}
    assert set(columns_of_file()) == {"file", "id", "prompt", "clip_b32", "kid", "image_reward"}
    assert columns_of_file()["prompt"] == ["prompt 0", "prompt 1", "prompt 2"]
    score_lines = lines("scored")
    again = scored(call, "metrics=[clip_b32,kid]", *words)
    assert again == after
    Path("scored/row.csv").write_text("")  # only an output: nothing reads it
    assert scored(call, "metrics=[clip_b32,kid]", *words) == after
    assert lines("scored") == score_lines
    third = scored(call, "metrics=clip_b16", *words)
    assert third["clip_score_backend"].startswith("clip_b16")
    assert third["kid"] == before["kid"]
    assert set(columns_of_file()) == {"file", "id", "prompt", "clip_b16", "kid", "image_reward"}


def test_other_pictures_are_scored_again(call: Call, folder: Path, weights: dict[str, str]) -> None:
    before = scored(call, "metrics=[clip_b32,kid]", "prompts=prompts.tsv", "partial=true")
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(folder / "3.png")
    after = scored(call, "metrics=[clip_b32,image_reward]", "partial=true")
    assert (after["n"], after["kid"]) == (4, None)
    assert after["clip_score"] not in (None, before["clip_score"])
    (folder / "3.png").unlink()
    last = scored(call, "metrics=image_reward", "partial=true")
    assert (last["n"], last["kid"], last["clip_score"]) == (3, before["kid"], before["clip_score"])
