"""VVS: which rounds commit a path without verification, which path that is, and what is drafted after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.audit import models, sizes
from specbench.audit.tabular import TabularTarget, TabularVVS, random_tables
from specbench.config import configuration
from specbench.decoding.drafters.dynamic import Eagle2
from specbench.decoding.drafters.vvs import VVS, Skips
from specbench.decoding.loop import DecoderConfig, Decoding, decode
from specbench.decoding.rules import exact
from specbench.decoding.rules.thresholds import Typical
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import build, from_parents
from specbench.decoding.verify import Draft
from specbench.errors import UsageError
from specbench.harness import method

PATHS = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]  # nodes 1 to 5; the leaves are 2, 4 and 5


def grown(rows: int, missing: int = 0) -> Draft:
    """The tree of PATHS without its last nodes: node n has token n + 10."""
    tree = build(PATHS)
    parent, rank = tree.parent.expand(rows, -1), torch.tensor([0, 0, 1, 0, 1, 0]).expand(rows, -1)
    valid = (torch.arange(6) < 6 - missing).expand(rows, -1)
    probs = torch.arange(3.0).view(1, 3, 1).expand(rows, -1, 20)  # for the nodes 0, 1 and 3
    return Draft(from_parents(parent, rank, 2, 3, 3, 2), torch.arange(10, 16).expand(rows, -1), probs, valid)


@pytest.mark.parametrize("rule", ["cool", "band"])
def test_a_schedule_over_depths_is_refused(rule: str) -> None:
    with pytest.raises(UsageError, match="rule=uniform"):
        method.check(configuration.compose(["method=vvs", f"rule={rule}"]))
    method.check(configuration.compose(["method=vvs", "rule=uniform"]))


def skips(interval: int = 2) -> Skips:
    return Skips(interval, SimpleNamespace(depth=3, nodes=5, expanded=4))  # type: ignore[arg-type]


def test_the_path_by_hand() -> None:
    """The paths have 2, 3 and 4 nodes with the root, 3 on average: at most two tokens are committed."""
    u, due = torch.tensor([0.1, 0.4, 0.7, 0.99, 0.1]), torch.tensor([True, True, True, True, False])
    nodes, length = skips().path(grown(5), due, u)
    assert length.tolist() == [1, 2, 2, 2, 0]
    assert [row[:n] for row, n in zip(nodes.tolist(), length.tolist(), strict=True)] == [
        [2],
        [1, 4],
        [1, 3],
        [1, 3],
        [],
    ]
    nodes, length = skips().path(grown(2, missing=2), due[:2], torch.tensor([0.2, 0.8]))  # paths of 2 and 3 nodes
    assert (length.tolist(), nodes[:, 0].tolist()) == ([1, 1], [2, 1])
    assert skips().path(grown(1, missing=5), due[:1], u[:1])[1].tolist() == [0]


def test_the_rounds_by_hand() -> None:
    """Rounds 1, 1 + i, ... commit a path, in one step with the next round; round 1 does not for an image with few
    tokens."""
    for interval, expected in ((2, [0, 1, 1, 1, 1, 1]), (3, [0, 1, 0, 1, 0, 1]), (5, [0, 1, 0, 0, 0, 1])):
        rounds, count = torch.zeros(1, dtype=torch.int64), torch.tensor([6])
        assert [int(skips(interval).due(rounds, count, 50)) for _ in range(6)] == expected
    rounds = torch.zeros(3, dtype=torch.int64)
    due_rounds = [skips(3).due(rounds, torch.tensor([5, 6, 50]), 50).tolist() for _ in range(2)]
    assert due_rounds == [[False] * 3, [False, True, False]]
    assert rounds.tolist() == [2, 3, 2]


def test_the_draft_by_hand() -> None:
    first, second = grown(3), grown(3)
    second.tokens = second.tokens + 10
    nodes, length = torch.tensor([[1, 4, 4], [2, 2, 2], [5, 5, 5]]), torch.tensor([2, 1, 0])
    draft = skips().joined(first, nodes, length, second)
    tree, unverified = draft.tree, draft.unverified
    assert unverified is not None
    assert draft.tokens.tolist() == [[10, *(10 + n for n in row), 21, 22, 23, 24, 25] for row in nodes.tolist()]
    for row, end in enumerate(length.tolist()):
        assert draft.valid[row].tolist() == [i <= end or i > 3 for i in range(9)]
        assert unverified[row].tolist() == [0 < i <= end for i in range(9)]
        chain = [*range(end)]
        assert tree.parent[row].tolist()[1 : end + 1] == chain
        assert tree.parent[row].tolist()[4:] == [end, end, 4, 4, 6]
        assert tree.depth[row].tolist()[4:] == [end + 1, end + 1, end + 2, end + 2, end + 3]
        kids = {n: tree.children[row, int(tree.slot[row, n])].tolist() for n in (*chain, end, 4, 6)}
        assert kids[end][:2] == [4, 5]
        assert (kids[4][:2], kids[6][:2]) == ([6, 7], [8, -1])
        assert all(kids[n][0] == n + 1 for n in chain)
        level = {n: float(draft.probs[row, int(tree.slot[row, n]), 0]) for n in kids}
        assert (level[end], level[4], level[6]) == (0, 1, 2)  # the second tree's nodes 0, 1 and 3
    assert float(draft.probs[0, 0, 0]) == 0
    assert not (draft.sampled if draft.sampled is not None else torch.ones(1)).any()


class Never(Typical):
    """Accepts no token."""

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return torch.zeros_like(token, dtype=torch.float32)


@torch.inference_mode()
def test_a_committed_path_is_not_verified() -> None:
    """With a rule that accepts nothing, steps commit their path and one more token."""
    tables = random_tables(3, 30, 1, order=1)
    drafter = TabularVVS(tables, 6, 3, 2, "full", 2)
    steps = Decoding(DecoderConfig(TabularTarget(tables), drafter, Never(), Sampling()), None, tiny.rng(40))
    seen = 0
    for _ in range(12):
        before = steps.num_committed.clone()
        steps.step()
        draft = steps.step_stats.draft if steps.step_stats else None
        assert draft is not None
        assert draft.unverified is not None
        path = draft.unverified.sum(1)
        active = before < 30
        assert torch.equal((steps.num_committed - before)[active], (path + 1)[active])
        assert not path[before <= 5].any()
        for row in range(40):
            committed = steps.history[row, before[row] : before[row] + path[row]]
            assert torch.equal(committed, draft.tokens[row, 1 : 1 + path[row]])
        seen += int((path > 0).sum())
        steps.record_stats()
    assert seen > 40


def test_without_skips_it_is_eagle2() -> None:
    """For greedy images, every token and every step are equal (in other images the nodes have other random numbers).
    Two trees are grown in a step, and the second one overwrites the first one's entries in the cache."""
    target = tiny.llamagen(side=4)
    head, out = tiny.eagle(target), []
    for drafter in (VVS(head, 6, 3, 2, "full", 10_000), Eagle2(head, 6, 3, 2)):
        images = decode(
            DecoderConfig(target, drafter, exact(), Sampling(0.0, cfg_scale=2.0)), tiny.prompts(3), tiny.rng(3)
        )
        out.append([images.tokens, images.steps, images.drafted, images.accepted])
    assert tiny.equal(*out)
    assert (out[0][1] < 16).all()


