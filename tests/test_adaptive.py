"""Trees whose shape follows the acceptance at neighbouring positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.audit.models import built_in
from specbench.decoding.drafters.adaptive import PRIOR, SHAPES, Acceptances, AdaptiveEagle, TreeShapes, best_paths
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.loop import StepResult
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import Path, build
from specbench.decoding.verify import Draft, VerificationResult
from specbench.errors import UsageError


def test_a_likely_acceptance_gives_a_chain_and_an_unlikely_one_siblings() -> None:
    """At 0.6 a second sibling is accepted with 0.4 x 0.3 = 0.12, a child with 0.36, its child with 0.216. At 0.3 the
    second sibling is accepted with 0.7 x 0.15 = 0.105, a third with 0.7 x 0.85 x 0.1 = 0.0595, and a child with 0.09.
    At 0.1 these are 0.045, 0.0285 and 0.01."""
    assert best_paths(0.6, 4, 3, 3) == [(0,), (0, 0), (0, 0, 0), (1,)]
    assert best_paths(0.6, 3, 2, 3) == [(0,), (0, 0), (1,)]
    assert best_paths(0.3, 4, 3, 3) == [(0,), (1,), (0, 0), (2,)]
    assert best_paths(0.1, 3, 3, 3) == [(0,), (1,), (2,)]
    assert best_paths(0.1, 3, 3, 2) == [(0,), (1,), (0, 0)]


def trees(nodes: int, depth: int, width: int) -> Iterator[frozenset[Path]]:
    """Every tree with `nodes` nodes whose siblings are numbered without a gap."""
    shapes = {frozenset[Path]()}
    for _ in range(nodes):
        grown = set()
        for tree in shapes:
            ends = [(*path, 0) for path in ((), *tree) if len(path) < depth]
            ends += [(*path[:-1], path[-1] + 1) for path in tree if path[-1] + 1 < width]
            grown |= {tree | {end} for end in ends if end not in tree}
        shapes = grown
    yield from shapes


@pytest.mark.parametrize("acceptance", [0.05, 0.35, 0.5, 0.75, 0.95])
def test_no_other_tree_has_more_tokens_accepted(acceptance: float) -> None:
    """A node's token is emitted if its path is emitted. A candidate is tried after its earlier siblings were rejected,
    and is accepted with a / (rank + 1)."""

    def accepted(paths: Any) -> float:
        total = 0.0
        for path in paths:
            chance = 1.0
            for rank in path:
                for elder in range(rank):
                    chance *= 1 - acceptance / (elder + 1)
                chance *= acceptance / (rank + 1)
            total += chance
        return total

    best = max(accepted(tree) for tree in trees(5, 3, 3))
    assert accepted(best_paths(acceptance, 5, 3, 3)) == pytest.approx(best, rel=1e-12)


def test_the_acceptance_ahead_is_the_mean_of_the_left_and_the_upper_neighbour() -> None:
    """In rows of three: the first token has no neighbour, the other tokens of the first row only the left one, the
    first token of a later row only the upper one. The mean of the image so far has the same weight as a neighbour."""
    rates = torch.tensor([0.9, 0.2, 0.4, 0.1, 0.6, 0.3]).expand(5, -1)
    ahead = Acceptances(rates, 3).ahead(torch.tensor([0, 2, 3, 4, 5]))
    near, so_far = (0.2, 0.9, (0.1 + 0.2) / 2, (0.6 + 0.4) / 2), (1.1 / 2, 1.5 / 3, 1.6 / 4, 2.2 / 5)
    assert ahead.tolist() == pytest.approx([PRIOR, *((a + b) / 2 for a, b in zip(near, so_far, strict=True))])


def test_the_rates_along_an_accepted_path() -> None:
    """Nodes: the root, its children 1 and 2, and 3, a child of 1. Image 0 accepts 1 and 3, a leaf, which has the rate
    of node 1; image 1 rejects both children; image 2 accepts 2, a leaf and a child of the root."""
    tree = build([(0,), (1,), (0, 0)])
    p = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1], [1.0, 0.0]]).expand(3, -1, -1)
    q = torch.tensor([[0.7, 0.3], [0.6, 0.4]]).expand(3, -1, -1)  # of the root and of node 1
    moved: dict[str, Any] = {k: v.expand(3, *v.shape[1:]) for k, v in vars(tree).items() if isinstance(v, Tensor)}
    draft = Draft(type(tree)(**vars(tree) | moved), torch.zeros(3, 4).long(), q, torch.ones(3, 4).bool())
    path, length = torch.tensor([[1, 3], [0, 0], [2, 2]]), torch.tensor([2, 0, 1])
    verdict = VerificationResult(path, length, path, p[:, 0], length)
    acceptances = Acceptances(torch.full((3, 6), 9.0), 3)
    acceptances.learn(StepResult(draft, p, p, verdict, torch.tensor([0, 1, 2])))
    assert acceptances.rates[0, :3].tolist() == pytest.approx([0.8, 0.6, 0.6])
    assert acceptances.rates[1, :2].tolist() == pytest.approx([9, 0.8])
    assert acceptances.rates[2, :4].tolist() == pytest.approx([9, 9, 0.8, 0.8])


def test_a_row_drafts_what_a_static_tree_of_its_shape_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows with three shapes in one batch, against EAGLE-1 with each of the trees. With random weights, equal
    random numbers give equal tokens, unless a rounding decides. A shape is chosen by the acceptance at the next
    position."""
    target = tiny.llamagen(side=4)
    head, conditioning, sampling = tiny.eagle(target), tiny.prompts(3), Sampling(cfg_scale=2.0)
    history, count, chosen = torch.randint(5, (3, 30)), torch.tensor([3, 1, 6]), [1, 5, 8]
    acceptances, asked = Acceptances(torch.rand(3, 40), 4), []
    monkeypatch.setattr(TreeShapes, "select", lambda self, rate: asked.append(rate) or torch.tensor(chosen))
    monkeypatch.setattr(Acceptances, "open", lambda *_: acceptances)

    def drafted(drafter: Any) -> Draft:
        session = target.open(conditioning, 3, True, drafter.tree.nodes)
        state = drafter.open(session, conditioning, sampling, tiny.rng(3, 7))
        with torch.inference_mode():
            return drafter.propose(state, history, count, torch.tensor([4, 4, 4]))

    drafts = drafted(AdaptiveEagle(head, 6, 3, 3))
    torch.testing.assert_close(asked, [acceptances.ahead(count)])
    for row, shape in enumerate(chosen):
        static = drafted(Eagle(head, best_paths((shape + 0.5) / SHAPES, 6, 3, 3)))
        assert torch.equal(drafts.tokens[row], static.tokens[row])
        assert drafts.valid[row].all()
        for name in ("parent", "depth", "ancestors"):
            assert torch.equal(getattr(drafts.tree, name)[row], getattr(static.tree, name)[0])
        inner = static.tree.inner[0]
        slots = drafts.tree.slot[row, inner]
        torch.testing.assert_close(drafts.probs[row, slots], static.probs[row], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("words", ["nodes=4 depth=3 width=3", "nodes=5 depth=2 width=4 verification=traversal"])
def test_it_is_lossless(words: str) -> None:
    """The second case has more siblings than tokens; the shapes differ from row to row."""
    assert tiny.verdict(f"method=eagle_adaptive {words}", built_in("v3t5"), 3000, margin=1) == "lossless"


def test_a_tree_too_small_for_its_depth_is_refused() -> None:
    with pytest.raises(UsageError, match="nodes=3"):
        TreeShapes(3, 4, 2)
    with pytest.raises(UsageError, match="width=2"):
        TreeShapes(9, 2, 2)
    with pytest.raises(UsageError, match="256"):
        TreeShapes(300, 4, 20)
    assert TreeShapes(6, 2, 2).nodes == 6
