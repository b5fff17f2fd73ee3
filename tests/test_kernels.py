"""The fused kernels against the plain functions that specify them: compiled on CUDA, by Triton's interpreter
elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
import test_engine
import tiny
import torch

from specbench.decoding.loop import decode
from specbench.decoding.sampling import Sampling
from specbench.engine.graph import Graphs

pytest.importorskip("triton")
from specbench.engine.kernels import FusedKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", ["eagle2", "sjd"])
def test_images_of_fused_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens for equal uniforms: the distributions differ by rounding, far less than a uniform is from
    a bound."""
    target = tiny.llamagen().to(DEVICE)
    used: list[str] = []
    kernels = FusedKernels()
    plain = kernels.block
    monkeypatch.setattr(kernels, "block", lambda *a: (used.append("block"), plain(*a))[1])
    given, outs = test_engine.conditioning(1, 1), []
    for engine in (Graphs(test_engine.at_once), Graphs(test_engine.at_once, kernels)):
        config = test_engine.configured(
            target, name, sampling=Sampling(cfg_scale=2.0, top_k=4 if name == "sjd" else None)
        )
        outs.append(decode(config, given, tiny.rng(1, 4, DEVICE), engine))
        assert bool(used) == (len(outs) == 2)
    one, two = outs
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.steps, two.steps)
    torch.testing.assert_close(astuple(one.trace), astuple(two.trace), rtol=1e-5, atol=1e-3)


SAMPLING = "_probs", "_draw", "_draw_distinct", "_uniforms", "_inputs", "_newest", "_level"


def test_every_kernel_compiles_for_hopper() -> None:
    """The interpreter takes what the compiler does not."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert names == {
        *SAMPLING,
        "_verify",
        "_advance",
        "_keep",
        "_choose",
        "_write",
        "_siblings",
    }  # those of layers: test_kernel_layers
