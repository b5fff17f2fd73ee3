"""Where results were computed: the commit of the code, the device, and the versions of the software."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from specbench.storage.package import __version__


@cache
def commit() -> str:
    """The checkout's commit, with -dirty if its code or configurations differ from it; read once, because a process
    runs the code that it has loaded. Without a checkout or without git, the value of the variable SPECBENCH_COMMIT, or
    ""."""
    root = Path(__file__).resolve().parents[2]
    if _git(root, "rev-parse", "--show-toplevel") != str(root):  # e.g. installed inside another repository
        return os.environ.get("SPECBENCH_COMMIT", "")
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    return head and head + ("-dirty" if _git(root, "status", "--porcelain", "--", "specbench", "conf") else "")


def _git(root: Path, *arguments: str) -> str:
    return _output("git", "-C", str(root), *arguments)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def environment(device: Any) -> dict[str, Any]:
    """The environment in which a process decodes, under the names of a row's columns. `device` is a torch.device.
    Imports torch."""
    import torch

    cuda = device.type == "cuda"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else ""
    return {
        "specbench": __version__,
        "commit": commit(),
        "device": str(device),
        "device_name": device_name(device),
        "torch": torch.__version__,
        "driver": driver.splitlines()[0] if driver else "",
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def device_name(device: Any) -> str:
    """The name of a CUDA device, or of the processor. Imports torch."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
