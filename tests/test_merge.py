"""No value of a row disappears without being named, whatever is asked of the folder that has it."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Call, row_of
from fake_pipeline import FakePipeline, at, interrupt
from PIL import Image

from specbench import metrics
from specbench.config import configuration, parameters
from specbench.errors import UsageError
from specbench.harness import run, sheet, status
from specbench.harness.folder import stored
from specbench.harness.planned import PlannedRun
from specbench.metrics import Score, base
from specbench.rows import provenance
from specbench.rows.columns import COLUMNS, METRICS
from specbench.rows.csv_files import csv_lines
from specbench.rows.journal import _to_line, pixel_digest, read_records
from specbench.tables.collect import Bench

#: What a row may lose without a word: none of it was measured.
NOT_MEASURED = {"note", "protocol", "commit"}
SPEEDUPS = ("speedup_latency", "speedup_throughput", "speedup_step", "baseline_latency_s", "baseline_run_id")


class Light(base.Metric):
    """The mean of a picture, moved by the metric's name, its weights and its reference."""

    def __init__(self, name: str, context: base.ScoringContext, weights: dict[str, str]) -> None:
        super().__init__(context, {})
        self.name, self.weights = name, weights
        self.columns = real_columns(name)  # type: ignore[misc]

    @property
    def reads_prompt(self) -> bool:  # type: ignore[override]
        return self.name.startswith("clip")

    @property
    def cache_key(self) -> str:
        if self.name not in self.weights or "nowhere" in str(self.context.weights):
            raise base.Unavailable(f"no weights of {self.name}")
        return f"{self.name}@{self.weights[self.name]}"

    def basis(self) -> str:
        return f"{self.cache_key} {self.context.reference}"

    def scorer(self) -> Any:
        return lambda pictures, items: np.array([[float(p.mean())] for p in pictures])

    def score(self, outputs: np.ndarray, items: Sequence[Any]) -> tuple[Score, ...]:
        if self.weights[self.name] == "broken":
            return tuple(Score.unmeasured("these pictures are too small", "") for _ in self.columns)
        move = float(len(self.basis())) + self.name.count("2")
        return tuple(Score(outputs.mean() + move + i, 0.5, self.basis(), "few") for i in range(len(self.columns)))

    def per_image(self, outputs: np.ndarray) -> np.ndarray | None:
        return outputs[:, 0]


real_columns = parameters.metric_columns


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Metric -> version of its weights, of those that are here."""
    here = dict.fromkeys(("fid", "fid_clean", "clip_b16", "clip_b32", "image_reward", "kid"), "1")
    monkeypatch.setattr(metrics, "metric", lambda name, context: Light(name, context, here))
    monkeypatch.setattr(sheet, "save", lambda path, title, cells: path.touch())
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(provenance, "_output", lambda *command: "")  # of git, some hundred times
    return here


def unnamed(before: dict[str, Any], after: dict[str, Any], told: str) -> list[str]:
    """The values of a row that are gone, or another metric's, and of which nothing was said."""
    words = set(re.findall(r"[\w.]+", told))
    lost = [c for c in before if before[c] is not None and after[c] is None]
    taken = [c for c in METRICS if before[c] is not None and before[f"{c}_backend"] != after[f"{c}_backend"]]
    if before["n"] == after["n"]:
        taken += [c for c in METRICS if before[c] is not None and before[c] != after[c]]
    bare = {re.sub("_(stderr|backend)$", "", c) for c in {*lost, *taken} - NOT_MEASURED}
    return sorted(c for c in bare if not {c, f"{c}_mean"} & words)


def files_of(folder: str) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in Path(folder).iterdir() if p.is_file() and p.name not in ("run.log", ".lock")}


def start(call: Call, *words: str) -> tuple[dict[str, Any], str]:
    """A run in the folder `first` -> its row, and all that was printed."""
    code, out, err = call("run", "out=first", *([] if any(word[:2] == "n=" for word in words) else ["n=6"]), *words)
    assert code == 0, err
    return row_of("first"), out + err


