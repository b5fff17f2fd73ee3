"""Traversal verification and selection among siblings: against plain sequential forms, enumerations and reference
values."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from test_verification import (
    ALPHA,
    FOLDER,
    IMAGES,
    WIDE,
    P,
    Q,
    close,
    drafted,
    equal,
    needs_values,
    run_on_tables,
    verified,
)
from torch import Tensor

from specbench.audit import models
from specbench.audit.tabular import TabularDrafter, sequence_probs
from specbench.audit.tabular import codes as coded
from specbench.config import configuration
from specbench.decoding import rules
from specbench.decoding.image_statistics import of_images
from specbench.decoding.sampling import draw_distinct, draw_several
from specbench.decoding.trees import Tree, build, from_parents, named, parse
from specbench.decoding.verify import VERIFY, Draft, TokenWise, Verdict
from specbench.decoding.verify.block import BlockVerification
from specbench.decoding.verify.selected import Selected, best_of, best_of_pair
from specbench.decoding.verify.traversal import Traversal
from specbench.errors import UsageError
from specbench.harness import run

BUSH = parse("[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,1,0]]")
TREES = {"bush": BUSH, "mc_sim": named("mc_sim_7b_63"), "balanced": named("reverse_balanced_25")}
MODES = ("without", "with", "chosen")


def drafted_tree(paths: Any, mode: str = "without", rows: int = 100, vocab: int = 8) -> tuple[Tensor, Draft]:
    """The target's distributions and a tree whose tokens are sampled from others, or chosen."""
    tree, g = build(paths), torch.Generator().manual_seed(5)
    p = (1.5 * torch.randn(rows, tree.nodes, vocab, generator=g)).softmax(-1)
    near = p[:, tree.inner[0]].log() + torch.randn(rows, tree.inner.shape[1], vocab, generator=g)
    q = near.softmax(-1)
    u = torch.rand(rows, len(q[0]), vocab, generator=g)
    width = tree.width
    drawn = draw_several(q, u[..., :width]) if mode == "with" else draw_distinct(q, u, width)
    if mode == "chosen":
        drawn = q.topk(width, dim=-1).indices
    tokens = torch.zeros(rows, tree.nodes, dtype=torch.int64)
    there = tree.children[0] >= 0
    tokens[:, tree.children[0][there]] = drawn[:, there]
    valid = torch.ones(rows, tree.nodes, dtype=torch.bool)
    return p, Draft(
        tree, tokens, q, valid, torch.zeros_like(valid) if mode == "chosen" else None, replacement=mode == "with"
    )


def sequential(p: Tensor, draft: Draft, row: int, u: Tensor) -> tuple[int, Tensor]:
    """The last accepted node and the distribution of the next token: a child is tried once the subtrees of its elder
    siblings are rejected as a whole, in float64."""
    tree = draft.tree

    def visit(node: int, mass: float) -> tuple[int, Tensor] | None:
        left, slot = p[row, node].double(), int(tree.slot[0, node])
        q = draft.probs[row, slot].double()
        for child in tree.children[0, slot].tolist() if slot >= 0 else []:
            if child < 0 or not draft.valid[row, child]:
                continue
            x = int(draft.tokens[row, child])
            of = q if draft.sampled is None else torch.eye(len(q), dtype=torch.float64)[x]
            if of[x] <= 0:
                continue
            if (found := visit(child, min(1.0, mass * float(left[x] / of[x])))) is not None:
                return found
            rest = (mass * left - of).clamp_min(0)
            kept = float(rest.sum())
            mass = kept / (kept + 1 - mass) if kept + 1 - mass > 0 else 1.0
            left = rest / kept if kept > 0 else left
            if not draft.replacement:
                q = q.index_fill(0, torch.tensor(x), 0) / (1 - q[x])
        return (node, left) if node == 0 or u[row, node] < mass else None

    found = visit(0, 1.0)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "mode"), [*zip(TREES, MODES), ("bush", "with"), ("mc_sim", "chosen"), ("balanced", "without")]
)
def test_traversal_decides_as_its_sequential_form(name: str, mode: str) -> None:
    """Some nodes do not exist. Near misses of the numbers by float32 have a probability below 1e-3 in all."""
    p, draft = drafted_tree(TREES[name], mode)
    gone = torch.rand(draft.valid.shape, generator=torch.Generator().manual_seed(1)) < 0.1
    draft.valid &= ~(gone.unsqueeze(1) & draft.tree.ancestors).any(-1) | draft.tree.ancestors[:, :, 0].logical_not()
    draft.valid[:, 0] = True
    u = tiny.rng(len(p)).uniform(torch.zeros(len(p), dtype=torch.int64), VERIFY, draft.tree.nodes)
    found = verified(Traversal(), p, draft)
    assert found.length.float().mean() > 0.5
    for row in range(len(p)):
        node, left = sequential(p, draft, row, u)
        assert int(found.path_with_root[row, -1]) == node
        torch.testing.assert_close(found.next_probs[row], left.float(), atol=1e-4, rtol=1e-3)
        assert int(found.length[row]) == int(draft.tree.depth[0, node])


