"""The kernels that grow a draft tree, and those that put a committed path in front of a tree, against the plain
functions that specify them: compiled on CUDA, by Triton's interpreter elsewhere."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.decoding.drafters.dynamic import Grower
from specbench.decoding.drafters.vvs import Skips
from specbench.decoding.rng import TAGS
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import Tree, topology
from specbench.decoding.verify import DRAFT, Draft

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
    sizes = {(59, 5, 10): True, (250, 5, 10): True, (251, 5, 10): False, (59, 5, 31): True, (59, 5, 32): False}
    assert {shape: KERNELS.grows(Grower(*shape)) for shape in sizes} == sizes


def drafted(seed: int, missing: int = 0, shape: tuple[int, int, int] = (12, 3, 3), size: int = 19) -> Draft:
    """A grown draft for every row, without its last nodes."""
    grower, table = Grower(*shape), Table(size, shape[1], torch.float32, size)
    table.probs = table.probs.roll(seed, 2)
    draft, _ = grown(grower, table, True)
    valid = torch.arange(draft.tree.nodes) < draft.tree.nodes - torch.tensor([[0], [0], [missing]])
    return replace(draft, valid=valid.to(DEVICE), tokens=draft.tokens + 20 * seed)


def skips(shape: tuple[int, int, int] = (12, 3, 3), interval: int = 2) -> Skips:
    return Skips(interval, Grower(*shape))


def test_commits_without_verification() -> None:
    """The path, and the draft after it, over rounds that commit one token or more, with small trees."""
    choice, num_known, rng = skips(), 5, tiny.rng(ROWS, 7, DEVICE)
    lengths = set()
    for number in range(6):
        guided, draft = number % 2, drafted(number % 3, missing=(0, 9, 12)[number % 3])
        rounds, count = (
            torch.tensor([1, number % 2, 3], device=DEVICE),
            torch.tensor([6, 14, 5 + number % 2]).to(DEVICE),
        )
        fresh, step = torch.tensor([0, 3, number % 4], device=DEVICE), torch.full((ROWS,), number, device=DEVICE)
        session: Any = SimpleNamespace(length=LENGTH - 5)
        state: Any = SimpleNamespace(
            rounds=rounds.clone(), fresh=fresh, halves=1 + guided, rng=rng, session=session, cache=None
        )
        with poisoned():
            path, length, longer, further, fresh_then, reused = KERNELS.skip(
                choice, state, draft, history(), count, step, num_known, TAGS, DRAFT
            )
        due = choice.due(rounds, count, session.length)
        assert torch.equal(rounds, state.rounds)
        expected, wanted_length = choice.path(draft, due, rng.uniform(step, DRAFT, 1)[:, 0])
        assert torch.equal(path, expected)
        assert torch.equal(length, wanted_length)
        assert torch.equal(longer, choice.extended(history(), count, draft.tokens.gather(1, expected), wanted_length))
        assert torch.equal(further, count + length)
        index, fresh_wanted = Skips.reused(fresh, wanted_length, torch.arange(num_known, device=DEVICE))
        assert torch.equal(reused, index.repeat(1 + guided, 1))
        assert torch.equal(fresh_then, fresh_wanted)
        lengths |= set(length.tolist())
    assert lengths == {0, 1, 2, 3}


@pytest.mark.parametrize("shape", [(12, 3, 3), (4, 2, 5), (6, 3, 1)], ids=lambda s: "-".join(map(str, s)))
def test_a_path_in_front_of_a_tree(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_BLOCK", 16)
    choice, first, second = skips(shape), drafted(0, 2, shape), drafted(1, 1, shape)
    u, due = torch.tensor([0.1, 0.5, 0.9], device=DEVICE), torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    path, _ = choice.path(first, due, u)
    for number in range(choice.depth + 1):
        length = torch.tensor([number, choice.depth - number, number // 2], device=DEVICE)
        plain = choice.joined(first, path, length, second)
        with poisoned():
            tensors, tokens, probs, valid, unverified = KERNELS.join(choice, first, path, length, second)
        same_trees(plain.tree, topology(*tensors, height=2 * choice.depth, beam=second.tree.width + 1))
        assert plain.unverified is not None
        for plain_value, fused_value in zip(
            (plain.tokens, plain.probs, plain.valid, plain.unverified), (tokens, probs, valid, unverified), strict=True
        ):
            assert torch.equal(plain_value, fused_value)