def test_evaluate_adds_a_metric_and_the_first_command_keeps_it(call: Call, weights: dict[str, str]) -> None:
    """`evaluate` used to empty the columns of every metric that it was not asked for."""
    before, _ = start(call, "metrics=[fid,clip_b32]")
    code, out, err = call("evaluate", "first", "metrics=image_reward")
    assert code == 0
    after = row_of("first")
    assert {c: after[c] for c in before if c.startswith(("fid", "clip_score"))} == {
        c: before[c] for c in before if c.startswith(("fid", "clip_score"))
    }
    assert after["image_reward"] is not None
    assert unnamed(before, after, err) == []
    assert after["note"].count("few") == 3  # the notes of those that stayed, too
    assert all(name in out for name in ("fid", "clip_score", "image_reward"))
    first = (Path("first") / "row.csv").read_bytes()
    for words in (["metrics=[fid,clip_b32]"], ["metrics=[clip_b32,fid]"], ["metrics=image_reward"], ["metrics=none"]):
        told = start(call, *words)[1]
        assert "nothing left to do" in told
        assert (Path("first") / "row.csv").read_bytes() == first
    assert call("evaluate", "first", "metrics=image_reward")[0] == 0
    assert row_of("first") | {"time": 0} == after | {"time": 0}
    [one] = [status.of_run(Path("first"))]
    assert (one.state, one.n) == ("finished", 6)
    assert stored(Path("first"))["metrics"] == ["fid", "clip_b32", "image_reward"]


def test_two_metrics_of_one_column(call: Call, weights: dict[str, str]) -> None:
    before, _ = start(call, "metrics=[fid,clip_b32]")
    after, told = start(call, "metrics=fid_clean")
    assert after["fid_backend"].startswith("fid_clean")
    assert after["clip_score"] == before["clip_score"]
    assert f"fid {after['fid']:.6g} [{after['fid_backend']}] replaces {before['fid']:.6g}" in told
    assert stored(Path("first"))["metrics"] == ["clip_b32", "fid_clean"]
    # One that has no value takes no column, and asking again changes nothing.
    weights["fid"] = "broken"
    for _ in range(2):
        again, told = start(call, "metrics=fid")
        assert again == after | {"time": again["time"]}
        assert "fid could not be measured" in told
        assert "fid_clean" in told
    assert "nothing left to do" in told
    del weights["fid"]
    again, told = start(call, "metrics=fid")
    assert again["fid"] == after["fid"]
    assert "no weights of fid" in told


def test_a_smaller_n_shows_its_row_and_leaves_the_larger_one(call: Call, weights: dict[str, str]) -> None:
    before, _ = start(call, "metrics=fid", "n=8")
    files = files_of("first")
    for _ in range(2):
        told = start(call, "n=4", "metrics=clip_b32")[1]
        assert "n=4" in told
        assert "keeps the row over 8 images" in told
        assert "clip_score" in told
        assert "the first 4 of 8 are in first" in told
        assert files_of("first") == files
    assert status.of_run(Path("first")).n == 8
    cfg = configuration.compose(["n=4", "metrics=clip_b32"])
    shown = run.execute(cfg, "first", loader=FakePipeline)
    alone = run.execute(cfg, "alone", loader=FakePipeline)
    same = set(COLUMNS) - {"run_id", "baseline_run_id", "time", "peak_memory_mib"}
    same -= {c for c in same if c.startswith(("text_s", "pixels_s"))}
    assert {c: shown[c] for c in same} == {c: alone[c] for c in same}
    assert before["n"] == 8


def test_a_larger_n_computes_again_what_can_be_and_names_the_rest(call: Call, weights: dict[str, str]) -> None:
    before, _ = start(call, "metrics=[fid,clip_b32]")
    del weights["clip_b32"]
    after, told = start(call, "n=8", "metrics=none", "baseline=false")
    assert after["n"] == 8
    assert after["fid"] is not None
    assert unnamed(before, after, told) == []
    assert "over 6 images and is now over 8" in told
    assert re.search(r"clip_score is no longer in the row: no weights of clip_b32 \(it was [\d.]+ \[clip_b32@1 ", told)
    assert all(f"{name} is no longer in the row: some images of the baseline" in told for name in SPEEDUPS)


def test_without_a_baseline_the_speed_ups_stay(call: Call, weights: dict[str, str]) -> None:
    before, _ = start(call, "metrics=none")
    after, told = start(call, "metrics=fid", "baseline=false")
    assert {c: after[c] for c in SPEEDUPS} == {c: before[c] for c in SPEEDUPS}
    assert unnamed(before, after, told) == []
    assert "nothing left to do" in start(call, "metrics=fid", "baseline=false")[1]
    assert call("resume", "first", "baseline=false", "metrics=none")[0] == 0
    assert row_of("first") == after


def test_other_weights_and_references_are_named(call: Call, weights: dict[str, str], tmp_path: Path) -> None:
    first, _ = start(call, "metrics=[fid,kid]")
    second, told = start(call, "metrics=kid", "reference=other.npz")
    for column in ("fid", "kid"):
        assert second[f"{column}_backend"].endswith("other.npz")
        assert f"{column} {second[column]:.6g}" in told
    third, told = start(call, "metrics=[fid,kid]", "metrics_dir=nowhere", "reference=other.npz")
    assert (third["fid"], third["kid"]) == (second["fid"], second["kid"])
    assert "fid could not be measured (no weights of fid): the row keeps" in told
    assert "nothing left to do" in start(call, "metrics=[fid,kid]", "metrics_dir=nowhere", "reference=other.npz")[1]
    fourth, told = start(call, "metrics=[fid,kid]")
    assert (fourth["fid"], fourth["kid"]) == (first["fid"], first["kid"])
    assert unnamed(third, fourth, told) == []


