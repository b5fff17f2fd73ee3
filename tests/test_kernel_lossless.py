"""The kernels of block and traversal verification against the plain functions: compiled on CUDA, by Triton's
interpreter elsewhere. Rows, nodes and tokens are few, since the interpreter runs every program for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernel_verification import CHAIN, DEVICE, drafted, grown, judged, same, shared

from specbench.decoding.rules import Band, Mentored, Rule, exact
from specbench.decoding.trees import Tree, build, parse
from specbench.decoding.verify import Verification
from specbench.decoding.verify.block import BlockVerification
from specbench.decoding.verify.traversal import Traversal
from specbench.engine.kernels import FusedKernels, lossless

ROWS = 4
BLOCK, TRAVERSAL = BlockVerification(), Traversal()
TREE = parse("[[0],[1],[2],[0,0],[0,1]]")
WAYS = {"block": (BLOCK, shared(CHAIN)), "chain": (TRAVERSAL, shared(CHAIN)), "tree": (TRAVERSAL, shared(TREE))}


def agree(way: Verification, tree: Tree, size: int, kind: str, rule: Rule | None = None, seed: int = 0) -> None:
    """The same path and the same tokens for the same uniforms."""
    rule, number = rule or exact(), torch.arange(tree.nodes, device=DEVICE).expand(ROWS, -1)
    sampled = {"mixed": number % 3 != 2, "deterministic": number < 0}.get(kind)
    p, draft = drafted(tree, size, size // 2 + 1, sampled, ROWS)
    draft = replace(draft, replacement=kind == "with replacement")
    before = p.clone(), draft.probs.clone()
    plain = judged(p, draft, rule, seed, way=way)
    same(judged(p, draft, rule, seed, FusedKernels(), way), plain)
    assert len(set(plain.length.tolist())) > 1  # it is not settled at the root
    assert torch.equal(p, before[0])
    assert torch.equal(draft.probs, before[1])


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("block", ("sampled", "mixed", "deterministic")),
        ("chain", ("sampled",)),
        ("tree", ("sampled", "mixed", "deterministic", "with replacement")),
    ],
)
def test_the_same_verdict_for_the_same_numbers(name: str, kinds: tuple[str, ...]) -> None:
    """Over a vocabulary that no 16 divide. A row has a shortened draft, and another fewer tokens than siblings."""
    for kind in kinds:
        agree(*WAYS[name], 19, kind)


def test_a_vocabulary_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "_BLOCK", 16)
    for name in ("block", "tree"):
        agree(*WAYS[name], 37, "sampled")


def test_a_block_of_what_a_rule_emits() -> None:
    """Where a draft ends early, the next token comes from the target's own distribution: the kernel drew it from what
    the rule emits."""
    agree(BLOCK, shared(CHAIN), 19, "sampled", Band(0.45, 0.5, 3))
    agree(BLOCK, shared(CHAIN), 19, "mixed", Mentored(0.05))


@pytest.mark.parametrize("name", ["block", "tree"])
def test_numbers_that_are_not_finite(name: str) -> None:
    """They are rejected and stay in what the next token is drawn from, so that the step's statistics show them."""
    way, tree = WAYS[name]
    p, draft = drafted(tree, 19, 10, None, ROWS)
    p[0] = torch.nan
    p[3, 0, 5] = torch.nan
    draft.probs[1] = torch.nan
    found, plain = (judged(p, draft, exact(), 0, kernels, way) for kernels in (FusedKernels(), None))
    assert torch.equal(found.path, plain.path)
    torch.testing.assert_close(found.next_probs, plain.next_probs, rtol=1e-3, atol=1e-7, equal_nan=True)
    assert found.next_probs[0].isnan().all()
    assert found.tokens[0].max() < 19


def test_rows_with_a_tree_of_their_own() -> None:
    """And more siblings than the drafter has tokens."""
    agree(TRAVERSAL, grown(8, 3, 4, ROWS), 5, "sampled")


def test_a_tree_without_nodes() -> None:
    tree = build([]).to(DEVICE)
    p, draft = drafted(shared(CHAIN), 19, 3, None, ROWS)
    empty = replace(draft, tree=tree, tokens=draft.tokens[:, :1], probs=draft.probs[:, :0], valid=draft.valid[:, :1])
    for way in (TRAVERSAL, BLOCK):
        assert judged(p[:, :1], empty, exact(), 0, FusedKernels(), way).length.eq(0).all()
