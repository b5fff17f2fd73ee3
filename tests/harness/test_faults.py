"""Faults in long runs: Ctrl-C, a full disk, a folder that disappears, too little memory; and the progress of a run."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Call, refused, row_of, said
from fake_pipeline import FakePipeline, at, execute, hungry, interrupt
from filelock import FileLock

from specbench.decoding import batch
from specbench.errors import RunError, UsageError
from specbench.harness import execution, log, run, worker
from specbench.harness.folder import RunFolder, stored
from specbench.rows import trackers
from specbench.rows.journal import Journal, Record, read_records
from specbench.storage.files import append_line, atomic_path, locked, write_atomically

WORDS = ("metrics=none", "n=6", "warmup=0")


def images(out: Path, name: str = "records") -> dict[int, str]:
    return {r.index: r.sha256 for r in read_records(out / f"{name}.jsonl")}


@pytest.fixture
def calm(tmp_path: Path) -> Path:
    execute(tmp_path / "calm")
    return tmp_path / "calm"


def test_ctrl_c_finishes_the_image_and_writes_a_row(calm: Path, tmp_path: Path) -> None:
    """In a timed run it finishes both halves of the pair."""
    for case, (words, empty, n) in enumerate(
        (
            ((), False, 3),
            ((), True, 3),
            (("timing=false",), False, 3),
            (("timing=false",), True, 6),
        )
    ):
        out = tmp_path / f"run{case}"
        with pytest.raises(run.Stopped, match=rf"first {n} .*row\.csv"):
            execute(out, *words, loader=at(2, interrupt, empty))
        assert set(images(out)) == set(range(n))  # including the image in progress
        row = row_of(out)
        assert (row["n"], row["timed_pairs"]) == (n, None if words else 3)
        assert (said(row).startswith(f"stopped after {n} of 6 images")) == (n < 6)
        alone = execute(tmp_path / f"alone{case}", *words, f"n={n}", *(["baseline=false"] if words else []))
        columns = ["config_hash", "steps", "speedup_step", "latency_s_mean", "speedup_latency"]
        assert {name: row[name] for name in columns} == {name: alone[name] for name in columns}
        done = execute(out, *words)
        assert (done["n"], done["timed_pairs"]) == (6, None if words else 6)
        assert ("2 processes" in said(done), "timings" in said(done)) == (True, not words)
        assert images(out) == images(calm)
        assert images(out, "baseline") == images(calm, "baseline")


def test_the_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice() -> None:
        interrupt()
        interrupt()

    with pytest.raises(run.Stopped, match="2 of 6"):
        execute(tmp_path / "run", loader=at(2, twice))
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(run.Stopped, match="4 of 6"):  # the first one finishes the batch
        execute(tmp_path / "batch", "batch=4", loader=at(1, interrupt))


def test_ctrl_c_says_how_to_go_on_with_a_grid(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_load_pipeline", at(2, interrupt))
    code, _, err = call("run", "-m", "delta=1,2", *WORDS)
    assert (code, "Traceback" in err) == (130, False)
    [folder] = tmp_path.glob("runs/*/*")
    last = err.splitlines()[-1]
    assert "3 of 6 images" in last
    assert re.search(r"first 3 .*row\.csv", last)
    again = f"run -m delta=1,2 {' '.join(WORDS)} out={folder.relative_to(tmp_path)}"
    assert last.endswith(f" specbench {again}")
    assert [job.name for job in folder.iterdir() if job.is_dir()] == ["delta=1"]


def test_a_row_over_more_images_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "run"
    row = execute(out, "baseline=false")
    with pytest.raises(run.Stopped, match="6 of 6.*3 of 6"):
        execute(out, loader=at(2, interrupt, empty=True))
    assert row_of(out) == row


def test_a_full_disk_is_named_and_no_image_is_lost_or_repeated(
    calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after a number of writes that differs from case to case."""
    fsync = os.fsync
    for case in range(0, 30, 2):
        out, words, count = tmp_path / "run", f"batch={1 + case % 4 // 2}", iter(range(1000))

        def full(descriptor: int, most: int = case, count: Iterator[int] = count) -> None:
            if next(count) >= most:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            message = f"{out} .*No space left on device.*resume {out}"
            with pytest.raises(RunError, match=message):
                execute(out, words)
        assert not list(out.rglob("*.tmp")), case
        if (out / "records.jsonl").exists():
            assert (out / "records.jsonl").read_bytes().endswith(b"\n") or not images(out), case
        execute(out, words)
        for name in ("records", "baseline"):
            assert images(out, name) == images(calm, name), case
            assert (out / f"{name}.jsonl").read_bytes().count(b"\n") == 6
        shutil.rmtree(out)


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, b"x" * 99 + b"\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (110, limits[1]))  # a disk with ten bytes left
    try:
        with pytest.raises(OSError, match="File too large"):
            append_line(path, b"y" * 49 + b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"x" * 99 + b"\n"


def stop_while_writing(path: Path) -> None:
    with atomic_path(path) as partial:
        partial.write_bytes(b"par")
        raise KeyboardInterrupt


def test_two_processes_may_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_path(path) as first, atomic_path(path) as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert path.read_bytes() == b"first"  # the last one to be complete
    with pytest.raises(KeyboardInterrupt):
        stop_while_writing(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"first"


def test_what_a_kill_leaves_is_removed_by_the_next_process(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "images/0.png") as killed:
        left = killed.with_name("1.png" + killed.name.removeprefix("0.png"))
        write_atomically(killed, b"")
        left.write_bytes(b"cut")
        (tmp_path / "mine.tmp").write_bytes(b"")
    with locked(tmp_path):
        assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [".lock", "0.png", "mine.tmp"]


def test_a_folder_that_vanishes_is_not_created_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for index in (0, 3):
        with pytest.raises(RunError, match=f"{out} .*gone"):
            execute(out, loader=at(index, lambda: shutil.rmtree(out)))
        assert not out.exists()


def test_a_folder_that_becomes_unwritable_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for number in (errno.EACCES, errno.EPERM):
        for path, why in ((folder.metadata_file, os.strerror(number)), (Path("model.safetensors"), "")):
            assert folder.disk_fault(OSError(number, os.strerror(number), str(path))) == why


def test_the_disk_use_is_printed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def note() -> None:
        printed.append(capsys.readouterr().err)

    printed: list[str] = []
    execute(tmp_path / "run", "n=2", loader=at(0, note))
    assert re.search(r"\b4 images .*9\.5 kB", printed[0])
    free = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    shutil.copy(tmp_path / "run/images/00000.png", tmp_path / "run/images/00002.png")  # without a record
    execute(tmp_path / "run", "n=3", loader=at(2, note))
    assert "2 images to decode" in printed[1]
    assert "the disk may fill up" in printed[1]


def test_the_log_is_turned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "LOG_BYTES", 500)
    execute(tmp_path / "run")
    logs = list((tmp_path / "run").glob("run.log*"))
    assert len(logs) == 1 + log.LOG_FILES
    assert all(log.stat().st_size < 2000 for log in logs)  # a line is longer than the limit


def test_too_little_memory_makes_the_batches_smaller(calm: Path, tmp_path: Path) -> None:
    row = execute(tmp_path / "run", "batch=5", "warmup=1", loader=hungry(2))
    assert images(tmp_path / "run") == images(calm)
    assert [r.batch for r in read_records(tmp_path / "run/records.jsonl")] == [2] * 6
    assert re.search(r"memory.*batches of 2\b", said(row))


def test_an_image_that_never_fits_is_recorded_and_tried_again(call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run, "_load_pipeline", hungry(2, never=(1, 4)))
    code, _, err = call("run", *WORDS, "batch=2", "baseline=false", "out=here")
    assert code == 1
    assert re.match("specbench: 2 images .*here/failures.jsonl", err.splitlines()[-1])
    assert set(images(tmp_path / "here")) == {0, 2, 3, 5}
    assert not (tmp_path / "here/row.csv").exists()
    code, out, _ = call("status", "here")
    assert code == 0
    assert "here: cool_sd on llamagen_scenes, n=6: stopped\n  images     4 done, 2 left\n" in out
    assert re.search("failures +2, .*cool_sd image 4: out of memory", out)
    with (tmp_path / "here/failures.jsonl").open("a") as file:
        file.write('{"pass": "cool_sd", "ind')  # cut by a kill
    [state] = json.loads(call("status", "here", "--json")[1])
    assert [(f["pass"], f["index"]) for f in state["failures"]] == [("cool_sd", 1), ("cool_sd", 4)]
    with (tmp_path / "here/failures.jsonl").open("a") as file:
        file.write("\n")
    monkeypatch.setattr(run, "_load_pipeline", hungry(2, never=(1,)))
    assert call("resume", "here")[0] == 1
    assert re.search("failures +1, .*cool_sd image 1: out of memory", call("status", "here")[1])
    monkeypatch.setattr(run, "_load_pipeline", FakePipeline)
    assert call("resume", "here")[0] == 0
    assert "failures" not in call("status", "here")[1]
    assert row_of("here")["n"] == 6


def test_errors_of_too_little_memory() -> None:
    for error in (
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    ):
        assert worker.out_of_memory(error), error
    for other in (RuntimeError("size mismatch"), ValueError("out of memory of former times")):
        assert not worker.out_of_memory(other), other
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**52)
    assert worker.out_of_memory(caught.value)