def test_on_a_chain_it_is_block_verification() -> None:
    p, draft = drafted(2000, 6)
    block, traversal = verified(BlockVerification(), p, draft), verified(Traversal(), p, draft)
    assert torch.equal(block.path, traversal.path)
    assert torch.equal(block.tokens, traversal.tokens)
    torch.testing.assert_close(block.next_probs, traversal.next_probs, atol=1e-4, rtol=1e-3)


def test_at_one_depth_it_is_token_wise_verification() -> None:
    """The root's mass stays 1, so that every operation is the same."""
    for mode in MODES:
        p, draft = drafted_tree([(c,) for c in range(4)], mode, rows=400)
        assert equal(verified(Traversal(), p, draft), verified(TokenWise(), p, draft)), mode


def per_row(tree: Tree) -> Tree:
    rank = torch.zeros_like(tree.parent)
    for m in range(tree.width):
        rank[0, tree.children[0, :, m].clamp_min(0)] = m
    rank[0, 0] = 0
    return from_parents(tree.parent, rank, tree.width, tree.height)


def test_a_tree_of_a_row_is_verified_as_a_shared_one() -> None:
    """As EAGLE-2's are, whose inner nodes have another order."""
    p, draft = drafted_tree(TREES["mc_sim"], rows=200)
    tree = per_row(draft.tree)
    inner, own = draft.tree.slot[0], tree.inner[0]
    probs = draft.probs[:, inner[own].clamp_min(0)]
    assert equal(verified(Traversal(), p, draft), verified(Traversal(), p, replace(draft, tree=tree, probs=probs)))


def test_a_verdict_depends_on_its_row_alone() -> None:
    p, draft = drafted_tree(BUSH, "with", rows=30, vocab=50)
    for way, row in itertools.product((Traversal(), Selected()), range(0, 30, 7)):
        together = verified(way, p, draft)
        own = slice(row, row + 1)
        one = replace(draft, tokens=draft.tokens[own], probs=draft.probs[own], valid=draft.valid[own])
        alone = way.verify(p[own], one, rules.exact(), tiny.rng([row]), torch.zeros(1, dtype=torch.int64))
        assert equal(alone, Verdict(**{k: x if x is None else x[own] for k, x in vars(together).items()}))


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        (Traversal(), "without"),
        (Selected(), "with"),
        (Selected(1.0), "without"),
    ],
)
def test_sequences_have_the_targets_distribution(way: Any, mode: str) -> None:
    pairs = way.name == "selected" and mode == "without"
    paths = [path for path in BUSH if max(path) < 2] if pairs else BUSH
    drafter = TabularDrafter(Q, paths, mode == "chosen", replacement=mode == "with")
    out = run_on_tables(way, drafter, P, 12_000)
    assert tiny.fit(coded(out.tokens, 3), sequence_probs(P)) > ALPHA


def test_the_drafts_of_the_target_itself_are_accepted_and_foreign_ones_rejected() -> None:
    for way in (Traversal(), Selected()):
        p, draft = drafted_tree(BUSH, "with")
        same = replace(draft, probs=p[:, draft.tree.inner[0]])
        assert verified(way, p, same).length.eq(3).all() or isinstance(way, Selected)
        p[..., :4] = 0
        p, q = p / p.sum(-1, keepdim=True), draft.probs.clone()
        q[..., 4:] = 0
        foreign = replace(draft, probs=q / q.sum(-1, keepdim=True), tokens=draft.tokens % 4)
        found = verified(way, p, foreign)
        assert found.length.eq(0).all()
        torch.testing.assert_close(found.next_probs, p[:, 0])


def test_selection_without_a_choice_is_block_verification() -> None:
    p, draft = drafted(500, 5)
    block, selected = verified(BlockVerification(), p, draft), verified(Selected(), p, draft)
    assert torch.equal(block.tokens, selected.tokens)
    assert torch.equal(block.path, selected.path)
    torch.testing.assert_close(block.next_probs, selected.next_probs, atol=1e-5, rtol=1e-4)


def test_the_share_of_selections_is_reported() -> None:
    """Of nodes with several children: a chain has none."""
    fixed = verified(Selected(0.25), *drafted_tree(BUSH, "with"))
    assert fixed.share is not None
    assert fixed.share.eq(0.25).all()
    auto = verified(Selected(), *drafted_tree(BUSH, "with"))
    assert auto.share is not None
    assert 0 < auto.share.mean() < 1
    chain = verified(Selected(), *drafted(10, 3))
    assert chain.share is not None
    assert chain.share.isnan().all()
    out = run_on_tables(Selected(0.25), TabularDrafter(Q, BUSH, replacement=True), P, 10)
    [found, *_] = of_images(out.trace, out.steps.tolist(), 0)
    assert found["select_share"] == 0.25


