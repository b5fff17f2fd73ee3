"""The mask of a decode pass against its definition, slot by slot."""

from __future__ import annotations

import pytest
import torch

from specbench.engine.masks import TreeMask


def test_a_tree_after_its_committed_slots() -> None:
    """Four rows (two conditional, two not) with different trees and different roots, and with padding."""
    start, root = torch.tensor([0, 3, 2, 0]), torch.tensor([5, 6, 9, 4])
    among = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0)) > 0.5
    mask = TreeMask(start, root, among)
    dense = mask.dense(torch.arange(14))
    assert dense.shape == (4, 1, 3, 14)
    for row in range(4):
        for i in range(3):
            seen = set(range(int(start[row]), int(root[row])))
            seen |= {int(root[row]) + j for j in range(4) if among[row % 2, i, j]}
            assert set(dense[row, 0, i].nonzero().flatten().tolist()) == seen
    part = TreeMask(start, root, among[:, 1:3])
    assert torch.equal(part.dense(torch.arange(14)), dense[:, :, 1:3])


def test_a_chain_that_starts_in_the_padding() -> None:
    """A padding position attends only to itself, and no valid position attends to it. The prompt has one token, so the
    position before the root is padding."""
    start, positions = torch.tensor([0, 6]), torch.tensor([[5, 6, 7], [5, 6, 7]])
    keys = torch.arange(9)
    queries = positions.unsqueeze(-1)
    expected = ((keys <= queries) & (keys >= start[:, None, None])) | (keys == queries)
    assert torch.equal(TreeMask.chain(start, positions).dense(keys), expected.unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_added_mask_has_rows_that_cuda_reads_without_a_copy(dtype: torch.dtype) -> None:
    start, root = torch.tensor([0, 3]), torch.tensor([5, 6])
    mask = TreeMask(start, root, torch.ones(1, 3, 3, dtype=torch.bool).tril())
    bias = mask.bias(13, dtype)
    assert bias.dtype == dtype
    assert torch.equal(bias == 0, mask.dense(torch.arange(13)))
    assert bias.masked_fill(bias == 0, -torch.inf).eq(-torch.inf).all()
    assert bias.stride(3) == 1
    assert all(stride % 8 == 0 for stride in bias.stride()[:3])
