"""`specbench evaluate`: folders of images, and complete runs; pairing by id, resuming, errors."""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Call, cells_of, refused, row_of, said
from fake_pipeline import FakePipeline
from filelock import FileLock
from PIL import Image

from specbench import metrics
from specbench.config import configuration
from specbench.data import scenes
from specbench.harness import run
from specbench.metrics.base import Metric
from specbench.metrics.scenes import ScenesClip, ScenesFID
from specbench.rows.columns import METRICS
from specbench.storage import image_files

N = 6
CAPTIONS = [scenes.sample("validation", i).caption for i in range(N)]


@pytest.fixture
def call(call: Call) -> Call:
    return partial(call, "evaluate")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Real images of scenes with the ids 0, 1, ...; their captions are in prompts.tsv next to the folder."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for i, picture in enumerate(scenes.WORLD.render("validation", range(N))[0]):
        Image.fromarray(picture).save(pictures / f"{i}.png")
    write_prompts(tmp_path / "prompts.tsv", dict(enumerate(CAPTIONS)))
    return pictures


def write_prompts(path: Path, prompts: dict[int, str]) -> None:
    path.write_text("id\tprompt\n" + "".join(f"{i}\t{text}\n" for i, text in prompts.items()))


def quality(row: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in row if name.startswith(METRICS) and row[name] is not None]
    return {name: row[name] for name in names}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images in each call of the scorer."""
    sizes: list[int] = []
    scorer = ScenesClip.scorer

    def counted(self: ScenesClip) -> Any:
        network = scorer(self)
        return lambda images, items: (sizes.append(len(images)), network(images, items))[1]

    monkeypatch.setattr(ScenesClip, "scorer", counted)
    return sizes


WORDS = ("pictures", "prompts=prompts.tsv", "metrics=scenes_clip")


def test_a_folder_is_scored_and_described(call: Call, folder: Path) -> None:
    code, out, err = call("pictures", "data=scenes", "metrics=[scenes_clip,scenes_reward]", "out=scored")
    assert code == 0
    row = row_of("scored")
    assert call("pictures", "data=scenes", "metrics=scenes_clip", "n=all", "out=all")[0] == 0
    assert row_of("all")["clip_score"] == row["clip_score"] > 0.9
    assert row["image_reward"] > 0.9
    assert row["clip_score_backend"].startswith("scenes-two-tower@")
    assert f"clip_score       {row['clip_score']:.4f} ± {row['clip_score_stderr']:.4f}" in out
    assert f"[{row['image_reward_backend']}]" in out
    assert "scored/row.csv" in out
    assert (row["n"], row["data"], row["split"], row["resolution"]) == (N, "scenes", "validation", 64)
    assert str(folder) in said(row)
    assert "image" in err  # the progress
    unknown = "model weights method drafter seed device torch config_hash accepted_length_mean".split()
    assert [row[name] for name in unknown] == [None] * len(unknown)
    each = cells_of("scored/pictures.csv")
    assert [(image_row["file"], image_row["id"], image_row["prompt"]) for image_row in each] == [
        (f"{i}.png", str(i), caption) for i, caption in enumerate(CAPTIONS)
    ]
    for name, column in (("scenes_clip", "clip_score"), ("scenes_reward", "image_reward")):
        assert np.mean([float(image_row[name]) for image_row in each]) == pytest.approx(row[column], abs=1e-9)


def test_shuffling_and_renaming_changes_no_score(call: Call, folder: Path, tmp_path: Path) -> None:
    """Images are paired by id, not by the order of a listing, the folder or the format of a file."""
    assert call(*WORDS, "out=plain")[0] == 0
    other = tmp_path / "other"
    for k, i in enumerate([4, 2, 0, 5, 1, 3]):
        path = other / f"part{k % 2}" / f"{i:06d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(folder / f"{i}.png").save(path)
    write_prompts(tmp_path / "shuffled.tsv", {i: CAPTIONS[i] for i in (3, 5, 1, 0, 2, 4)})
    assert call("other", "prompts=shuffled.tsv", "metrics=scenes_clip", "out=shuffled", "batch=2")[0] == 0
    assert quality(row_of("shuffled")) == quality(row_of("plain"))
    (folder / "0.png").rename(folder / "x.png")
    (folder / "1.png").rename(folder / "0.png")
    (folder / "x.png").rename(folder / "1.png")
    assert call(*WORDS, "out=exchanged")[0] == 0
    assert row_of("exchanged")["clip_score"] < row_of("plain")["clip_score"]


#: What happens to the folder of images, and what the error says.
SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "2.png").unlink(), "1 prompt (2)"),
    (lambda f: (f / "2.png").rename(f / "7.png"), "1 image (7.png)"),
    (lambda f: shutil.copy(f / "2.png", f / "b.png"), "1 image (b.png)"),
    (lambda f: shutil.copy(f / "2.png", f / "02.png"), "02.png and "),
    (lambda f: shutil.copytree(f, f / "copy"), "prompt 0"),
    (lambda f: (f / "2.png").write_bytes(b"GIF89a"), "2.png"),
    (lambda f: [p.unlink() for p in f.iterdir()], "holds no images (.png, .jpg,"),
]


def test_what_does_not_pair_is_named_in_one_sentence(call: Call, folder: Path) -> None:
    whole = shutil.copytree(folder, folder.with_name("whole"))
    for spoil, sentence in SPOILT:
        spoil(folder)
        code, out, err = call(*WORDS)
        last = err.splitlines()[-1]
        assert (code, out, last.startswith("specbench: "), sentence in last) == (2, "", True, True), last
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)


def test_partial_accepts_some_of_the_images(call: Call, folder: Path) -> None:
    (folder / "2.png").unlink()
    assert call(*WORDS, "partial=true", "out=some")[0] == 0
    assert row_of("some")["n"] == N - 1
    assert "1 of 6 prompts" in said(row_of("some"))
    for path in folder.iterdir():
        path.rename(folder / f"a{path.name}")
    assert "id of 5 images" in call(*WORDS, "partial=true")[2]


def test_images_of_a_run_keep_their_prompts(call: Call, tmp_path: Path) -> None:
    """Files are numbered from 0, lines of a text file from 1. The images of a shard got the prompts before theirs."""
    (tmp_path / "lines.txt").write_text("\n".join(CAPTIONS))
    cfg = ["data=prompts", f"prompts={tmp_path}/lines.txt", "metrics=none", f"n={N}", "baseline=false", "device=cpu"]
    run.run(configuration.compose([*cfg, "shard=2/2", "images_per_prompt=2"]), tmp_path / "shard", loader=Large)
    shutil.copytree("shard/images", "copied")
    Path("copied/00001.png").rename("copied/first.png")
    write_prompts(tmp_path / "from_0.tsv", dict(enumerate(CAPTIONS)))  # other numbers, the same prompts
    wanted = [(CAPTIONS[i], f"{i:05d}{end}") for i in (1, 3, 5) for end in ("", "-1")]
    cases = [("shard/images", "lines.txt"), ("copied", "lines.txt"), ("shard/images", "from_0.tsv")]
    for folder, prompts in cases:
        out = f"{folder[:5]}_{prompts}"
        words = (folder, f"prompts={prompts}", "partial=true", "metrics=scenes_clip", f"out={out}")
        assert call(*words)[0] == 0
        files = [(cell["prompt"], Path(cell["file"]).stem) for cell in cells_of(f"{out}/pictures.csv")]
        assert [(prompt, stem.replace("first", "00001")) for prompt, stem in files] == wanted
        assert "another prompt" not in said(row_of(out))
    others = [scenes.sample("validation", N + i).caption for i in range(N)]  # the same ids
    (tmp_path / "lines.txt").write_text("\n".join(others))
    assert call("copied", "prompts=lines.txt", "partial=true", "metrics=scenes_clip", "out=others")[0] == 0
    assert "6 of 6 images were decoded from another prompt" in said(row_of("others"))
    assert [cell["id"] for cell in cells_of("others/pictures.csv")] == ["2", "2", "4", "4", "6", "6"]


def test_an_offset_of_one_is_named(call: Call, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(CAPTIONS))
    words = ("pictures", "prompts=lines.txt", "metrics=scenes_clip")
    whole = refused(call, *words)  # 0 to 5 and 1 to 6
    assert ("raised by one" in whole, "partial" in whole) == (True, False)
    (folder / "0.png").unlink()
    part = refused(call, *words)  # 1 to 5 fit the prompts of both numbers
    assert ("raised by one" in part, "partial" in part) == (True, False)
    assert call(*words, "partial=true", "out=some")[0] == 0
    assert "raised by one" in said(row_of("some"))
    write_prompts(tmp_path / "prompts.tsv", {i - 1: text for i, text in enumerate(CAPTIONS, 1)} | {9: "x"})
    for path in sorted(folder.iterdir(), reverse=True):
        path.rename(folder / f"{int(path.stem) + 1}-0.png")  # 2 to 6
    assert "lowered by one" in refused(call, *WORDS)


def test_names_of_the_real_images_pair_too(call: Call, folder: Path, tmp_path: Path) -> None:
    """COCO's images have names from their file names at least as often as from their ids."""
    ids = [139 + i for i in range(N)]
    coco = {
        "images": [{"id": i, "file_name": f"COCO_val2014_{i:012d}.jpg"} for i in ids],
        "annotations": [{"id": i, "image_id": i, "caption": c} for i, c in zip(ids, CAPTIONS)],
    }
    (tmp_path / "captions_val2014.json").write_text(json.dumps(coco))
    for i in range(N):
        stem = f"COCO_val2014_{ids[i]:012d}" if i % 2 else f"{ids[i]:012d}"
        (folder / f"{i}.png").rename(folder / f"{stem}.png")
    words = ("pictures", "data=coco2014", "data_dir=.", "metrics=scenes_clip")
    assert call(*words, "out=all")[0] == 0
    row = row_of("all")
    assert row["clip_score"] > 0.9
    assert (row["data"], row["caption"], row["n"]) == ("coco2014", "first", N)
    assert call(*words, "n=all", "out=every")[0] == 0
    assert row_of("every")["n"] == N
    assert "3 images (" in refused(call, *words, "n=3", "out=few")


