"""The fused kernels against the plain functions that specify them: compiled on CUDA, by Triton's interpreter
elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import astuple
from functools import partial
from pathlib import Path

import pytest
import test_engine
import tiny
import torch
from torch import Tensor

from specbench.decoding.loop import decode
from specbench.decoding.sampling import Sampling
from specbench.engine import ops
from specbench.engine.graph import Graphs
from specbench.models.transformer import Block, BlockConfig, RMSNorm, grid_rotary, line_rotary, run_blocks

pytest.importorskip("triton")
from specbench.engine.kernels import FusedKernels, attention, products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: float32 sums in another order: 1e-5 of numbers of order one, some hundred of them added up.
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4, check_dtype=False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("rows", [1, 3, 6, 17])  # scalars, the matrix units, and more than these kernels take
@pytest.mark.parametrize("shape", [(33, 40), (64, 600)])  # one block of columns; a full one and a part
@torch.inference_mode()
def test_products(rows: int, shape: tuple[int, int]) -> None:
    out, width = shape
    x, residual = normal(rows, width), normal(rows, out, seed=3)
    weight, gate = normal(out, width, seed=1) / 8, normal(out, width, seed=2) / 8
    norm = RMSNorm(width, 1e-5).to(DEVICE)
    norm.weight.copy_(1 + 0.1 * normal(width, seed=4))
    plain = norm(x) @ weight.T
    close(products.project(x, weight), x @ weight.T)
    close(products.project(x, weight, norm), plain)
    close(products.project(x, weight, torch.nn.Identity()), x @ weight.T)
    close(products.project(x, weight, norm, gate), torch.nn.functional.silu(plain) * (norm(x) @ gate.T))
    close(products.project(x, weight, residual=residual), x @ weight.T + residual)
    close(products.rms_norm(x, norm, residual=x), norm(x) + x)


@pytest.mark.parametrize(("heads", "kv", "dim", "nodes", "slots"), [
    (2, 2, 16, 1, 30),
    (4, 2, 16, 5, 150),  # queries of a group side by side, several shares of the keys
    (3, 3, 20, 40, 70),  # more queries than one program takes when heads share keys; a width that is no power of two
    (6, 1, 16, 12, 70),
])  # fmt: skip
@torch.inference_mode()
def test_attention(heads: int, kv: int, dim: int, nodes: int, slots: int) -> None:
    q, k, v = normal(2, nodes, heads, dim), normal(2, kv, slots, dim, seed=1), normal(2, kv, slots, dim, seed=2)
    mask = normal(2, 1, nodes, slots, seed=3) > 0.3
    mask[0, :, :, :20] = False  # padding, and beyond: full blocks that no query attends to
    mask[1, :, :, 25:] = False
    mask[:, :, :, 22] = True
    plain = ops.attention(q.transpose(1, 2), k, v, mask).transpose(1, 2)
    close(attention.attend(q, k, v, mask), plain)


BLOCKS = {
    "llamagen": BlockConfig(32, 2, 2, 48),
    "grouped": BlockConfig(64, 4, 2, 48, rotary="halves"),
    "chameleon": BlockConfig(64, 4, 4, 48, rotary="halves", qk_norm=4),
    "shared norms": BlockConfig(64, 4, 2, 48, rotary="halves", qk_norm=1),
    "post": BlockConfig(64, 4, 4, 48, rotary="halves", qk_norm=4, post_norm=True),
}


@pytest.mark.parametrize(("name", "first"), [*((name, True) for name in BLOCKS), ("llamagen", False)])
@torch.inference_mode()
def test_a_block_and_its_cache(name: str, first: bool) -> None:
    cfg, rows, nodes, slots = BLOCKS[name], 2, 3, 12
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList([Block(cfg, input_norm=first), Block(cfg)]).to(DEVICE)
    for p in blocks.parameters():
        p.add_(0.2 * normal(*p.shape))
    table = grid_rotary(3, cfg.head_dim, 2) if cfg.rotary == "interleaved" else line_rotary(slots, cfg.head_dim, 1e4)
    x, at = normal(rows, nodes, cfg.dim), torch.tensor([[4, 5, 6], [8, 9, 10]], device=DEVICE)
    mask = (torch.arange(slots, device=DEVICE) <= at.unsqueeze(-1)).unsqueeze(1)
    rope = table.to(DEVICE)[at if first else at[:1]]  # of every row, or the same for all
    plain, fused = (ops.KVCache(2, rows, cfg.n_kv_heads, slots, cfg.head_dim, x) for _ in range(2))
    for cache in (plain, fused):
        cache.k.copy_(normal(*cache.k.shape, seed=7))
        cache.v.copy_(normal(*cache.v.shape, seed=8))
    fused.kernels = FusedKernels()
    close(*(run_blocks(blocks, x, rope, mask, cache, at) for cache in (fused, plain)))
    close(fused.k, plain.k)
    close(fused.v, plain.v)


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


SAMPLING = "_probs", "_draw", "_draw_distinct", "_uniforms"


def test_every_kernel_compiles_for_hopper() -> None:
    """The interpreter takes what the compiler does not."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {line.split()[0] for line in done.stdout.splitlines()}
    names -= {"_project", "_rms_norm", "_swiglu", "_rotate", "_attend", "_combine"}
    assert names == {*SAMPLING, "_verify", "_choose", "_write", "_siblings"}
