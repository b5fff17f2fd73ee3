"""The kernels that gather a pass's inputs, against the plain functions that specify them: compiled on CUDA, by Triton's
interpreter elsewhere. They only copy, so the bits are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_engine
import tiny
import torch
from test_capture import llamagen, unified
from torch import Tensor

from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import build, chain_paths, parse
from specbench.engine.masks import TreeMask
from specbench.models import eagle

pytest.importorskip("triton")
from gpu_checks.parity import poisoned

from specbench.engine.kernels import FusedKernels, inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_BLOCK", 32)


class Recorded:
    """Records the inputs of passes through blocks, and returns them as the output."""

    def __init__(self) -> None:
        self.passes: list[tuple[Tensor, ...]] = []

    def __call__(
        self, blocks: Any, x: Tensor, rope: Tensor, mask: TreeMask, cache: Any, slots: Tensor, *_: Any
    ) -> Tensor:
        dense = mask.dense(torch.arange(cache.slots, device=x.device)) if isinstance(mask, TreeMask) else mask
        self.passes.append((x, rope, slots, dense))
        return x


def on_device(make: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    target, conditioning = make()
    return target.to(DEVICE).requires_grad_(False), type(conditioning)(
        *(x.to(DEVICE) for x in vars(conditioning).values())
    )


@pytest.mark.parametrize(("make", "guided"), [(llamagen, True), (unified, True), (unified, False)])
@torch.inference_mode()
def test_a_target_reads_its_inputs_in_one_launch(
    make: Callable[[], tuple[Any, Any]], guided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first root is in the prefix, and so may be a token before it."""
    target, conditioning = on_device(make)
    for tree in (build([]), build(chain_paths(3)), build(parse("[[0],[1],[0,0],[0,1]]"))):
        tree = tree.to(DEVICE)
        session = target.open(conditioning, 2, guided, tree.nodes)
        tokens = torch.randint(5, (2, tree.nodes), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        count = torch.tensor([0, 4], device=DEVICE)
        first = count[:, None] + (session.prefix_length - 2)
        recorded = Recorded()
        monkeypatch.setattr("specbench.models.language.run_blocks", recorded)
        for kernels in (None, FusedKernels()):
            session.cache.kernels = kernels
            monkeypatch.setattr(target.norm, "forward", lambda x, *_: x)
            with poisoned():
                session.forward(tokens, tree, torch.zeros(2, 9, dtype=torch.int64, device=DEVICE), count)
                session.feed_chain(tokens[:, :2], first + torch.arange(min(2, tree.nodes), device=DEVICE))
        plain, fused = recorded.passes[:2], recorded.passes[2:]
        for plain_pass, fused_pass in zip(plain, fused, strict=True):
            for a, b in zip(plain_pass, fused_pass, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize(("make", "name"), [(llamagen, "chain"), (unified, "tree"), (llamagen, "eagle2")])
@torch.inference_mode()
def test_an_eagle_network_reads_its_inputs_in_one_launch_per_level(
    name: str, make: Callable[[], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, conditioning = on_device(make)
    drafter = test_engine.DRAFTERS[name](target)
    drafter.head.to(DEVICE)
    recorded = Recorded()
    monkeypatch.setattr(eagle, "run_blocks", recorded)
    history = torch.randint(5, (2, 40), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    count, step = torch.tensor([0, 6], device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    drafts, passes = [], []
    for kernels in (None, FusedKernels()):
        session = target.open(conditioning, 2, True, drafter.tree.nodes)
        state = drafter.open(session, conditioning, Sampling(cfg_scale=2.0), tiny.rng(2, device=DEVICE))
        state.pending[:] = torch.randn(state.pending.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        state.fresh[:] = torch.tensor([0, 2], device=DEVICE)
        state.cache.kernels = kernels
        recorded.passes.clear()  # the prefill
        with poisoned():
            drafts.append(drafter.propose(state, history, count, step))
        passes.append([*recorded.passes])
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    for plain_pass, fused_pass in zip(*passes, strict=True):
        for a, b in zip(plain_pass, fused_pass, strict=True):
            assert torch.equal(a, b)