def test_pictures_that_are_not_those_of_the_row_make_its_scores_invalid(call: Call, weights: dict[str, str]) -> None:
    before, _ = start(call, "metrics=[fid,clip_b32]", "baseline=false")
    journal = Path("first/records.jsonl")
    made = read_records(journal)
    picture = np.zeros((8, 8, 3), np.uint8)
    Image.fromarray(picture).save(Path("first") / made[2].image)
    made[2] = replace(made[2], sha256=pixel_digest(picture))
    journal.write_bytes(b"".join(map(_to_line, made)))
    del weights["clip_b32"]
    after, told = start(call, "metrics=fid", "baseline=false")
    assert after["fid"] != before["fid"]
    assert after["clip_score"] is None
    assert unnamed(before, after, told) == []


def test_a_bad_reference_leaves_the_folder_as_it_was(call: Call, weights: dict[str, str], monkeypatch: Any) -> None:
    """The configuration in the folder used to be replaced before the file was looked at."""
    start(call, "metrics=fid")
    files = files_of("first")

    def basis(self: Light) -> str:
        raise UsageError("there is no file bad.npz")

    with monkeypatch.context() as patch:
        patch.setattr(Light, "basis", basis)
        assert call("run", "out=first", "n=6", "metrics=kid", "reference=bad.npz")[0] == 2
    assert files_of("first") == files


def test_a_stop_keeps_the_scored_row(call: Call, weights: dict[str, str], monkeypatch: Any) -> None:
    before, _ = start(call, "metrics=fid", "baseline=false")
    with monkeypatch.context() as patch:
        patch.setattr(run, "_load_pipeline", at(7, interrupt))
        assert call("run", "out=first", "n=12", "metrics=none", "baseline=false")[0] == 130
    assert row_of("first") == before
    assert status.of_run(Path("first")).state == "stopped"
    assert call("resume", "first")[0] == 0
    after = row_of("first")
    assert (after["n"], after["fid"] is None) == (12, False)


def test_a_stop_within_the_scoring_is_no_finished_run(call: Call, weights: dict[str, str], monkeypatch: Any) -> None:
    def stop(self: Light) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Light, "scorer", stop)
        assert call("run", "out=first", "n=4", "metrics=fid", "baseline=false")[0] == 130
    assert status.of_run(Path("first")).state == "stopped"
    assert call("resume", "first")[0] == 0
    assert status.of_run(Path("first")).state == "finished"


def test_a_table_gets_its_own_row_from_a_folder_that_has_more(
    call: Call, weights: dict[str, str], monkeypatch: Any
) -> None:
    planned = PlannedRun(Path("first"), configuration.compose(["n=4", "metrics=fid", "baseline=false"]))
    first = Bench().row(planned)
    assert call("evaluate", "first", "metrics=clip_b32")[0] == 0
    again = Bench().row(planned)
    assert again["config_hash"] == planned.config_hash
    assert dict(again) | {"time": 0} == dict(first) | {"time": 0}
    assert row_of("first")["clip_score"] is not None


