"""The fused kernels against the plain functions that specify them: compiled on CUDA, by Triton's interpreter
elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import test_engine
import tiny
import torch
from torch import Tensor

from specbench.decoding.loop import decode
from specbench.decoding.sampling import Sampling
from specbench.engine.graph import Graphs

pytest.importorskip("triton")
from specbench.engine.kernels import FusedKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("top_k", [None, 1, 7, 99, 100, 500])
@torch.inference_mode()
def test_distributions(top_k: int | None) -> None:
    logits = 3 * normal(4, 2, 100)
    logits[0] = logits[0].round()  # ties, zeros of both signs
    logits[1, :, 3:] = -torch.inf  # what a grammar forbids; fewer are left than top_k
    sampling = Sampling(temperature=0.7, top_k=top_k)
    plain = sampling.probs(logits)
    probs = replace(sampling, kernels=FusedKernels()).probs(logits)
    assert torch.equal(probs > 0, plain > 0)
    torch.testing.assert_close(probs, plain, rtol=1e-4, atol=1e-7)
    for sampling in (Sampling(0.0), Sampling(1.0, None, 0.5)):  # greedy and top-p have no kernel
        assert torch.equal(replace(sampling, kernels=FusedKernels()).probs(logits), sampling.probs(logits))


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
        config = test_engine.configured(target, name, sampling=Sampling(cfg_scale=2.0, top_k=4))
        outs.append(decode(config, given, tiny.rng(1, 4, DEVICE), engine))
        assert bool(used) == (len(outs) == 2)
    one, two = outs
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.steps, two.steps)
    torch.testing.assert_close(astuple(one.trace), astuple(two.trace), rtol=1e-5, atol=1e-3)


def test_every_kernel_compiles_for_hopper() -> None:
    """The interpreter takes what the compiler does not."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert names == {"_probs", "_verify", "_choose", "_write", "_siblings"}  # those of layers: test_ptxas
