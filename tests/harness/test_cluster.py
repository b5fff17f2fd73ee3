"""Several workers for one run: once with Ray itself, then each of its failures with a fake that needs no processes."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from commands import ROOT, Call, refused, said
from fake_pipeline import FakePipeline, Mortal, hungry

from specbench import data
from specbench.config import configuration
from specbench.errors import RunError, UsageError, install
from specbench.harness import cluster, run
from specbench.harness.worker import Died, Event, Failure, Image, Joined, Shrunk, never
from specbench.rows.columns import TIMED_COLUMNS
from specbench.rows.journal import read_records

WORDS = ["metrics=none", "n=6", "warmup=0"]

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture
def short_path() -> Iterator[str]:
    """A folder for Ray's sockets, whose paths are limited in length."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@needs_ray
def test_two_workers_make_the_images_of_one_process_though_one_is_killed(
    tmp_path: Path, short_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", short_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    alone = run.run(configuration.compose(WORDS), tmp_path / "alone", loader=FakePipeline).row
    loader = functools.partial(Mortal, delay=0.02, log=tmp_path / "flag")
    try:
        row = run.run(configuration.compose([*WORDS, "workers=2"]), tmp_path / "many", loader=loader).row
    except RunError as e:
        if "Ray did not start" not in str(e):
            raise
        pytest.skip(str(e))  # on a machine that has no time for it
    assert (tmp_path / "flag").exists()
    assert "ActorDiedError: " in capsys.readouterr().err
    for name in ("records.jsonl", "baseline.jsonl"):
        reference, shared = (read_records(tmp_path / folder / name) for folder in ("alone", "many"))
        assert [(r.index, r.sha256, r.steps) for r in shared] == [(r.index, r.sha256, r.steps) for r in reference]
        assert {r.latency_s for r in shared} == {None}
    sessions = json.loads((tmp_path / "many/run.json").read_text())["sessions"]
    assert 2 <= len({session["pid"] for session in sessions.values()}) == len(sessions) <= 3  # the third may be late
    assert {(session["threads"], session["device"], session["workers"]) for session in sessions.values()} == {
        (1, "cpu", 2)
    }
    assert row["config_hash"] == alone["config_hash"]
    assert (row["latency_s_mean"], row["speedup_latency"]) == (None, None)
    assert "2 workers" in said(row)
    assert {row[name] for name in TIMED_COLUMNS} == {None}
    differing = {*TIMED_COLUMNS, "timing"} | {
        "run_id",
        "time",
        "remarks",
        "baseline_run_id",
        "peak_memory_mib",
        "threads",
    }
    assert {k: row[k] for k in set(row) - differing} == {k: alone[k] for k in set(row) - differing}
    again = run.run(configuration.compose(WORDS), tmp_path / "many", loader=FakePipeline)
    assert {k: again.row[k] for k in set(row) - {"remarks"}} == {k: row[k] for k in set(row) - {"remarks"}}
    assert "decoded by 2 workers" in said(again.row)  # in whatever number they are asked for now


def test_without_ray_the_sentence_says_what_to_install(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = call("run", *WORDS, "workers=2", "out=here")
    assert code == 2
    assert err.splitlines()[-1].endswith(f"need Ray: {install('ray')}")
    assert not Path("here").exists()


class FakeRay:
    """Tasks run when their result is requested, the oldest first. `deadly`: how many more times a worker dies on an
    index; `stillborn`: how many workers die while loading."""

    class exceptions:
        class RayError(Exception): ...

        class RayActorError(RayError): ...

        class RayTaskError(RayError):
            def __init__(self, cause: Exception) -> None:
                self.cause = cause

    def __init__(self, **resources: float) -> None:
        self.resources = resources
        self.deadly: dict[int, int] = {}
        self.stillborn = 0
        self.tasks: list[tuple[int, Sequence[data.Item]]] = []  # (worker, items) of every task that was started
        self.workers = 0
        self.options: dict[str, Any] = {}
        self.ended = False

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def shutdown(self) -> None:
        self.ended = True

    def remote(self, actor: Any) -> Any:
        def method(worker: Any, name: str, number: int) -> Any:
            def go(*arguments: Any) -> Any:
                if name == "load" and self.stillborn:
                    self.stillborn -= 1
                    raise self.exceptions.RayActorError("a page\nout of luck\n")
                if name == "decode":
                    self.tasks.append((number, arguments[0]))
                    for item in arguments[0]:
                        if self.deadly.get(item.index, 0):
                            self.deadly[item.index] -= 1
                            raise self.exceptions.RayActorError("a page\nout of luck\n")
                try:
                    return getattr(worker, name)(*arguments)
                except Exception as e:
                    raise self.exceptions.RayTaskError(e) from None

            return SimpleNamespace(worker=worker, remote=lambda *arguments: functools.partial(go, *arguments))

        def create(*arguments: Any) -> Any:
            self.workers += 1
            worker = actor(*arguments)
            return SimpleNamespace(**{name: method(worker, name, self.workers) for name in ("load", "decode")})

        def with_options(**options: Any) -> Any:
            self.options = options
            return SimpleNamespace(remote=create)

        return SimpleNamespace(options=with_options)

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def get(self, reference: Any) -> list[Event]:
        events: list[Event] = reference()
        return events


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(CPU=8)
    monkeypatch.setattr(cluster, "_connected", lambda together, address: fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return fake


def decode(*words: str, loader: Any = FakePipeline, stop: Callable[[], bool] = never) -> list[Event]:
    cfg = configuration.compose([*WORDS, *words])
    with cluster.Workers(cfg, loader) as workers:
        return [event for happened in workers.decode(data.load(cfg.prompts), False, stop) for event in happened]


def indices(events: list[Event]) -> list[int]:
    return [event.record.index for event in events if isinstance(event, Image)]


def test_prompts_are_pulled_one_batch_at_a_time(ray: FakeRay) -> None:
    events = decode("workers=3", "batch=2")
    assert sorted(indices(events)) == list(range(6))
    assert sorted(len(items) for _, items in ray.tasks) == [2, 2, 2]
    assert len({name for name, _ in ray.tasks}) == ray.workers == 3
    assert ray.options == {"num_cpus": 1, "num_gpus": 0, "max_restarts": 0}
    assert ray.ended
    joined = [event for event in events if isinstance(event, Joined)]
    assert [j.process.workers for j in joined] == [3] * 3
    ray.workers = 0
    assert len(indices(decode("workers=8", "batch=4"))) == 6
    assert ray.workers == 2  # no more than batches


def test_what_a_dead_worker_was_at_goes_to_another_one(ray: FakeRay) -> None:
    ray.deadly = {0: 1, 1: 2}
    events = decode("workers=2")
    assert sorted(indices(events)) == list(range(6))
    assert sum(isinstance(event, Died) for event in events) == 3
    assert ray.workers == 2 + 3
    ray.deadly = {0: 4}  # twice in the batch of two, twice alone: deaths over a batch do not count for its images
    assert sorted(indices(decode("workers=2", "batch=2"))) == list(range(6))


def test_an_image_that_kills_its_workers_is_given_up(ray: FakeRay) -> None:
    """Only this image is given up, not the others of its batch."""
    ray.deadly = {2: 99}
    events = decode("workers=2", "batch=4")
    assert sorted(indices(events)) == [0, 1, 3, 4, 5]
    [failure] = [event for event in events if isinstance(event, Failure)]
    assert failure.index == 2
    assert re.match(r"3 .*RayActorError: out of luck", failure.reason)


def test_workers_that_die_while_loading_are_not_begun_forever(ray: FakeRay) -> None:
    ray.stillborn = 5
    assert len(indices(decode("workers=2"))) == 6
    ray.stillborn = 6
    with pytest.raises(RunError, match="6.*llamagen_scenes"):
        decode("workers=2")
    assert ray.ended


def test_an_error_of_a_worker_is_reported_as_the_workers(ray: FakeRay) -> None:
    def load(cfg: Any) -> Any:
        raise UsageError("no weights here")

    with pytest.raises(UsageError, match="^no weights here$"):
        decode("workers=2", loader=load)


def test_a_worker_reports_too_little_memory(ray: FakeRay) -> None:
    events = decode("workers=2", "batch=3", loader=hungry(1))
    assert sorted(indices(events)) == list(range(6))
    assert Shrunk(1) in events


def test_after_a_stop_started_images_are_finished(ray: FakeRay) -> None:
    answers = deque([False] * 5)
    events = decode("workers=2", stop=lambda: not answers or answers.popleft())
    assert 0 < len(indices(events)) < 6
    assert len(ray.tasks) == len(indices(events))


def test_one_worker_a_device(ray: FakeRay) -> None:
    two_gpus, one_gpu = {"CPU": 16, "GPU": 2}, {"CPU": 16, "GPU": 1}
    for resources, wanted, device in (
        (two_gpus, "auto", "cuda"),
        (two_gpus, "cpu", "cpu"),
        ({"CPU": 16}, "auto", "cpu"),
    ):
        ray.resources = resources
        with cluster.Workers(configuration.compose([*WORDS, "workers=2", f"device={wanted}"]), FakePipeline) as workers:
            assert workers._cfg.device == device
            assert ray.options["num_gpus"] == int(device == "cuda")
    for resources, wanted, sentence in (
        (one_gpu, "auto", "workers=2 needs as many GPUs"),
        ({"CPU": 1}, "cpu", "workers=2 needs as many processors"),
        (two_gpus, "cuda:1", "device=cuda:1 names one device"),
    ):
        ray.resources, ray.ended = resources, False
        cfg = configuration.compose([*WORDS, "workers=2", f"device={wanted}"])
        with pytest.raises(UsageError, match=sentence), cluster.Workers(cfg, FakePipeline):
            pass
        assert ray.ended


@needs_ray
def test_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    failures: list[Exception] = []

    def start(*_: Any, **__: Any) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(ray, "init", start)
    late, cut_off = RuntimeError("timed out\nduring startup"), ConnectionError("timed out\nduring startup")
    failures[:] = [late]
    assert cluster._connected(2, None) is ray  # it has a second chance
    failures[:] = [late, late]
    with pytest.raises(RunError, match="Ray.*start"):
        cluster._connected(2, None)
    failures[:] = [cut_off]
    with pytest.raises(UsageError, match="ray_address=10.0.0.1:6379"):
        cluster._connected(2, "10.0.0.1:6379")


@needs_ray
def test_an_address_where_no_cluster_answers_is_one_sentence(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray tries for minutes, and then ends its process. Nothing is left, or changed in a folder that exists."""
    monkeypatch.setattr(cluster, "WAIT_S", 1)
    assert call("run", *WORDS, "out=there")[0] == 0
    before = {path: path.read_bytes() for path in Path("there").rglob("*") if path.is_file()}
    with socket.socket() as silent, socket.socket() as closed:
        for one in (silent, closed):
            one.bind(("127.0.0.1", 0))
        silent.listen()
        ports = [one.getsockname()[1] for one in (silent, closed)]
        for address in (*(f"127.0.0.1:{port}" for port in ports), "no-address"):
            err = refused(call, "run", *WORDS, f"ray_address={address}", "out=a/here")
            assert (f"ray_address={address}" in err, Path("a").exists()) == (True, False)
    assert "ray_address" in refused(call, "resume", "there", "n=9", "ray_address=no-address")
    assert {path: path.read_bytes() for path in Path("there").rglob("*") if path.is_file()} == before


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_the_helpers_of_a_killed_process_end_with_it(tmp_path: Path) -> None:
    """A process starts two others. One resembles Ray's agents: its path names it, and its own parent has ended. After a
    kill the guard, which looks twice a second, ends this one. After an orderly end both continue to run."""
    program = tmp_path / "ray" / "agent.py"
    program.parent.mkdir()
    program.write_text("import time\ntime.sleep(600)\n")
    start = (
        "import subprocess, sys, time\nfrom specbench.harness import processes\nwith processes.guarded():\n"
        "    some = [subprocess.Popen([sys.executable, *words], stdout=2) for words in"
        f" ([{str(program)!r}], ['-c', 'import time; time.sleep(600)'])]\n"
        "    time.sleep(float(sys.argv[1]))\n    print(*(one.pid for one in some), flush=True)\n    sys.stdin.read()\n"
    )

    def pids(kill: bool) -> list[int]:
        driver = subprocess.Popen(
            [sys.executable, "-c", start, "3" if kill else "1.5"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert driver.stdout is not None
        numbers = [int(pid) for pid in driver.stdout.readline().split()]
        if kill:
            driver.kill()
        driver.communicate()
        return numbers

    def ends(pid: int, seconds: float) -> bool:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            until = time.monotonic() + seconds
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > until:
                    return False
                time.sleep(0.1)
        return True

    started: list[int] = []
    try:
        helper, other = pids(kill=True)
        started += [helper, other]
        assert ends(helper, 30)
        assert not ends(other, 0)
        started += (left := pids(kill=False))
        assert not any([ends(left[0], 1), ends(left[1], 0)])
    finally:
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