def test_no_value_disappears_without_being_named(
    tmp_path: Path, weights: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """200 commands on folders that have a row."""
    choice = random.Random(7)
    plain = configuration.compose(["metrics=none", "n=4", "warmup=0", "device=cpu"])
    everything = list(weights)
    asked = {"pairs": 0, "lost": 0, "smaller": 0, "idle": 0}
    decode = FakePipeline.decode

    def words() -> dict[str, Any]:
        some: list[str] = []
        for name in choice.sample(everything, choice.randrange(4)):
            if not any(set(real_columns(name)) & set(real_columns(other)) for other in some):
                some.append(name)
        return {
            "n": choice.choice([3, 4, 4, 4, 5, 6]),
            "metrics": some,
            "baseline": choice.random() < 0.5,
            "reference": choice.choice([None, None, "a.npz"]),
            "metrics_dir": choice.choice([None, None, "nowhere"]),
        }

    for _ in range(20):
        folder = tmp_path / f"{asked['pairs']}"
        run.execute({**plain, **words()}, folder, loader=FakePipeline)
        for _ in range(10):
            for name in everything:
                weights.pop(name, None)
                if choice.random() < 0.8:
                    weights[name] = choice.choice(["1", "1", "1", "2", "broken"])
            before, given = row_of(folder), words()
            if choice.random() < 0.2:
                shutil.rmtree(folder / choice.choice(["scores", "baseline"]), ignore_errors=True)
            command = choice.choice(["run", "run", "resume", "evaluate", "stop"])
            if command == "evaluate":
                given = {name: given[name] for name in ("metrics", "metrics_dir", "reference")}
            cfg = (stored(folder) if command in ("evaluate", "resume") else plain) | given
            capsys.readouterr()
            one, outcome = run.Run(cfg, folder, loader=FakePipeline), None
            try:
                if command == "stop":
                    FakePipeline.decode = lambda *a: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore
                outcome = one.rescore() if command == "evaluate" else one.execute()
            except (UsageError, KeyboardInterrupt):
                pass  # images are missing
            finally:
                FakePipeline.decode = decode  # type: ignore[method-assign]
            told, after = capsys.readouterr().err, row_of(folder)
            assert unnamed(before, after, told) == [], (folder, command, given, told)
            assert after["n"] >= before["n"]
            asked["pairs"] += 1
            asked["lost"] += any(before[c] is not None and after[c] is None for c in before)
            asked["smaller"] += outcome is not None and outcome.larger > 0
            if command == "run" and choice.random() < 0.4:
                bytes_of = (folder / "row.csv").read_bytes()
                assert run.Run(cfg, folder, loader=FakePipeline).execute().nothing_left
                assert (folder / "row.csv").read_bytes() == bytes_of
                asked["idle"] += 1
    assert asked["pairs"] == 200
    assert min(asked.values()) > 5  # every kind of pair was there


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "pictures"
    made.mkdir()
    for i in range(3):
        Image.fromarray(np.full((8, 8, 3), 40 * i, np.uint8)).save(made / f"{i}.png")
    (tmp_path / "prompts.tsv").write_text("id\tprompt\n" + "".join(f"{i}\tprompt {i}\n" for i in range(4)))
    return made


def each(path: str = "scored/pictures.csv") -> dict[str, list[str]]:
    columns, lines = csv_lines(Path(path))
    return {name: [line[name] for _, line in lines] for name in columns}


def scored(call: Call, *words: str) -> tuple[dict[str, Any], str]:
    code, out, err = call("evaluate", "pictures", "out=scored", *words)
    assert code == 0, err
    return row_of("scored"), out + err


def test_scores_of_pictures_merge(call: Call, folder: Path, weights: dict[str, str]) -> None:
    before, _ = scored(call, "metrics=[clip_b32,kid]", "prompts=prompts.tsv", "partial=true")
    after, told = scored(call, "metrics=image_reward")  # without the prompts
    assert unnamed(before, after, told) == []
    kept = [c for c in before if before[c] is not None and c not in ("time", "note")]
    assert {c: after[c] for c in kept} == {c: before[c] for c in kept}
    table = each()
    assert set(table) == {"file", "id", "prompt", "clip_b32", "kid", "image_reward"}
    assert table["prompt"] == ["prompt 0", "prompt 1", "prompt 2"]
    again, told = scored(call, "metrics=[clip_b32,kid]", "prompts=prompts.tsv", "partial=true")
    assert again["image_reward"] == after["image_reward"]
    assert set(each()) == set(table)
    third, told = scored(call, "metrics=clip_b16", "prompts=prompts.tsv", "partial=true")
    assert f"clip_score {third['clip_score']:.6g}" in told
    assert third["kid"] == before["kid"]
    assert "clip_b32 of each image is no longer in scored/pictures.csv" in told
    weights["clip_b32"] = "broken"
    fourth, told = scored(call, "metrics=clip_b32", "prompts=prompts.tsv", "partial=true")
    assert fourth["clip_score"] == third["clip_score"]
    assert "clip_b32 could not be measured" in told
    assert "clip_b16" in each()


def test_other_pictures_are_scored_again_or_named(call: Call, folder: Path, weights: dict[str, str]) -> None:
    before, _ = scored(call, "metrics=[clip_b32,kid]", "prompts=prompts.tsv", "partial=true")
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(folder / "3.png")
    after, told = scored(call, "metrics=image_reward")
    assert after["n"] == 4
    assert after["kid"] not in (None, before["kid"])
    assert after["clip_score"] is None
    assert "clip_score is no longer in the row: it reads prompts, and none are given" in told
    assert unnamed(before, after, told) == []
    assert "clip_b32 of each image is no longer in" in told
    del weights["kid"]
    (folder / "3.png").unlink()
    last, told = scored(call, "metrics=image_reward")
    assert last["kid"] is None
    assert "kid is no longer in the row: no weights of kid" in told
