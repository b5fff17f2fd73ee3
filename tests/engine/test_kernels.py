"""The fused kernels against the plain functions that specify them: compiled on CUDA, by Triton's interpreter
elsewhere."""

from __future__ import annotations

from dataclasses import astuple

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


@pytest.mark.parametrize("name", ["vvs", "sjd", "zipar", "pjd", "pjd_released"])
def test_images_of_fused_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal uniforms give equal tokens: the rounding differences of the distributions are much smaller than the
    distance of a uniform from a bound."""
    target = tiny.llamagen().to(DEVICE)
    used: list[str] = []
    kernels = FusedKernels()
    plain = kernels.block
    monkeypatch.setattr(kernels, "block", lambda *a: (used.append("block"), plain(*a))[1])
    images = 2 if name == "sjd" else 1
    conditioning, outs = test_engine.conditioning(images, 1), []
    conditioning = type(conditioning)(conditioning.features.to(DEVICE), conditioning.valid.to(DEVICE))
    for engine in (Graphs(test_engine.at_once), Graphs(test_engine.at_once, kernels)):
        config = test_engine.configured(
            target, name, sampling=Sampling(cfg_scale=2.0, top_k=4 if name == "sjd" else None)
        )
        if hasattr(config.drafter, "head"):
            config.drafter.head.to(DEVICE)
        outs.append(decode(config, conditioning, tiny.rng(images, 4, DEVICE), engine))
        assert bool(used) == (len(outs) == 2)
    plain_out, fused = outs
    assert torch.equal(plain_out.tokens, fused.tokens)
    assert torch.equal(plain_out.steps, fused.steps)
    torch.testing.assert_close(astuple(plain_out.trace), astuple(fused.trace), rtol=1e-5, atol=1e-3, equal_nan=True)
