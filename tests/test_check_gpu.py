"""`scripts/check_gpu.py` without a GPU: its output, the errors that it survives, and its requirements."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import check_gpu
from gpu_checks import gates, models, results

from specbench.audit import plan as audit_plan
from specbench.config import configuration
from specbench.engine.graph import Graphs
from specbench.engine.kernels.tiles import Tile

ROOT = Path(__file__).resolve().parents[1]

#: Started before each of the script's processes: it has what a bare machine has, and hangs in the fourth stage.
BARE = """
import sys, time
GONE = {"hydra", "omegaconf", "antlr4", "transformers", "huggingface_hub", "torchmetrics", "tokenizers", "pycocotools"}
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
if "--worker" in sys.argv and HANGS in sys.argv:
    time.sleep(100)
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    """Runs the script with arguments; `hangs`: the stage that hangs -> (exit code, lines, output)."""

    def run_it(*arguments: str, hangs: str = "") -> tuple[int, list[dict[str, Any]], str]:
        (tmp_path / "sitecustomize.py").write_text(BARE.replace("HANGS", repr(f"--stages={hangs}")))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
        file = tmp_path / "made" / "lines.jsonl"
        monkeypatch.setattr(sys, "argv", ["check_gpu.py", *arguments, f"--out={file}"])
        code = check_gpu.main()
        captured = capfd.readouterr()
        return code, [json.loads(line) for line in file.read_text().splitlines()], captured.out + captured.err

    return run_it


#: The stages that a test carries out as the script does, each in a process of its own; the others share one, which
#: imports torch and makes the networks once.
IN_PROCESSES = {1, 3}
SHARED = f"""
import sys
sys.path[:0] = {[str(ROOT / "scripts"), str(ROOT / "tests")]!r}
import check_gpu
from interpreter import patch_language_once

patch_language_once()
for stage in map(int, sys.argv[2:]):
    assert check_gpu.worker(stage, "a", check_gpu.Path(sys.argv[1]), True, "") == 0
"""


def test_a_dry_run_needs_no_gpu_and_no_package_but_torch(tmp_path: Path) -> None:
    """A few checks of a stage; from the fourth stage on they do their work without timing."""
    (tmp_path / "sitecustomize.py").write_text(BARE.replace("HANGS", "''"))
    stages = sorted(set(check_gpu.STAGES) - IN_PROCESSES)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SHARED, str(tmp_path / "lines.jsonl"), *map(str, stages)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    environment, *checks = (json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines())
    assert environment["stage"] == 0
    assert {"torch", "triton", "driver", "device_name", "commit", "python"} <= environment.keys()
    assert {line["stage"] for line in checks} == set(stages)
    assert not [line for line in checks if line["ok"] is False]
    assert all(line["ok"] for line in checks if line["stage"] < 4)
    skipped = {line["check"]: line["note"] for line in checks if line["stage"] > 3}
    assert set(skipped.values()) == {"SKIPPED: there is no CUDA device; done on small shapes, and not timed"}
    assert len(skipped) == 14