def test_prompts_are_needed_by_what_reads_them(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_feature(self: Metric, outputs: np.ndarray, items: Any) -> tuple[metrics.Score, ...]:
        return (metrics.Score(float(np.abs(outputs[:, 0]).sum()), None, "", ""),)

    # the distance itself takes seconds to import
    monkeypatch.setattr(ScenesFID, "score", first_feature)
    assert re.search("scenes_clip .*prompts=", refused(call, "pictures", "metrics=scenes_clip"))
    assert call("pictures", "metrics=scenes_fid", "out=out")[0] == 0
    alone = row_of("out")
    assert (alone["data"], alone["prompts_hash"]) == (None, None)
    for path in folder.iterdir():
        path.rename(folder / f"any name {path.name}")
    assert call("pictures", "metrics=scenes_fid", "data=scenes", "out=out")[0] == 0
    named = row_of("out")
    assert named["fid"] == alone["fid"] > 0
    assert "not paired with prompts" in said(named)
    assert "id of 6 images" in call("pictures", "metrics=scenes_fid", "prompts=prompts.tsv")[2]


def test_a_file_in_the_folder_has_the_prompts(call: Call, folder: Path, calls: list[int]) -> None:
    """Hugging Face's folders of images have a metadata file whose file_name is used for pairing. After a stop, or for a
    second metric of the network, no image is scored again."""
    lines = [json.dumps({"file_name": f"{i}.png", "text": text}) for i, text in enumerate(CAPTIONS)]
    (folder / "metadata.jsonl").write_text("\n".join(lines[::-1]))
    code, _, err = call("pictures", "metrics=scenes_clip", "out=own")
    assert code == 0
    assert "pictures/metadata.jsonl" in err
    assert call(*WORDS, "out=given")[0] == 0
    from_folder, from_argument = row_of("own"), row_of("given")
    assert (from_folder["clip_score"], from_folder["data"], from_folder["prompts"]) == (
        from_argument["clip_score"],
        "prompts",
        "pictures/metadata.jsonl",
    )
    assert call("pictures", "metrics=scenes_clip", "out=own")[0] == 0
    assert sum(calls) == 2 * N
    (folder / "captions.txt").write_text("\n".join(CAPTIONS))
    two = refused(call, "pictures", "metrics=scenes_clip", "out=own")
    assert re.search(r"pictures .*\b2 .*\(captions.txt, metadata.jsonl\).*prompts=", two)
    (folder / "metadata.jsonl").unlink()
    assert "1 prompt (6)" in refused(call, "pictures", "metrics=scenes_clip", "out=own")


def test_names_with_folders_and_accents_pair(call: Call, folder: Path) -> None:
    """As in Hugging Face's folders of images. Two folders may have the same names; a Mac decomposes an accent."""
    names = ["train/0000.png", "test/0000.png", "train/é.png", "e\u0301 2.png", "deep/er/0.png", "0-1.png"]
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.png").rename(folder / unicodedata.normalize("NFD" if i % 2 else "NFC", name))
    rows = [f'{unicodedata.normalize("NFC", name)},"{text}"\n' for name, text in zip(names, CAPTIONS, strict=True)]
    (folder / "metadata.csv").write_text("file_name,text\n" + "".join(reversed(rows)))
    assert call("pictures", "metrics=scenes_clip,scenes_fid", "out=own")[0] == 0
    row = row_of("own")
    assert row["clip_score"] > 0.9
    assert row["fid"] > 0
    assert row["n"] == N
    (folder / "metadata.csv").write_text("id,text\n" + "".join(row.replace(".png", "") for row in rows))
    assert call("pictures", "metrics=scenes_clip", "out=stems")[0] == 0
    assert row_of("stems")["clip_score"] == row["clip_score"]


def test_absent_weights_leave_a_metric_empty(call: Call, folder: Path) -> None:
    code, out, _ = call("pictures", "prompts=prompts.tsv", "metrics_dir=nowhere", "out=scored")  # coco's metrics
    assert code == 0
    row = row_of("scored")
    for column in ("fid", "clip_score", "image_reward", "hpsv2"):
        assert row[column] is None
        assert f"{column}: " in said(row)
    assert out.count("not measured") == 4


MISTAKES = [
    ([], "evaluate takes DIR"),
    (["pictures", "more"], "evaluate takes DIR"),
    (["absent"], "there is no folder absent"),
    (["x" * 5000], "a file name is too long (xxx"),
    (["pictures", "delta=2"], "unknown file or argument 'delta' (choose from: batch, caption, data,"),
    (["pictures", "prompts=prompts.tsv", "data=scenes"], "prompts= and data= name two sets of prompts"),
    (["pictures", "prompts=prompts.tsv", "caption=first"], "has no parameter 'caption'"),
    (["pictures", "prompts=absent.tsv", "metrics=scenes_clip"], "there is no file absent.tsv"),
    (["pictures", "data=scenes", "metrics=none"], "name some with metrics="),
    (["pictures", "data=scenes", "batch=0"], "batch must be an integer of at least 1"),
    (["pictures", "data=scenes", "partial=maybe"], "partial must be true or false"),
    (["pictures", "data=scenes", "out=pictures"], "pictures holds 0.png"),
    (["pictures", "data=scenes", "out=/dev/null/x"], "cannot write into /dev/null/x"),
]


def test_a_mistake_is_one_line(call: Call, folder: Path) -> None:
    before = {p.name for p in folder.iterdir()}
    for words, sentence in MISTAKES:
        err = refused(call, *words)
        assert (sentence in err, err.count("\n")) == (True, 1), err
        assert {p.name for p in folder.iterdir()} == before


def test_the_same_command_scores_nothing_again(
    call: Call, folder: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = call(*WORDS)
    assert calls == [N]
    [row] = Path("runs/evaluate").glob("pictures-*/row.csv")  # the same folder every time
    before = row_of(row.parent)
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "read", None)  # nothing is decoded again, either
        again = call(*WORDS)
    assert again[:2] == first[:2]
    assert calls == [N]
    assert row_of(row.parent)["run_id"] == before["run_id"]
    assert row_of(row.parent)["resolution"] == 64
    (row.parent / "digests.json").write_text('{"' + "0" * 64 + '": 1, "a": [1, 2]')
    assert call(*WORDS)[:2] == first[:2]
    assert calls == [N]
    Image.open(folder / "3.png").rotate(90).save(folder / "3.png")
    call(*WORDS)
    assert calls == [N, 1]
    shutil.copytree(folder, folder.with_name("elsewhere"))
    assert str(folder) in refused(call, "elsewhere", *WORDS[1:], f"out={row.parent}")
    for damaged in ("{", '{"pictures": 3}'):
        (row.parent / "evaluation.json").write_text(damaged)
        assert re.search("evaluation.json.* out=", call(*WORDS)[2])


def test_stopped_scoring_continues(call: Call, folder: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    words, scorer = (*WORDS, "batch=1", "out=scored"), ScenesClip.scorer

    def stopping(self: ScenesClip) -> Any:
        network = scorer(self)

        def score(pictures: Any, items: Any) -> np.ndarray:
            if len(calls) == 2:
                raise KeyboardInterrupt
            return network(pictures, items)

        return score

    with monkeypatch.context() as patch:
        patch.setattr(ScenesClip, "scorer", stopping)
        code, _, err = call(*words)
    assert code == 130
    assert "cached in scored" in err
    assert not Path("scored/row.csv").exists()
    assert call(*words)[0] == 0
    assert calls == [1] * N  # none twice
    assert call(*WORDS, "out=undisturbed")[0] == 0
    assert quality(row_of("scored")) == quality(row_of("undisturbed"))
    with FileLock("scored/.lock"):
        assert "another process is working in scored" in call(*WORDS, "out=scored")[2]


class Large(FakePipeline):
    """The fake pipeline's images at 64x64, the size for the embedded evaluators."""

    resolution = 64

    def pixels(self, tokens: Any) -> np.ndarray:
        return super().pixels(tokens).repeat(8, 1).repeat(8, 2)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run that measured only speed."""
    run.run(configuration.compose(["metrics=none", "n=4", "device=cpu"]), tmp_path / "run", loader=Large)
    return tmp_path / "run"


def test_a_run_gets_its_quality_columns_and_keeps_all_else(call: Call, finished: Path) -> None:
    before, memory = row_of("run"), json.loads((finished / "run.json").read_text())["sessions"]
    pictures = {path: path.read_bytes() for path in finished.rglob("*/*.png")}
    journals = [(finished / f"{name}.jsonl").read_bytes() for name in ("records", "baseline")]
    code, out, _ = call("run", "metrics=[scenes_clip,scenes_reward]", "batch=2", "device=cpu")
    assert code == 0
    row = row_of("run")
    assert f"image_reward     {row['image_reward']:.4f} ± " in out
    assert row["clip_score"] is not None
    columns = ("clip_score", "image_reward", "time", "config_hash", "remarks")
    changed = {name for name in row if name.startswith(columns)}
    assert {name: row[name] for name in set(row) - changed} == {name: before[name] for name in set(row) - changed}
    assert {path: path.read_bytes() for path in finished.rglob("*/*.png")} == pictures
    assert [(finished / f"{name}.jsonl").read_bytes() for name in ("records", "baseline")] == journals
    assert json.loads((finished / "run.json").read_text())["sessions"] == memory
    # the same as measuring them in the run itself, where there is nothing left to do
    cfg = configuration.compose(["metrics=[scenes_clip,scenes_reward]", "n=4", "device=cpu"])
    outcome = run.run(cfg, finished, loader=Large)
    assert (outcome.row, outcome.nothing_left) == (row, True)
    other = run.run(cfg, "other", loader=Large).row
    assert quality(other) == quality(row)


def test_a_runs_own_metrics_are_the_default(call: Call, finished: Path, calls: list[int]) -> None:
    assert call("run", "metrics=scenes_clip")[0] == 0
    first = row_of("run")
    assert call("run")[0] == 0
    assert calls == [4, 4]  # the method's images, and vanilla's next to them
    assert quality(row_of("run")) == quality(first)
    run.run(configuration.compose(["metrics=scenes_clip", "n=6", "device=cpu"]), finished, loader=Large)
    assert calls == [4, 4, 2, 2]


def test_neither_prompts_nor_weights_of_a_run_need_exist(call: Call, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.tsv", dict(enumerate(CAPTIONS)))
    gone = tmp_path / "gone"
    gone.mkdir()
    words = [f"prompts={tmp_path}/prompts.tsv", "metrics=none", "n=4", "device=cpu", f"weights={gone}"]
    cfg = configuration.compose(words)
    before = run.run(cfg, tmp_path / "run", loader=Large).row
    (tmp_path / "prompts.tsv").unlink()
    gone.rmdir()
    assert call("run", "metrics=scenes_clip")[0] == 0
    row = row_of("run")
    assert row["clip_score"] is not None
    assert row["prompts_hash"] == before["prompts_hash"]
    assert f"weights: {gone}\n" in (tmp_path / "run/config.yaml").read_text()


def test_a_folder_of_runs_is_no_folder_of_images(call: Call, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "grid").mkdir()
    finished.rename(tmp_path / "grid" / "delta=2")
    assert "1 run (delta=2)" in refused(call, "grid", "data=scenes", "metrics=scenes_clip")


def test_errors_of_a_run_are_named(call: Call, finished: Path) -> None:
    mistakes = {
        "data=scenes": "leave data= out",
        "out=there": "leave out= out",
        "metrics=nope": "unknown metric 'nope'",
    }
    for word, sentence in mistakes.items():
        code, _, err = call("run", word)
        assert (code, sentence in err) == (2, True), err
    (finished / "images" / "00003.png").unlink()
    assert "3 of the 4 images in records.jsonl" in refused(call, "run", "metrics=scenes_clip")
    (finished / "config.yaml").write_text("{")
    assert "run/config.yaml" in call("run")[2]


def test_images_with_transparency_are_counted_and_scored_again(call: Call, folder: Path, calls: list[int]) -> None:
    """Other versions put them on white. Their cached digests and scores do not count."""
    pixels = np.asarray(Image.open(folder / "3.png"))
    assert call(*WORDS, "out=opaque")[0] == 0
    Image.fromarray(np.dstack([pixels, np.zeros((64, 64), np.uint8)])).save(folder / "3.png")
    assert call(*WORDS, "out=clear")[0] == 0
    assert "1 of 6 images have transparency" in said(row_of("clear"))
    opaque, clear = (cells_of(f"{out}/pictures.csv")[3]["scenes_clip"] for out in ("opaque", "clear"))
    assert clear == opaque
    stored = json.loads(Path("clear/digests.json").read_text())
    [special] = [name for name in stored if " " in name]
    assert special.endswith(" alpha")
    stored[special.split()[0]] = ["0" * 64, *stored.pop(special)[1:]]  # of a version that did not know
    Path("clear/digests.json").write_text(json.dumps(stored))
    assert call(*WORDS, "out=clear")[0] == 0
    assert special in json.loads(Path("clear/digests.json").read_text())


def test_degenerate_images_are_noted(call: Call, folder: Path) -> None:
    """Also if the scores are cached. In a folder without prompts, copies of a few images are not reported."""
    assert call(*WORDS, "out=fine")[0] == 0
    assert not any(word in said(row_of("fine")) for word in ("equal", "flat", "below"))
    for i in (1, 2):
        shutil.copy(folder / "0.png", folder / f"{i}.png")
    for i, size in ((4, (64, 64)), (5, (8, 8))):
        Image.new("RGB", size, (9, 9, 9)).save(folder / f"{i}.png")
    for _ in range(2):
        assert call(*WORDS, "out=bad")[0] == 3  # the score needs images of one size
        for remark in (
            f"2 of {N} images .*flat",
            f"1 of {N} images .*16 pixels .*8x8",
            f"3 of {N} images equal",
        ):
            assert re.search(remark, said(row_of("bad")))