def test_another_error_ends_the_run_with_the_images_before_it(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="^size mismatch$"):
        execute(tmp_path, loader=at(3, broken))
    assert set(images(tmp_path)) == {0, 1, 2}


def test_memory_does_not_grow_with_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record stays in memory (some kilobytes); images and tensors do not."""
    monkeypatch.setattr(FakePipeline, "pixels", lambda self, tokens: np.zeros((len(tokens), 256, 256, 3), np.uint8))
    bytes_held: list[int] = []
    add = Journal.add

    def watched(self: Journal, record: Record, image: np.ndarray) -> None:
        add(self, record, image)
        bytes_held.append(tracemalloc.get_traced_memory()[0])

    monkeypatch.setattr(Journal, "add", watched)
    tracemalloc.start()
    try:
        execute(tmp_path / "run", "n=40", "baseline=false")
    finally:
        tracemalloc.stop()
    assert bytes_held[-1] - bytes_held[10] < 30 * 10_000  # of 196,608 bytes per image


def test_status_of_a_run_from_its_beginning_to_its_end(call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    def status() -> dict[str, Any]:
        [state] = json.loads(call("status", "here", "--json")[1])
        assert isinstance(state, dict)
        return state

    seen: list[dict[str, Any]] = []
    pipeline = at(4, lambda: seen.append(status()))
    monkeypatch.setattr(run, "_load_pipeline", lambda cfg: pipeline(cfg, 0.01))
    assert call("run", *WORDS, "out=here")[0] == 0
    [running] = seen
    assert (running["state"], running["n"], running["method"]) == ("running", 6, "cool_sd")
    assert (running["images"]["done"], running["images"]["left"]) == (4, 2)
    assert 0 < running["images"]["per_s"] < 100  # 10 ms each, and some for the files
    assert (running["baseline"]["done"], running["baseline"]["left"]) == (4, 2)
    # The passes alternate: both are done when the slower one is.
    assert running["time_left_s"] == max(2 / running[name]["per_s"] for name in ("images", "baseline"))
    with (tmp_path / "here/records.jsonl").open(
        "ab"
    ) as f:  # it reads while a line is half written, and changes nothing
        f.write(b'{"index": 6, "pro')
    before = {p: p.read_bytes() for p in (tmp_path / "here").rglob("*") if p.is_file()}
    done = status()
    assert before == {p: p.read_bytes() for p in (tmp_path / "here").rglob("*") if p.is_file()}
    assert (done["state"], done["images"]["left"], done["baseline"]["left"]) == ("finished", 0, 0)
    assert done["time_left_s"] == 0
    assert done["bytes"] > 1000
    (tmp_path / "here/images/00002.png").unlink()
    (tmp_path / "here/row.csv").unlink()
    assert status()["state"] == "stopped"
    with FileLock(tmp_path / "here/.lock"):
        assert status()["state"] == "running"
    monkeypatch.setattr(run, "_load_pipeline", FakePipeline)
    assert call("resume", "here")[0] == 0
    six = (tmp_path / "here/row.csv").read_bytes()
    assert call("resume", "here", "n=7")[0] == 0
    assert status()["state"] == "finished"
    (tmp_path / "here/row.csv").write_bytes(six)  # a kill after the last image leaves the row of the earlier request
    assert status()["state"] == "stopped"


def test_resume_continues_with_the_arguments_of_the_folder(call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run, "_load_pipeline", at(3, interrupt))
    code, _, err = call("run", *WORDS, "delta=1.3", "out=here")
    assert (code, len(images(tmp_path / "here"))) == (130, 4)
    monkeypatch.setattr(run, "_load_pipeline", at(5, interrupt))
    code, _, err = call("resume", "here", "n=8")
    assert code == 130
    assert err.splitlines()[-1].endswith(" specbench resume here n=8")
    monkeypatch.setattr(run, "_load_pipeline", FakePipeline)
    code, out, _ = call("resume", "here", "n=8", "workers=1")
    assert code == 0
    assert "here/row.csv" in out
    row = row_of("here")
    assert (row["n"], row["delta"]) == (8, 1.3)
    assert "nothing left to do: 8 images" in call("resume", "here")[1]


def test_resume_refuses_parameters_that_do_not_fit_and_stores_nothing(call: Call, tmp_path: Path) -> None:
    execute(tmp_path / "here", "n=2", "timing=true")
    before = {p: p.read_bytes() for p in (tmp_path / "here").rglob("*") if p.name != "run.log" and p.is_file()}
    for argument, sentence in (
        ("data_dir=/tmp", "has no parameter 'data_dir'"),
        ("workers=2", "timing=true"),
        ("shard=3/2", "shard=3/2 does not exist"),
        ("shard=3/3", "shard=3/3 of 2 prompts"),
    ):
        assert sentence in refused(call, "resume", "here", argument)
        assert before == {p: p.read_bytes() for p in before}, argument
    assert "nothing left to do" in call("resume", "here")[1]


def test_resume_may_change_the_tracker(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tracker has its own parameters."""
    monkeypatch.setattr(trackers, "check", lambda cfg: None)
    monkeypatch.setattr(trackers, "write", lambda *_: "there")
    execute(tmp_path / "here", "n=1")
    for words, expected in (
        (["log=wandb", "log_project=mine"], {"log": "wandb", "log_project": "mine"}),
        (["log=wandb"], {"log": "wandb", "log_project": "mine"}),
        (["log=tensorboard"], {"log": "tensorboard", "log_dir": None}),
        (["log=none"], {"log": "none"}),
    ):
        assert call("resume", "here", *words)[0] == 0
        cfg = stored(tmp_path / "here")
        assert {name: value for name, value in cfg.plain().items() if name.startswith("log")} == expected


