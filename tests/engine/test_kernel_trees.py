"""The kernels that grow a draft tree, against the plain functions that specify them: compiled on CUDA, by
Triton's interpreter elsewhere."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import fields
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.decoding.drafters.dynamic import Grower
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import Tree
from specbench.decoding.verify import Draft

pytest.importorskip("triton")
from gpu_checks.parity import poisoned

from specbench.engine.kernels import FusedKernels, trees

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, LENGTH = 3, 20
PLAIN = Sampling()
KERNELS = FusedKernels()


@pytest.fixture(autouse=True)
def take_the_first_of_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """`topk` promises no order for equal numbers. Here the plain functions take the first, as the kernels do."""
    Top = namedtuple("Top", ("values", "indices"))

    def topk(x: Tensor, k: int, dim: int = -1) -> Any:
        return Top(*(part.narrow(dim, 0, k) for part in x.sort(dim=dim, descending=True, stable=True)))

    monkeypatch.setattr(Tensor, "topk", topk)


class Table:
    """Replaces a network (see `Expand`): the distribution after a node depends on its token, depth and row. It records
    its calls."""

    def __init__(self, size: int, depth: int, dtype: torch.dtype, support: int) -> None:
        generator = torch.Generator().manual_seed(size)
        logits = (3 * torch.randn(ROWS, depth, size, size, generator=generator)).to(dtype).float()
        logits[..., support:] = -torch.inf
        self.probs, self.calls = logits.softmax(-1).to(DEVICE), list[Any]()

    def __call__(self, tokens: Tensor, parents: Tensor, depth: int, first: int, sees: Tensor) -> Tensor:
        self.calls.append([x.clone() for x in (tokens, parents, torch.tensor([depth, first]), sees)])
        return self.probs[torch.arange(ROWS, device=DEVICE)[:, None], depth, tokens]


def history() -> Tensor:
    return torch.randint(5, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2)).to(DEVICE)


COUNT = torch.tensor([4, 0, 9], device=DEVICE)  # before the first token no draft is possible


def grown(grower: Grower, table: Table, fused: bool, sampling: Sampling = PLAIN) -> tuple[Draft, list[Any]]:
    tokens, table.calls = history(), []
    root = tokens.gather(1, (COUNT - 1).clamp_min(0)[:, None])
    with torch.inference_mode(), poisoned():
        first = table(root, root, 0, 0, root)
        if fused:
            return grower.grow_fused(KERNELS, tokens, COUNT, first, table, sampling), table.calls
        draft = grower.grow(root, first, table, sampling)
        draft.valid[1, 1:] = False
    return draft, table.calls


def same_trees(plain: Tree, fused: Tree) -> None:
    for field in fields(Tree):
        first, second = getattr(plain, field.name), getattr(fused, field.name)
        assert torch.equal(first, second) if isinstance(first, Tensor) else first == second, field.name


def compare(grower: Grower, table: Table, sampling: Sampling = PLAIN) -> Draft:
    (plain, plain_calls), (fused, fused_calls) = (grown(grower, table, fused, sampling) for fused in (False, True))
    assert tiny.equal(plain_calls, fused_calls)
    same_trees(plain.tree, fused.tree)
    for name in ("tokens", "valid", "sampled"):
        assert torch.equal(getattr(plain, name), getattr(fused, name)), name
    torch.testing.assert_close(fused.probs, plain.probs, rtol=1e-6, atol=1e-8)
    return plain


@pytest.mark.parametrize(("shape", "dtype"), [
    ((3, 2, 2), torch.bfloat16), ((7, 3, 3), torch.float32), ((24, 4, 4), torch.bfloat16),
    *(((59, 5, 10), torch.bfloat16), ((6, 6, 1), torch.float32), ((5, 1, 7), torch.float32)),
], ids=str)  # fmt: skip
def test_grown_trees(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """In bfloat16, some tokens have equal probability."""
    draft = compare(Grower(*shape), Table(37, shape[1], dtype, 37))
    assert draft.valid[0].all()
    assert len({tuple(row) for row in draft.tree.parent.tolist()}) > 1 or shape[2] == 1 or shape[1] == 1


def test_blocks_of_a_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane holds several of the chosen tokens."""
    monkeypatch.setattr(trees, "_BLOCK", 4)
    compare(Grower(24, 3, 6), Table(37, 3, torch.bfloat16, 37))


@pytest.mark.parametrize("support", [1, 5])
def test_fewer_tokens_than_siblings(support: int) -> None:
    """Candidates of probability zero are in the tree but not valid. A vocabulary of five has five siblings."""
    draft = compare(Grower(20, 3, 7), Table(5, 3, torch.float32, support))
    assert draft.valid.all() == (support == 5) or not draft.valid[1, 1:].any()
    assert bool(draft.valid[0].all()) == (support == 5)


@pytest.mark.parametrize(("ranking", "sampling"), [
    ("full", Sampling(top_k=3)), ("filtered", Sampling(top_k=3)), ("full", Sampling(0.0)),
])  # fmt: skip
def test_the_distributions_of_a_draft(ranking: str, sampling: Sampling) -> None:
    """Ranked before top-k; otherwise the network gives its distributions as they are, and they are not filtered
    again."""
    grower, table = Grower(9, 3, 4, ranking), Table(21, 3, torch.float32, 21)
    if not grower.ranks_filtered(sampling):
        compare(grower, table, sampling)
        return
    plain, _ = grown(grower, table, False, sampling)
    table.probs = sampling.filtered_probs(table.probs)
    root, tokens = history().gather(1, (COUNT - 1).clamp_min(0)[:, None]), history()
    with torch.inference_mode():
        fused = grower.grow_fused(KERNELS, tokens, COUNT, table(root, root, 0, 0, root), table, None)
    same_trees(plain.tree, fused.tree)
    assert torch.equal(plain.tokens, fused.tokens)
    torch.testing.assert_close(fused.probs, plain.probs, rtol=1e-6, atol=1e-8)


def test_numbers_that_are_not_finite_stay_within_the_vocabulary() -> None:
    grower, table = Grower(12, 3, 4), Table(21, 3, torch.float32, 21)
    table.probs[0] = torch.nan
    table.probs[2, 1] = torch.nan
    draft, calls = grown(grower, table, True)
    assert all(((x >= 0) & (x < 21)).all() for x in (draft.tokens, *(a[0] for a in calls)))
    assert not draft.valid[0, 1:].any()
    assert draft.probs[0].isnan().all()


def test_trees_that_only_the_plain_functions_grow() -> None:
    sizes = {(59, 5, 10): True, (255, 5, 10): True, (256, 5, 10): False, (59, 5, 31): True, (59, 5, 32): False}
    assert {shape: KERNELS.grows(Grower(*shape)) for shape in sizes} == sizes
