"""Drafters without a network, and trees grown at every step: exact, and faster than vanilla."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from scipy import stats
from test_loop import ALPHA, COUNT, PLAIN, P, Q, fit, run
from windows import window

from specbench.audit.statistics import filtered
from specbench.audit.tabular import TabularGrower, random_tables, sequence_probs
from specbench.decoding import rules
from specbench.decoding.drafters.dynamic import Eagle2, Grower
from specbench.decoding.drafters.eagle import Eagle, Entries
from specbench.decoding.drafters.window import INITS
from specbench.decoding.loop import StepResult
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths, window_paths
from specbench.decoding.verify import VerificationResult
from specbench.errors import UsageError

WINDOWS = {
    **{f"window {w}": {"window": w} for w in (1, 9)},  # 9 is larger than the image
    **{init: {"window": 3, "init": init} for init in INITS[1:]},
    "not_refined": {"window": 3, "refine": False},
    "gumbel, repeat": {"window": 3, "coupling": "gumbel", "init": "horizontal_repeat"},
    "full": {"window": 8, "width": 2, "depth": 3},
    "full, maximal": {"window": 8, "width": 2, "depth": 3, "coupling": "maximal"},
    "comb": {"window": 8, "width": 3, "depth": 2, "tree": "comb"},
    "comb, height": {"window": 8, "width": 3, "depth": 2, "tree": "comb", "coupling": "height"},
    "full, gumbel": {"window": 6, "width": 2, "depth": 3, "coupling": "gumbel"},
    "wider than the vocabulary": {"window": 8, "width": 6, "depth": 1, "tree": "comb", "coupling": "maximal"},
    "jacobi": {"window": 3, "match": True},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_lossless(name):
    """With more images for a coupling: 40,000 refute one that draws afresh (`mutants`), 20,000 do not."""
    options = WINDOWS[name]
    out = run(window(**options), rules.exact(), 40_000 if "coupling" in options else COUNT)
    assert fit(out.tokens, sequence_probs(P)) > ALPHA
    assert out.steps.float().mean() < 4


def test_a_greedy_window_gives_the_greedy_sequence():
    greedy = Sampling(temperature=0)
    wanted = run(window(1), rules.exact(), 8, greedy).tokens
    token, expected = 0, []
    for table in P:  # the arg max of every distribution
        expected.append(int(table[token].argmax()))
        token = token * 4 + expected[-1]
    assert wanted.eq(torch.tensor(expected)).all()
    for name, options in WINDOWS.items():
        assert torch.equal(run(window(**options), rules.exact(), 8, greedy).tokens, wanted), name


@pytest.mark.parametrize(
    ("shape", "sampling"), [((5, 2, 2), PLAIN), ((12, 3, 4), Sampling(temperature=0.7, top_k=3)), ((40, 3, 9), PLAIN)]
)
def test_a_dynamic_tree_is_lossless(shape, sampling):
    out = run(TabularGrower(Q, *shape), rules.exact(), sampling=sampling)
    assert fit(out.tokens, sequence_probs([sampling.probs(t.log()) for t in P])) > ALPHA
    assert out.steps.float().mean() < 4


def test_a_dynamic_tree_has_the_most_likely_paths():
    """Against an enumeration of every path's score."""
    tables = random_tables(3, 3, seed=5)
    code = {(): 0} | {(a,): a for a in range(3)} | {(a, b): 3 * a + b for a in range(3) for b in range(3)}

    def probs_of(paths):
        return torch.stack([tables[len(p)][code[p]] for p in paths])[None]

    beams: list[tuple[int, ...]] = [()]

    def expand(tokens, parents, depth, first, sees):
        nodes = [(*beams[int(p)], int(t)) for t, p in zip(tokens[0], parents[0], strict=True)]
        for i, node in enumerate(nodes):  # a node sees itself and those above it
            seen = {beams[1 + int(j)] for j in sees[0, i].nonzero()[:, 0] if int(j) < first} | {node}
            assert seen == {node[:d] for d in range(1, len(node) + 1)}
        beams.extend(nodes)
        return probs_of(nodes)

    draft = Grower(nodes=7, depth=3, width=3).grow(torch.zeros(1, 1).long(), probs_of([()]), expand, PLAIN)
    score, expanded = {(): 1.0}, [()]
    for depth in range(3):  # of the paths of each depth the best three have children
        below = {(*p, x): score[p] * float(tables[depth][code[p], x]) for p in expanded for x in range(3)}
        expanded = sorted(below, key=lambda p: -below[p])[:3]
        score |= below
    del score[()]
    wanted = sorted(score, key=lambda p: -score[p])[:7]
    paths = []
    for above in draft.tree.ancestors[0, 1:8]:
        paths.append(tuple(draft.tokens[0, 1:][above[1:]].tolist()))
    assert sorted(paths) == sorted(wanted)
    tree = draft.tree
    for path, slot in zip([(), *paths], tree.slot[0].tolist(), strict=True):
        below = [p for p in paths if p[:-1] == path]
        assert (slot >= 0) == bool(below)  # the leaves are no inner nodes
        if below:
            assert [paths[k - 1] for k in tree.children[0, slot].tolist() if k >= 0] == below
            assert torch.equal(draft.probs[0, slot], tables[len(path)][code[path]])
    assert tree.inner[0, 0] == 0
    assert all((tree.children[0, first_unused:, m] < 0).all() for m, first_unused in enumerate(tree.parents_per_rank))
    assert draft.tree.depth[0, 1:].tolist() == [len(p) for p in paths]


