"""Trees and acceptance of LANTERN's code: the variants of the EAGLE and LANTERN methods, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specbench.config import configuration
from specbench.decoding.drafters.dynamic import Grower
from specbench.decoding.rules.base import Rule
from specbench.decoding.sampling import Sampling
from specbench.harness.method import build_rule

LUMINA = "model=lumina_mgpt weights=random"


def settings(words: str, *names: str) -> list[Any]:
    cfg = configuration.compose(words.split())
    return [cfg.get(name) for name in names]


@pytest.mark.parametrize("model", ["", LUMINA])
def test_trees_by_family(model: str) -> None:
    released = f"variant=released {model}"
    static = "mc_sim_7b_63" if model else "naive_extend_57"
    clears = "released_p" if model else "released"
    assert settings(f"method=eagle1 {released}", "tree") == [static]
    assert settings(f"method=lantern_pp {released}", "tree", "bound", "resample") == [static, "total", clears]
    grown = ("nodes", "depth", "ranking")
    assert settings(f"method=eagle2 {released}", *grown) == [58, 6 if model else 5, "filtered"]
    assert settings(f"method=lantern {released}", *grown, "resample") == [58, 6 if model else 5, "filtered", clears]
    assert settings(f"method=eagle2 {model}", *grown) == [59, 5, "full"]


def test_a_part_that_replaces_the_presets_keeps_its_parameters() -> None:
    assert settings("method=lantern variant=released rule=cool", "resample", "nodes") == ["optimal", 58]
    assert settings("method=lantern variant=released drafter=sjd", "resample", "width") == ["released", 1]


def acceptance_and_residual(words: str) -> tuple[float, Tensor]:
    """Acceptance of token 0, and the residual distribution after its rejection. Its neighbours are 1, 2, 3, 4."""
    cfg = configuration.compose([*words.split(), "lam=1.5", "k=2"])
    codes = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    rule: Rule = build_rule(cfg, 5, lambda: codes)
    r, q = torch.tensor([0.4, 0.1, 0.2, 0.2, 0.1]), torch.tensor([0.8, 0.05, 0.05, 0.05, 0.05])
    args = (r, q, torch.tensor(0), torch.tensor(1))
    return float(rule.accept(*args)), rule.residual(*args)


def test_the_variants_of_lantern_pp() -> None:
    for words, accepted, mass in (
        ("variant=printed", 0.7 / 0.8, [0, 0, 0, 0.15, 0.05]),  # neighbours below 1.5 x 0.4: 1 and 2; their mass moves
        ("variant=mixed", 0.5 / 0.8, [0, 0, 0.15, 0.15, 0.05]),  # the total is at most 1.5 x 0.4: only 1
        ("variant=released", 0.5 / 0.8, [0, 0.1, 0.2, 0.2, 0.05]),  # 1, 2 and 3 are removed from q
        (f"variant=released {LUMINA}", 0.5 / 0.8, [0, 0, 0, 0, 0.05]),  # 1, 2 and 3 are removed from p
    ):
        acceptance, left = acceptance_and_residual(f"method=lantern_pp {words}")
        assert acceptance == pytest.approx(accepted), words
        torch.testing.assert_close(left, torch.tensor(mass) / sum(mass))


def test_a_dynamic_tree_ranked_after_the_filter() -> None:
    """Two children: A of 0.5, whose children have at most 0.11, and B of 0.4 with children of 0.3 and 0.29. With top-k
    2 the best paths are 0.56 x 0.5 = 0.28 and 0.44 x 0.51 = 0.23; without it they are 0.055 and 0.12."""
    root = torch.full((10,), 0.1 / 8)
    root[:2] = torch.tensor([0.5, 0.4])
    below = torch.full((10, 10), 0.78 / 8)
    below[:, :2] = 0.11
    below[1] = 0.41 / 8
    below[1, :2] = torch.tensor([0.3, 0.29])

    def expand(tokens: Tensor, *_: Any) -> Tensor:
        return below[tokens]

    for ranking, parent in (("full", 2), ("filtered", 1)):
        draft = Grower(3, 2, 2, ranking).grow(torch.zeros(1, 1).long(), root[None, None], expand, Sampling(top_k=2))
        assert draft.tree.parent.tolist() == [[0, 0, 0, parent]]
        torch.testing.assert_close(draft.probs[0, 0], torch.tensor([5 / 9, 4 / 9, *[0.0] * 8]))
