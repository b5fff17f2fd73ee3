"""`scripts/check_gpu.py` and `scripts/gpu_call.sh` without a GPU: rows, failures, and the commands of a call."""

from __future__ import annotations

import ast
import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import check_gpu
from gpu_checks import speed

from specbench.audit import plan as audit_plan
from specbench.bench import floor
from specbench.bench.benchmark_rows import COLUMNS
from specbench.cli.measurements import bench
from specbench.config import configuration

ROOT = Path(__file__).resolve().parents[2]


def test_a_dry_run_does_everything_and_times_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part in a process of its own; here in this one, which has imported everything."""
    started = []

    def run(command: list[str]) -> SimpleNamespace:
        started.append(command[:2])
        return SimpleNamespace(returncode=check_gpu.main(command[2:]))

    monkeypatch.setattr(check_gpu, "subprocess", SimpleNamespace(run=run))
    for speed_of in ("bandwidth", "arithmetic"):  # products in bfloat16 take half a minute on a CPU; test_bench
        monkeypatch.setattr(floor, speed_of, lambda *_: 1e9)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "rows.csv"
    assert check_gpu.main(["gates", "speed", f"--out={out}"]) == 0
    assert started == [[sys.executable, str(ROOT / "scripts/check_gpu.py")]] * 2
    rows = check_gpu.ROWS.read(out)
    assert {row["stage"] for row in rows} == {"4", "6"}
    assert {row["result"] for row in rows} == {"SKIP"}
    assert not any(row["measured"] for row in rows)
    assert all(row[name] for row in rows for name in ("torch", "triton", "python", "device_name", "time"))
    assert len(rows) == 6


def test_committed_rows_have_the_columns() -> None:
    with (ROOT / "results/gpu/checks.csv").open(newline="") as f:
        assert next(csv.reader(f)) == [*check_gpu.ROWS.columns]


def test_after_a_failure_the_next_check_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        ("broken", lambda: 1 / 0),
        ("slow", lambda: {"ok": False, "measured": 1.23456789, "gate": 1.0, "unit": "ms"}),
        ("fine", dict),
    ]
    monkeypatch.setattr(speed, "gates", lambda: iter(checks))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check_gpu, "environment", lambda cuda: {"device_name": "H200"})
    assert check_gpu.main(["gates", f"--out={tmp_path / 'rows.csv'}"]) == 1
    broken, slow, fine = check_gpu.ROWS.read(tmp_path / "rows.csv")
    assert (broken["result"], broken["note"]) == ("FAIL", "ZeroDivisionError: division by zero")
    assert (slow["result"], slow["measured"], slow["device_name"]) == ("FAIL", "1.23457", "H200")
    assert fine["result"] == "PASS"


def test_gates_are_existing_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    for small in (True, False):
        monkeypatch.setattr(speed, "small", lambda small=small: small)
        for words, column, by, _ in speed.GATES.values():
            line = bench.read(speed.arguments(words))
            assert line is not None
            cfg = configuration.grid(line.others, multirun=False)[0].cfg
            assert (cfg.weights, cfg.device) == ("random", "cpu" if small else "cuda")
            assert column in COLUMNS
            assert by in COLUMNS if column != "node_cost" else int(by) in line["bench.nodes"] or small


#: Instead of python3: notes its arguments.
NOTES = f'#!{sys.executable}\nimport sys\nprint(repr(sys.argv[1:]), file=open({{file!r}}, "a"))\n'


def test_the_next_call_does_what_its_page_says(tmp_path: Path) -> None:
    """Its commands have existing parameters."""
    (tmp_path / "bin").mkdir()
    for name in ("python3", "nvidia-smi"):
        (tmp_path / "bin" / name).write_text(NOTES.format(file=str(tmp_path / "calls")))
        (tmp_path / "bin" / name).chmod(0o755)
    page = (ROOT / "docs/gpu.md").read_text()
    lines = re.findall(r"scripts/gpu_call\.sh ([a-z ]+?) *(?:#|$)", page, re.MULTILINE)
    parts = [part for words in lines for part in words.split()]
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OUT": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(["sh", "scripts/gpu_call.sh", *parts], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["sh", "scripts/gpu_call.sh", "all"], cwd=ROOT, env=env, capture_output=True).returncode == 2
    calls = [ast.literal_eval(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call[1] for call in calls if call[0] == "scripts/check_gpu.py"] == [*check_gpu.PARTS]
    assert any(call[:2] == ["-m", "pytest"] for call in calls)
    audits = [call[3:] for call in calls if call[:3] == ["-m", "specbench.cli", "audit"]]
    assert len(audits) == 5
    for words in audits:
        assert "audit.device=cuda" in words
        words = [word for word in words if not word.startswith(("audit.device=", "out="))]
        assert audit_plan.planned(words).measurements
    [line] = [call[3:] for call in calls if call[:3] == ["-m", "specbench.cli", "bench"]]
    words = [word for word in line if not word.startswith(("bench.", "out=", "forced_accept="))]
    assert configuration.compose(words).engine == "triton"


def test_the_tests_for_a_gpu_are_collected_on_a_bare_machine(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("""
import sys
GONE = {"hydra", "omegaconf", "antlr4", "transformers", "huggingface_hub", "torchmetrics", "tokenizers", "pycocotools"}
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
""")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    names = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert "tests/engine/test_gpu.py::test_no_step_waits_for_the_host" in names


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
    subprocess.run(["make", "gpu", f"PYTHON={python}", "ARGS=compile"], cwd=tmp_path, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ("-m venv .venv" in calls) == (not triton)
    assert ("scripts/check_gpu.py compile" in calls) == triton


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


def test_a_gate_is_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4.3 GB that are read."""
    for device, bytes_a_second, gate in (
        ("NVIDIA H200", 4.0e12, 1.0),
        ("NVIDIA H100 80GB HBM3", 3.1e12, 1.0 + 4.3 * (1 / 3.0 - 1 / 4.3)),
        ("NVIDIA A100", 1.5e12, 1.0 + 4.3 * (1 / 1.5 - 1 / 4.3)),
    ):
        monkeypatch.setattr(speed, "device_name", lambda name=device: name)
        least = 1e3 * 4_300_000_000 / bytes_a_second
        good, bad = (speed.gated(gate + more, 1.0, least, bytes_a_second) for more in (-0.01, 0.01))
        assert good["gate"] == pytest.approx(gate)
        assert good["floor"] == least
        assert (good["ok"], bad["ok"]) == (True, False)