def test_a_mistake_costs_one_sentence(call: Call, tmp_path: Path) -> None:
    execute(tmp_path / "here", "n=1", "baseline=false")
    for words, sentence in (
        (["status"], "status takes DIR"),
        (["status", "absent"], "there is no folder absent"),
        (["status", "here/images"], "images holds no run"),
        (["resume"], "resume takes DIR"),
        (["resume", "absent"], "absent holds no run"),
        (["resume", "here", "delta=2"], "unknown parameter 'delta' (choose from: "),
        (["resume", "here", "n=0"], "n must be an integer of at least 1"),
        (["resume", "here", "workers=x"], "workers must be an integer of at least 1"),
    ):
        err = refused(call, *words)
        assert (sentence in err, err.count("\n")) == (True, 1), err


def test_the_bar_moves_with_the_steps_of_a_batch(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four images, two at a time: the bar shows tenths of images within a batch, and ends with whole images. A warm-up
    does not move it."""
    shown: list[float] = []

    class Bar(execution.tqdm):  # type: ignore[misc, valid-type]
        def update(self, n: float = 1) -> Any:
            shown.append(self.n)
            return super().update(n)

    class Stepping(FakePipeline):
        def decode(self, conditioning: list[str], keys: list[tuple[int, int]]) -> Any:
            if watcher := batch._WATCHER.get():
                for part in (0.52, 1.0, 2.0):
                    watcher(part)
            return super().decode(conditioning, keys)

    monkeypatch.setattr(execution, "tqdm", Bar)
    monkeypatch.setattr(run, "_load_pipeline", Stepping)
    words = ("metrics=none", "n=4", "batch=2", "warmup=1", "baseline=false", "timing=true", "device=cpu", "out=one")
    assert call("run", *words)[0] == 0
    # the second image of a batch is complete with the first, and is recorded after it
    assert shown == [0.5, 1, 2, 2, 2, 2.5, 3, 4, 4, 4]
    assert batch._WATCHER.get() is None


def test_a_grid_and_a_broken_configuration(call: Call, tmp_path: Path) -> None:
    assert call("run", "-m", *WORDS, "delta=1,2", "out=grid")[0] == 0
    assert call("status", "grid")[1].count(": finished\n") == 2
    config = Path("grid/delta=1/config.yaml")
    text = config.read_text()
    for content, reason in (("[1, 2", f"cannot read {config}"), (text + "size: x\n", "changed since")):
        config.write_text(content)
        code, out, err = call("status", "grid")  # one broken run does not hide the others
        assert (code, err.count("\n"), reason in err) == (2, 1, True), err
        assert out.startswith("grid: 2 runs, 1 finished, 1 not started; ")
    config.write_text(text)
    Path("grid/grid.json").unlink()  # a folder that other things put runs into
    assert re.search(r"2 runs.*delta=1\b", refused(call, "resume", "grid"))
    (tmp_path / "config.yaml").write_text("[1, 2")
    for command in ("status", "resume"):
        code, out, err = call(command, ".")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "config.yaml" in err
    (tmp_path / "config.yaml").write_text("- a\n")
    with pytest.raises(UsageError, match="cannot read"):
        stored(tmp_path)


def test_a_changed_record_is_not_trusted(calm: Path) -> None:
    path = calm / "records.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    assert '"steps": 4' in first
    path.write_text("".join([first.replace('"steps": 4', '"steps": 2'), *others]))
    with pytest.raises(UsageError, match="line 1.*records.jsonl"):
        execute(calm)
    path.write_text("".join(others))
    assert execute(calm)["steps"] == np.mean([4, 5, 6, 7, 4, 5])
