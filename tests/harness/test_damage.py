"""A damaged or exchanged file of a run changes no number: the row is the same, or one message names the file."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Call, refused, row_of
from fake_pipeline import FakePipeline, at, interrupt
from light_metrics import light_metrics as light_metrics  # a fixture

from specbench.config import configuration
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.harness import row, run
from specbench.harness.folder import RunFolder, stored
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import as_read

#: Columns that depend on when and by which process an image was decoded.
_OF_PROCESSES = {"run_id", "time", "remarks", "baseline_run_id", "peak_memory_mib"}
SAME = [c for c in COLUMNS if c not in _OF_PROCESSES and not c.startswith(("text_s", "pixels_s"))]


def config(*words: str) -> RunConfig:
    arguments = ["n=3", "metrics=[clip_b32,kid]", "warmup=0", "timing=false", "device=cpu", *words]
    return configuration.compose(arguments)


def finished(folder: Path, *words: str) -> Path:
    run.run(config(*words), folder, loader=FakePipeline)
    return folder


def half(folder: Path, *words: str) -> Path:
    with pytest.raises(run.Stopped):
        run.run(config(*words), folder, loader=at(1, interrupt, empty=True))
    return folder


def damages(path: Path, other: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to damage a file; other: the same file of another run."""
    content = path.read_bytes()

    def flipped(offset: int) -> bytes:
        return content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]

    yield "removed", path.unlink
    yield "emptied", lambda: path.write_bytes(b"")
    if other.is_file():
        yield "exchanged", lambda: shutil.copy(other, path)
    for cut in {len(content) // 3, content.rfind(b"\n", 0, -1) + 1, len(content) - 1} if content else ():
        yield f"cut at {cut}", lambda cut=cut: path.write_bytes(content[:cut])  # type: ignore[misc]
    for offset in range(0, len(content), max(1, len(content) // 4)):
        yield f"flipped at {offset}", lambda offset=offset: path.write_bytes(flipped(offset))  # type: ignore[misc]


def outcome(folder: Path) -> tuple[str, Any]:
    """The message with which a run ends, or its row."""
    try:
        return "", run.run(config(), folder, loader=FakePipeline).row
    except UsageError as e:
        return str(e), None


@pytest.mark.parametrize("decoded_run", [finished, half])
def test_damage_changes_no_number(
    decoded_run: Callable[..., Path], tmp_path: Path, light_metrics: dict[str, str]
) -> None:
    whole, other = decoded_run(tmp_path / "whole"), finished(tmp_path / "other", "seed=5")
    shutil.copytree(whole, tmp_path / "reference")
    run.run(config(), tmp_path / "reference", loader=FakePipeline)
    wanted, names = row_of(tmp_path / "reference"), set[str]()
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    kinds = {file if file.parent == Path() else (file.parent, file.suffix): file for file in reversed(files)}
    files = [file for file in kinds.values() if file.name != ".lock"]  # of images, and of their scores, one of a kind
    for file in files:
        for what, damage in damages(whole / file, other / file):
            del damage  # of the original: it is done to a copy
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            dict(damages(copy / file, other / file))[what]()
            message, row = outcome(copy)
            assert not message or file.name in message, (file, what, message)
            if message:
                names.add(file.name)
                continue
            differ = {c: (row[c], wanted[c]) for c in SAME if row[c] != wanted[c]}
            assert differ == {}, (file, what)
            assert row_of(copy) == row
    assert {"config.yaml", "run.json", "records.jsonl"} <= names
    assert {file.name for file in files} >= {"records.jsonl", "config.yaml", "row.csv", "00000.png"}


def test_a_row_from_elsewhere_is_replaced(tmp_path: Path, light_metrics: dict[str, str]) -> None:
    """The row used to be mixed into the new one: steps of one run, rewards of the other."""
    first, second = finished(tmp_path / "one"), finished(tmp_path / "other", "seed=5")
    before = (first / "row.csv").read_bytes()
    shutil.copy(second / "row.csv", first / "row.csv")
    run.run(config(), first, loader=FakePipeline)
    assert (first / "row.csv").read_bytes() == before
    (first / "row.csv").write_bytes(before.replace(b"clip_b32@1", b"clip_b32@9"))
    run.rescore(first, run.Rescoring())
    assert (first / "row.csv").read_bytes() == before


def test_an_edited_configuration_is_refused(tmp_path: Path, light_metrics: dict[str, str]) -> None:
    """`resume` used to continue with it, and mixed two settings in one row."""
    folder = half(tmp_path / "one")
    file = folder / "config.yaml"
    text = file.read_text()
    for name in ("seed: 0", "delta: 1.1"):
        assert name in text
        file.write_text(text.replace(name, f"{name.split(':')[0]}: 3"))
        for command in (lambda: run.stored(folder), lambda: run.run(config(), folder, loader=FakePipeline)):
            with pytest.raises(UsageError, match="config.yaml"):
                command()


def test_records_of_another_configuration_are_refused(tmp_path: Path, light_metrics: dict[str, str]) -> None:
    first, second = finished(tmp_path / "one"), finished(tmp_path / "other", "delta=2")
    for name in ("records.jsonl", "run.json"):
        shutil.copy(second / name, first / name)
    with pytest.raises(UsageError, match="config.yaml"):
        run.run(config(), first, loader=FakePipeline)
    shutil.copy(second / "config.yaml", first / "config.yaml")
    shutil.copy(finished(tmp_path / "third", "nu=0.5") / "baseline.jsonl", first / "baseline.jsonl")
    with pytest.raises(UsageError, match="baseline.jsonl.*image 0.*config.yaml"):
        run.run(config("delta=2"), first, loader=FakePipeline)


def test_a_row_needs_no_file_and_no_clock(tmp_path: Path, light_metrics: dict[str, str], monkeypatch: Any) -> None:
    path = finished(tmp_path / "one")
    before, folder = row_of(path), RunFolder(path)
    records = folder.open_records(config())
    inputs = config(), folder.metadata(), *records.wanted_records, list(folder.open_scores())
    shutil.rmtree(path)
    monkeypatch.setattr("time.time", None)
    monkeypatch.setattr(Path, "open", None)
    lines = [line for line in inputs[4] if line.side != "vanilla"]
    assert as_read(row.row(*inputs[:4], lines)) == as_read(row.row(*inputs[:4], lines)) == before


def test_a_kill_between_the_two_files_of_a_configuration_costs_nothing(
    tmp_path: Path, light_metrics: dict[str, str], monkeypatch: Any
) -> None:
    folder = finished(tmp_path / "one")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("specbench.harness.folder.write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            run.run(config("metrics=kid"), folder, loader=FakePipeline)
    assert stored(folder).get("metrics") == ["clip_b32", "kid"]
    assert run.run(config("metrics=kid"), folder, loader=FakePipeline).row["clip_score"] is None


FILES = (
    "config.yaml",
    "run.json",
    "records.jsonl",
    "baseline.jsonl",
    "timings.jsonl",
    "scores.jsonl",
    "row.csv",
    "run.log",
)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    """Links to a file outside of the folder that a run would accept."""
    path.rename(path.parent.parent / path.name)
    path.symlink_to((path.parent.parent / path.name).resolve())


@pytest.mark.parametrize("kind", [_pipe, _folder, _link])
def test_only_files_of_its_own_are_a_runs(kind: Callable[[Path], None], call: Call) -> None:
    """No command hangs, leaves the folder, or reads or writes through a link out of it; also the commands that only
    read end."""
    folder = finished(Path("made"), "n=2", "metrics=none")
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    for name in (*FILES, min((folder / "images").iterdir()).relative_to(folder)):
        shutil.rmtree("here", ignore_errors=True)
        path = Path(shutil.copytree(folder, "here")) / name
        if not path.exists():
            path.write_bytes(b"")
        kind(path)
        outside = path.resolve()
        before = outside.read_bytes() if kind is _link else b""
        try:
            for words in (["resume", "here"], ["status", "here"], ["show", "here"], ["report", "here", "out=r.html"]):
                signal.alarm(60)
                code, _, err = call(*words)
                assert code in (0, 2), (words, err)
                if words[0] == "resume":
                    assert (code, err.count("\n"), path.name in err) == (2, 1, True), err
        finally:
            signal.alarm(0)
        assert kind is not _link or outside.read_bytes() == before
        if kind is _link:
            outside.unlink()
    signal.signal(signal.SIGALRM, old)


def test_a_linked_folder_of_images_is_not_written_through(call: Call, tmp_path: Path) -> None:
    here = half(Path("here"), "metrics=none")
    (here / "images").rename(tmp_path / "elsewhere")
    (here / "images").symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").iterdir())
    assert "images is a link" in refused(call, "resume", "here")
    assert sorted((tmp_path / "elsewhere").iterdir()) == before