@torch.inference_mode()
@pytest.mark.parametrize(("rule", "fewer"), [(Never(), True), (exact(), False)])
def test_the_head_reads_the_last_existing_hidden_states(rule: Any, fewer: bool) -> None:
    """fewer: whether a round without accepted tokens comes before each path, so that only one hidden state is known."""
    target = tiny.llamagen(side=4)
    drafter = VVS(tiny.eagle(target), 6, 3, 2, "full", 3 if fewer else 2)
    grow, seen = drafter.grow, []

    def record_state(state: Any, history: Tensor, count: Tensor) -> Draft:
        seen.append((state.pending.clone(), state.fresh.clone(), count.clone(), history.clone()))
        return grow(state, history, count)

    drafter.grow = record_state  # type: ignore[method-assign]
    steps = Decoding(DecoderConfig(target, drafter, rule, Sampling(cfg_scale=2.0)), tiny.prompts(4), tiny.rng(4))
    compared: set[bool] = set()
    for _ in range(8):
        steps.step()
        (pending, fresh, count, _), (reused, entries, longer, history) = seen[-2:]
        draft = steps.step_stats.draft if steps.step_stats else None
        steps.record_stats()
        assert draft is not None
        for row, path in enumerate((longer - count).tolist()):
            num_known, halves = int(fresh[row]) + 1, [row, row + 4]
            if path == 0:
                assert torch.equal(reused[halves], pending[halves])
                continue
            indices = [min(max(num_known - path, 0) + i, num_known - 1) for i in range(path)]
            assert torch.equal(reused[halves, :path], pending[halves][:, indices])
            assert int(entries[row]) == path - 1
            assert torch.equal(history[row, count[row] : longer[row]], draft.tokens[row, 1 : 1 + path])
            compared.add(num_known < path)
    assert fewer in compared


def test_the_audit_refutes_vvs() -> None:
    """With EAGLE-2's trees and the exact rule, which are lossless without skips."""
    model, words = models.built_in("v2t10"), "method=vvs rule=exact nodes=3 depth=2 width=2"
    assert tiny.verdict(f"{words} interval=2", model, 4000) == "not lossless"
    assert tiny.verdict(f"{words} interval=1000", model, 4000) != "not lossless"
    assert not sizes.is_exact(configuration.compose(words.split()))