def test_the_distribution_of_the_best_of_several_draws() -> None:
    """Against all tuples of draws; tokens of equal rank come in one order."""
    q, order = torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2]]), torch.tensor([[3, 0, 4, 1, 2]])
    for count in (1, 2, 3):
        wanted = torch.zeros(5, dtype=torch.float64)
        for drawn in itertools.product(range(5), repeat=count):
            best = max(drawn, key=order[0].tolist().index)
            wanted[best] += q[0, list(drawn)].double().prod()
        found = best_of(q, order, torch.tensor([[count]]), 3)[0]
        torch.testing.assert_close(found.double(), wanted, atol=1e-7, rtol=1e-6)


def test_the_distribution_of_the_best_of_a_pair() -> None:
    """Against all pairs of different tokens."""
    q, order = torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2]]), torch.tensor([[3, 0, 4, 1, 2]])
    wanted = torch.zeros(5, dtype=torch.float64)
    for one, other in itertools.permutations([0, 1, 3, 4], 2):
        best = max(one, other, key=order[0].tolist().index)
        wanted[best] += float(q[0, one]) * float(q[0, other]) / (1 - float(q[0, one]))
    torch.testing.assert_close(best_of_pair(q, order)[0].double(), wanted, atol=1e-7, rtol=1e-6)
    sure = torch.tensor([[0.0, 1.0, 0.0]])
    assert best_of_pair(sure, torch.tensor([[0, 1, 2]])).isfinite().all()  # there is no second token


def test_the_share_of_selections_maximises_what_is_accepted() -> None:
    """At p = q following the first sibling is best; far from it the best sibling; and a row does not matter to
    another."""
    way, q = Selected(), torch.full((1, 6), 1 / 6)
    best = best_of(q, torch.arange(6)[None], torch.tensor([[2]]), 2)
    far = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.5, 0.5]])
    p = torch.cat([q, far])
    share = way._share(p, q.expand(2, -1), best.expand(2, -1), torch.ones(2, 1))
    assert share.tolist() == [[0], [1]]


def test_what_would_not_be_exact_is_refused() -> None:
    for words, sentence in (
        ("method=cool_sd verification=traversal", "has rule cool"),
        ("method=lantern verification=selected", "has rule lantern"),
        ("method=sjd_pac verification=traversal", "carries over to the next step"),
        (
            "method=eagle2 verification=selected",
            "sampled with replacement or in pairs, and drafter eagle2 does not",
        ),
        ("method=medusa rule=exact verification=selected", "in pairs, and drafter medusa does not"),
        ("method=medusa rule=exact verification=selected select_from=pair", "in pairs, and drafter medusa does not"),
        ("method=eagle_selected select_from=pair", "needs nodes with two children at most, and the tree has 4"),
    ):
        with pytest.raises(UsageError, match=sentence):
            run.check(configuration.compose(words.split()))


def test_point_masses_and_chains_may_be_traversed() -> None:
    """A tree that is ranked by the values of its tokens is exact where these are point masses."""
    for words in ("method=eagle2", "method=medusa rule=exact", "method=eagle_chain", "method=eagle3"):
        run.check(configuration.compose([*words.split(), "verification=traversal"]))


def test_the_share_of_selections_is_from_0_to_1() -> None:
    for value in ("-0.1", "1.5", "best"):
        with pytest.raises(UsageError, match="select must be a number of at least 0 and at most 1, or auto"):
            configuration.compose(["method=eagle1", "verification=selected", f"select={value}"])
    with pytest.raises(UsageError, match="no parameter 'select'"):
        configuration.compose(["method=eagle1", "select=0.5"])


# --- reference values -------------------------------------------------------------------------------------------------

FORK = "[[0], [0, 0], [0, 1], [0, 0, 0], [0, 1, 0]]"


@needs_values
@pytest.mark.parametrize(
    ("case", "paths", "mode"),
    [("block_b", WIDE, "without"), ("block_b", FORK, "with"), ("block_e", WIDE, "chosen"), ("block_e", WIDE, "with")],
)
def test_trees_reach_the_reference_lengths(case: str, paths: str, mode: str) -> None:
    wanted = json.loads((FOLDER / "expected_block.json").read_text())[case]["trees"][paths]
    tables = models.load(str(FOLDER / f"{case}.npz"))
    drafter = TabularDrafter(tables.q, parse(paths), mode == "chosen", replacement=mode == "with")
    close(run_on_tables(Traversal(), drafter, tables.p, IMAGES), wanted[f"traversal {mode}"])


@needs_values
@pytest.mark.parametrize(
    ("case", "select", "mode"),
    [
        ("block_a", None, "with"),
        ("block_b", 1.0, "with"),
        ("block_b", None, "without"),
        ("block_e", None, "with"),
    ],
)
def test_selections_reach_the_reference_lengths(case: str, select: float | None, mode: str) -> None:
    wanted = json.loads((FOLDER / "expected_block.json").read_text())[case]["selected"]
    tables = models.load(str(FOLDER / f"{case}.npz"))
    paths = [path for d in range(1, 4) for path in itertools.product(range(2), repeat=d)]
    drafter = TabularDrafter(tables.q, paths, replacement=mode == "with")
    out = run_on_tables(Selected(select), drafter, tables.p, IMAGES)
    close(out, wanted[f"widths=[2, 2, 2] {mode} lam={'auto' if select is None else select}"])
