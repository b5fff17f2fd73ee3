"""Blocks that are compiled by `torch.compile` compute what plain blocks compute, and one compilation serves all layers
of the same shapes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import test_engine
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.decoding.loop import DecoderConfig, Decoding, decode
from specbench.decoding.rules import exact
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import build, chain_paths
from specbench.engine import ops
from specbench.engine.compiled import BlockCall, call_block, compiling, inductor
from specbench.engine.graph import Graphs
from specbench.models.unified import Prompts, Unified, UnifiedConfig, image_tokens

SAMPLING = Sampling(cfg_scale=2.0, top_k=4)


@pytest.fixture(autouse=True)
def new_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def traced(compilations: Counter[str]) -> Callable[[], BlockCall]:
    """Compiles by PyTorch's own operations: where the trace has a break, an error. Counts compilations by the shape of
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
    """A target with an image grammar, norms of queries and keys, two query heads a key head, and a padded prompt."""
    torch.manual_seed(0)
    target = Unified(
        UnifiedConfig(32, 2, 4, 2, 48, 8, qk_norm=2), image_tokens(torch.arange(5), 3, 3, 5, [6])
    )
    for p in target.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.3)
    valid = torch.tensor([[False, True, True], [True, True, True]])
    ids = torch.arange(6).view(2, 3)
    return target.eval().requires_grad_(False), Prompts(ids, valid, ids.flip(1), valid)


@pytest.mark.parametrize(("make", "name"), [
    (llamagen, "none"),
    (llamagen, "chain"),
    (llamagen, "tree"),
    (llamagen, "draft_model"),
    (llamagen, "zipar"),
    (unified, "sjd"),
    (unified, "tree"),
])  # fmt: skip
def test_compiled_steps_give_the_same_bits(
    make: Callable[[], tuple[Any, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, with products that are one operation, as on CUDA."""
    monkeypatch.setattr(ops, "product", F.linear)
    target, given = make()
    config = DecoderConfig(target, test_engine.DRAFTERS[name](target), exact(), SAMPLING, emitted_draws=2)
    compilations: Counter[str] = Counter()
    engine = Graphs(compiling(test_engine.at_once, traced(compilations)))
    assert tiny.equal(*(tiny.results(decode(config, given, tiny.rng(2), one)) for one in (engine, None)))
    print(name, compilations)
