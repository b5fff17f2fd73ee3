"""Blocks compiled by `torch.compile` compute the same as plain blocks, and one compilation serves all layers of the
same shapes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_engine
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rules import exact
from specbench.decoding.sampling import Sampling
from specbench.engine import ops
from specbench.engine.graph import BlockCall, Graphs, Recorder, call_block, compiling
from specbench.engine.masks import TreeMask
from specbench.engine.ops import KVCache
from specbench.models.transformer import Block, BlockConfig, line_rotary, run_blocks
from specbench.models.unified import Prompts, Unified, UnifiedConfig, image_tokens

SAMPLING = Sampling(cfg_scale=2.0, top_k=4)


@pytest.fixture(autouse=True)
def new_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def traced(compilations: Counter[str]) -> Callable[[], BlockCall]:
    """Compiles with PyTorch's own operations; a break in the trace is an error. Counts compilations by the shape of
    their input."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(module: Any, inputs: list[Tensor]) -> Any:
        compilations[str(tuple(inputs[0].shape))] += 1
        return aot_eager(module, inputs)

    call = torch.compile(call_block, backend=backend, fullgraph=True, dynamic=False)
    return lambda: call


def llamagen() -> tuple[Any, Any]:
    return tiny.llamagen(side=4), test_engine.conditioning(2, 0)


def unified() -> tuple[Any, Any]:
    """A target with an image grammar, norms of queries and keys, two query heads per key head, and a padded prompt."""
    torch.manual_seed(0)
    target = Unified(UnifiedConfig(32, 2, 4, 2, 48, 8, qk_norm=2), image_tokens(torch.arange(5), 3, 3, 5, [6]))
    for p in target.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.3)
    valid = torch.tensor([[False, True, True], [True, True, True]])
    ids = torch.arange(6).view(2, 3)
    return target.eval().requires_grad_(False), Prompts(ids, valid, ids.flip(1), valid)


@pytest.mark.parametrize(("make", "name", "shapes"), [
    (llamagen, "none", 1),
    (llamagen, "chain", 3),  # the target, the newest entries, and a node at a time
    (llamagen, "tree", 3),
    (llamagen, "eagle2", 5),  # blocks with and without an input norm
    (llamagen, "draft_model", 3),
    (llamagen, "zipar", 1),
    (unified, "sjd", 1),
    (unified, "tree", 3),
])  # fmt: skip
def test_compiled_steps_give_the_same_bits(
    make: Callable[[], tuple[Any, Any]], name: str, shapes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, with products that are one operation, as on CUDA. One compilation serves all layers of the same
    shapes; a prefill is not compiled."""
    monkeypatch.setattr(ops, "product", F.linear)
    target, conditioning = make()
    config = DecoderConfig(target, test_engine.DRAFTERS[name](target), exact(), SAMPLING, emitted_draws=2)
    compilations: Counter[str] = Counter()
    engine = Graphs(compiling(test_engine.at_once, traced(compilations)))
    assert tiny.equal(
        *(tiny.results(decode(config, conditioning, tiny.rng(2), executed)) for executed in (engine, None))
    )
    assert compilations.total() == shapes


def one_pass(blocks: nn.ModuleList, nodes: int, record: Recorder) -> tuple[Tensor, KVCache]:
    """Outputs of a pass over two rows, which begin at slots 3 and 5, and its cache of 40 slots."""
    cfg: Any = blocks[0].attention.cfg
    like, rng = blocks[0].ffn_norm.weight, torch.Generator().manual_seed(nodes)
    cache = KVCache(len(blocks), 2, cfg.n_kv_heads, 40, cfg.head_dim, like)
    for stored in (cache.k, cache.v):
        stored.normal_(generator=rng)
    x = torch.randn(2, nodes, cfg.dim, generator=rng).to(like)
    slots = torch.tensor([[3], [5]]) + torch.arange(nodes)
    mask, rope = TreeMask.chain(torch.tensor([0, 2]), slots), line_rotary(40, cfg.head_dim, 1e4)[slots]
    out: list[Tensor] = []
    [replay] = record(
        {"a pass": lambda: out.append(run_blocks(blocks, x, rope, mask, cache, slots))}, torch.device("cpu")
    )
    replay()
    return out[-1], cache


@torch.inference_mode()
def test_there_are_more_shapes_than_dynamo_compiles_by_default() -> None:
    graphs: list[Any] = []
    call = torch.compile(
        call_block, backend=lambda module, inputs: graphs.append(module) or module, fullgraph=True, dynamic=False
    )
    blocks = nn.ModuleList([Block(BlockConfig(16, 2, 2, 24)).bfloat16()])
    for nodes in range(1, 11):
        one_pass(blocks, nodes, compiling(test_engine.at_once, lambda: call))
    assert len(graphs) == 10 > torch._dynamo.config.recompile_limit


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("error:Torchinductor does not support code generation for complex")
@torch.inference_mode()
def test_inductor_compiles_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without complex numbers, and without a copy of the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(BlockConfig(32, 4, 2, 48)) for _ in range(2)).bfloat16()
    want, plain = one_pass(blocks, 3, test_engine.at_once)
    faster_compilation = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
    with torch._inductor.config.patch(faster_compilation):
        (out, cache), [code] = run_and_get_code(one_pass, blocks, 3, compiling(test_engine.at_once))
    assert code.count("def call(") == 1
    assert "empty_strided_cpu((2, 2, 40, 8)" not in code
    torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
    for x, y in ((cache.k, plain.k), (cache.v, plain.v)):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
        assert torch.equal(x[..., 8:, :], y[..., 8:, :])