def test_lines_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows also have the values of the first line of their run; a check that was repeated kernel by kernel has one
    row."""
    lost = {"run": "a", "stage": 4, "check": "7B", "ok": False, "note": "RuntimeError: CUDA\nmore"}
    lines = [
        {"run": "a", "stage": 0, "check": "environment", "device_name": "H200", "commit": "abc", "time": "today"},
        {"run": "a", "stage": 4, "check": "XL", "ok": True, "measured": 1.23456789, "gate": 2.0, "seconds": 0.5},
        lost,
        {**lost, "launch_blocking": True},
    ]
    file, out = tmp_path / "lines.jsonl", tmp_path / "rows.csv"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", f"--rows={out}", str(file)])
    assert check_gpu.main() == 0
    first, second = csv.DictReader(out.open())
    assert (first["check"], first["result"], first["measured"], first["gate"]) == ("XL", "PASS", "1.23457", "2.0")
    assert (second["result"], second["note"], second["measured"]) == ("FAIL", "RuntimeError: CUDA", "")
    assert {(row["device_name"], row["commit"], row["time"]) for row in (first, second)} == {("H200", "abc", "today")}


def test_a_pass_beyond_the_image_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read rotary rows and keys that do not exist, and its time would mean nothing."""
    monkeypatch.setattr(gates, "small", lambda: False)
    monkeypatch.setattr(gates, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(gates, "network", lambda name: models.target(name, "meta", torch.bfloat16, 1))
    with pytest.raises(ValueError, match="leaves the image of 256"):
        gates.recorded_pass("xl", 200, Graphs(lambda functions, device: list(functions.values())))


def test_a_dry_check_that_fails_is_a_failure() -> None:
    assert results.dry(lambda: {"ok": False, "note": "logits differ"})["note"] == "logits differ"


#: Instead of python3: notes its arguments.
NOTES = f'#!{sys.executable}\nimport sys\nprint(repr(sys.argv[1:]), file=open({{file!r}}, "a"))\n'


def test_the_next_call_does_what_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs every stage from the second on, and its commands have existing parameters."""
    (tmp_path / "bin").mkdir()
    for name in ("python3", "nvidia-smi"):
        (tmp_path / "bin" / name).write_text(NOTES.format(file=str(tmp_path / "calls")))
        (tmp_path / "bin" / name).chmod(0o755)
    page = (ROOT / "docs/gpu.md").read_text()
    parts = [
        part
        for words in re.findall(r"scripts/gpu_call\.sh ([a-z ]+?) *(?:#|$)", page, re.MULTILINE)
        for part in words.split()
    ]
    env = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OUT": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(["sh", "scripts/gpu_call.sh", *parts], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["sh", "scripts/gpu_call.sh", "all"], cwd=ROOT, env=env, capture_output=True).returncode == 2
    calls = [ast.literal_eval(line) for line in (tmp_path / "calls").read_text().splitlines()]
    checked = [check_gpu.parser().parse_args(call[1:]) for call in calls if call[0] == "scripts/check_gpu.py"]
    stages = [int(stage) for arguments in checked for stage in arguments.stages.split(",")]
    assert sorted(stages) == [stage for stage in check_gpu.STAGES if stage > 1]  # later ones compile what they need
    audits = [call[3:] for call in calls if call[:3] == ["-m", "specbench.cli", "audit"]]
    assert len(audits) == 5
    for words in audits:
        assert "audit.device=cuda" in words
        assert audit_plan.planned(
            [word for word in words if not word.startswith(("audit.device=", "out="))]
        ).measurements
    [bench] = [call[3:] for call in calls if call[:3] == ["-m", "specbench.cli", "bench"]]
    words = [word for word in bench if not word.startswith(("bench.", "out=", "forced_accept="))]
    assert configuration.compose(words)["engine"] == "triton"


def test_the_tests_for_a_gpu_are_collected_without_hydra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE.replace("HANGS", "''"))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    names = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert "tests/test_gpu.py::test_no_step_waits_for_the_host" in names


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
@pytest.mark.parametrize("triton", [True, False])
def test_where_triton_is_nothing_is_set_up(triton: bool, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$*" in *triton*) exit {int(not triton)};; esac\n'
    )
    python.chmod(0o755)
    subprocess.run(["make", "gpu", f"PYTHON={python}", "ARGS=--stages 1"], cwd=tmp_path, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ("-m venv .venv" in calls) == (not triton)
    assert ("scripts/check_gpu.py --stages 1" in calls) == triton


def test_what_travels_to_a_gpu_is_small() -> None:
    """A machine takes 64 MiB: the tracked files and wheels, except the files that docs/gpu.md says to move away."""
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    item = page.partition("Move away before a call: ")[2].split("\n- ")[0]
    globs = [pattern for pattern in re.findall(r"`([\w/*.]+)`", item) if "/" in pattern]
    away = {file.relative_to(ROOT).as_posix() for pattern in globs for file in ROOT.glob(pattern)}
    assert len(away) >= len(globs) > 2
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and name not in away]
    assert 10 << 20 < sum(file.lstat().st_size for file in files if file.is_symlink() or file.exists()) < 60 << 20


def test_stages_share_the_time_and_tuned_tiles_are_kept(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's tuned tiles are next to its lines; the gates read them there, and tuning writes them there."""
    (tmp_path / "earlier.json").write_text("{}")
    _, lines, _ = run("--stages=5", "--seconds=0", f"--tiles={tmp_path / 'earlier.json'}")
    assert [line["note"] for line in lines if line["ok"] is False] == ["stopped after 1 s"]
    stored = tmp_path / "made" / results.TILES
    assert stored.read_text() == "{}"
    monkeypatch.setenv("OUT", str(stored.parent))
    tiles = gates.stored_tiles()
    tiles.tuned["a"] = Tile(1, 0)
    tiles.save()
    assert gates.stored_tiles().tuned == {"a": Tile(1, 0)}


def test_a_stage_that_hangs_is_stopped_and_the_next_one_runs(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check_gpu.STAGES, 4, (*check_gpu.STAGES[4][:2], 1))
    began = time.monotonic()
    code, lines, output = run("--stages=4,1,3", "--fast", "--patience=5", hangs="4")
    assert code == 1
    assert [line["check"] for line in lines if line["ok"] is False] == ["stage 4"]
    assert lines[0]["note"] == "stopped after 5 s"
    assert "FAIL  stage 4  stage 4" in output
    assert "stage 1: 3 passed, 0 failed, 0 skipped" in output
    assert "stage 3: 3 passed, 0 failed, 0 skipped" in output
    assert all(line["registers"] > 0 for line in lines if line["stage"] == 1)
    assert time.monotonic() - began < 100  # as long as stage 4 sleeps


def test_a_line_states_its_measurements(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"

    def skipped() -> dict[str, Any]:
        raise results.SkippedError("no such device")

    checks = [
        ("slow", lambda: {"ok": False, "measured": 1.5, "gate": 1.0, "aim": 0.7, "floor": 0.5, "unit": "ms"}),
        ("broken", lambda: 1 / 0),
        ("absent", skipped),
        ("done before", lambda: 1 / 0),
        ("fine", lambda: {"measured": 0.9, "gate": 1.0, "unit": "ms", "device": "H200"}),
    ]
    results.carry_out(checks, 4, "a", file, {"done before"}, again=False)
    results.append(file, {"run": "b", "stage": 4, "check": "another run's", "ok": False})
    with file.open("a") as f:
        f.write('{"run": "a", "stage": 4, "che')  # cut off
    lines = results.read(file, "a")
    assert [line["ok"] for line in lines] == [False, False, None, True]
    assert results.summary(lines).splitlines() == [
        f"FAIL  stage 4  {'slow':44s}  1.500 ms  gate 1.000  aim 0.700  floor 0.500",
        f"FAIL  stage 4  {'broken':44s}  ZeroDivisionError: division by zero",
        f"PASS  stage 4  {'fine':44s}  0.900 ms  gate 1.000  H200",
        f"SKIP  stage 4  {'absent':44s}  SKIPPED: no such device",
        "stage 4: 1 passed, 2 failed, 1 skipped",
    ]


def test_after_an_error_of_the_device_another_process_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed check is repeated with kernels one by one, then the others follow."""
    file, started = tmp_path / "lines.jsonl", []

    def lost() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    checks = [("a", dict), ("b", lost), ("c", dict)]

    def process(stage: int, run: str, file: Path, fast: bool, again: str, end: float) -> int:
        started.append(again)
        done = {line["check"] for line in results.read(file, run)}
        try:
            chosen = [check for check in checks if check[0] == again] if again else checks
            results.carry_out(chosen, stage, run, file, set() if again else done, bool(again))
        except results.DeviceLostError:
            return check_gpu._LOST
        return check_gpu._LOST if again else 0

    monkeypatch.setattr(check_gpu, "_process", process)
    check_gpu.carry_out(2, "r", file, False, 100.0)
    assert started == ["", "b", ""]
    lines = results.read(file, "r")
    assert [(line["check"], line["ok"], "launch_blocking" in line) for line in lines] == [
        ("a", True, False), ("b", False, False), ("b", False, True), ("c", True, False),
    ]  # fmt: skip


def test_a_gate_is_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, bytes_a_second, gate in (
        ("NVIDIA H200", 4.0e12, 1.0),
        ("NVIDIA H100 80GB HBM3", 3.1e12, 1.0 + 4.3 * (1 / 3.0 - 1 / 4.3)),
        ("NVIDIA A100", 1.5e12, 1.0 + 4.3 * (1 / 1.5 - 1 / 4.3)),
    ):
        monkeypatch.setattr(gates, "device_name", lambda name=device: name)
        monkeypatch.setattr(gates, "speed", lambda speed=bytes_a_second: speed)
        good, bad = (gates.line(gate + more, 1.0, 4_300_000_000) for more in (-0.01, 0.01))
        assert good["gate"] == pytest.approx(gate)
        assert good["floor"] == pytest.approx(4.3e12 / bytes_a_second)
        assert (good["ok"], bad["ok"]) == (True, False)