def test_coupling_and_proactive_drafts_save_steps():
    """On a Markov chain, where an accepted token does not change the distributions after it."""
    g = torch.Generator().manual_seed(2)
    after = (2 * torch.randn(3, 3, generator=g)).softmax(-1)
    tables = [torch.full((1, 3), 1 / 3)] + [after.repeat(3 ** (t - 1), 1) for t in range(1, 9)]

    def steps(**options):
        return float(run(window(8, **options), rules.exact(), 3000, target=tables).steps.float().mean())

    # standard errors are near 0.03 steps, the differences 0.4 and more
    plain, kept = steps(), steps(coupling="maximal")
    assert kept < plain - 0.15
    assert steps(coupling="height") < kept + 0.15
    assert steps(coupling="gumbel") < plain - 0.15
    assert steps(width=2, depth=2, tree="comb") < plain - 0.15
    assert steps(width=2, depth=2, tree="comb", coupling="maximal") < kept - 0.15


def test_maximal_coupling_keeps_a_token_as_often_as_can_be_and_draws_the_rest_anew():
    """A position's token x under q and its next one y under p have the joint distribution min(p, q)(x) for y = x, plus
    (q - p)_+(x) (p - q)_+(y) / TV(p, q): the number that decides against x must not decide on y, too. Chi-square over
    the 16 pairs, at every step; 40,000 pairs refute a total variation of 0.03."""
    rows, size = 40_000, 4
    tables = (1.5 * torch.randn(4, size, generator=torch.Generator().manual_seed(4))).softmax(-1)
    for options in ({}, {"width": 2, "depth": 2, "tree": "comb"}):
        seen, _ = moving(window(9 if options else 6, coupling="maximal", **options), tables, rows)
        uniform = torch.full((size,), 1 / size)
        for step, (q, p) in enumerate(itertools.pairwise(x.double() for x in (uniform, *tables))):
            rejected, rest = (q - p).clamp_min(0), (p - q).clamp_min(0)
            joint = torch.minimum(p, q).diag() + rejected[:, None] * rest / rest.sum()
            pair = seen[:, step] * size + seen[:, step + 1]
            assert tiny.fit(pair, joint.flatten()) > ALPHA


def moving(drafter, tables, rows):
    """The tokens (rows, len(tables) + 1) of the last position of a window, and the drafts. The window moves by one
    position per step, since every verification keeps nothing; the position has each of the distributions in turn."""
    count, size, height = torch.zeros(rows, dtype=torch.int64), tables.shape[1], drafter.tree.height
    session: Any = SimpleNamespace(vocab_size=size, codes=size, width=9, forced=lambda positions: None)
    state = drafter.open(session, None, PLAIN, tiny.rng(rows))
    seen, drafts = [], []
    for step, table in enumerate((*tables, None)):
        drafts.append(drafter.propose(state, torch.zeros(rows, 12).long(), count + step, count + step))
        seen.append(state.tokens[:, height - 1 - step].clone())
        if table is not None:
            path, p = torch.zeros(rows, height).long(), table.expand(rows, drafter.tree.nodes, size)
            verdict = VerificationResult(path, count, path, p[:, 0], p[:, 0, 0])
            drafter.commit(state, StepResult(drafts[-1], p, p, verdict, count + step))
    return torch.stack(seen, 1), drafts


