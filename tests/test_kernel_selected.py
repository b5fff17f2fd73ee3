"""The kernels of selected-path verification against the plain functions: compiled on CUDA, by Triton's interpreter
elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernel_verification import CHAIN, DEVICE, drafted, grown, judged, same, shared, uniforms

from specbench.decoding.rules import Band, exact
from specbench.decoding.sampling import draw_several
from specbench.decoding.trees import Tree, build, parse
from specbench.decoding.verify import Draft, Verdict
from specbench.decoding.verify.selected import Selected

pytest.importorskip("triton")
from specbench.engine.kernels import FusedKernels, selected

ROWS = 6
TREE, PAIRS = parse("[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1]]"), parse("[[0],[1],[0,0],[0,1],[1,0],[1,1]]")


def siblings(tree: Tree, size: int, kind: str = "sampled", coarse: bool = False) -> tuple[torch.Tensor, Draft]:
    """A target's distributions, and a draft whose siblings are drawn with replacement or, of two, without. coarse: from
    distributions of bfloat16 numbers, of which many are equal."""
    number = torch.arange(tree.nodes, device=DEVICE).expand(ROWS, -1)
    of = {"mixed": (number % 3 != 2) & (tree.parent != 0), "deterministic": number < 0}.get(kind)
    p, draft = drafted(tree, size, size // 2 + 1, of, ROWS)
    if coarse:
        p, q = (x.bfloat16().float() for x in (p, draft.probs))
        p, draft = p / p.sum(-1, keepdim=True), replace(draft, probs=q / q.sum(-1, keepdim=True))
    if kind != "pairs":
        drawn = draw_several(draft.probs, uniforms(ROWS, draft.probs.shape[1], tree.width, seed=2))
        tokens = torch.zeros(ROWS, tree.nodes + 1, dtype=torch.int64, device=DEVICE)
        children = tree.children.expand(ROWS, -1, -1)
        tokens.scatter_(1, torch.where(children >= 0, children, tree.nodes).flatten(1), drawn.flatten(1))
        draft = replace(draft, tokens=tokens[:, :-1].contiguous(), replacement=True)
    return p, draft


def agree(way: Selected, p: torch.Tensor, draft: Draft, seeds: int = 2) -> list[Verdict]:
    found = []
    for seed in range(seeds):
        before = p.clone(), draft.probs.clone()
        plain = judged(p, draft, exact(), seed, way=way)
        fused = judged(p, draft, exact(), seed, FusedKernels(), way)
        same(fused, plain)
        torch.testing.assert_close(fused.share, plain.share, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert torch.equal(p, before[0])
        assert torch.equal(draft.probs, before[1])
        found.append(plain)
    return found


@pytest.mark.parametrize(
    ("kind", "coarse"),
    [("sampled", False), ("sampled", True), ("mixed", False), ("deterministic", True), ("pairs", False)],
)
def test_the_same_verdict_for_the_same_numbers(kind: str, coarse: bool) -> None:
    """Over a vocabulary that no 16 divide. A row has a shortened draft, and another one token alone."""
    found = agree(Selected(), *siblings(shared(PAIRS if kind == "pairs" else TREE), 19, kind, coarse))
    assert len({n for plain in found for n in plain.length.tolist()}) > 2
    assert any(plain.share is not None and (plain.share > 0).any() for plain in found) or kind == "deterministic"


def test_shares() -> None:
    """One for all, and more of them than are tried at once."""
    for way in (Selected(0.0), Selected(0.6), Selected(1.0), Selected(grid=1), Selected(grid=20)):
        agree(way, *siblings(shared(TREE), 19), seeds=1)


def test_blocks_of_a_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected, "_BLOCK", 16)
    monkeypatch.setattr(selected, "_PIECE", 8)
    agree(Selected(), *siblings(shared(TREE), 37), seeds=1)
    agree(Selected(), *siblings(shared(PAIRS), 37, "pairs"), seeds=1)


def test_chains() -> None:
    """Nothing is selected."""
    for plain in agree(Selected(), *siblings(shared(CHAIN), 19, "mixed")):
        assert plain.share is not None
        assert plain.share.isnan().all()


def test_rows_with_a_tree_of_their_own() -> None:
    agree(Selected(), *siblings(grown(9, 3, 4, ROWS), 19), seeds=1)


def test_numbers_that_are_not_finite() -> None:
    """They are rejected and stay in what the next token is drawn from, so that the step's statistics show them."""
    p, draft = siblings(shared(TREE), 19)
    p[0] = torch.nan
    p[3, 0, 5] = torch.nan
    draft.probs[4] = torch.nan
    found, plain = (judged(p, draft, exact(), 0, kernels, Selected()) for kernels in (FusedKernels(), None))
    assert torch.equal(found.path, plain.path)
    torch.testing.assert_close(found.next_probs, plain.next_probs, rtol=1e-3, atol=1e-7, equal_nan=True)
    assert found.next_probs[0].isnan().all()
    assert found.tokens[0].max() < 19


def test_what_a_rule_emits_is_left_to_the_plain_functions() -> None:
    p, draft = siblings(shared(TREE), 19)
    same(*(judged(p, draft, Band(0.45, 0.5, 3), 0, kernels, Selected()) for kernels in (FusedKernels(), None)))


def test_a_tree_without_nodes() -> None:
    p, draft = siblings(shared(CHAIN), 19)
    tree = build([]).to(DEVICE)
    empty = replace(draft, tree=tree, tokens=draft.tokens[:, :1], probs=draft.probs[:, :0], valid=draft.valid[:, :1])
    assert judged(p[:, :1], empty, exact(), 0, FusedKernels(), Selected()).length.eq(0).all()
