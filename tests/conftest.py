"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import patch_language_once

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    patch_language_once()
os.fsync = lambda descriptor: None  # a test ends no machine, so that nothing needs to be on the disk


try:
    import hydra  # noqa: F401
except ImportError:  # a bare GPU machine: tests for a device are collected, and what needs no command line
    here = Path(__file__).parent.rglob("test_*.py")
    collect_ignore = [str(file) for file in here if not file.name.startswith(("test_gpu", "test_kernel"))]


def pytest_collection_finish() -> None:
    """Objects that are loaded now stay: the garbage collector need not check them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """On a device a failure is written at once, since a run may be cut off. A process that has lost the device ends;
    pytest-xdist starts another one."""
    if not report.failed or not torch.cuda.is_available() or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    if out := os.environ.get("OUT"):
        with Path(out, "failures.log").open("a") as file:
            file.write(f"{report.nodeid} {report.when}\n{report.longreprtext[-6000:]}\n\n")
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(3)


#: Files that take longest. They begin first, so that two processes end at about the same time.
LONGEST = (
    "test_capture", "test_train_drafter", "test_readme", "test_real", "test_embedded", "test_ptxas", "test_cluster",
    "test_models", "test_targets", "test_continuous", "test_audit_command", "test_cli", "test_rehearsal",
    "test_invariance", "test_densities", "test_mar_scenes", "test_audit_bounds", "test_training", "test_engine",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of kernels use the device if one exists."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items:
        if item.path.name.startswith("test_kernel") and torch.cuda.is_available():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in an empty folder with the fake pipeline -> (exit code, stdout, stderr)."""
    from fake_pipeline import FakePipeline

    from specbench import cli
    from specbench.config import registry
    from specbench.harness import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECBENCH_DEBUG", raising=False)
    monkeypatch.setenv("SPECBENCH_HOME", "/dev/null/there")
    monkeypatch.setattr(run, "_load_pipeline", FakePipeline)
    monkeypatch.setattr(run, "check", lambda cfg, elsewhere=False: None)
    check_prompts = run.check_prompts  # official tokenizers are not here
    monkeypatch.setattr(run, "check_prompts", lambda c, i: None if c.weights == "official" else check_prompts(c, i))
    monkeypatch.setattr(registry, "weights_here", lambda cfg: None)

    def run_it(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return run_it


@pytest.fixture
def rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products on the CPU take all rows at once. Otherwise they take 16 at a time, so that images are the same
    in any batch (test_invariance): half the time of a test that draws thousands of images for their distribution."""
    from specbench.engine import invariance, ops

    monkeypatch.setattr(ops, "product", invariance.together)


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure is drawn once, as SVG, and its parts are not arranged, which draws it three times more; its PNG is
    empty. For tests that look at nothing in the picture."""
    from matplotlib.figure import Figure

    save = Figure.savefig

    def once(figure: Figure, path: Path, **how: Any) -> None:
        if path.suffix == ".png":
            path.touch()
            return
        figure.set_layout_engine("none")
        save(figure, path, **how)

    monkeypatch.setattr(Figure, "savefig", once)