@torch.inference_mode()
@pytest.mark.parametrize("sampling", [Sampling(cfg_scale=3.0), Sampling(0.8, top_k=3, cfg_scale=2.0), Sampling()])
def test_eagle_drafts_from_the_guided_distribution_of_its_head(sampling, monkeypatch):
    """u + s (c - u) of the head's logits c and u, applied once, at every depth. Any other draft would keep the output
    exact, but fewer of its tokens would be accepted."""
    target, rows = tiny.llamagen(side=3, vocab=7), 4
    head, outputs, original = tiny.eagle(target), [], Entries._distributions

    def noted(self, state, used, features, position):
        outputs.append(features)
        return original(self, state, used, features, position)

    monkeypatch.setattr(Entries, "_distributions", noted)
    session = target.open(tiny.prompts(rows), rows, sampling.guided, 8)
    history = torch.randint(7, (rows, 20), generator=torch.Generator().manual_seed(0))
    count = torch.ones(rows, dtype=torch.int64)
    for drafter, levels in ((Eagle(head, chain_paths(3)), 3), (Eagle2(head, 5, 3, 2), 1)):
        outputs.clear()
        state = drafter.open(session, tiny.prompts(rows), sampling, tiny.rng(rows))
        draft = drafter.propose(state, history, count, count)
        for level, features in enumerate(outputs[:levels]):  # of the dynamic tree the root's, whose place is known
            logits = target.head(head.readable(features, None))
            if sampling.guided:
                conditional, unconditional = logits.chunk(2)
                logits = unconditional + sampling.cfg_scale * (conditional - unconditional)
            # float32 logits of a magnitude near 50 are exact to 1e-5
            wanted = filtered(logits[:, 0], sampling)
            torch.testing.assert_close(draft.probs[:, level].double(), wanted, atol=1e-4, rtol=0)


def test_a_height_survives_as_long_as_any_coupling_can_let_it():
    """A position's first token under distributions p_0 (uniform) to p_4: it survives with min_j p_j(y) / p_0(y), its
    height stays uniform below its probability, and the position has the last distribution."""
    rows, size = 40_000, 4
    tables = (2 * torch.randn(4, size, generator=torch.Generator().manual_seed(4))).softmax(-1)
    seen, drafts = moving(window(6, coupling="height"), tables, rows)
    where = range(6, 1, -1)  # the node of the position that is last at first
    assert tiny.fit(seen[:, -1], tables[-1].double()) > ALPHA
    survived = (seen == seen[:, :1]).all(1)
    for token in range(size):
        survivors = survived[seen[:, 0] == token].double()
        share = float((tables[:, token] * size).min().clamp_max(1))
        assert abs(float(survivors.mean()) - share) < 4.5 * (share * (1 - share) / len(survivors)) ** 0.5 + 1e-6
    for draft, node in zip(drafts, where, strict=True):
        for token in range(size):
            height = draft.heights[draft.tokens[:, node] == token, node].double()
            assert stats.kstest(height.numpy(), "uniform").pvalue > ALPHA


def test_window_trees():
    assert window_paths(5, 1, 3, "full") == chain_paths(5)
    assert window_paths(5, 2, 2, "full") == [(0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert window_paths(4, 2, 2, "comb") == [(0,), (1,), (0, 0), (0, 1)]
    full = window_paths(64, 4, 3, "full")
    assert len(full) == 64
    assert [sum(len(p) == d for p in full) for d in (1, 2, 3)] == [4, 16, 1]
    comb = window_paths(14, 4, 3, "comb")
    assert [sum(len(p) == d for p in comb) for d in (1, 2, 3, 4, 5)] == [4, 4, 4, 1, 1]
    with pytest.raises(UsageError, match="window=16"):
        window_paths(16, 4, 3, "full")
