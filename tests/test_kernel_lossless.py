"""The kernels of block and traversal verification against the plain functions: compiled on CUDA, by Triton's
interpreter elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernel_verification import CHAIN, DEVICE, ROWS, TOPOLOGIES, TREE, drafted, judged, same, shared

from specbench.decoding.rules import exact
from specbench.decoding.trees import Tree, build
from specbench.decoding.verify import Verification
from specbench.decoding.verify.block import BlockVerification
from specbench.decoding.verify.traversal import Traversal
from specbench.engine.kernels import FusedKernels

WAYS = {
    "block": (BlockVerification(), shared(CHAIN)),
    "chain": (Traversal(), shared(CHAIN)),
    "tree": (Traversal(), shared(TREE)),
}


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic", "with replacement"])
@pytest.mark.parametrize("name", WAYS)
def test_the_same_verdict_for_the_same_numbers(name: str, kind: str) -> None:
    """Over a vocabulary that no 16 divide."""
    way, tree = WAYS[name]
    number = torch.arange(tree.nodes, device=DEVICE).expand(ROWS, -1)
    sampled = {"mixed": number % 3 != 2, "deterministic": number < 0}.get(kind)
    p, draft = drafted(tree, 77, 40, sampled)
    draft = replace(draft, replacement=kind == "with replacement")
    before = p.clone(), draft.probs.clone()
    plain = judged(p, draft, exact(), 0, way=way)
    same(judged(p, draft, exact(), 0, FusedKernels(), way), plain)
    assert len(set(plain.length.tolist())) > 1  # it is not settled at the root
    assert torch.equal(p, before[0])
    assert torch.equal(draft.probs, before[1])


@pytest.mark.parametrize("name", WAYS)
def test_a_vocabulary_of_several_blocks(name: str) -> None:
    way, tree = WAYS[name]
    p, draft = drafted(tree, 9001, 3000, None)
    same(judged(p, draft, exact(), 0, FusedKernels(), way), judged(p, draft, exact(), 0, way=way))


@pytest.mark.parametrize("name", WAYS)
def test_numbers_that_are_not_finite(name: str) -> None:
    """They are rejected and stay in what the next token is drawn from, so that the step's statistics show them."""
    way, tree = WAYS[name]
    p, draft = drafted(tree, 77, 40, None)
    p[0] = torch.nan
    p[3, 0, 5] = torch.nan
    draft.probs[4] = torch.nan
    found, plain = (judged(p, draft, exact(), 0, kernels, way) for kernels in (FusedKernels(), None))
    assert torch.equal(found.path, plain.path)
    torch.testing.assert_close(found.next_probs, plain.next_probs, rtol=1e-3, atol=1e-7, equal_nan=True)
    assert found.next_probs[0].isnan().all()
    assert found.tokens[0].max() < 77


@pytest.mark.parametrize("name", ["chain", "eagle", "grown"])
def test_topologies(name: str) -> None:
    """Long chains, rows with a tree of their own, and more siblings than the drafter has tokens."""
    tree = TOPOLOGIES[name]
    ways: list[Verification] = [Traversal(), *([BlockVerification()] if tree.is_chain else [])]
    for seed, sampled in enumerate((None, torch.zeros(ROWS, tree.nodes, dtype=torch.bool, device=DEVICE))):
        p, draft = drafted(tree, 19, 3, sampled)
        for way in ways:
            same(judged(p, draft, exact(), seed, FusedKernels(), way), judged(p, draft, exact(), seed, way=way))


def test_a_tree_without_nodes() -> None:
    tree: Tree = build([]).to(DEVICE)
    p, draft = drafted(shared(CHAIN), 19, 3, None)
    empty = replace(draft, tree=tree, tokens=draft.tokens[:, :1], probs=draft.probs[:, :0], valid=draft.valid[:, :1])
    for way in (Traversal(), BlockVerification()):
        assert judged(p[:, :1], empty, exact(), 0, FusedKernels(), way).length.eq(0).all()
